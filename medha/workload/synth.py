"""Generates traces: arrival processes, and the trace of one process and one distribution of lengths.

Draws come from ``numpy.random.PCG64``, with a stream for arrivals and one for lengths, so that another rate leaves the
lengths as they are. The same seed gives the same trace on the same numpy.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from medha.errors import ConfigError
from medha.workload.lengths import parse_lengths
from medha.workload.trace import Trace

ARRIVALS = ("poisson", "gamma", "uniform", "at-once")
"""``gamma`` is as vLLM's ``--burstiness``: 1 is Poisson, less is burstier, the CV of the gaps is 1 / sqrt(it)."""

MAX_REQUESTS = 20_000_000
_BLOCK = 65_536


def generators(seed: int) -> tuple[np.random.Generator, np.random.Generator]:
    """The streams of a seed for arrivals and for lengths.

    Raises:
        ConfigError: the seed is negative.
    """
    if seed < 0:
        raise ConfigError(f"seed={seed}; accepted: 0 or more")
    streams = np.random.SeedSequence(seed).spawn(2)
    return np.random.Generator(np.random.PCG64(streams[0])), np.random.Generator(np.random.PCG64(streams[1]))


def arrival_times(
    process: str,
    rng: np.random.Generator,
    *,
    qps: float | None = None,
    burstiness: float = 1.0,
    num_requests: int | None = None,
    duration_s: float | None = None,
) -> NDArray[np.float64]:
    """Draw arrival times in seconds, so many of them or those before ``duration_s``.

    The first request of ``poisson`` and ``gamma`` comes after a gap, that of ``uniform`` at 0.

    Args:
        process: one of ARRIVALS.
        rng: where draws come from.
        qps: requests a second on average; not for ``at-once``.
        burstiness: shape of the gaps of ``gamma``, 0.001 to 1e6.
        num_requests, duration_s: give one of them; ``at-once`` takes the number alone.

    Raises:
        ConfigError: an argument is missing or not accepted, or more than MAX_REQUESTS would result.
    """
    if process not in ARRIVALS:
        raise ConfigError(f"arrivals={process!r}; accepted: {', '.join(ARRIVALS)}")
    if (num_requests is None) == (duration_s is None):
        raise ConfigError(f"num_requests={num_requests} and duration_s={duration_s}; accepted: one of the two")
    if process == "at-once":
        if num_requests is None or qps is not None:
            raise ConfigError(f"arrivals at-once with qps={qps}, duration_s={duration_s}; accepted: num_requests alone")
        return np.zeros(_checked_number(num_requests))
    qps = _within("qps", qps, 0.0)
    if duration_s is not None and qps * _within("duration_s", duration_s, 0.0) > MAX_REQUESTS:
        raise ConfigError(f"qps={qps:g} for {duration_s:g} s; accepted: at most {MAX_REQUESTS} requests in all")
    count = math.ceil(qps * duration_s) + 1 if duration_s is not None else _checked_number(num_requests or 0)
    if process == "uniform":
        times = np.arange(count) / qps
    else:
        shape = 1.0 if process == "poisson" else _within("burstiness", burstiness, 1e-3, 1e6)
        times = _sums(lambda number: rng.standard_gamma(shape, number) / (qps * shape), count, duration_s)
    return times if duration_s is None else times[times < duration_s]


def _sums(gaps: Callable[[int], NDArray[np.float64]], count: int, duration_s: float | None) -> NDArray[np.float64]:
    """Running sums of so many gaps, and of as many more as it takes to get past ``duration_s``."""
    drawn = gaps(count)
    while duration_s is not None and drawn.sum() < duration_s:
        drawn = np.concatenate([drawn, gaps(_BLOCK)])
    return np.cumsum(drawn)  # one sum from the first gap on, so that a shorter trace has the same bits


def _within(name: str, value: float | None, low: float, high: float = math.inf) -> float:
    if value is None or not (low < value < high):
        raise ConfigError(f"{name}={value}; accepted: a finite number above {low:g}, below {high:g}")
    return value


def _checked_number(num_requests: int) -> int:
    if not 1 <= num_requests <= MAX_REQUESTS:
        raise ConfigError(f"num_requests={num_requests}; accepted: 1 to {MAX_REQUESTS}")
    return num_requests


def synthesize(
    lengths: str,
    arrivals: str | NDArray[np.float64] = "poisson",
    *,
    qps: float | None = None,
    burstiness: float = 1.0,
    num_requests: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
) -> Trace:
    """Generate a trace.

    Args:
        lengths: a name or a specification of :func:`medha.workload.lengths.parse_lengths`.
        arrivals: a process of ARRIVALS, or the times of a trace (seconds, non-decreasing): then ``qps`` scales them,
            and ``num_requests`` or ``duration_s``, if any, keeps the first of them.
        qps, burstiness, num_requests, duration_s: as of :func:`arrival_times`.
        seed: 0 or more.

    Raises:
        ConfigError: an argument is missing or not accepted, or no request arrives within ``duration_s``.
    """
    distribution = parse_lengths(lengths)
    for_arrivals, for_lengths = generators(seed)
    if isinstance(arrivals, str):
        times = arrival_times(
            arrivals,
            for_arrivals,
            qps=qps,
            burstiness=burstiness,
            num_requests=num_requests,
            duration_s=duration_s,
        )
    else:
        times = _from_trace(arrivals, qps, num_requests, duration_s)
    if not len(times):
        raise ConfigError(f"duration_s={duration_s}: no request arrives; accepted: longer, or a higher qps")
    prompts, outputs = distribution.sample(for_lengths, len(times))
    return Trace(times, prompts, outputs)


def _from_trace(
    times: NDArray[np.float64], qps: float | None, num_requests: int | None, duration_s: float | None
) -> NDArray[np.float64]:
    trace = Trace(times, np.ones(len(times), np.int64), np.ones(len(times), np.int64))
    if qps is not None:
        trace = trace.scaled(qps)
    if duration_s is not None:
        trace = trace.window(_within("duration_s", duration_s, 0.0))
    if num_requests is not None:
        if not 1 <= num_requests <= len(trace):
            raise ConfigError(f"num_requests={num_requests}; accepted: 1 to {len(trace)}, the arrivals of the trace")
        trace = trace.head(num_requests)
    return trace.arrival_s
