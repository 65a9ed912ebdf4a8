"""The ``medha`` command. A verb's own module holds its work; what is heavy is imported when a verb runs."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, NoReturn

import typer

import medha
from medha.bench.cli import app as bench_app
from medha.command import end_process, make_app, run_app
from medha.generate import generate

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

app = make_app(help="Serve long-context LLMs without convoys.")
app.command("generate")(generate)
app.add_typer(bench_app, name="bench")


@app.callback(invoke_without_command=True)
def medha_command(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", "-v", help="Print the version and exit.")] = False,
) -> None:
    """Serve long-context LLMs without convoys."""
    if show_version:
        print(f"medha {medha.__version__}")
        raise typer.Exit()
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> int:
    """Print versions, devices and threads, for a bug report."""
    facts = environment()
    if as_json:
        print(json.dumps(facts, indent=2))
        return 0
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {item}" for key, item in value.items() if item is not None)
        elif isinstance(value, list):
            value = ", ".join(value)
        print(f"{name:>10}  {'none' if value is None else value}")
    return 0


def environment() -> dict[str, Any]:
    """What matters about this machine and installation, as plain JSON values."""
    import torch  # here because it takes a second, and only this verb of this module needs it

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
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> NoReturn:
    """Entry point of ``medha``. Ends in SystemExit."""
    end_process(run_app(app, "medha"))


if __name__ == "__main__":
    main()
