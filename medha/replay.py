"""``medha replay``: put the calls of a journal to a new scheduler and compare every decision.

Exit code 0: every decision is the same. 1: one differs; what it was and what it is now is printed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_DIFFERENT = 1


def replay(
    journal: Annotated[Path, typer.Argument(metavar="FILE", help="What medha generate --journal wrote.")],
) -> int:
    """Repeat the decisions of a recorded run, without its model, and say whether they are the same."""
    from medha.engine.journal import replay as replayed

    found = replayed(journal)
    if found.is_truncated:
        print(f"{journal} is truncated: its last line, which lacks its end, is left out")
    counts = f"{found.num_batches:,} batches and {found.num_calls:,} calls"
    if found.mismatch is None:
        print(f"{counts} compared: every decision is the same")
        return 0
    print(f"after {counts} that are the same, {found.mismatch}")
    return _DIFFERENT
