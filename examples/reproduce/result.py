"""What a figure gives, and how it is judged against what a paper says.

The rule, printed in every report:

- A value is *reproduced* where its change is within 15 % of the paper's, *partly* within a factor of 2, and *not*
  otherwise. A change is from the point where nothing changes: 1 for a ratio, 0 for a difference and for an amount. A
  range must hold at both ends. A ratio that changes the same way by more than twice as much *exceeds* the paper's: that
  is no agreement and no contradiction, and is not counted. A difference that does, such as what chunks cost, is *not*
  reproduced.
- A bound is reproduced where it holds, partly where it is missed by less than a factor of 2.
- A statement without a number is tested in several cases: reproduced in all of them, partly in at least half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from examples.reproduce.claims import Claim
from examples.reproduce.plotting import Panel

CLOSE = 0.15
FACTOR = 2.0
_ROUNDING = 1e-9
VERDICTS = ("reproduced", "partly", "exceeds", "not")
RULE = (
    "A value is reproduced where its change is within 15 % of the paper's, partly within a factor of 2, else not; a "
    "change is from the point where nothing changes (1 for a ratio, 0 for a difference and for an amount). A range at "
    "both ends. A ratio that changes the same way by more than twice as much exceeds the paper's and stands "
    "apart. A bound is reproduced where it holds, partly where it is missed by less than a factor of 2. A "
    "statement is tested in several cases: reproduced in all, partly in at least half. Verdicts on arithmetic, on "
    "inputs and on what our setting has by construction say nothing of a system and stand apart."
)

Ours = float | tuple[float, float]


@dataclass(frozen=True, slots=True)
class Options:
    """How figures are computed.

    Attributes:
        quick: fewer points on the axes; claims keep the points that they are about.
        seed: of what is drawn.
    """

    quick: bool = False
    seed: int = 0

    @property
    def window_s(self) -> float:
        """Seconds for which a load is played: the papers' hour; ``quick`` takes five minutes, in which queues grow
        less."""
        return 300.0 if self.quick else 3600.0


class Answer:
    """What we get for one claim.

    Args:
        ours: in the unit of the claim; two numbers for a range, for a statement whether it holds, by tested case.
        facts: what the claim's ``how`` names.
    """

    def __init__(self, ours: Ours | Sequence[bool] | NDArray[np.bool_], /, **facts: object) -> None:
        self.ours: Ours = ours if isinstance(ours, (float, int, tuple)) else float(np.mean(ours))
        self.facts = facts


@dataclass(frozen=True, slots=True)
class FigureResult:
    """A figure that was computed.

    Attributes:
        panels: what is drawn.
        answers: by the id of the claim.
    """

    panels: Sequence[Panel]
    answers: dict[str, Answer] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FigureSpec:
    """A figure that can be computed.

    Attributes:
        name: on the command line and of its files.
        title: one line.
        run: computes it.
    """

    name: str
    title: str
    run: Callable[[Options], FigureResult]


def figure(name: str, title: str) -> Callable[[Callable[[Options], FigureResult]], FigureSpec]:
    """Make a figure of the function below."""
    return partial(FigureSpec, name, title)


def verdict(claim: Claim, ours: Ours) -> str:
    """One of VERDICTS.

    Raises:
        ValueError: one number for a range or two for a value.
    """
    if isinstance(ours, tuple) != (claim.kind == "range"):
        raise ValueError(f"claim {claim.id} is a {claim.kind}; ours: {ours}")
    if isinstance(ours, tuple):
        ends = (_of_value(paper, own, claim.neutral) for paper, own in zip(claim.value, ours, strict=True))
        return max(ends, key=VERDICTS.index)
    number, paper = ours, claim.value
    if claim.kind == "statement":
        return "reproduced" if number >= 1 else "partly" if number >= 1 / FACTOR else "not"
    if claim.kind == "value":
        return _of_value(paper, number, claim.neutral)
    missed = number / paper if claim.kind == "at-most" else paper / number if number > 0 else math.inf
    return "reproduced" if missed <= 1 + _ROUNDING else "partly" if missed <= FACTOR else "not"


def ratio(claim: Claim, ours: Ours) -> float | None:
    """Our change over the paper's, of the middles of a range; None for a statement or a paper's 0."""
    if claim.kind == "statement":
        return None
    ours_middle = sum(ours) / 2 if isinstance(ours, tuple) else ours
    return _relative(sum(claim.value) / 2 if claim.kind == "range" else claim.value, ours_middle, claim.neutral)


def _relative(paper: float, ours: float, neutral: float) -> float | None:
    """Our change from the point where nothing changes, over the paper's; None where the paper has none."""
    return (ours - neutral) / (paper - neutral) if paper != neutral else None


def _of_value(paper: float, ours: float, neutral: float) -> str:
    share = _relative(paper, ours, neutral)
    if share is None:
        return "reproduced" if ours == paper else "not"
    if abs(share - 1) <= CLOSE + _ROUNDING:
        return "reproduced"
    if neutral == 1 and share > FACTOR + _ROUNDING:
        return "exceeds"
    return "partly" if 1 / FACTOR - _ROUNDING <= share <= FACTOR + _ROUNDING else "not"
