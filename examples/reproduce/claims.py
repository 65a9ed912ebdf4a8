"""The numeric claims of the two Medha papers, as data: ``claims.toml``, checked when it is read.

v5 is arXiv:2409.17264v5 (*No Request Left Behind*), v4 its earlier version. A claim names the figure of ours that gives
a verdict on it, or the reason why none does.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from medha.errors import ConfigError

CLAIMS = Path(__file__).with_name("claims.toml")
BASES = ("", "arithmetic", "input", "by construction")
KINDS = ("value", "range", "at-least", "at-most", "statement")
VERSIONS = ("v4", "v5")


@dataclass(frozen=True)
class Claim:
    """One claim.

    Attributes:
        id: unique.
        versions: of the paper that make it: ``v4``, ``v5``.
        where: section and figure.
        says: what it says, in our words.
        kind: ``value`` (about so much), ``range`` (from, to), ``at-least``, ``at-most``, or ``statement`` (no number of
            its own: ours is the share of tested cases in which it is true).
        value: the number, or two for a range; 1 for a statement.
        unit: of the number.
        figure: of ours that answers it, or empty.
        reason: why no figure does; empty where one does.
        neutral: value at which nothing changes: ours has to be on the same side; None where there is none.
        basis: what the answer rests on where a verdict says nothing of the system, so that it is not counted:
            ``arithmetic`` (follows from shapes, published rates and a formula), ``input`` (we put the number in) or
            ``by construction`` (our setting has it); empty where it was simulated.
        note: contradictions within or between the papers, and what is to be known of the verdict.
    """

    id: str
    versions: tuple[str, ...]
    where: str
    says: str
    kind: str
    value: float | tuple[float, ...]
    unit: str
    figure: str = ""
    reason: str = ""
    neutral: float | None = None
    basis: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("id", "where", "says", "unit", "figure", "reason", "note"):
            _check(self, name, isinstance(getattr(self, name), str), "a text")
        for name in ("id", "where", "says", "unit"):
            _check(self, name, bool(getattr(self, name).strip()), "a text that is not empty")
        _check(self, "kind", self.kind in KINDS, ", ".join(KINDS))
        _check(self, "basis", self.basis in BASES, ", ".join(BASES[1:]))
        known = bool(self.versions) and set(self.versions) <= set(VERSIONS)
        _check(self, "versions", known, f"one or more of {', '.join(VERSIONS)}")
        self._check_numbers()
        if bool(self.figure) == bool(self.reason.strip()):
            raise ConfigError(
                f"claim {self.id}: figure={self.figure!r} and reason={self.reason!r}; accepted: one of the two"
            )

    def _check_numbers(self) -> None:
        if self.kind == "range":
            pair = isinstance(self.value, tuple) and len(self.value) == 2 and all(map(_is_number, self.value))
            _check(self, "value", pair and self.pair[0] < self.pair[1], "two rising numbers for a range")
        else:
            _check(self, "value", _is_number(self.value), "a finite number")
        if self.kind == "statement":
            _check(self, "value", self.value == 1, "1 for a statement")
        _check(self, "neutral", self.neutral is None or _is_number(self.neutral), "a finite number")

    @cached_property
    def number(self) -> float:
        """The value of a claim that is no range."""
        assert not isinstance(self.value, tuple), f"{self.id} is a range"
        return float(self.value)

    @cached_property
    def pair(self) -> tuple[float, float]:
        """The ends of a range."""
        assert isinstance(self.value, tuple), f"{self.id} is no range"
        low, high = self.value
        return float(low), float(high)


def load_claims(path: Path = CLAIMS) -> list[Claim]:
    """All claims of a file.

    Raises:
        ConfigError: naming the claim and the field that is unknown, missing, wrong or given twice.
    """
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"claims {path} cannot be read: {error}") from error
    rows = tree.get("claim")
    if set(tree) != {"claim"} or not isinstance(rows, list):
        raise ConfigError(f"claims {path}; accepted: a list of [[claim]] and nothing else")
    claims = [_claim(row, number) for number, row in enumerate(rows, 1)]
    seen: set[str] = set()
    for claim in claims:
        if claim.id in seen:
            raise ConfigError(f"claim {claim.id} is given twice")
        seen.add(claim.id)
    return claims


def _claim(row: dict[str, Any], number: int) -> Claim:
    where = f"claim {row.get('id', f'number {number}')}"
    known = {item.name: item.default is MISSING for item in fields(Claim)}
    if unknown := sorted(set(row) - set(known)):
        raise ConfigError(f"{where} has unknown fields {', '.join(unknown)}; known: {', '.join(known)}")
    if missing := [name for name, needed in known.items() if needed and name not in row]:
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Claim(**given)


def _check(claim: Claim, name: str, is_right: bool, accepted: str) -> None:
    if not is_right:
        raise ConfigError(f"claim {claim.id}: {name}={getattr(claim, name)!r}; accepted: {accepted}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
