"""What became of a trace on a system: the common form in which systems under load are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from medha.sim.outcome import Gaps, Outcome
from medha.workload.metrics import percentile
from medha.workload.trace import Trace

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Served:
    """A trace that was played, by its row; seconds of the virtual clock, NaN for what had not happened at the end.

    Attributes:
        trace: what was asked, in order of arrival.
        first_token_s, finish_s: times of the first and the last token.
        end_s: when the play ended: with the last token, or where it was stopped.
        gaps: waits between tokens, over all tokens.
    """

    trace: Trace
    first_token_s: Floats
    finish_s: Floats
    end_s: float
    gaps: Gaps

    @classmethod
    def of(cls, outcome: Outcome) -> Served:
        """What a simulation of medha's scheduler came to."""
        first_s = float(outcome.trace.arrival_s[0]) if len(outcome.trace) else 0.0
        requests = outcome.requests
        return cls(outcome.trace, requests.first_token_s, requests.finish_s, first_s + outcome.duration_s, outcome.gaps)

    @property
    def ttft_s(self) -> Floats:
        """Seconds to the first token; inf where there was none: a quantile is then no less than it would have been."""
        waited_s = self.first_token_s - self.trace.arrival_s
        return np.where(np.isnan(waited_s), np.inf, waited_s)

    @property
    def tpot_s(self) -> Floats:
        """Mean seconds between the tokens of each request that ended and has several; NaN for the others."""
        gaps = np.maximum(self.trace.output_tokens - 1, 1)
        return np.where(self.trace.output_tokens > 1, (self.finish_s - self.first_token_s) / gaps, np.nan)

    @property
    def is_finished(self) -> NDArray[np.bool_]:
        """Which requests got their last token."""
        return ~np.isnan(self.finish_s)


def finite(value: float) -> float | None:
    """The value; None for NaN and inf, which are no JSON."""
    return value if math.isfinite(value) else None


def quantile_s(values: Floats, share: float) -> float:
    """The quantile of a share, linear; inf where it is for ever; NaN are left out."""
    known = values[~np.isnan(values)]
    found = percentile(known, 100 * share)
    return found if found is not None else math.inf if len(known) else math.nan
