"""A discrete-event simulator around the engine's own scheduler.

The loop is that of :class:`medha.engine.Engine` under :func:`medha.driver.drive`: add who has arrived, fill the
pipeline to its depth, wait for its oldest batch. Time is virtual: what a batch takes is predicted, and who gets tokens
and when a request ends is read off the trace. The scheduler is the very object of the engine and knows nothing of it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from medha.batch import Batch
from medha.errors import ConfigError
from medha.request import SLO
from medha.sched.scheduler import RequestHead, Scheduler
from medha.sim.pipeline import Passage, Pipeline
from medha.workload.trace import NORMAL, Row, Trace

_MAX_SAMPLES = 4096
_GAP_BINS_PER_DECADE = 100
_LEAST_GAP_S = 1e-6


@dataclass(slots=True)
class Requests:
    """What became of each request of a trace, by its row; seconds of the virtual clock, NaN for what did not happen.

    Attributes:
        first_scheduled_s, first_token_s, finish_s: times.
        deadline_s: seconds from arrival to when the first token was due, given or derived; inf for none.
        max_gap_s: longest wait between two of its tokens.
        num_tokens: produced.
        num_preemptions: how often it gave up its KV memory.
        is_refused: it never fits.
    """

    first_scheduled_s: NDArray[np.float64]
    first_token_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    deadline_s: NDArray[np.float64]
    max_gap_s: NDArray[np.float64]
    num_tokens: NDArray[np.int64]
    num_preemptions: NDArray[np.int64]
    is_refused: NDArray[np.bool_]

    @classmethod
    def empty(cls, count: int) -> Requests:
        """None has happened."""
        never = (np.full(count, np.nan) for _ in range(4))
        first_scheduled_s, first_token_s, finish_s, deadline_s = never
        num_tokens, num_preemptions = np.zeros((2, count), np.int64)
        gap_s, is_refused = np.zeros(count), np.zeros(count, np.bool_)
        return cls(
            first_scheduled_s, first_token_s, finish_s, deadline_s, gap_s, num_tokens, num_preemptions, is_refused
        )


@dataclass(slots=True)
class Series:
    """Samples over time, thinned out where they are many: every other goes, and fewer come.

    Attributes:
        rows: (seconds, requests running, requests waiting, share of KV blocks in use).
    """

    rows: list[tuple[float, int, int, float]] = field(default_factory=list)
    _every: int = 1
    _skipped: int = 0

    def add(self, row: tuple[float, int, int, float]) -> None:
        """Take a sample, or not."""
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self.rows.append(row)
        if len(self.rows) >= _MAX_SAMPLES:
            self.rows = self.rows[::2]
            self._every *= 2


@dataclass(slots=True)
class Gaps:
    """Waits between tokens of a request, over all tokens: counts by size, a hundred sizes a decade."""

    counts: dict[int, int] = field(default_factory=dict)
    total_s: float = 0.0
    count: int = 0

    def add(self, gap_s: float, count: int = 1) -> None:
        """Count some gaps of one size."""
        size = round(math.log10(max(gap_s, _LEAST_GAP_S)) * _GAP_BINS_PER_DECADE)
        self.counts[size] = self.counts.get(size, 0) + count
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


@dataclass(slots=True)
class Outcome:
    """What a simulation came to.

    Attributes:
        trace: what was asked.
        requests: by row of the trace.
        duration_s: from the first arrival to the last token, or to where it was stopped.
        series: over time.
        gaps: between tokens.
        stage_busy_s: by group and stage.
        stage_bubble_s: by group and stage, seconds without work while another stage of the group had some.
        num_batches, num_skipped: batches in all, and those of them that were stepped over in one go.
        work_lost_s: predicted seconds of what was computed again.
        is_stopped: it did not run to the end.
    """

    trace: Trace
    requests: Requests
    duration_s: float
    series: Series
    gaps: Gaps
    stage_busy_s: list[list[float]]
    stage_bubble_s: list[list[float]]
    num_batches: int
    num_skipped: int
    work_lost_s: float
    is_stopped: bool


@dataclass(slots=True)
class _Live:
    """A request that is not closed."""

    row: int
    num_left: int
    last_token_s: float = math.nan
    ended: bool = False


class Simulation:
    """One run of a trace.

    Args:
        scheduler: fresh.
        pipeline: of as many groups as the scheduler has.
        trace: in order of arrival.
        stop_s: virtual time at which to stop; None is the end.
        driver_waits: whether rank 0 decides the next batch only when its own stage is done with this one, as an engine
            does that computes on the CPU.
        skips: whether stretches of steady decoding are stepped over in one go; the outcome is the same.
        on_progress: told now and then of requests closed so far.

    Raises:
        ConfigError: scheduler and pipeline have not the same groups.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pipeline: Pipeline,
        trace: Trace,
        *,
        stop_s: float | None = None,
        driver_waits: bool = False,
        skips: bool = True,
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        if scheduler.memory.num_groups != pipeline.num_groups:
            raise ConfigError(
                f"the scheduler has {scheduler.memory.num_groups} groups and the pipeline {pipeline.num_groups}"
            )
        self.scheduler = scheduler
        self.pipeline = pipeline
        self.trace = trace
        self.requests = Requests.empty(len(trace))
        self.series = Series()
        self.gaps = Gaps()
        self.now_s = 0.0
        self._stop_s = math.inf if stop_s is None else stop_s
        self._driver_waits = driver_waits
        self._skips = skips
        self._on_progress = on_progress or (lambda count: None)
        self._arrivals = trace.rows()
        self._next: tuple[int, Row] | None = None
        self._num_taken = self._num_closed = self._num_batches = self._num_skipped = 0
        self._work_lost_s = 0.0
        self._live: dict[int, _Live] = {}
        self._free_slots: list[int] = []
        self._in_flight: deque[tuple[Batch, Passage]] = deque()

    def run(self) -> Outcome:
        """Play the trace to its end.

        Raises:
            RuntimeError: the scheduler runs none of the unfinished requests.
        """
        self._next = next(self._numbered(), None)
        while self.now_s < self._stop_s:
            self._add_arrived()
            if self._skips and self._skip():
                continue
            self._fill()
            if self._in_flight:
                self._complete()
            elif self._next is not None:
                self.now_s = max(self.now_s, self._arrival_s())
            elif self._live:
                raise RuntimeError(f"the scheduler runs none of {len(self._live)} unfinished requests")
            else:
                break
        return self.outcome()

    def _numbered(self) -> Iterator[tuple[int, Row]]:
        for row in self._arrivals:
            self._num_taken += 1
            yield self._num_taken - 1, row

    def _arrival_s(self) -> float:
        """Of the next request."""
        assert self._next is not None
        return self._next[1].arrival_s or 0.0

    # -- the engine's loop -------------------------------------------------------------------------------------------

    def _add_arrived(self) -> None:
        while self._next is not None and self._arrival_s() <= self.now_s:
            self._add(*self._next)
            self._next = next(self._numbered(), None)

    def _add(self, index: int, row: Row) -> None:
        slot = self._free_slots.pop() if self._free_slots else len(self._live)
        slo = SLO(row.ttft_slo_s, row.tpot_slo_s) if row.ttft_slo_s or row.tpot_slo_s else None
        priority = NORMAL if row.priority is None else row.priority
        head = RequestHead(slot, row.prompt_tokens, row.output_tokens, row.arrival_s or 0.0, slo, priority)
        if head.num_kv_tokens > self.scheduler.memory.max_request_tokens:
            self.requests.is_refused[index] = True
            self._free_slots.append(slot)
            self._num_closed += 1
            return
        self.requests.deadline_s[index] = self.scheduler.add(head)
        self._live[slot] = _Live(index, row.output_tokens)

    def _fill(self) -> None:
        while (batch := self._schedule()) is not None:
            passage = self.pipeline.send(batch, self.scheduler.memory, self.now_s)
            self._num_batches += 1
            for row in batch.rows:
                if not row.is_decode:
                    index = self._live[row.slot].row
                    if math.isnan(self.requests.first_scheduled_s[index]):
                        self.requests.first_scheduled_s[index] = self.now_s
            self._in_flight.append((batch, passage))
            if self._driver_waits:
                self.now_s = max(self.now_s, passage.first_end_s)

    def _schedule(self) -> Batch | None:
        batch = self.scheduler.schedule(self.now_s)
        for slot, lost_s in self.scheduler.displaced:
            self.requests.num_preemptions[self._live[slot].row] += 1
            self._work_lost_s += lost_s
        return batch

    def _skip(self) -> bool:
        """Step over batches that can be foreseen: decodes alone, until a request is about to end or one arrives.

        Returns:
            Whether time has passed.
        """
        scheduler, pipeline = self.scheduler, self.pipeline
        if not scheduler.is_steady or not pipeline.is_plain or _has_learned(scheduler):
            return False
        lives = list(self._live.values())
        most = min(live.num_left for live in lives) - 1
        if most < 1 or any(live.last_token_s != self.now_s for live in lives):
            return False
        until_s = self._stop_s if self._next is None else min(self._stop_s, self._arrival_s())
        positions = [scheduler.num_computed_tokens(slot) for slot in self._live]
        block_size, num_blocks = scheduler.memory.block_size, scheduler.memory.num_used
        all_blocks = scheduler.memory.num_blocks
        new_blocks = Counter(-position % block_size for position in positions)
        count, total, longest = len(positions), sum(positions), max(positions)
        seconds = pipeline.stages[0].steady_decodes(count)
        max_gap_s, step = 0.0, 0
        while step < most and self.now_s < until_s:
            step_s = seconds((total + step * count) / count, longest + step)
            before_s, self.now_s = self.now_s, self.now_s + step_s
            pipeline.busy_s[0][0] += step_s
            gap_s = self.now_s - before_s
            max_gap_s = max(max_gap_s, gap_s)
            self.gaps.add(gap_s, count)
            num_blocks += new_blocks[step % block_size]
            self.series.add((self.now_s, count, scheduler.num_waiting, num_blocks / all_blocks))
            step += 1
        if not step:
            return False
        scheduler.skip(step)
        pipeline.pass_time(self.now_s)
        for live in lives:
            live.num_left -= step
            live.last_token_s = self.now_s
            self.requests.num_tokens[live.row] += step
            self.requests.max_gap_s[live.row] = max(self.requests.max_gap_s[live.row], max_gap_s)
        self._num_batches += step
        self._num_skipped += step
        return True

    def _complete(self) -> None:
        batch, passage = self._in_flight.popleft()
        self.now_s = max(self.now_s, passage.end_s)
        results = [(row.slot, 1, self._take_token(self._live[row.slot])) for row in batch.rows if row.samples]
        closed = self.scheduler.complete(batch.batch_id, self.now_s, results, passage.busy_s)
        for slot in closed:
            del self._live[slot]
            self._free_slots.append(slot)
        if closed:
            self._num_closed += len(closed)
            self._on_progress(self._num_closed)
        memory = self.scheduler.memory
        share = memory.num_used / (memory.num_blocks * memory.num_groups)
        self.series.add((self.now_s, self.scheduler.num_running, self.scheduler.num_waiting, share))

    def _take_token(self, live: _Live) -> bool:
        """A request gets a token; whether it ends with it."""
        requests, row, now_s = self.requests, live.row, self.now_s
        requests.num_tokens[row] += 1
        live.num_left -= 1
        if math.isnan(live.last_token_s):
            requests.first_token_s[row] = now_s
        else:
            gap_s = now_s - live.last_token_s
            self.gaps.add(gap_s)
            if gap_s > requests.max_gap_s[row]:
                requests.max_gap_s[row] = gap_s
        live.last_token_s = now_s
        if not live.num_left:
            requests.finish_s[row] = now_s
        return not live.num_left

    def outcome(self) -> Outcome:
        """What has become of the requests so far."""
        first_s = float(self.trace.arrival_s[0]) if len(self.trace) else 0.0
        return Outcome(
            trace=self.trace,
            requests=self.requests,
            duration_s=self.now_s - first_s,
            series=self.series,
            gaps=self.gaps,
            stage_busy_s=self.pipeline.busy_s,
            stage_bubble_s=self.pipeline.bubble_s,
            num_batches=self._num_batches,
            num_skipped=self._num_skipped,
            work_lost_s=self._work_lost_s,
            is_stopped=bool(self._live) or self._next is not None,
        )


def _has_learned(scheduler: Scheduler) -> bool:
    """Whether the scheduler predicts other than at first."""
    predictor = scheduler.predictor
    return predictor is not None and any(log for log, _ in predictor.correction.learned.values())
