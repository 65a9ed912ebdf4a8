"""What a simulation came to, in figures: the fields of vLLM's serving benchmark, and what a scheduler is judged by.

Definitions:

- TTFT is from arrival to the first token, queueing included. TPOT is (last - first token) / (tokens - 1) of a request,
  and a request of one token has none. ITL is the gap between two tokens of a request; its percentiles are within 1 %.
  E2EL is from arrival to the last token. Those of the fields named as in vLLM are over finished requests, percentiles
  by linear interpolation.
- By prompt length and for the slowdown, percentiles are by nearest rank over all requests that arrived, and one without
  a first token waits for ever: its percentile is None.
- A request is in time if it finished, its first token came by its deadline (given, or derived by the scheduler), and
  its TPOT, if it has an objective, was met. ``slo_attainment`` is the share of those that arrived, ``request_goodput``
  their number a second.
- Slowdown is TTFT over the predicted TTFT of that prompt on the idle replica, in chunks of the medha scheduler.
- A request waits until its first chunk is sent, and is active from then to its last token.
- A stage has a bubble while it is without work and another stage of its group is not.
- Over-saturation: see :class:`Saturation`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medha.cost.predictor import Predictor, slowest_of
from medha.cost.prefill_time import budgeted_chunk
from medha.sim.replica import Replica
from medha.sim.simulator import Gaps, Outcome

Floats = NDArray[np.float64]

PERCENTILES = (50, 90, 99)
BUCKETS = (1, 1_024, 8_192, 32_768, 131_072, 524_288, 2_097_152)
"""Prompt tokens at which a bucket of lengths begins; it ends before the next."""

DRAIN = 0.1
"""See :class:`Saturation`."""
_NUM_SAMPLES = 201


@dataclass(frozen=True, slots=True)
class System:
    """What one run simulates.

    Attributes:
        name: of the scheduler, or of the policy where that tells more.
        replica: hardware, model, layout, scheduler.
        qps: requests a second that were asked for; None is what the trace has.
    """

    name: str
    replica: Replica
    qps: float | None = None

    @property
    def label(self) -> str:
        """Name and rate."""
        return self.name if self.qps is None else f"{self.name}, {self.qps:g} requests/s"


@dataclass(frozen=True, slots=True)
class Bucket:
    """Requests of similar prompts. TTFT in seconds, P50, P90 and P99; None is never."""

    low: int
    high: int | None
    num_requests: int
    ttft_s: tuple[float | None, ...]
    slo_attainment: float

    @property
    def name(self) -> str:
        """Range of prompt tokens, for a table."""
        if self.high is None:
            return f"{_tokens(self.low)} and more"
        return f"{_tokens(self.low)} to {_tokens(self.high)}"


@dataclass(frozen=True, slots=True)
class Stage:
    """One pipeline stage of one group.

    Attributes:
        occupancy: share of the span in which it computed.
        bubble: share in which it had no work and another stage of its group had some.
    """

    group: int
    stage: int
    occupancy: float
    bubble: float


@dataclass(frozen=True, slots=True)
class Saturation:
    """Whether more arrived than could be served.

    The queue is who has arrived and has no first token. A run is over-saturated where both hold:

    - the queue grows through the second half of the time of arrivals: its straight line (least squares) rises by more
      than the square root of the number that arrive then, which is the chance of a Poisson stream;
    - those in the queue at the last arrival need more than 10 % of the time of arrivals until the last of them has its
      first token, or never get there.

    Attributes:
        is_over: both hold.
        growth: requests by which the line rises; None where all arrive at once.
        num_late: arrivals of the second half.
        drain_s: seconds from the last arrival; None is never.
        arrivals_s: from the first arrival to the last.
    """

    is_over: bool
    growth: float | None
    num_late: int
    drain_s: float | None
    arrivals_s: float


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests, over the span: the time-weighted mean, and the most at once."""

    mean: float
    max: int


