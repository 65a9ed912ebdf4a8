"""Where reports are printed."""

from __future__ import annotations

from typing import Any

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
