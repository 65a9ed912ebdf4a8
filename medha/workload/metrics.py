"""What was served, live or simulated: one table of times by request, and the fields of ``vllm bench serve`` from it.

Percentiles are numpy's, by linear interpolation (:func:`percentile`). TTFT, TPOT, E2EL and ITL are over the requests
that have completed (ITL: over all gaps of these, and in a simulation that was stopped of the others too); a figure over
nothing is None. ``max_concurrent_requests`` is exact over time and of those that were served,
``max_output_tokens_per_s`` over calendar seconds from the start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from medha.config.fields import POSITIVE, Check, choice, number, number_or_text
from medha.errors import ConfigError
from medha.params import SLO

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

METRICS = ("ttft", "tpot", "itl", "e2el")  # vLLM's names of what percentiles are taken of
_PERCENT = number("numbers above 0, below 100", lambda value: 0 < value < 100)

OBJECTIVES = ("ttft", "tpot", "e2el")
_ROUNDING_S = 1e-8  # of differences of a clock's times
BUCKET_ENDS = tuple(4**power for power in range(4, 11))
"""Prompt lengths in tokens at which one bucket ends and the next begins: 256 to 1M."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """Objectives of every request, seconds; None is no objective of that kind."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Goodput:
        """From vLLM's form, ``ttft:100 tpot:50``, in milliseconds; ConfigError for any other."""
        found: dict[str, float] = {}
        for text in " ".join(texts).replace(",", " ").split():
            name, _, value = text.partition(":")
            if name not in OBJECTIVES or not POSITIVE.holds(number_or_text(value)) or name in found:
                accepted = ", ".join(f"{one}:MS" for one in OBJECTIVES)
                raise ConfigError(f"goodput={text!r}; accepted: {accepted}, each at most once, milliseconds above 0")
            found[name] = float(value) / 1e3
        return cls(**{f"{name}_s": value for name, value in found.items()})

    @property
    def slo(self) -> SLO:
        """What the scheduler is told of it."""
        return SLO(self.ttft_s, self.tpot_s)


def parse_metrics(option: str, text: str) -> tuple[str, ...]:
    """``ttft,e2el`` as names, each once, in their usual order; ConfigError for an unknown one."""
    given = _parts(option, text, choice(*METRICS))
    return tuple(name for name in METRICS if name in given)


def parse_percentiles(option: str, text: str) -> tuple[float, ...]:
    """``50,99.9`` as numbers, each once; ConfigError where they are not above 0 and below 100."""
    return tuple(sorted(set(map(float, _parts(option, text, _PERCENT)))))


def _parts(option: str, text: str, check: Check) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not check.holds(number_or_text(part)):
            raise ConfigError(f"{option}={part!r}; accepted: {check.accepted}, comma separated")
    return parts