@dataclass(frozen=True, slots=True)
class Report:
    """One run.

    Attributes:
        system: what ran.
        is_complete: it ran to its end.
        serving: fields and names of vLLM's serving benchmark; milliseconds and requests or tokens a second.
        num_arrived: requests that arrived within the run.
        num_unfinished: of them, those neither finished nor refused.
        slo_attainment: share of those that arrived, refused ones included.
        buckets: by prompt length, those with requests.
        slowdown: P50 and P99; None is never.
        waiting, active: requests.
        kv_mean, kv_max: share of the KV blocks of all groups in use; of samples, so that the most may be more.
        stages: by group and stage.
        num_preemptions: how often a request gave its memory up.
        work_lost_s: predicted seconds of what was computed again, or moved to host memory and back.
        num_swaps: how many of the preemptions moved what was computed to host memory.
        saturation: whether more arrived than could be served.
        num_batches, num_skipped: in all, and those that were stepped over in one go.
        series: samples over time.
    """

    system: System
    is_complete: bool
    serving: dict[str, float | None]
    num_arrived: int
    num_unfinished: int
    slo_attainment: float
    buckets: tuple[Bucket, ...]
    slowdown: tuple[float | None, float | None]
    waiting: Counts
    active: Counts
    kv_mean: float
    kv_max: float
    stages: tuple[Stage, ...]
    num_preemptions: int
    work_lost_s: float
    num_swaps: int
    saturation: Saturation
    num_batches: int
    num_skipped: int
    series: dict[str, list[float]]

    def to_json(self) -> dict[str, Any]:
        """Plain values; the same for the same seed. Nothing here was measured with a clock."""
        replica = self.system.replica
        policy = replica.scheduler.policy if replica.scheduler.scheduler == "medha" else None
        return {
            "label": self.system.label,
            "scheduler": replica.scheduler.scheduler,
            "policy": policy if policy is None or isinstance(policy, str) else self.system.name,
            "complete": self.is_complete,
            "num_prompts": self.num_arrived,
            **self.serving,
            "unfinished": self.num_unfinished,
            "slo_attainment": self.slo_attainment,
            "by_prompt_tokens": [asdict(bucket) for bucket in self.buckets],
            "p50_slowdown": self.slowdown[0],
            "p99_slowdown": self.slowdown[1],
            "waiting": asdict(self.waiting),
            "active": asdict(self.active),
            "kv_cache_usage": {"mean": self.kv_mean, "max": self.kv_max},
            "stages": [asdict(stage) for stage in self.stages],
            "num_preemptions": self.num_preemptions,
            "work_lost_s": self.work_lost_s,
            "num_swaps": self.num_swaps,
            "saturation": asdict(self.saturation),
            "num_batches": self.num_batches,
            "series": self.series,
        }


