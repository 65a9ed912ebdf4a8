"""What a simulation came to: what became of each request, and a report in the fields of a serving benchmark.

Definitions beside those of :mod:`medha.workload.metrics`:

- A request is in time if it finished, its first token came by its deadline (given, or derived by the scheduler), and
  its TPOT, if it has an objective, was met. ``slo_attainment`` is the share of those that arrived, refused ones
  included; ``request_goodput`` their number a second.
- Slowdown is TTFT over the predicted TTFT of that prompt on the idle replica, in chunks of the medha scheduler.
- A request waits until its first chunk is sent, and is active from then to its last token.
- A stage has a bubble while it is without work and another stage of its group is not.

:func:`write_trace` shows it as a Chrome trace (opens in ui.perfetto.dev).
"""

from __future__ import annotations

import logging
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from medha.cost.predictor import slowest_of
from medha.cost.prefill_time import budgeted_chunk
from medha.records import BatchRecord, RankRecords
from medha.sim.pipeline import Segment
from medha.sim.replica import Replica
from medha.timeline import counter_event, name_event, stage_events, write_events
from medha.workload.metrics import Floats, Times, by_length, counted, percentile, serving_fields
from medha.workload.trace import Trace

logger = logging.getLogger("medha")

PERCENTILES = (50, 90, 99)
MAX_SEGMENTS = 200_000  # batches on a stage that a trace holds; those that come later are left out, with a warning
DRAIN = 0.1  # see saturation_of
_NUM_SAMPLES = 201
_GAP_BINS_PER_DECADE = 100
_LEAST_GAP_S = 1e-6


class Requests:
    """What became of each request of a trace, by its row; seconds of the virtual clock, NaN for what did not happen."""

    def __init__(self, count: int) -> None:
        self.first_scheduled_s, self.first_token_s, self.finish_s, self.deadline_s = np.full((4, count), np.nan)
        # the last from arrival to when the first token was due; inf for none
        self.num_tokens, self.num_preemptions = np.zeros((2, count), np.int64)  # produced; losses of its KV memory
        self.is_refused = np.zeros(count, np.bool_)  # it never fits


@dataclass(slots=True)
class Gaps:
    """Waits between tokens of a request, over all tokens: counts by size, a hundred sizes a decade."""

    counts: Counter[int] = field(default_factory=Counter)
    total_s: float = 0.0
    count: int = 0

    def add(self, gap_s: float, count: int = 1) -> None:
        """Count some gaps of one size."""
        self.counts[round(_GAP_BINS_PER_DECADE * math.log10(max(gap_s, _LEAST_GAP_S)))] += count
        self.total_s += gap_s * count
        self.count += count

    def quantile_s(self, share: float) -> float:
        """Seconds within about 1 % of which a share of the gaps lie; NaN without gaps."""
        left = share * self.count
        for size in sorted(self.counts):
            left -= self.counts[size]
            if left <= 0:
                return float(10.0 ** (size / _GAP_BINS_PER_DECADE))
        return math.nan

    def fields(self) -> dict[str, float | None]:
        """Those of the time between tokens: the mean is exact, the others are within about 1 %."""
        mean_s = self.total_s / max(self.count, 1)
        sizes = sorted(self.counts.items())  # in one order, so that the sum has the same bits
        squares = sum(count * (10.0 ** (size / _GAP_BINS_PER_DECADE) - mean_s) ** 2 for size, count in sizes)
        std_s = math.sqrt(squares / max(self.count, 1))
        found = {"mean": mean_s, "median": self.quantile_s(0.5), "std": std_s, "p99": self.quantile_s(0.99)}
        return {f"{name}_itl_ms": 1e3 * value if self.count else None for name, value in found.items()}


@dataclass(slots=True)
class Outcome:
    """What a simulation came to."""

    trace: Trace  # what was asked
    requests: Requests
    duration_s: float = 0.0  # from the first arrival to the last token, or to where it was stopped
    usage_at_s: array[float] = field(default_factory=lambda: array("d"))  # when each batch was sent, and done
    usage: array[float] = field(default_factory=lambda: array("d"))  # share of the KV blocks in use from then on
    gaps: Gaps = field(default_factory=Gaps)
    stage_busy_s: list[list[float]] = field(default_factory=list)  # by group and stage
    stage_bubble_s: list[list[float]] = field(default_factory=list)  # without work while another stage had some
    num_batches: int = 0
    work_lost_s: float = 0.0  # predicted, of what was computed again, or moved to host memory and back
    is_stopped: bool = False  # it did not run to the end
    num_cached_tokens: int = 0  # of prompts, which requests before them had computed
    num_swaps: int = 0  # preemptions that moved what was computed to host memory

    @property
    def times(self) -> Times:
        """Of the requests that arrived by the end."""
        trace, requests = self.trace, self.requests
        end_s = np.nextafter(self.duration_s + (trace.arrival_s[0] if len(trace) else 0.0), np.inf)  # a sum may round
        rows = slice(0, int(np.searchsorted(trace.arrival_s, end_s, side="right")))
        deadline_s, none = np.nan_to_num(requests.deadline_s, nan=np.inf, posinf=np.inf), np.full(len(trace), np.nan)
        slo_s = np.stack([deadline_s, none if trace.tpot_slo_s is None else trace.tpot_slo_s, none], axis=1)
        columns: list[Any] = [trace.arrival_s, requests.first_token_s, requests.finish_s, requests.num_tokens]
        columns += [trace.prompt_tokens, requests.is_refused, slo_s]
        return Times(*(column[rows] for column in columns))


