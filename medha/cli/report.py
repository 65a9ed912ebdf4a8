"""What every benchmark prints and writes: configuration, hardware, versions, warm-up, runs, median and spread."""

from __future__ import annotations

import json
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from medha.cost.hardware import cpu_name
from medha.errors import ConfigError
from medha.parallel.launch import read_launch

DEFINITIONS = {
    "TTFT": "arrival to first token, queueing included",
    "TPOT": "(last - first token) / (tokens - 1) of a request; does not exist for one token",
    "ITL": "gap between successive tokens of a request",
    "E2EL": "arrival to last token",
    "goodput": "completed requests a second that met every objective they had",
    "SLO attainment": "share, of the requests with an objective, that completed and met all of theirs",
}
"""What the terms of serving mean here; other tools differ."""


_PACKAGES = (
    *("torch", "numpy", "safetensors", "tokenizers", "huggingface-hub", "minijinja", "typer", "rich"),
    *("transformers", "flashinfer-python"),
)


def environment() -> dict[str, Any]:
    """Versions, devices and threads. Loads torch."""
    import torch  # here because it takes a second, and command lines ask for this seldom

    devices = ["cpu"]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index} ({gpu.name}, {gpu.total_memory / 2**30:.0f} GiB)")
    return {
        "medha": version("medha"),
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


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr while this is open; yields what is to be called as one or more of ``total`` parts are
    done, with their number."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count=1: bar.advance(task, count)


def stamp() -> dict[str, Any]:
    """Date, hardware and versions of a run."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), **environment()}


def machine_line(facts: Mapping[str, Any] | None = None) -> str:
    """Hardware and versions on one line, for below a table: those of a :func:`stamp`, or of this machine."""
    facts = facts or environment()
    versions = ", ".join(f"{name} {facts['packages'][name]}" for name in ("torch", "transformers"))
    return f"{facts['cpu']}, {facts['cpus']} cores, medha {facts['medha']}, {versions}"


def peak_memory_bytes() -> int:
    """Resident memory of this process at its largest."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


STDOUT = Path("-")
"""Where ``--output-json -`` writes: then nothing else is printed there."""


def check_writable(path: Path | None) -> None:
    """Find out before a run that its report cannot be written; every rank of rank 0's node does, before it begins.

    Raises:
        ConfigError: the folder is missing or not writable.
    """
    launch = read_launch()
    if path is None or path == STDOUT or (launch is not None and launch.rank >= launch.local_world_size):
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"report file {path} cannot be written; accepted: a file in a writable folder")


def write_report(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write a report as JSON, to stdout or replacing a former file whole."""
    text = json.dumps(report, indent=2, default=_plain) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    elif path is not None:
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text)
        partial.replace(path)


def deliver(report: Mapping[str, Any], path: Path | None, *, title: str = "") -> None:
    """Write a report where ``--output-json`` says, and print it unless that is stdout."""
    write_report(path, report)
    if path != STDOUT:
        from medha.cli.table import print_report

        print_report(report, title=title)


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)
