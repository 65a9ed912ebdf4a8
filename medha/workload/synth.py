"""Generates traces: arrival processes, and the trace of one process and one distribution of lengths.

Draws come from ``numpy.random.PCG64``, with a stream for arrivals and one for lengths, so that another rate leaves the
lengths as they are. The same seed gives the same trace on the same numpy.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medha.config.fields import check_number, parse_size
from medha.errors import ConfigError
from medha.workload.io import Reading
from medha.workload.trace import HASHED_TOKENS, MAX_TOKENS, Trace

ARRIVALS = ("poisson", "gamma", "uniform", "at-once")
"""``gamma`` is as vLLM's ``--burstiness``: 1 is Poisson, less is burstier, the CV of the gaps is 1 / sqrt(it)."""

MAX_REQUESTS = 20_000_000


def generators(seed: int) -> tuple[np.random.Generator, np.random.Generator]:
    """The streams of a seed (0 or more) for arrivals and for lengths."""
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
    """Draw arrival times of a process of ARRIVALS in seconds, so many of them or those before ``duration_s``.

    The first request of ``poisson`` and ``gamma`` comes after a gap, that of ``uniform`` at 0. ``qps`` is requests a
    second on average, not for ``at-once``; ``burstiness`` the shape of the gaps; another than 1 makes
    ``poisson`` a ``gamma``.
    """
    if process not in ARRIVALS:
        raise ConfigError(f"arrivals={process!r}; accepted: {', '.join(ARRIVALS)}")
    if (num_requests is None) == (duration_s is None):
        raise ConfigError(f"num_requests={num_requests} and duration_s={duration_s}; accepted: one of the two")
    if process == "at-once":
        if num_requests is None or qps is not None:
            raise ConfigError(f"arrivals at-once with qps={qps}, duration_s={duration_s}; accepted: num_requests alone")
        return np.zeros(num_requests)
    if qps is None:
        raise ConfigError(f"arrivals={process!r} without a rate; accepted: --request-rate, or --arrivals at-once")
    for name, value in (("qps", qps), ("duration_s", duration_s), ("burstiness", burstiness)):
        if value is not None:
            check_number(name, value)
    count = (num_requests or 0) if duration_s is None else math.ceil(qps * duration_s) + 1
    if not 1 <= count <= MAX_REQUESTS:
        raise ConfigError(f"num_requests={count}; accepted: 1 to {MAX_REQUESTS}")
    if process == "uniform":
        times = np.arange(count) / qps
    else:
        times = _sums(lambda number: rng.standard_gamma(burstiness, number) / (qps * burstiness), count, duration_s)
    return times if duration_s is None else times[times < duration_s]


def _sums(gaps: Callable[[int], NDArray[np.float64]], count: int, duration_s: float | None) -> NDArray[np.float64]:
    """Running sums of so many gaps, and of as many more as it takes to get past ``duration_s``."""
    drawn = gaps(count)
    while duration_s is not None and drawn.sum() < duration_s:
        if len(drawn) >= MAX_REQUESTS:
            raise ConfigError(f"duration_s={duration_s}: over {MAX_REQUESTS} requests; accepted: a higher burstiness")
        drawn = np.concatenate([drawn, gaps(min(len(drawn), MAX_REQUESTS - len(drawn)))])
    return np.cumsum(drawn)  # one sum from the first gap on, so that a shorter trace has the same bits


def retimed(
    reading: Reading,
    process: str,
    *,
    qps: float | None,
    burstiness: float = 1.0,
    num_requests: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
) -> Trace:
    """The first requests of a file at a rate: its own gaps by one factor, or arrivals drawn where it has none."""
    trace, (rng, _) = reading.trace, generators(seed)
    if not reading.has_arrivals:
        times = arrival_times(process, rng, qps=qps, burstiness=burstiness, num_requests=len(trace))
        trace = replace(trace, arrival_s=times)
    elif (process, burstiness) != (ARRIVALS[0], 1):
        what = f"arrivals={process!r}, burstiness={burstiness:g} of requests that have arrival times"
        raise ConfigError(f"{what}; accepted: the defaults, and --request-rate, which scales their gaps")
    return trace.first(num_requests, duration_s, qps if reading.has_arrivals else None)


