"""One renderer for whatever measures: a report as its JSON has it, printed as lines and tables.

What a figure is stands in the end of its name: ``_s`` seconds, ``_ms``, ``_bytes``, ``_per_s``, ``_share`` and
``_error`` parts of one, ``_ratio`` times. A mapping with ``median_s``, ``min_s`` and ``max_s`` is a time and spread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

_TABLE_WIDTH = 160  # of a table where no terminal says how wide it is

# Entries of a report that say what was asked for and where: in the file, not on the screen.
_UNPRINTED = ("benchmark", "title", "notes", "environment", "format", "version", "options", "config", "model", "label")

_STYLES = {"FAIL": "bold red", "wrong": "bold red", "not run": "yellow", "pass": "green", "right": "green"}
_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_BYTES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes"))
_UNITS = {"_s": _SECONDS, "_bytes": _BYTES}


class _Report(Console):
    """Stdout: text as wide as the terminal, else 80 columns; a table in a file takes what it needs."""

    def print(self, *objects: Any, **options: Any) -> None:
        text_width = self.width
        if not self.is_terminal and any(isinstance(one, Table) for one in objects):
            self.width = max(text_width, _TABLE_WIDTH)
        try:
            super().print(*objects, **options)
        finally:
            if self.width != text_width:
                self.width = text_width


def report_console() -> Console:
    """Where a command prints its report."""
    return _Report()


def print_report(report: Mapping[str, Any], console: Console | None = None, *, title: str = "") -> None:
    """Print a report.

    Its ``title`` or ``benchmark`` comes first; then every scalar as ``name: value``, a mapping of scalars as one line,
    a list of mappings or a mapping of mappings as a table; last its ``notes`` (lines) and its machine.

    Args:
        report: what a run measured, plain values and dataclasses.
        console: where to; stdout by default.
        title: in place of the report's own.
    """
    console = console or report_console()
    heading = title or str(report.get("title") or report.get("benchmark") or "")
    if heading:
        console.print(heading, style="bold", highlight=False)
    for name, value in report.items():
        if name not in _UNPRINTED:
            _print_entry(console, name, _plain(value))
    for note in report.get("notes", ()):
        console.print(str(note), highlight=False, markup=False)
    if "environment" in report:
        from medha.cli.report import machine_line

        console.print(machine_line(report["environment"]), highlight=False)


def _print_entry(console: Console, name: str, value: Any) -> None:
    if isinstance(value, Mapping) and value and all(isinstance(one, Mapping) for one in value.values()):
        table = rows_table(spoken(name), [{"": key, **inside} for key, inside in value.items()])
    elif isinstance(value, list) and value and all(isinstance(one, Mapping) for one in value):
        table = rows_table(spoken(name), value)
    else:
        text = text_of(name, value)
        if text:
            console.print(f"{heading_of(name, [value])}: {text}", highlight=False, markup=False)
        return
    console.print(table)


def rows_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of mappings: a column for each name that some of them have; lists, such as raw samples, are left out."""
    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    columns = {name: [row.get(name) for row in flat] for name in names}
    columns = {name: values for name, values in columns.items() if not any(isinstance(one, list) for one in values)}
    words = [name for name, values in columns.items() if all(one is None or isinstance(one, str) for one in values)]
    table = Table(title=title, min_width=cell_len(title), box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name, values in columns.items():
        table.add_column(
            heading_of(name, values), justify="left" if name in words else "right", no_wrap=name not in words
        )
    cells = [[text_of(name, value, values) or "-" for value in values] for name, values in columns.items()]
    for row in zip(*cells, strict=True):
        table.add_row(*(Text(cell, _STYLES.get(cell, "")) for cell in row))
    return table


def spoken(name: str) -> str:
    """A name in words: ``total_input_tokens`` is ``total input tokens``."""
    return name.replace("_", " ")


def heading_of(name: str, values: Sequence[Any]) -> str:
    """What stands above figures of a name: in words, with the unit in which :func:`text_of` gives them."""
    for end, units in _UNITS.items():
        if name.endswith(end) and not name.endswith("_per_s"):
            unit = _unit(values, units)[1]
            return f"{spoken(name.removesuffix(end))} {unit}"
    return spoken(name)


def text_of(name: str, value: Any, beside: Sequence[Any] = ()) -> str:
    """A value by what its name ends in; empty where there is nothing to show.

    Args:
        name: of the value.
        value: a scalar, a time and its spread, or a mapping of scalars.
        beside: the values that get the same unit, this one included.
    """
    if isinstance(value, Mapping):
        if "median_s" in value:
            return _with_spread(value, beside or [value])
        parts = {key: text_of(key, one) for key, one in value.items() if not isinstance(one, (Mapping, list))}
        return ", ".join(f"{heading_of(key, [value[key]])} {text}" for key, text in parts.items() if text)
    if value is None or isinstance(value, list):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (int, float)):
        return str(value)
    for end, units in _UNITS.items():
        if name.endswith(end) and not name.endswith("_per_s"):
            return _figure(value / _unit(beside or [value], units)[0])
    if name.endswith(("share", "error", "utilization", "mfu", "mbu")):
        return f"{value:.1%}"
    return f"{value:.2f}x" if name.endswith("ratio") else _figure(value)


def counted(number: int, noun: str) -> str:
    """``1 thread``, ``2 threads``."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def _plain(value: Any) -> Any:
    """Dataclasses as mappings and tuples as lists, all the way down."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


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


def _unit(values: Sequence[Any], units: Sequence[tuple[float, str]]) -> tuple[float, str]:
    """The largest unit of which the largest value has one at least; the first, where all are 0 or unknown."""
    found = [one.get("median_s") if isinstance(one, Mapping) else one for one in values]
    most = max((abs(one) for one in found if isinstance(one, (int, float)) and math.isfinite(one)), default=0.0)
    return next((unit for unit in units if most >= unit[0]), units[-1] if most else units[0])


def _with_spread(timing: Mapping[str, Any], beside: Sequence[Any]) -> str:
    """``12.3 (11.9-13.0)``: the median, the least and the most."""
    scale = _unit(beside, _SECONDS)[0]
    median, least, most = (_figure(timing[name] / scale) for name in ("median_s", "min_s", "max_s"))
    return median if least == most else f"{median} ({least}-{most})"


def _figure(value: float) -> str:
    """Whole numbers with commas, others with four digits or so."""
    if not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or (value == int(value) and abs(value) >= 1000):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