@dataclass(frozen=True, slots=True)
class Times:
    """Columns over the requests of a trace that arrived within the run; NaN is what did not happen. Seconds.

    Attributes:
        arrival_s, first_scheduled_s, first_token_s, finish_s: on the virtual clock.
        prompt_tokens, num_tokens: of the prompt, and produced.
        is_in_time: finished, TTFT by its deadline and TPOT by its objective.
        is_refused: it never fits.
    """

    arrival_s: Floats
    first_scheduled_s: Floats
    first_token_s: Floats
    finish_s: Floats
    prompt_tokens: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    is_in_time: NDArray[np.bool_]
    is_refused: NDArray[np.bool_]

    @classmethod
    def of(cls, outcome: Outcome) -> Times:
        """Of the requests that arrived by the end."""
        trace, requests = outcome.trace, outcome.requests
        end_s = outcome.duration_s + (trace.arrival_s[0] if len(trace) else 0.0)
        rows = slice(0, int(np.searchsorted(trace.arrival_s, end_s, side="right")))
        first_token_s, finish_s = requests.first_token_s[rows], requests.finish_s[rows]
        arrival_s, num_tokens = trace.arrival_s[rows], requests.num_tokens[rows]
        in_time = ~np.isnan(finish_s) & (first_token_s - arrival_s <= requests.deadline_s[rows])
        if trace.tpot_slo_s is not None:
            tpot_s = (finish_s - first_token_s) / np.maximum(num_tokens - 1, 1)
            in_time &= np.isnan(trace.tpot_slo_s[rows]) | (tpot_s <= trace.tpot_slo_s[rows])
        return cls(
            arrival_s,
            requests.first_scheduled_s[rows],
            first_token_s,
            finish_s,
            trace.prompt_tokens[rows],
            num_tokens,
            in_time,
            requests.is_refused[rows],
        )

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def ttft_s(self) -> Floats:
        """From arrival to the first token."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """Of each request, NaN for one that did not finish or of one token."""
        count = np.where(self.num_tokens > 1, self.num_tokens - 1.0, np.nan)
        return (self.finish_s - self.first_token_s) / count

    @property
    def has_finished(self) -> NDArray[np.bool_]:
        """Whether the last token is there."""
        return ~np.isnan(self.finish_s)

    def waiting(self) -> tuple[Floats, NDArray[np.int64]]:
        """Times, and requests that wait for their first chunk from each of them on."""
        return _counted(self.arrival_s, self.first_scheduled_s, ~self.is_refused)

    def active(self) -> tuple[Floats, NDArray[np.int64]]:
        """Times, and requests between first chunk and last token from each of them on."""
        return _counted(self.first_scheduled_s, self.finish_s, ~np.isnan(self.first_scheduled_s))

    def queue(self) -> tuple[Floats, NDArray[np.int64]]:
        """Times, and requests without a first token from each of them on."""
        return _counted(self.arrival_s, self.first_token_s, ~self.is_refused)


def report(system: System, outcome: Outcome, alone_s: Floats, *, interrupted: bool = False) -> Report:
    """The figures of a run.

    Args:
        system: what ran.
        outcome: what became of it.
        alone_s: of each request of the trace, the predicted TTFT on the idle replica; see :func:`alone_seconds`.
        interrupted: somebody broke it off.
    """
    times = Times.of(outcome)
    first_s = float(times.arrival_s[0]) if len(times) else 0.0
    end_s = first_s + outcome.duration_s
    span_s = max(outcome.duration_s, 1e-12)
    slowdown = times.ttft_s / alone_s[: len(times)]
    served = ~times.is_refused
    kv_mean, kv_max = _kv_use(outcome, first_s, end_s)
    return Report(
        system=system,
        is_complete=not (outcome.is_stopped or interrupted),
        serving=_serving(times, outcome.gaps, outcome.duration_s, system.qps, outcome.trace.qps),
        num_arrived=len(times),
        num_unfinished=int((served & ~times.has_finished).sum()),
        slo_attainment=float(times.is_in_time.mean()) if len(times) else 1.0,
        buckets=_buckets(times),
        slowdown=(percentile(slowdown[served], 50), percentile(slowdown[served], 99)),
        waiting=_counts(*times.waiting(), first_s, end_s),
        active=_counts(*times.active(), first_s, end_s),
        kv_mean=kv_mean,
        kv_max=kv_max,
        stages=tuple(
            Stage(group, stage, busy_s / span_s, max(bubble_s, 0.0) / span_s if len(columns[0]) > 1 else 0.0)
            for group, columns in enumerate(zip(outcome.stage_busy_s, outcome.stage_bubble_s, strict=True))
            for stage, (busy_s, bubble_s) in enumerate(zip(*columns, strict=True))
        ),
        num_preemptions=int(outcome.requests.num_preemptions.sum()),
        work_lost_s=outcome.work_lost_s,
        num_swaps=outcome.num_swaps,
        saturation=_saturation(times, end_s),
        num_batches=outcome.num_batches,
        num_skipped=outcome.num_skipped,
        series=_series(times, outcome, first_s, end_s),
    )


def alone_seconds(replica: Replica, prompt_tokens: NDArray[np.int64]) -> Floats:
    """Predicted TTFT of prompts on the idle replica, float64 of their shape.

    On one KV-parallel group, in chunks that fill ``t_target_s`` or ``quantum_s`` in the slowest stage, whatever the
    scheduler: chunk i + 1 is in a stage while chunk i is in the next.

    Args:
        replica: hardware, model, layout, budgets.
        prompt_tokens: lengths, one dimension.
    """
    config = replace(replica.scheduler, scheduler="medha")
    stages = replace(replica, scheduler=config).stages()
    slowest, most = slowest_of(stages), config.max_batch_tokens
    size = {"granularity": config.chunk_granularity, "min_tokens": min(config.min_chunk, most)}
    rule = budgeted_chunk(slowest, config.t_target_s or config.quantum_s, most, **size)
    lengths, rows = np.unique(prompt_tokens, return_inverse=True)
    alone_s: list[float] = []
    free_s, start, chunk = [0.0] * len(stages), 0, rule(0)
    for length in lengths.tolist():
        while start + chunk < length:
            free_s = _through(stages, free_s, chunk, start, samples=False)
            start, chunk = start + chunk, rule(start + chunk)
        alone_s.append(_through(stages, free_s, length - start, start, samples=True)[-1])
    return np.array(alone_s, dtype=np.float64)[rows]


def _through(
    stages: Sequence[Predictor], free_s: Sequence[float], q_len: int, kv_before: int, *, samples: bool
) -> list[float]:
    """When each stage is done with a chunk that comes next.

    Args:
        stages: what they cost.
        free_s: when each is done with the chunk before; seconds.
        q_len, kv_before: tokens of the chunk, and cached before it.
        samples: it ends its prompt.
    """
    done_s: list[float] = []
    for stage, stage_free_s in zip(stages, free_s, strict=True):
        ready_s = max(done_s[-1], stage_free_s) if done_s else stage_free_s
        done_s.append(ready_s + stage.tick().with_chunk(q_len, kv_before, samples=samples))
    return done_s


def percentile(values: Floats, percent: float) -> float | None:
    """By nearest rank, NaN counting as infinite; None if that is the answer or there are no values."""
    if not len(values):
        return None
    found = float(np.percentile(np.where(np.isnan(values), np.inf, values), percent, method="inverted_cdf"))
    return found if math.isfinite(found) else None


# ---------------------------------------------------------------------------------------------------------------------
# Parts of a report


def _serving(
    times: Times, gaps: Gaps, duration_s: float, asked_qps: float | None, qps: float | None
) -> dict[str, float | None]:
    finished = times.has_finished
    num_input, num_output = int(times.prompt_tokens[finished].sum()), int(times.num_tokens[finished].sum())
    a_second = 1 / duration_s if duration_s > 0 else 0.0
    everyone = _counted(times.arrival_s, times.finish_s, ~times.is_refused)[1]
    return {
        "request_rate": asked_qps if asked_qps is not None else qps,
        "duration": duration_s,
        "completed": int(finished.sum()),
        "failed": int(times.is_refused.sum()),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": int(finished.sum()) * a_second,
        "request_goodput": int(times.is_in_time.sum()) * a_second,
        "output_throughput": num_output * a_second,
        "total_token_throughput": (num_input + num_output) * a_second,
        "max_concurrent_requests": int(everyone.max(initial=0)),
        **_statistics("ttft", times.ttft_s[finished]),
        **_statistics("tpot", times.tpot_s[finished]),
        **_gap_statistics(gaps),
        **_statistics("e2el", (times.finish_s - times.arrival_s)[finished]),
    }


def _statistics(name: str, seconds: Floats) -> dict[str, float | None]:
    """vLLM's four figures in milliseconds; None without values."""
    ms = 1e3 * seconds[~np.isnan(seconds)]
    if not len(ms):
        return {f"{figure}_{name}_ms": None for figure in ("mean", "median", "std", "p99")}
    return {
        f"mean_{name}_ms": float(ms.mean()),
        f"median_{name}_ms": float(np.median(ms)),
        f"std_{name}_ms": float(ms.std()),
        f"p99_{name}_ms": float(np.percentile(ms, 99)),
    }


