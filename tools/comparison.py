"""Times of requests on a real engine against those in a simulation of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.tables import Floats

Figures = dict[str, dict[str, float]]
METRICS = {"TTFT": "ttft_s", "TPOT": "tpot_s", "latency": "e2e_s"}
SHARES = {"median": 50, "P90": 90, "P95": 95, "P99": 99}


@dataclass(frozen=True, slots=True)
class Times:
    """What became of requests, a column each; seconds of one clock.

    Attributes:
        arrival_s, first_token_s, finish_s: when.
        num_tokens: that each produced.
    """

    arrival_s: Floats
    first_token_s: Floats
    finish_s: Floats
    num_tokens: Floats

    @property
    def ttft_s(self) -> Floats:
        """Arrival to first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """Mean time between tokens after the first; NaN with one token."""
        return (self.finish_s - self.first_token_s) / np.where(self.num_tokens > 1, self.num_tokens - 1, np.nan)

    @property
    def e2e_s(self) -> Floats:
        """Arrival to last token."""
        return self.finish_s - self.arrival_s

    @property
    def makespan_s(self) -> float:
        """First arrival to last token of all."""
        return float(self.finish_s.max() - self.arrival_s.min())

    def of(self, rows: NDArray[np.bool_]) -> Times:
        """Some of the requests."""
        return Times(*(getattr(self, column.name)[rows] for column in fields(self)))


def compared(measured: Times, simulated: Times, metric: str) -> Figures:
    """Mean, median and percentiles of one of METRICS on both sides, and the signed error as a share of the measured."""
    sides = [values[np.isfinite(values)] for values in (getattr(t, METRICS[metric]) for t in (measured, simulated))]
    means = pair(*(float(values.mean()) for values in sides))
    return {"mean": means, **{n: pair(*(float(np.percentile(v, p)) for v in sides)) for n, p in SHARES.items()}}


def pair(measured_s: float, simulated_s: float) -> dict[str, float]:
    """A figure on both sides, seconds, and its error."""
    return {"measured_s": measured_s, "simulated_s": simulated_s, "error": simulated_s / measured_s - 1.0}


def request_error(measured: Times, simulated: Times, metric: str) -> float:
    """The absolute error of each request as a share of what was measured, the mean over all requests."""
    real, ours = (getattr(times, METRICS[metric]) for times in (measured, simulated))
    known = np.isfinite(real) & np.isfinite(ours) & (real > 0)
    return float(np.mean(np.abs(ours[known] / real[known] - 1.0)))


def against_aims(errors: Mapping[str, float], aims: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Whether absolute errors are within the largest that are aimed at, by name."""
    found = {name: (abs(errors[name]), aim) for name, aim in aims.items()}
    return {
        name: {"error": error, "aimed_error": aim, "verdict": "met" if error <= aim else "missed"}
        for name, (error, aim) in found.items()
    }
