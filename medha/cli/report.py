"""Reports of whatever measures: where and by what they were made, written as JSON, printed as lines and tables.

What a figure is stands in the end of its name: ``_s`` seconds, ``_ms``, ``_bytes``, ``_per_s``, ``_share`` and
``_error`` parts of one, ``_ratio`` times. A mapping with ``median_s``, ``min_s`` and ``max_s`` is a time and spread.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import fill
from typing import Any, cast

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

from medha.cli.replacing import replacing
from medha.errors import ConfigError
from medha.parallel.launch import cpu_name, read_launch

_PACKAGES = (
    *("torch", "numpy", "safetensors", "tokenizers", "huggingface-hub", "minijinja", "typer", "rich"),
    *("transformers", "flashinfer-python"),
)

_FILE_WIDTH = 160  # the least, of what goes to no terminal
# In the file, not on the screen.
_UNPRINTED = ("benchmark", "title", "notes", "environment", "format", "version", "options", "config", "model")

_STYLES = {"FAIL": "bold red", "wrong": "bold red", "not run": "yellow", "pass": "green", "right": "green"}
_UNITS = {
    "_s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")),
    "_bytes": ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes")),
}


def environment() -> dict[str, Any]:
    """Versions, devices and threads. Loads torch."""
    import torch  # here because it takes a second, and command lines ask for this seldom

    devices, packages = ["cpu"], dict.fromkeys(_PACKAGES, cast(str | None, None))
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index} ({gpu.name}, {gpu.total_memory / 2**30:.0f} GiB)")
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            packages[name] = version(name)
    return {
        "medha": version("medha"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "cuda": torch.version.cuda,
        "devices": devices,
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


@contextmanager
def progress(what: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A progress bar on stderr while this is open; yields what is to be called as one or more of ``total`` parts are
    done, with their number; None: it is not known."""
    counts = () if total is None else (MofNCompleteColumn(),)
    columns = TextColumn("{task.description}"), BarColumn(), *counts, TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield partial(bar.advance, bar.add_task(what, total=total))


def stamp() -> dict[str, Any]:
    """Date, hardware and versions of a run."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), **environment()}


STDOUT = Path("-")
"""Where ``--output-json -`` writes: then nothing else is printed there."""


def check_writable(path: Path | None) -> None:
    """Raise ConfigError before a run whose report cannot be written, on every rank of rank 0's node."""
    launch = read_launch()
    if path is None or path == STDOUT or (launch is not None and launch.rank >= launch.local_world_size):
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"report file {path} cannot be written; accepted: a file in a writable folder")


def write_report(path: Path | None, report: Mapping[str, Any]) -> None:
    """Write a report as JSON, to stdout or replacing a former file whole."""
    text = json.dumps(_plain(report), indent=2, default=str) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    elif path is not None:
        with replacing(path, "report file") as unfinished:
            unfinished.write_text(text)


def deliver(report: Mapping[str, Any], path: Path | None, *, shown: Mapping[str, Any] | None = None) -> None:
    """Write a report where ``--output-json`` says and, unless that is stdout, print it, or what is ``shown`` of it."""
    write_report(path, report)
    if path != STDOUT:
        print_report(report if shown is None else shown)
    sys.stdout.flush()


