"""Tables of figures on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.table import Table


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
