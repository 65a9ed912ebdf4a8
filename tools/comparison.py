"""Times of requests on a real engine against those in a simulation of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from medha.workload.metrics import Floats, TokenTimes

Figures = dict[str, dict[str, float]]
METRICS = {"TTFT": "ttft_s", "TPOT": "tpot_s", "latency": "e2el_s"}
SHARES = {"median": 50, "P90": 90, "P95": 95, "P99": 99}


def makespan_s(times: TokenTimes) -> float:
    """First arrival to last token of all."""
    return float(times.finish_s.max() - times.arrival_s.min())


def compared(measured: Floats, simulated: Floats) -> Figures:
    """Mean, median and percentiles on both sides, and the signed error as a share of the measured."""
    sides = [values[np.isfinite(values)] for values in (measured, simulated)]
    means = pair(*(float(values.mean()) for values in sides))
    return {"mean": means, **{n: pair(*(float(np.percentile(v, p)) for v in sides)) for n, p in SHARES.items()}}


def pair(measured_s: float, simulated_s: float) -> dict[str, float]:
    """A figure on both sides, seconds, and its error."""
    return {"measured_s": measured_s, "simulated_s": simulated_s, "error": simulated_s / measured_s - 1.0}


def request_error(measured: TokenTimes, simulated: TokenTimes, metric: str) -> float:
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
