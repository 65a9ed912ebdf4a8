"""What running teaches about a prediction: a factor by kind of batch.

Fed by a stage's own busy time alone: waits for other stages say nothing about its cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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


class Correction:
    """One factor a kind, on every prediction.

    The logarithm of the ratio of busy to uncorrected time is averaged: plainly over the first observations, then
    exponentially. As the target does not contain the factor itself, batches in flight cause no feedback, and a change
    of speed is approached from one side. A kind that has not been seen borrows the factor of the kind seen most.
    """

    def __init__(self) -> None:
        self._log = dict.fromkeys(KINDS, 0.0)
        self._seen = dict.fromkeys(KINDS, 0)

    def factor(self, kind: Kind) -> float:
        """What predictions of a kind are multiplied by."""
        return math.exp(self._log[self._source(kind)])

    def _source(self, kind: Kind) -> Kind:
        """The kind whose factor a kind has."""
        return kind if self._seen[kind] else max(KINDS, key=self._seen.__getitem__)

    @property
    def num_seen(self) -> int:
        """Batches that taught it."""
        return sum(self._seen.values())

    @property
    def learned(self) -> dict[str, tuple[float, int]]:
        """What predictions go by: of each kind the logarithm of its factor, and how many batches taught it."""
        return {kind: (self._log[kind], self._seen[kind]) for kind in KINDS}

    def restore(self, learned: Mapping[str, tuple[float, int]]) -> None:
        """Predict from now on as the correction whose :attr:`learned` this is."""
        for kind in KINDS:
            self._log[kind], self._seen[kind] = learned[kind]

    def observe(self, kind: Kind, predicted_s: float, busy_s: float, *, factor: float | None = None) -> bool:
        """Learn from one batch; False if that was ignored: not finite, not above 0 or absurd.

        Args:
            kind: what was in it.
            predicted_s: as predicted before dispatch, corrected.
            busy_s: what the stage took, waits excluded.
            factor: the correction within ``predicted_s``; None is the present one.
        """
        start = self._log[self._source(kind)]
        if predicted_s == busy_s and factor == 1.0 and start == 0.0 and 0 < busy_s < math.inf:
            self._seen[kind] += 1  # nothing to learn, as at every step of most simulations
            self._log[kind] = 0.0
            return True
        within = math.exp(start) if factor is None else factor
        if not (0 < predicted_s < math.inf and 0 < busy_s < math.inf and 0 < within < math.inf):
            return False
        target = math.log(busy_s) - math.log(predicted_s) + math.log(within)
        if abs(target) > math.log(_MAX_RATIO):
            return False
        self._seen[kind] += 1
        share = 1.0 / self._seen[kind]
        step, most = max(_GAIN, share) * (target - start), max(_MAX_STEP, share)
        self._log[kind] = start + min(max(step, -most), most)
        return True