def _gap_statistics(gaps: Gaps) -> dict[str, float | None]:
    if not gaps.count:
        return _statistics("itl", np.empty(0))
    mean_s = gaps.total_s / gaps.count
    return {
        "mean_itl_ms": 1e3 * mean_s,
        "median_itl_ms": 1e3 * gaps.quantile_s(0.5),
        "std_itl_ms": 1e3 * gaps.std_s(),
        "p99_itl_ms": 1e3 * gaps.quantile_s(0.99),
    }


def _buckets(times: Times) -> tuple[Bucket, ...]:
    buckets = []
    for low, after in zip(BUCKETS, (*BUCKETS[1:], None), strict=True):
        here = (times.prompt_tokens >= low) & (True if after is None else times.prompt_tokens < after)
        if here.any():
            ttft_s = tuple(percentile(times.ttft_s[here & ~times.is_refused], percent) for percent in PERCENTILES)
            share = float(times.is_in_time[here].mean())
            buckets.append(Bucket(low, None if after is None else after - 1, int(here.sum()), ttft_s, share))
    return tuple(buckets)


def _saturation(times: Times, end_s: float) -> Saturation:
    if not len(times) or times.arrival_s[0] == times.arrival_s[-1]:
        return Saturation(False, None, 0, None, 0.0)
    first_s, last_s = float(times.arrival_s[0]), float(times.arrival_s[-1])
    arrivals_s = last_s - first_s
    at_s = np.linspace(first_s + arrivals_s / 2, last_s, _NUM_SAMPLES)
    queue = _sampled(*times.queue(), at_s).astype(np.float64)
    growth = float(np.polynomial.polynomial.polyfit(at_s - at_s[0], queue, 1)[1]) * arrivals_s / 2
    num_late = int((times.arrival_s >= at_s[0]).sum())
    first_tokens_s = times.first_token_s[~times.is_refused]
    drain_s = float(np.max(first_tokens_s, initial=last_s)) - last_s  # NaN where one never came
    drain = None if math.isnan(drain_s) else drain_s
    lasts_s = end_s - last_s if drain is None else drain
    is_growing = growth > math.sqrt(num_late)
    return Saturation(
        is_growing and (drain is None or lasts_s > DRAIN * arrivals_s), growth, num_late, drain, arrivals_s
    )


