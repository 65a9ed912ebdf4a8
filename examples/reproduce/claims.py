"""The numeric claims of the two Medha papers, of Tetris and of a post, as data: ``claims.toml``.

v5 is arXiv:2409.17264v5 (*No Request Left Behind*), v4 its earlier version, Tetris "Optimizing Long-context LLM Serving
via Fine-grained Sequence Parallelism", the post "Dynamic Batching: Orca, Sarathi, and Iteration-Level Scheduling
Algorithms". A claim names the figure of ours that gives
a verdict on it, or the reason why none does.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLAIMS = Path(__file__).with_name("claims.toml")


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        id: unique.
        where: of which papers (``v4``, ``v5``, ``Tetris``, ``post``), section and figure.
        says: what it says, in our words.
        kind: ``value`` (about so much), ``range`` (from, to), ``at-least``, ``at-most``, or ``statement`` (no number of
            its own: ours is the share of tested cases in which it is true).
        value: the number, or two for a range; 1 for a statement.
        unit: of the number; a statement has none.
        figure: of ours that answers it, or empty.
        how: what the answer was computed with, and why it differs where it does; in braces the facts of the answer.
        reason: why no figure does; empty where one does.
        basis: what the answer rests on where a verdict says nothing of the system, so that it is not counted:
            ``arithmetic`` (follows from shapes, published rates and a formula), ``input`` (we put the number in) or
            ``by construction`` (our setting has it); empty where it was simulated.
        note: contradictions within or between the papers, and what is to be known of the verdict.
    """

    id: str
    where: str
    says: str
    kind: str
    value: Any = 1
    unit: str = ""
    figure: str = ""
    how: str = ""
    reason: str = ""
    basis: str = ""
    note: str = ""

    @property
    def neutral(self) -> float:
        """The value at which nothing changes, on the same side of which ours has to be: 1 of a ratio, else 0."""
        return 1.0 if self.unit == "times" and self.kind in ("value", "range") else 0.0


def load_claims() -> list[Claim]:
    """All claims."""
    rows: list[dict[str, Any]] = tomllib.loads(CLAIMS.read_text(encoding="utf-8"))["claim"]
    for row in rows:
        row |= {name: tuple(value) for name, value in row.items() if isinstance(value, list)}
    return [Claim(**row) for row in rows]
