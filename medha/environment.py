"""What matters about this machine and installation, as plain JSON values: for bug reports and benchmark reports."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import medha

_PACKAGES = (
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "huggingface-hub",
    "minijinja",
    "typer",
    "rich",
    "transformers",
    "flashinfer-python",
)


def environment() -> dict[str, Any]:
    """Versions, devices and threads. Loads torch."""
    import torch  # here because it takes a second, and command lines ask for this seldom

    devices = ["cpu"]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index} ({gpu.name}, {gpu.total_memory / 2**30:.0f} GiB)")
    return {
        "medha": medha.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "cuda": torch.version.cuda,
        "devices": devices,
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor as its maker names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