def _kv_use(outcome: Outcome, first_s: float, end_s: float) -> tuple[float, float]:
    """Mean over the span, and the most of the samples."""
    if not outcome.series.rows:
        return 0.0, 0.0
    at_s, *_, shares = (np.array(column, dtype=np.float64) for column in zip(*outcome.series.rows, strict=True))
    spans_s = np.diff(np.append(at_s, max(end_s, at_s[-1])))
    return float((shares * spans_s).sum() / max(end_s - first_s, 1e-12)), float(shares.max())


def _series(times: Times, outcome: Outcome, first_s: float, end_s: float) -> dict[str, list[float]]:
    """At equal steps of the span: seconds of the virtual clock, requests, share of KV blocks."""
    at_s = np.linspace(first_s, end_s, _NUM_SAMPLES)
    samples = outcome.series.rows or [(first_s, 0, 0, 0.0)]
    kv_s, *_, shares = zip(*samples, strict=True)
    return {
        "time_s": at_s.tolist(),
        "waiting": _sampled(*times.waiting(), at_s).tolist(),
        "active": _sampled(*times.active(), at_s).tolist(),
        "kv_cache_usage": _sampled(np.array(kv_s), np.array(shares), at_s).tolist(),
    }


def _counted(from_s: Floats, to_s: Floats, counts: NDArray[np.bool_]) -> tuple[Floats, NDArray[np.int64]]:
    """Times at which the number of requests between two events changes, and that number from each of them on."""
    begins_s, ends_s = from_s[counts], to_s[counts]
    ends_s = ends_s[~np.isnan(ends_s)]
    at_s = np.concatenate([begins_s, ends_s])
    steps = np.concatenate([np.ones(len(begins_s), np.int64), -np.ones(len(ends_s), np.int64)])
    order = np.argsort(at_s, kind="stable")  # who begins at the time at which another ends comes first
    at_s, numbers = at_s[order], np.cumsum(steps[order])
    is_last = np.append(at_s[1:] != at_s[:-1], True)[: len(at_s)]
    return at_s[is_last], numbers[is_last]


def _counts(at_s: Floats, numbers: NDArray[np.int64], first_s: float, end_s: float) -> Counts:
    if not len(at_s) or end_s <= first_s:
        return Counts(0.0, int(numbers.max(initial=0)))
    spans_s = np.diff(np.append(at_s, max(end_s, at_s[-1])))
    return Counts(float((numbers * spans_s).sum() / (end_s - first_s)), int(numbers.max()))


def _sampled(at_s: Floats, values: NDArray[Any], wanted_s: Floats) -> NDArray[Any]:
    """The value at the last time up to each wanted one; 0 before the first."""
    return np.concatenate([np.zeros(1, values.dtype), values])[np.searchsorted(at_s, wanted_s, side="right")]


def _tokens(count: int) -> str:
    """1,023 or 128K."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if count >= unit and (count % unit == 0 or (count + 1) % unit == 0):
            return f"{(count + 1) // unit if (count + 1) % unit == 0 else count // unit}{name}"
    return f"{count:,}"