class System(NamedTuple):
    """What one run simulates."""

    name: str  # of the scheduler, or of the policy where that tells more
    replica: Replica
    trace: Trace
    qps: float | None = None  # requests a second that were asked for; None is what the trace has


def report(system: System, outcome: Outcome, alone_s: Floats, *, interrupted: bool = False) -> dict[str, Any]:
    """The figures of a run, as plain values; ``alone_s`` are the :func:`alone_seconds` of the trace's prompts."""
    times, config = outcome.times, system.replica.scheduler
    first_s = float(times.arrival_s[0]) if len(times) else 0.0
    end_s, span_s = first_s + outcome.duration_s, max(outcome.duration_s, 1e-12)
    slowdown = (times.ttft_s / alone_s[: len(times)])[~times.is_refused]
    columns = times.arrival_s, outcome.requests.first_scheduled_s[: len(times)], times.finish_s
    policy = config.policy if isinstance(config.policy, str) else system.name
    started = np.flatnonzero(~np.isnan(outcome.requests.first_scheduled_s))
    return {
        "label": system.name if system.qps is None else f"{system.name}, {system.qps:g} requests/s",
        "scheduler": config.scheduler,
        "policy": policy if config.scheduler == "medha" else None,
        "complete": not (outcome.is_stopped or interrupted),
        "num_prompts": len(times),
        "request_rate": system.qps if system.qps is not None else outcome.trace.qps,
        **serving_fields(times, outcome.duration_s, outcome.gaps.fields()),
        "unfinished": int((~times.has_finished & ~times.is_refused).sum()),
        "ttft_by_length": by_length(times, PERCENTILES),
        "p50_slowdown": percentile(slowdown, 50),
        "p99_slowdown": percentile(slowdown, 99),
        "waiting": _mean_and_most(*counted(*columns[:2], ~times.is_refused), first_s, end_s),
        "active": _mean_and_most(*counted(*columns[1:], ~np.isnan(columns[1])), first_s, end_s),
        "kv_cache_usage": _mean_and_most(np.array(outcome.usage_at_s), np.array(outcome.usage), first_s, end_s),
        "stages": [
            {"group": group, "stage": stage, "occupancy": busy_s / span_s, "bubble": idle_s / span_s * (len(busy) > 1)}
            for group, (busy, bubbles) in enumerate(zip(outcome.stage_busy_s, outcome.stage_bubble_s, strict=True))
            for stage, (busy_s, idle_s) in enumerate(zip(busy, np.maximum(bubbles, 0.0).tolist(), strict=True))
        ],
        "num_preemptions": int(outcome.requests.num_preemptions.sum()),
        "prefix_hit_rate": outcome.num_cached_tokens / max(int(outcome.trace.prompt_tokens[started].sum()), 1),
        "work_lost_s": outcome.work_lost_s,
        "num_swaps": outcome.num_swaps,
        "saturation": saturation_of(times),
        "num_batches": outcome.num_batches,
        "start_times": (times.arrival_s - first_s).tolist(),
        "input_lens": times.prompt_tokens.tolist(),
        "ttfts": [None if math.isnan(seconds) else seconds for seconds in times.ttft_s.tolist()],
    }