def percentile(values: ArrayLike, percent: float) -> float | None:
    """A percentile (0 to 100) by numpy's linear interpolation, the convention of all figures, live and simulated.

    NaN and inf are requests that wait for ever; the result is None where it is for ever, or where there are no values.
    """
    known = np.sort(np.where(np.isnan(given := np.asarray(values, dtype=np.float64)), np.inf, given))
    if not len(known) or np.isinf(known[math.ceil((len(known) - 1) * percent / 100)]):
        return None
    return float(np.percentile(np.minimum(known, known[np.isfinite(known)][-1]), percent))


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """When requests got their tokens, in order of arrival; seconds of one clock, NaN for what did not happen."""

    arrival_s: Floats
    first_token_s: Floats
    finish_s: Floats
    num_tokens: NDArray[np.int64]  # produced

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def ttft_s(self) -> Floats:
        """From arrival to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """Mean time between tokens of each request, NaN for one that did not finish or of one token."""
        return (self.finish_s - self.first_token_s) / np.where(self.num_tokens > 1, self.num_tokens - 1.0, np.nan)

    @property
    def e2el_s(self) -> Floats:
        """From arrival to the last token."""
        return self.finish_s - self.arrival_s


@dataclass(frozen=True, slots=True)
class Times(TokenTimes):
    """The same with what else became of them."""

    prompt_tokens: NDArray[np.int64]
    is_refused: Flags  # it was not served
    slo_s: Floats  # [requests, 3], objectives as in OBJECTIVES; NaN for none

    @property
    def has_finished(self) -> Flags:
        """Whether the last token is there."""
        return ~np.isnan(self.finish_s)

    @property
    def has_objective(self) -> Flags:
        """Whether some objective was set."""
        return np.asarray((~np.isnan(self.slo_s)).any(axis=1))

    @property
    def is_in_time(self) -> Flags:
        """Finished, and met every objective; of one token that between tokens is met."""
        taken_s = np.stack([self.ttft_s, self.tpot_s, self.e2el_s], axis=1)
        return self.has_finished & ~(taken_s > self.slo_s + _ROUNDING_S).any(axis=1)


def counted(from_s: Floats, to_s: Floats, counts: Flags) -> tuple[Floats, NDArray[np.int64]]:
    """Times at which the number of requests between two events changes, and that number from each of them on."""
    begins_s, ends_s = from_s[counts], to_s[counts]
    ends_s = ends_s[~np.isnan(ends_s)]
    at_s = np.concatenate([begins_s, ends_s])
    steps = np.concatenate([np.ones(len(begins_s), np.int64), -np.ones(len(ends_s), np.int64)])
    order = np.argsort(at_s, kind="stable")  # who begins at the time at which another ends comes first
    at_s, numbers = at_s[order], np.cumsum(steps[order])
    is_last = np.append(at_s[1:] != at_s[:-1], True)[: len(at_s)]
    return at_s[is_last], numbers[is_last]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request. Times in seconds."""

    request_id: str
    input_len: int  # tokens of the prompt
    output_len: int  # tokens produced
    start_s: float  # arrival, after the start of the load
    queue_s: float | None  # arrival to its first chunk; None where there was none
    ttft_s: float | None  # arrival to the first token; None where there was none
    itl_s: tuple[float, ...]  # gaps between successive tokens
    e2el_s: float  # arrival to the end
    num_chunks: int = 0  # batches in which its prompt was read
    error: str = ""  # why it has not completed; empty where it has
    slo: SLO = field(default_factory=SLO)

    @property
    def is_completed(self) -> bool:
        """Whether it has come to its end."""
        return not self.error

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens after the first; None with fewer than two."""
        return sum(self.itl_s) / len(self.itl_s) if self.itl_s else None

    @property
    def end_s(self) -> float:
        """Its end, after the start of the load."""
        return self.start_s + self.e2el_s


class Served(NamedTuple):
    """A load that is done."""

    outcomes: tuple[Outcome, ...]  # in the order of arrivals
    duration_s: float  # from the start to the end of the load's last request

    def times(self, goodput: Goodput) -> Times:
        """The load as a table, in order of arrival; objectives of a request were merged with these when it was sent,
        but for the end-to-end latency."""
        rows = sorted(self.outcomes, key=lambda one: one.start_s)
        times = [(one.start_s, one.ttft_s, one.end_s if one.is_completed else None) for one in rows]
        start_s, ttft_s, finish_s = np.array(times, np.float64).reshape(-1, 3).T  # None is NaN there
        made, read = np.array([(one.output_len, one.input_len) for one in rows], np.int64).reshape(-1, 2).T
        aims = [(one.slo.ttft_s, one.slo.tpot_s, goodput.e2el_s) for one in rows]
        slo_s = np.array(aims, np.float64).reshape(-1, len(OBJECTIVES))
        return Times(start_s, start_s + ttft_s, finish_s, made, read, np.isnan(finish_s), slo_s)


def latency_fields(name: str, seconds: ArrayLike, percentiles: Sequence[float]) -> dict[str, float | None]:
    """``mean_ttft_ms`` and the others of one metric; NaN are left out, and what is for ever (inf) is None."""
    given = np.asarray(seconds, dtype=np.float64) * 1e3
    values = given[~np.isnan(given)]
    known = values if np.isfinite(values).all() else values[:0]
    return {
        f"mean_{name}_ms": float(known.mean()) if len(known) else None,
        f"median_{name}_ms": percentile(values, 50),
        f"std_{name}_ms": float(known.std()) if len(known) else None,
        **{f"p{percent:g}_{name}_ms": percentile(values, percent) for percent in percentiles},
    }


def serving_fields(
    times: Times,
    duration_s: float,
    itl: Mapping[str, float | None],
    *,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (99.0,),
) -> dict[str, Any]:
    """The fields of vLLM's serving benchmark, and how many met their objectives; ``itl`` are those of the gaps."""

    def a_second(amount: float) -> float:
        return amount / duration_s if duration_s > 0 else 0.0

    done = times.has_finished
    num_input, num_output = int(times.prompt_tokens[done].sum()), int(times.num_tokens[done].sum())
    good, aimed = int((times.is_in_time & times.has_objective).sum()), int(times.has_objective.sum())
    together = counted(times.arrival_s, times.finish_s, ~times.is_refused)[1]
    fields: dict[str, Any] = {
        "duration": duration_s,
        "completed": int(done.sum()),
        "failed": int(times.is_refused.sum()),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": a_second(int(done.sum())),
        "request_goodput": a_second(good) if aimed else None,
        "slo_attainment": good / aimed if aimed else None,
        "output_throughput": a_second(num_output),
        "total_token_throughput": a_second(num_input + num_output),
        "max_concurrent_requests": int(together.max(initial=0)),
    }
    for name in metrics:
        fields |= itl if name == "itl" else latency_fields(name, getattr(times, f"{name}_s")[done], percentiles)
    return fields


