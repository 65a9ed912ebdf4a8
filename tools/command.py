"""What the tools' command lines share: a function's parameters as options, lists in them, tables in Markdown."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from medha.cli.command import end_process, make_app, run_app
from medha.errors import ConfigError
from medha.parallel.launch import is_launched


def run_tool(tool: Callable[..., Any], arguments: Sequence[str] | None = None) -> int:
    """Run a tool by a command line, by default that of this process; its parameters are the options, its docstring is
    the help. Returns the exit code."""
    app = make_app()
    app.command()(tool)
    return run_app(app, f"python -m {tool.__globals__['__spec__'].name}", arguments)


def main(tool: Callable[..., Any]) -> NoReturn:
    """Run a tool as what this process is for. Without a launcher a SIGTERM ends it like an error, and so what it has
    started."""
    if not is_launched():
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    end_process(run_tool(tool))


def chosen(name: str, text: str, known: Collection[str], separator: str = ",") -> list[str]:
    """The names that an option lists; raises ConfigError for one that is not known."""
    names = text.split(separator)
    if unknown := [one for one in names if one not in known]:
        accepted = f"{separator} ".join(known)
        raise ConfigError(f"{name}={unknown[0]!r}; accepted: of {accepted}, with {separator!r} between")
    return names


def numbers(name: str, text: str) -> list[float]:
    """The numbers that an option lists; raises ConfigError where they are none."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{name}={text!r}; accepted: numbers with commas between") from error


def print_row(*cells: object) -> None:
    """Print a row of a table in Markdown."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_head(*names: str) -> None:
    """Print the head of a table in Markdown."""
    print_row(*names)
    print_row(*("---" for _ in names))
