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
Mask = NDArray[np.bool_]

LONG_TOKENS = 8192
"""Prompts above are long: ``sharegpt4-8k`` has none, and v5 section 6.5 calls those below short."""
_CURVE = tuple(np.linspace(0.0, 1.0, 101).tolist())


@dataclass(frozen=True, slots=True)
class Bounded:
    """A time in seconds, or only a bound on it.

    Attributes:
        seconds: the time.
        is_least: the true one is this or more, as it was not over when the play was stopped.
    """

    seconds: float
    is_least: bool = False

    def __str__(self) -> str:
        number = f"{self.seconds:.3g}" if self.seconds < 1000 else f"{self.seconds:,.0f}"
        return f"{'at least ' if self.is_least else ''}{number} s"


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
    def is_finished(self) -> Mask:
        """Which requests got their last token."""
        return ~np.isnan(self.finish_s)

    @property
    def is_long(self) -> Mask:
        """Which requests have a long prompt."""
        return np.asarray(self.trace.prompt_tokens > LONG_TOKENS)

    def ttft_quantile(self, share: float, among: Mask | None = None) -> Bounded:
        """A quantile of the TTFT, of all requests or some; a bound where it falls on one without a first token."""
        chosen = slice(None) if among is None else among
        value_s = quantile_s(self.ttft_s[chosen], share)
        if math.isfinite(value_s) or math.isnan(value_s):
            return Bounded(value_s)
        waited_s = np.minimum(self.ttft_s, self.end_s - self.trace.arrival_s)  # no more than the true one
        return Bounded(quantile_s(waited_s[chosen], share), True)

    def finished_share(self, early_s: float) -> float:
        """Share of the requests that arrived before a time that have finished; NaN of none."""
        finished = self.is_finished[self.trace.arrival_s < early_s]
        return float(finished.mean()) if len(finished) else math.nan


def quantile_s(values: Floats, share: float) -> float:
    """The quantile of a share, linear; inf where it is for ever; NaN are left out."""
    known = values[~np.isnan(values)]
    found = percentile(known, 100 * share)
    return found if found is not None else math.inf if len(known) else math.nan


def curve(values: Floats) -> list[float | None]:
    """101 quantiles from the least to the most; None where it is not over, or there is none."""
    found = [quantile_s(values, share) for share in _CURVE]
    return [value if math.isfinite(value) else None for value in found]
