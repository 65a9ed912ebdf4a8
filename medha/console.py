"""Where reports are printed."""

from __future__ import annotations

from rich.console import Console

_FILE_WIDTH = 160  # of a table where no terminal says how wide it is


def report_console() -> Console:
    """Stdout, as wide as the terminal; in a file or a pipe wide enough that no figure is cut."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, _FILE_WIDTH)
    return console