def by_length(times: Times, percentiles: Sequence[float]) -> list[dict[str, Any]]:
    """Figures of each bucket of prompt lengths that has requests; ``256-1K`` is from 256 on, below 1,024.

    TTFT is over all that were not refused: one without a first token waits for ever, and such a figure is None.
    """
    lines = []
    for low, high in zip((1, *BUCKET_ENDS), (*BUCKET_ENDS, None), strict=True):
        here = (times.prompt_tokens >= low) & (True if high is None else times.prompt_tokens < high)
        if not here.any():
            continue
        aimed, ttft_s = here & times.has_objective, times.ttft_s[here & ~times.is_refused]
        line = {
            "bucket": f"{_short(low)}-{_short(high)}" if high else f"{_short(low)}-",
            "num_requests": int(here.sum()),
            "completed": int((here & times.has_finished).sum()),
            "slo_attainment": float(times.is_in_time[aimed].mean()) if aimed.any() else None,
        }
        lines.append(line | latency_fields("ttft", np.where(np.isnan(ttft_s), np.inf, ttft_s), percentiles))
    return lines


def serving_figures(
    served: Served, *, goodput: Goodput, metrics: Sequence[str], percentiles: Sequence[float]
) -> dict[str, Any]:
    """The fields of a load on a live engine; a request's own objectives go before those of ``goodput``."""
    completed = [one for one in served.outcomes if one.is_completed]
    times = served.times(goodput)
    itl = latency_fields("itl", [gap for one in completed for gap in one.itl_s], percentiles)
    # most within one second of the load's clock, counted from its start
    at_s = [accumulate([one.start_s + one.ttft_s, *one.itl_s]) for one in served.outcomes if one.ttft_s is not None]
    a_second = np.bincount(np.fromiter(chain.from_iterable(at_s), np.int64))
    return {
        **serving_fields(times, served.duration_s, itl, metrics=metrics, percentiles=percentiles),
        "max_output_tokens_per_s": float(a_second.max(initial=0)),
        "ttft_by_length": by_length(times, percentiles),
    }


_DETAILS = {
    **{"input_lens": "input_len", "output_lens": "output_len", "start_times": "start_s", "ttfts": "ttft_s"},
    **{"itls": "itl_s", "latencies": "e2el_s", "queue_times": "queue_s", "errors": "error"},
}


def detailed(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """vLLM's arrays, one value a request; times in seconds."""
    return {name: [getattr(one, field) for one in outcomes] for name, field in _DETAILS.items()}


def _short(tokens: int) -> str:
    return f"{tokens >> 20}M" if tokens >= 1 << 20 else f"{tokens >> 10}K" if tokens >= 1 << 10 else str(tokens)