def report_console() -> Console:
    """Stdout, as wide as the terminal; a file is wide."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    return console


def print_report(report: Mapping[str, Any]) -> None:
    """Print a report: its title; a scalar as ``name: value``, a mapping of scalars as one line, a list or a mapping of
    mappings as a table; last its ``notes`` and its machine."""
    console = report_console()
    if heading := report.get("title") or report.get("benchmark"):
        console.print(str(heading), style="bold", highlight=False, markup=False)
    for name, value in report.items():
        if name not in _UNPRINTED:
            _print_entry(console, name, _plain(value))
    for note in report.get("notes", ()):
        console.print(str(note), highlight=False, markup=False)
    if facts := report.get("environment"):
        versions = ", ".join(f"{name} {facts['packages'][name]}" for name in ("torch", "transformers"))
        console.print(f"{facts['cpu']}, {facts['cpus']} cores, medha {facts['medha']}, {versions}", highlight=False)


def _print_entry(console: Console, name: str, value: Any) -> None:
    rows = value
    if isinstance(value, Mapping) and all(isinstance(one, Mapping) for one in value.values()):
        rows = [{"": key, **inside} for key, inside in value.items()]
    if isinstance(rows, list) and rows and all(isinstance(one, Mapping) for one in rows):
        print_rows(console, _spoken(name), rows)
    elif text := text_of(name, value):
        console.print(f"{_spoken(name)}: {text}", highlight=False, markup=False)


def print_rows(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of mappings, whole: one that is too wide has headings of several lines, and is the terminal's to
    wrap. It has a column for each name that some of them have; lists, such as raw samples, are left out."""
    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    columns = {name: [row.get(name) for row in flat] for name in names}
    columns = {name: values for name, values in columns.items() if not any(isinstance(one, list) for one in values)}
    cells = {name: [text_of(name, value) or "-" for value in values] for name, values in columns.items()}
    table = Table(title=title, min_width=cell_len(title), box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name, values in columns.items():
        is_words = all(one is None or isinstance(one, str) for one in values)
        table.add_column(_spoken(name), justify="left" if is_words else "right", no_wrap=True)
    for row in zip(*cells.values(), strict=True):
        table.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
    whole = console.options.update(width=1 << 20)
    if console.measure(table, options=whole).maximum > console.width:
        for column, texts in zip(table.columns, cells.values(), strict=True):
            column.header = fill(str(column.header), max(map(cell_len, texts)), break_long_words=False)
    console.print(Segments(console.render(table, whole)), soft_wrap=True)


def _spoken(name: str) -> str:
    """In words, without the end that says in what its figures are; those have their unit beside them."""
    return name.removesuffix(_unit_end(name)).replace("_", " ")


def _unit_end(name: str) -> str:
    """The end of a name that says that its figures have units; empty without."""
    return next((end for end in _UNITS if name.endswith(end) and not name.endswith("_per_s")), "")


def text_of(name: str, value: Any) -> str:
    """A scalar, a time and its spread, or a mapping of these, by what the name ends in; empty where there is none."""
    if isinstance(value, Mapping):
        if "median_s" in value:
            return _scaled("_s", *(value[one] for one in ("median_s", "min_s", "max_s")))
        parts = {
            key: text_of(key, one) for key, one in value.items() if not isinstance(one, Mapping) or "median_s" in one
        }
        return ", ".join(f"{_spoken(key)} {text}" for key, text in parts.items() if text)
    if value is None or isinstance(value, list):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return str(value)
    if end := _unit_end(name):
        return _scaled(end, value)
    if name.endswith(("share", "error", "utilization", "mfu", "mbu")):
        return f"{value:.1%}"
    return f"{value:.2f}x" if name.endswith("ratio") else _figure(value)


def _plain(value: Any) -> Any:
    """Tuples as lists and infinity, which JSON lacks, as a word, all the way down."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row in which the entries of its mappings are its own; a time with its spread stays together."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping) and "median_s" in value:
            flat[name if name.endswith("_s") else f"{name}_s"] = value
        elif isinstance(value, Mapping):
            flat |= {f"{name} {key}": one for key, one in _flat(value).items()}
        else:
            flat[name] = value
    return flat


def _scaled(end: str, value: float, *spread: float) -> str:
    """In the largest unit of which there is one at least, ``12.3 ms (11.9-13.0)`` with the least and the most."""
    units = _UNITS[end]
    size, unit = next((one for one in units if abs(value) >= one[0]), units[-1] if value else units[0])
    median, *ends = (_figure(one / size) for one in (value, *spread))
    return f"{median} {unit}" + (f" ({'-'.join(ends)})" if len(set(ends)) > 1 else "")


def _figure(value: float) -> str:
    """Whole numbers with commas, others with four digits or so."""
    if not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or (value == int(value) and abs(value) >= 1000):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
