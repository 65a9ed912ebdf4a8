"""What ``medha bench serve`` makes of the requests of a load: the fields of ``vllm bench serve``, and medha's.

Percentiles are by linear interpolation over the requests that have completed (ITL: over all gaps of these); a figure
over nothing is None. ``max_concurrent_requests`` and ``max_output_tokens_per_s`` are exact over time, and over calendar
seconds from the start, respectively.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from medha.errors import ConfigError
from medha.params import SLO

METRICS = ("ttft", "tpot", "itl", "e2el")
"""vLLM's names of what percentiles are taken of."""

OBJECTIVES = ("ttft", "tpot", "e2el")
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
        """From vLLM's form, ``ttft:100 tpot:50``, in milliseconds.

        Raises:
            ConfigError: it has another form, or names an objective twice.
        """
        found: dict[str, float] = {}
        for text in " ".join(texts).replace(",", " ").split():
            name, _, value = text.partition(":")
            if name not in OBJECTIVES or not _is_number(value) or not float(value) > 0 or name in found:
                raise ConfigError(
                    f"goodput={text!r}; accepted: {', '.join(f'{one}:MS' for one in OBJECTIVES)}, each at most once, "
                    "milliseconds above 0"
                )
            found[name] = float(value) / 1e3
        return cls(**{f"{name}_s": value for name, value in found.items()})

    @property
    def slo(self) -> SLO:
        """What the scheduler is told of it."""
        return SLO(self.ttft_s, self.tpot_s)


def parse_metrics(text: str) -> tuple[str, ...]:
    """``ttft,e2el`` as names, each once, in their usual order.

    Raises:
        ConfigError: an unknown name.
    """
    given = [name.strip() for name in text.split(",")]
    unknown = [name for name in given if name not in METRICS]
    if unknown:
        raise ConfigError(f"percentile_metrics={unknown[0]!r}; accepted: {', '.join(METRICS)}, comma separated")
    return tuple(name for name in METRICS if name in given)


def parse_percentiles(text: str) -> tuple[float, ...]:
    """``50,99.9`` as numbers, each once.

    Raises:
        ConfigError: not numbers above 0 and below 100.
    """
    parts = [part.strip() for part in text.split(",")]
    wrong = [part for part in parts if not _is_number(part) or not 0 < float(part) < 100]
    if wrong:
        raise ConfigError(f"metric_percentiles={wrong[0]!r}; accepted: numbers above 0, below 100, comma separated")
    return tuple(sorted({float(part) for part in parts}))


def percentile_name(percent: float) -> str:
    """``p99``, ``p99.9``."""
    return f"p{percent:g}"


def latency_fields(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """``mean_ttft_ms`` and the others of one metric."""
    values = np.asarray(seconds, dtype=np.float64) * 1e3
    figures: dict[str, Callable[..., Any]] = {"mean": np.mean, "median": np.median, "std": np.std}
    found = {f"{what}_{name}_ms": float(figure(values)) if len(values) else None for what, figure in figures.items()}
    for percent in percentiles:
        value = float(np.percentile(values, percent)) if len(values) else None
        found[f"{percentile_name(percent)}_{name}_ms"] = value
    return found


def seconds_of(name: str, outcomes: Iterable[Outcome]) -> list[float]:
    """The values of one metric over requests; those that do not exist are left out."""
    if name == "itl":
        return [gap for one in outcomes for gap in one.itl_s]
    return [value for one in outcomes if (value := getattr(one, f"{name}_s")) is not None]


def serving_figures(
    served: Served, *, goodput: Goodput, metrics: Sequence[str], percentiles: Sequence[float]
) -> dict[str, Any]:
    """The fields of the result.

    Args:
        served: the load.
        goodput: objectives; a request's own go before them.
        metrics: names of METRICS.
        percentiles: of them.
    """
    completed = [one for one in served.outcomes if one.is_completed]
    input_tokens, output_tokens = sum(one.input_len for one in completed), sum(one.output_len for one in completed)
    duration_s = served.duration_s
    aimed = [one for one in served.outcomes if _has_objective(one, goodput)]
    num_good = sum(meets(one, goodput) for one in aimed)
    fields: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(completed),
        "failed": len(served.outcomes) - len(completed),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": _over(len(completed), duration_s),
        "request_goodput": _over(num_good, duration_s) if aimed else None,
        "slo_attainment": num_good / len(aimed) if aimed else None,
        "output_throughput": _over(output_tokens, duration_s),
        "total_token_throughput": _over(input_tokens + output_tokens, duration_s),
        "max_output_tokens_per_s": most_tokens_a_second(served.outcomes),
        "max_concurrent_requests": most_at_once(served.outcomes),
    }
    for name in metrics:
        fields |= latency_fields(name, seconds_of(name, completed), percentiles)
    return fields | probe_fields(served.probes) | {"ttft_by_length": by_length(served.outcomes, goodput, percentiles)}