def synthesize(
    lengths: str,
    arrivals: str | Trace = "poisson",
    *,
    qps: float | None = None,
    burstiness: float = 1.0,
    num_requests: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
) -> Trace:
    """Generate a trace of lengths of :func:`parse_lengths`; the rest is as of :func:`arrival_times`.

    ``arrivals`` may be a trace whose arrivals are taken: then ``qps`` scales them, and ``num_requests`` or
    ``duration_s``, if any, keeps the first of them.
    """
    distribution = parse_lengths(lengths)
    for_arrivals, for_lengths = generators(seed)
    if isinstance(arrivals, str):
        limits: dict[str, Any] = {"num_requests": num_requests, "duration_s": duration_s}
        times = arrival_times(arrivals, for_arrivals, qps=qps, burstiness=burstiness, **limits)
    else:
        times = arrivals.first(num_requests, duration_s, qps).arrival_s
    if not len(times):
        raise ConfigError(f"duration_s={duration_s}: no request arrives; accepted: longer, or a higher qps")
    return Trace(times, *distribution.sample(for_lengths, len(times)))


Quantile = Callable[[NDArray[np.float64]], NDArray[np.float64]]  # from levels in [0, 1) to lengths

LONG_SHARE = 0.05

# Quantiles of a file of conversations, by level
# fmt: off
_LEVELS = (
    0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 1,
)
_SHAREGPT_PROMPT = (
    1, 12, 16, 29, 74, 180, 382, 580, 777, 1203, 1730, 2401, 3235, 3734, 4278, 4918, 5696, 6563, 7164, 7434, 8141,
)
_SHAREGPT_OUTPUT = (
    2, 6, 19, 44, 84, 130, 181, 228, 271, 346, 415, 493, 581, 628, 683, 754, 834, 920, 975, 998, 1024,
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of a kind of request, or of two kinds; draws of prompts and outputs are independent."""

    prompt: Quantile
    output: Quantile
    max_total: int | None = None  # outputs are cut so that prompt and output together have at most so many tokens
    long: Lengths | None = None  # another kind, of which a share of the requests are, each by its own draw
    long_share: float = 0.0

    def sample(self, rng: np.random.Generator, num_requests: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draw prompt and output tokens, int64; the first n requests are the same however many follow."""
        levels = rng.random((num_requests, 3)).T
        lengths = self._at(levels)
        if self.long is not None:
            lengths = np.where(levels[2] < self.long_share, self.long._at(levels), lengths)
        prompts, outputs = lengths.astype(np.int64)
        return prompts, outputs

    def _at(self, levels: NDArray[np.float64]) -> NDArray[np.float64]:
        """[2, n]: prompts and outputs."""
        prompts, outputs = np.rint(self.prompt(levels[0])), np.rint(self.output(levels[1]))
        return np.stack([prompts, outputs if self.max_total is None else np.minimum(outputs, self.max_total - prompts)])


@dataclass(frozen=True, slots=True)
class Sessions:
    """Requests that resend their history: each begins with all that its session has read and answered, of which the
    first is a document. Some sessions are under way at a time; a request is of any of these."""

    document: int  # tokens
    prompt: int  # what a request adds to the history
    output: int
    num_requests: int  # of a session
    num_open: int = 16

    def sample(self, rng: np.random.Generator, num_requests: int) -> tuple[Any, ...]:
        """Draw the columns of a :class:`Trace` behind its arrivals; as of :meth:`Lengths.sample`."""
        sessions, counts = list(range(self.num_open)), [0] * self.num_open
        prompts, hashes = np.empty(num_requests, np.int64), np.empty(num_requests, object)
        for row, at in enumerate((rng.random(num_requests) * self.num_open).astype(int).tolist()):
            prompts[row] = self.document + counts[at] * (self.prompt + self.output) + self.prompt
            first = sessions[at] << 32
            hashes[row] = array("q", range(first, first + int(prompts[row]) // HASHED_TOKENS))
            counts[at] += 1
            if counts[at] == self.num_requests:
                sessions[at], counts[at] = max(sessions) + 1, 0
        return prompts, np.full(num_requests, self.output), None, hashes


def knots(values: tuple[float, ...]) -> Quantile:
    """Straight lines between the quantiles of a file of conversations."""
    return lambda u: np.interp(u, _LEVELS, values)


def geometric_knots(values: tuple[float, ...], levels: tuple[float, ...]) -> Quantile:
    """Straight lines between the logarithms of given quantiles, for lengths that span orders of magnitude."""
    return lambda u: np.exp(np.interp(u, levels, np.log(values)))


def uniform(low: int, high: int) -> Quantile:
    """Integers from ``low`` to ``high``, both included."""
    return lambda u: np.minimum(np.floor(low + u * (high - low + 1)), high)  # a level just below 1 may round up


def cut_exponential(low: float, high: float, mean: float) -> Quantile:
    """An exponential distribution from ``low``, cut at ``high``, with the given mean, which is below their middle."""
    width = high - low

    def mean_at(rate: float) -> float:
        return low + 1 / rate - width / math.expm1(rate * width)

    slow, fast = 1e-3 / width, 500 / width
    for _ in range(200):  # the mean falls as the rate grows
        rate = (slow + fast) / 2
        slow, fast = (rate, fast) if mean_at(rate) > mean else (slow, rate)
    return lambda u: low - np.log1p(u * math.expm1(-rate * width)) / rate


@cache
def named_lengths() -> dict[str, Lengths]:
    """The distributions that have names."""
    output = knots(_SHAREGPT_OUTPUT)
    short = Lengths(knots(_SHAREGPT_PROMPT), output, max_total=8192)
    swe_prompt = ((131_072.0, 393e3, 839e3, 1e6), (0, 0.5, 0.9, 1))
    swe_output = geometric_knots((64, 332, 518, 808, 1161, 2048), (0, 0.1, 0.5, 0.9, 0.99, 1))
    swe, swe_2m = (
        Lengths(geometric_knots(tuple(scale * value for value in swe_prompt[0]), swe_prompt[1]), swe_output)
        for scale in (1, 2)
    )
    tetris = {"short": (4e3, 95e3, 23.6e3), "medium": (8e3, 142e3, 32.8e3), "long": (16e3, 190e3, 50.1e3)}
    return {
        "sharegpt4-8k": short,
        "medha-swe": swe,
        "medha-mix": replace(short, long=swe, long_share=LONG_SHARE),
        "medha-mix-1": replace(short, long=swe, long_share=0.01),
        "medha-mix-2m": replace(short, long=swe_2m, long_share=LONG_SHARE),
        **{f"tetris-{name}": Lengths(cut_exponential(*figures), output) for name, figures in tetris.items()},
    }


def parse_lengths(spec: str) -> Lengths | Sessions:
    """The distribution of a name, of ``fixed:P,D``, of ``uniform:A-B,C-D`` or ``sessions:DOCUMENT,P,D,REQUESTS``;
    ConfigError if it is none of these."""
    if spec in named_lengths():
        return named_lengths()[spec]
    if found := re.fullmatch(r"sessions:(0|N),(N),(N),(N)".replace("N", r"[1-9]\d{0,5}[kKmM]?"), spec, re.ASCII):
        document, prompt, output, count = (parse_size(text) if text != "0" else 0 for text in found.groups())
        if document + count * (prompt + output) <= MAX_TOKENS:
            return Sessions(document, prompt, output, count)
    match = re.fullmatch(r"fixed:(N),(N)|uniform:(N)-(N),(N)-(N)".replace("N", r"\d{1,9}[kKmM]?"), spec, re.ASCII)
    p, d, *ends = (parse_size(text) if text.strip("0") else 0 for text in match.groups("0")) if match else (0,) * 6
    a, b, c, e = ends if any(ends) else (p, p, d, d)
    if not (1 <= a <= b <= MAX_TOKENS and 1 <= c <= e <= MAX_TOKENS):
        raise ConfigError(
            f"lengths={spec!r:.80}; accepted: {', '.join(named_lengths())}, fixed:P,D, uniform:A-B,C-D or "
            f"sessions:DOCUMENT,P,D,REQUESTS with 1 to {MAX_TOKENS} tokens"
        )
    return Lengths(uniform(a, b), uniform(c, e))
