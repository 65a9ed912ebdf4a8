"""Where reports are printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

_TABLE_WIDTH = 160  # of a table where no terminal says how wide it is


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


def counted(number: int, noun: str) -> str:
    """``1 thread``, ``2 threads``."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def figures_table(title: str, figures: Sequence[str], *, words: Sequence[str] = ()) -> Table:
    """An empty table.

    Args:
        title: above it, on one line if the console is wide enough.
        figures: headings of columns of numbers, aligned on the right.
        words: headings of columns of text, which come first.
    """
    table = Table(title=title, min_width=cell_len(title), box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    return table
