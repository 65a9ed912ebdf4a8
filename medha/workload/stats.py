"""What a trace is like: rate, burstiness, quantiles of lengths, the share of long prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from medha.workload.trace import Trace

LONG_PROMPTS = (8_192, 32_768, 131_072)
"""Prompt lengths of which the share at or above is stated, in tokens."""


@dataclass(frozen=True, slots=True)
class LengthStats:
    """Tokens of prompts or outputs; quantiles by linear interpolation."""

    total: int
    mean: float
    min: int
    p50: float
    p90: float
    p99: float
    max: int

    @classmethod
    def of(cls, tokens: NDArray[np.int64]) -> LengthStats:
        """Of one column, which is not empty."""
        p50, p90, p99 = (float(q) for q in np.percentile(tokens, [50, 90, 99]))
        return cls(int(tokens.sum()), float(tokens.mean()), int(tokens.min()), p50, p90, p99, int(tokens.max()))


@dataclass(frozen=True, slots=True)
class TraceStats:
    """A trace in figures.

    Attributes:
        first_arrival_s, duration_s: seconds; the duration is from the first arrival to the last.
        qps: requests a second, None where all arrive at once.
        gap_cv: coefficient of variation of the gaps between arrivals, 1 for Poisson; None for fewer than 2 gaps.
        burstiness: 1 / gap_cv**2, the value that generates such gaps with gamma arrivals; None also for equal gaps.
        long_shares: by length in tokens, the share of prompts of at least that length.
    """

    num_requests: int
    first_arrival_s: float
    duration_s: float
    qps: float | None
    gap_cv: float | None
    burstiness: float | None
    prompt_tokens: LengthStats
    output_tokens: LengthStats
    long_shares: dict[int, float]


def trace_stats(trace: Trace) -> TraceStats:
    """The figures of a trace with at least one request."""
    gaps = np.diff(trace.arrival_s)
    mean = float(gaps.mean()) if len(gaps) else 0.0
    cv = float(gaps.std()) / mean if len(gaps) > 1 and mean > 0 else None
    return TraceStats(
        len(trace),
        float(trace.arrival_s[0]),
        trace.duration_s,
        trace.qps,
        cv,
        1 / cv**2 if cv is not None and cv > 1e-6 else None,
        LengthStats.of(trace.prompt_tokens),
        LengthStats.of(trace.output_tokens),
        {length: float((trace.prompt_tokens >= length).mean()) for length in LONG_PROMPTS},
    )
