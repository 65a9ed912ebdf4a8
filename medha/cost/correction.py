"""What running teaches about a prediction: a factor by kind of batch, and how far off predictions were.

Fed by a stage's own busy time alone: waits for other stages say nothing about its cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["decode", "mixed", "prefill"]
KINDS: tuple[Kind, ...] = ("decode", "mixed", "prefill")
"""A batch of decodes alone, of decodes and chunks, of chunks alone."""

_GAIN = 0.15
"""Of the present observation once there are many: a slow-down is followed with a time constant of 7 steps."""
_MAX_STEP = 0.05
"""Largest change of a factor's natural logarithm at one observation then; a stall of a minute is no new speed."""
_MAX_RATIO = 1e4
"""Observations further than this from the uncorrected prediction, either way, are ignored."""


@dataclass(frozen=True, slots=True)
class ErrorFigures:
    """Errors of predictions made before dispatch, as a share of the real time.

    Attributes:
        count: batches.
        mean_abs: mean absolute error; 0.1 is 10 %.
        mean_signed: mean error; above 0 where predictions are too long.
    """

    count: int
    mean_abs: float
    mean_signed: float


class RunningError:
    """Errors of predictions by kind, since the start."""

    def __init__(self) -> None:
        self._sums = {kind: [0, 0.0, 0.0] for kind in KINDS}

    def add(self, kind: Kind, predicted_s: float, busy_s: float) -> None:
        """Count one batch; both times are above 0."""
        share = predicted_s / busy_s - 1.0
        sums = self._sums[kind]
        sums[0] += 1
        sums[1] += abs(share)
        sums[2] += share

    def figures(self, kind: Kind | None = None) -> ErrorFigures:
        """Of one kind, or of all batches; zeros before the first."""
        chosen = list(self._sums.values()) if kind is None else [self._sums[kind]]
        count, absolute, signed = (sum(column) for column in zip(*chosen, strict=True))
        return ErrorFigures(int(count), absolute / max(count, 1), signed / max(count, 1))


class Correction:
    """One factor a kind, on every prediction.

    The logarithm of the ratio of busy to uncorrected time is averaged: plainly over the first observations, then
    exponentially. As the target does not contain the factor itself, batches in flight cause no feedback, and a change
    of speed is approached from one side. A kind that has not been seen borrows the factor of the kind seen most.

    Attributes:
        errors: of the predictions as they were made.
    """

    def __init__(self) -> None:
        self.errors = RunningError()
        self._log = dict.fromkeys(KINDS, 0.0)
        self._seen = dict.fromkeys(KINDS, 0)

    def factor(self, kind: Kind) -> float:
        """What predictions of a kind are multiplied by."""
        return math.exp(self._log[self._source(kind)])

    def _source(self, kind: Kind) -> Kind:
        """The kind whose factor a kind has."""
        return kind if self._seen[kind] else max(KINDS, key=self._seen.__getitem__)

    @property
    def learned(self) -> dict[str, tuple[float, int]]:
        """What predictions go by: of each kind the logarithm of its factor, and how many batches taught it."""
        return {kind: (self._log[kind], self._seen[kind]) for kind in KINDS}

    def restore(self, learned: Mapping[str, tuple[float, int]]) -> None:
        """Predict from now on as the correction whose :attr:`learned` this is; the counts of errors stay."""
        for kind in KINDS:
            self._log[kind], self._seen[kind] = learned[kind]

    def observe(self, kind: Kind, predicted_s: float, busy_s: float, *, factor: float | None = None) -> bool:
        """Learn from one batch.

        Args:
            kind: what was in it.
            predicted_s: as predicted before dispatch, corrected.
            busy_s: what the stage took, waits excluded.
            factor: the correction within ``predicted_s``; None is the present one, which is right where the batch was
                predicted after the last observation.

        Returns:
            False if the observation was ignored: not finite, not above 0 or absurd.
        """
        start = self._log[self._source(kind)]
        if predicted_s == busy_s and factor == 1.0 and start == 0.0 and 0 < busy_s < math.inf:
            self.errors.add(kind, predicted_s, busy_s)  # nothing to learn, as at every step of most simulations
            self._seen[kind] += 1
            self._log[kind] = 0.0
            return True
        within = math.exp(start) if factor is None else factor
        if not (0 < predicted_s < math.inf and 0 < busy_s < math.inf and 0 < within < math.inf):
            return False
        target = math.log(busy_s) - math.log(predicted_s) + math.log(within)
        if abs(target) > math.log(_MAX_RATIO):
            return False
        self.errors.add(kind, predicted_s, busy_s)
        self._seen[kind] += 1
        share = 1.0 / self._seen[kind]
        step, most = max(_GAIN, share) * (target - start), max(_MAX_STEP, share)
        self._log[kind] = start + min(max(step, -most), most)
        return True