def probe_fields(probes: Sequence[Outcome]) -> dict[str, float | int | None]:
    """What the load did to small requests that have nothing to do with it."""
    e2els = [one.e2el_s * 1e3 for one in probes if one.is_completed]
    return {
        "probe_completed": len(e2els),
        "probe_failed": len(probes) - len(e2els),
        "probe_median_e2el_ms": float(np.median(e2els)) if e2els else None,
        "probe_p99_e2el_ms": float(np.percentile(e2els, 99)) if e2els else None,
        "probe_max_e2el_ms": max(e2els, default=None),
    }


def by_length(outcomes: Sequence[Outcome], goodput: Goodput, percentiles: Sequence[float]) -> list[dict[str, Any]]:
    """Figures of each bucket of prompt lengths that has requests; ``256-1K`` is from 256 on, below 1,024."""
    buckets: dict[tuple[int, int], list[Outcome]] = {}
    for one in sorted(outcomes, key=lambda one: one.input_len):
        low = max((end for end in BUCKET_ENDS if end <= one.input_len), default=1)
        high = next((end for end in BUCKET_ENDS if end > one.input_len), 0)
        buckets.setdefault((low, high), []).append(one)
    lines = []
    for (low, high), inside in buckets.items():
        completed = [one for one in inside if one.is_completed]
        aimed = [one for one in inside if _has_objective(one, goodput)]
        lines.append(
            {
                "bucket": f"{_short(low)}-{_short(high)}" if high else f"{_short(low)}-",
                "num_requests": len(inside),
                "completed": len(completed),
                "slo_attainment": sum(meets(one, goodput) for one in aimed) / len(aimed) if aimed else None,
                **latency_fields("ttft", seconds_of("ttft", completed), percentiles),
            }
        )
    return lines


def detailed(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """vLLM's arrays, one value a request; times in seconds."""
    return {
        "input_lens": [one.input_len for one in outcomes],
        "output_lens": [one.output_len for one in outcomes],
        "start_times": [one.start_s for one in outcomes],
        "ttfts": [one.ttft_s for one in outcomes],
        "itls": [one.itl_s for one in outcomes],
        "latencies": [one.e2el_s for one in outcomes],
        "queue_times": [one.queue_s for one in outcomes],
        "generated_texts": [one.text for one in outcomes],
        "errors": [one.error for one in outcomes],
    }


def meets(outcome: Outcome, goodput: Goodput) -> bool:
    """Whether a request has completed and met its objectives; its own were merged with these when it was sent."""
    pairs = (
        (outcome.ttft_s, outcome.slo.ttft_s),
        (outcome.tpot_s, outcome.slo.tpot_s),
        (outcome.e2el_s, goodput.e2el_s),
    )
    return outcome.is_completed and all(value is None or limit is None or value <= limit for value, limit in pairs)


def most_at_once(outcomes: Iterable[Outcome]) -> int:
    """Most requests that had arrived and not ended."""
    events = sorted(event for one in outcomes for event in ((one.start_s, 1), (one.end_s, -1)))
    running = most = 0
    for _, change in events:  # an end goes before an arrival of the same time
        running += change
        most = max(most, running)
    return most


def most_tokens_a_second(outcomes: Iterable[Outcome]) -> float:
    """Most output tokens within one second of the load's clock, counted from its start."""
    times = [time for one in outcomes if one.ttft_s is not None for time in _token_times(one)]
    return float(np.bincount(np.asarray(times, dtype=np.int64)).max()) if times else 0.0


def _token_times(outcome: Outcome) -> list[float]:
    first_s = outcome.start_s + (outcome.ttft_s or 0.0)
    return list(accumulate([first_s, *outcome.itl_s]))


def _has_objective(outcome: Outcome, goodput: Goodput) -> bool:
    return any(limit is not None for limit in (outcome.slo.ttft_s, outcome.slo.tpot_s, goodput.e2el_s))


def _over(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None


def _short(tokens: int) -> str:
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= size:
            return f"{tokens // size}{unit}"
    return str(tokens)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d{1,12}(?:\.\d{1,12})?", text, re.ASCII) is not None


def cell(fields: Mapping[str, Any], name: str) -> str:
    """A field in milliseconds for a table."""
    value = fields[name]
    return "-" if value is None else f"{value:,.1f}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request. Times in seconds.

    Attributes:
        input_len, output_len: tokens of the prompt, and tokens produced.
        start_s: arrival, after the start of the load.
        queue_s: arrival to its first chunk; None where there was none.
        ttft_s: arrival to the first token; None where there was none.
        itl_s: gaps between successive tokens.
        e2el_s: arrival to the end.
        num_chunks: batches in which its prompt was read.
        text: what was generated; empty without a tokenizer.
        error: why it has not completed; empty where it has.
        slo: its objectives.
    """

    request_id: str
    input_len: int
    output_len: int
    start_s: float
    queue_s: float | None
    ttft_s: float | None
    itl_s: tuple[float, ...]
    e2el_s: float
    num_chunks: int = 0
    text: str = ""
    error: str = ""
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


@dataclass(frozen=True, slots=True)
class Served:
    """A load that is done.

    Attributes:
        outcomes: of the load, in the order of its arrivals.
        probes: of the probes, in the order in which they came.
        duration_s: from the start to the end of the load's last request.
    """

    outcomes: tuple[Outcome, ...]
    probes: tuple[Outcome, ...]
    duration_s: float