def alone_seconds(replica: Replica, prompt_tokens: NDArray[np.int64]) -> Floats:
    """Predicted TTFT of prompts on the idle replica, float64 of their shape.

    On one KV-parallel group, in chunks that fill ``t_target_s`` or ``quantum_s`` in the slowest stage, whatever the
    scheduler: chunk i + 1 is in a stage while chunk i is in the next. Whoever stays alone takes longer batches, and is
    up to a tenth sooner.
    """
    config = replace(replica.scheduler, scheduler="medha")
    stages = replace(replica, scheduler=config).stages()
    rule = budgeted_chunk(config, slowest_of(stages))

    def through(free_s: Sequence[float], q_len: int, kv_before: int, *, samples: bool) -> list[float]:
        """When each stage is done with the next chunk, given when it was done with the one before; seconds."""
        done_s: list[float] = []
        for stage, stage_free_s in zip(stages, free_s, strict=True):
            ready_s = max(done_s[-1], stage_free_s) if done_s else stage_free_s
            done_s.append(ready_s + stage.tick().with_chunk(q_len, kv_before, samples=samples))
        return done_s

    control_s = replica.spec.control_s if len(stages) > 1 else 0.0
    lengths, rows = np.unique(prompt_tokens, return_inverse=True)
    alone_s: list[float] = []
    free_s, start, chunk = [0.0] * len(stages), 0, rule(0)
    for length in lengths.tolist():
        while start + chunk < length:
            free_s = through(free_s, chunk, start, samples=False)
            start, chunk = start + chunk, rule(start + chunk)
        alone_s.append(through(free_s, length - start, start, samples=True)[-1] + control_s)
    return np.array(alone_s, dtype=np.float64)[rows]


def saturation_of(times: Times) -> dict[str, Any]:
    """Whether more arrived than could be served.

    The queue is who has arrived and has no first token. A run is over-saturated where both hold:

    - the queue grows through the second half of the time of arrivals: its straight line (least squares) rises by more
      than the square root of the number that arrive then, which is the chance of a Poisson stream;
    - those in the queue at the last arrival need more than 10 % of the time of arrivals until the last of them has its
      first token, or never get there.

    Returns ``is_over`` (both hold), ``growth`` (requests by which the line rises; None where all arrive at once),
    ``num_late`` (arrivals of the second half), ``drain_s`` (from the last arrival; None is never) and ``arrivals_s``.
    """
    if not len(times) or times.arrival_s[0] == times.arrival_s[-1]:
        return {"is_over": False, "growth": None, "num_late": 0, "drain_s": None, "arrivals_s": 0.0}
    first_s, last_s = float(times.arrival_s[0]), float(times.arrival_s[-1])
    arrivals_s = last_s - first_s
    at_s = np.linspace(first_s + arrivals_s / 2, last_s, _NUM_SAMPLES)
    changed_s, numbers = counted(times.arrival_s, times.first_token_s, ~times.is_refused)
    queue = np.append(0.0, numbers)[np.searchsorted(changed_s, at_s, side="right")]
    growth = float(np.polynomial.polynomial.polyfit(at_s - at_s[0], queue, 1)[1]) * arrivals_s / 2
    num_late = int((times.arrival_s >= at_s[0]).sum())
    drain_s = float(np.max(times.first_token_s[~times.is_refused], initial=last_s)) - last_s  # NaN where one never came
    drain = None if math.isnan(drain_s) else drain_s
    is_over = growth > math.sqrt(num_late) and (drain is None or drain > DRAIN * arrivals_s)
    return {"is_over": is_over, "growth": growth, "num_late": num_late, "drain_s": drain, "arrivals_s": arrivals_s}


def _mean_and_most(at_s: Floats, values: NDArray[Any], first_s: float, end_s: float) -> dict[str, float]:
    """Of values over the span, each from its time on: the time-weighted mean, and the most."""
    most = values.max(initial=0).item()
    if not len(at_s) or end_s <= first_s:
        return {"mean": 0.0, "max": most}
    spans_s = np.diff(np.append(at_s, max(end_s, at_s[-1])))
    return {"mean": float((values * spans_s).sum() / (end_s - first_s)), "max": most}


def write_trace(path: Path, outcome: Outcome, segments: Sequence[Segment]) -> None:
    """Write the trace of a run in microseconds of virtual time; gzip when the name ends in ``.gz``.

    Process 0 is the stages, a lane each, with arrows along which a batch goes on; process 1 what share of the KV blocks
    is in use.
    """
    if len(segments) > MAX_SEGMENTS:
        logger.warning("%s has the first %s batches on a stage of %s", path, f"{MAX_SEGMENTS:,}", f"{len(segments):,}")
    batches = defaultdict(list)  # as the stages of a live engine have them
    for one in segments[:MAX_SEGMENTS]:
        batches[one.group, one.stage].append(BatchRecord(one.batch_id, one.num_tokens, one.start_s, one.end_s))
    places = enumerate(sorted(batches))
    records = [RankRecords(i, stage, 0, tuple(batches[group, stage]), group) for i, (group, stage) in places]
    events = [name_event("process_name", 0, 0, "stages"), name_event("process_name", 1, 0, "memory")]
    events += stage_events(records, 0.0)
    used = zip(outcome.usage_at_s[:MAX_SEGMENTS], outcome.usage[:MAX_SEGMENTS], strict=True)
    events += (counter_event("KV blocks in use (%)", at_s, {"used": 100 * share}) for at_s, share in used)
    write_events(path, events)
