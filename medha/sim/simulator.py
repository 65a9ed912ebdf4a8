"""A discrete-event simulator around the engine's own scheduler.

The loop is that of :class:`~medha.engine.engine.Engine` under :func:`~medha.engine.arrivals.drive`: add who has
arrived, fill the pipeline to its depth, wait for its oldest batch. Time is virtual: what a batch takes is predicted,
and who gets tokens and when a request ends is read off the trace. The scheduler is the very object of the engine and
knows nothing of it. Where chunks are dealt, batches that share no group complete beside each other, the one that is
done first first, and who arrives meanwhile is added at once.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import numpy as np

from medha.batch import Batch
from medha.params import SLO
from medha.sched.decision import SchedulerRequest
from medha.sched.scheduler import Scheduler
from medha.sim.outcome import Outcome, Requests
from medha.sim.pipeline import Passage, Pipeline
from medha.workload.trace import NORMAL, Row, Trace, prefix_ids


@dataclass(slots=True)
class _Live:
    """A request that is not closed."""

    row: int
    num_left: int
    last_token_s: float = math.nan


@dataclass(eq=False, repr=False)
class Simulation:
    """One run of a trace, whose :attr:`outcome` is that of all requests once :meth:`run` has ended.

    Scheduler and pipeline are fresh, and of as many groups. ``stop_s`` is the virtual time at which to stop.
    ``on_progress`` is told how many more requests are closed.
    """

    scheduler: Scheduler
    pipeline: Pipeline
    trace: Trace
    _: KW_ONLY
    stop_s: float | None = None
    on_progress: Callable[[int], None] = lambda count: None

    def __post_init__(self) -> None:
        self.requests = Requests(len(self.trace))
        busy_s, bubble_s = self.pipeline.busy_s, self.pipeline.bubble_s
        self.outcome = Outcome(self.trace, self.requests, stage_busy_s=busy_s, stage_bubble_s=bubble_s)
        self.now_s = 0.0
        self._stop_s = math.inf if self.stop_s is None else self.stop_s
        self._arrivals = enumerate(self.trace.rows())
        self._next = next(self._arrivals, None)
        self._live: dict[int, _Live] = {}
        self._free_slots: list[int] = []
        self._in_flight: deque[tuple[Batch, Passage]] = deque()

    def run(self) -> Outcome:
        """Play the trace to its end, or to an interrupt, whose outcome is that of a stop."""
        try:
            self._play()
        finally:
            for live in self._live.values():
                self._note(live)
            for _, passage in self._in_flight:
                self.pipeline.account(passage, self.now_s)
            first_s = float(self.trace.arrival_s[0]) if len(self.trace) else 0.0
            self.outcome.duration_s = max(self.now_s - first_s, 0.0)
            self.outcome.is_stopped = bool(self._live) or self._next is not None
        return self.outcome

    def _play(self) -> None:
        while self.now_s < self._stop_s:
            while self._next is not None and self._arrival_s() <= self.now_s:
                self._add(*self._next)
                self._next = next(self._arrivals, None)
            self._fill()
            if self._in_flight:
                if self.scheduler.planner is not None:
                    ends_s = [passage.end_s for _, passage in self._in_flight]
                    self._in_flight.rotate(-ends_s.index(min(ends_s)))  # the one that is done first comes first
                    if self._next is not None and self._arrival_s() < min(ends_s):
                        self.now_s = max(self.now_s, self._arrival_s())
                        continue
                self._complete()
            elif self._next is not None:
                self.now_s = min(max(self.now_s, self._arrival_s()), self._stop_s)
            elif self._live:
                raise RuntimeError(f"the scheduler runs none of {len(self._live)} unfinished requests")
            else:
                break

    def _arrival_s(self) -> float:
        """Of the next request."""
        assert self._next is not None
        return self._next[1].arrival_s or 0.0

    # -- the engine's loop -------------------------------------------------------------------------------------------

    def _add(self, index: int, row: Row) -> None:
        slot = self._free_slots.pop() if self._free_slots else len(self._live)
        slo = SLO(row.ttft_slo_s, row.tpot_slo_s) if row.ttft_slo_s or row.tpot_slo_s else None
        priority = NORMAL if row.priority is None else row.priority
        lengths, arrival_s = (row.prompt_tokens, row.output_tokens), row.arrival_s or 0.0
        prefix = self._prefix(index, row)
        head = SchedulerRequest(slot, *lengths, arrival_s, slo, priority, tenant=row.tenant or "", prefix=prefix)
        if head.num_kv_tokens > self.scheduler.memory.max_request_tokens:
            self.requests.is_refused[index] = True
            self._free_slots.append(slot)
            self.on_progress(1)
            return
        self.requests.deadline_s[index] = self.scheduler.add(head).deadline_s
        self._live[slot] = _Live(index, row.output_tokens)

    def _prefix(self, index: int, row: Row) -> bytes:
        config, unit = self.scheduler.config, self.scheduler.memory.prefix.unit
        if config.prefix_caching is False:
            return b""
        if row.prefix_hashes is None and config.overcommit:  # who gives way finds its own again, its output as well
            count = (row.prompt_tokens + row.output_tokens) // unit
            return np.stack([np.full(count, ~index), np.arange(count)], axis=1).tobytes()
        return prefix_ids(row, unit)

    def _fill(self) -> None:
        while True:
            decision = self.scheduler.schedule(self.now_s)
            for preempted in decision.preempted:
                self.requests.num_preemptions[self._live[preempted.slot].row] += 1
                self.outcome.work_lost_s += preempted.lost_s
                self.outcome.num_swaps += preempted.swapped_tokens > 0
            if (batch := decision.batch) is None:
                return
            passage = self.pipeline.send(batch, self.scheduler.memory, self.now_s)
            self.outcome.num_batches += 1
            self._note_usage()
            for shared in batch.shared:
                if math.isnan(self.requests.first_scheduled_s[self._live[shared.slot].row]):
                    self.outcome.num_cached_tokens += shared.num_tokens
            for row in batch.chunks:
                index = self._live[row.slot].row
                if math.isnan(self.requests.first_scheduled_s[index]):
                    self.requests.first_scheduled_s[index] = self.now_s
            self._in_flight.append((batch, passage))

    def _complete(self) -> None:
        batch, passage = self._in_flight.popleft()
        self.pipeline.account(passage)
        self.now_s = now_s = max(self.now_s, passage.end_s)
        last_tokens_s: list[float] = []
        results = []
        for row in batch.rows:
            if not row.samples:
                continue
            live = self._live[row.slot]
            live.num_left -= 1
            if live.last_token_s != live.last_token_s:  # NaN: it is the first
                self.requests.first_token_s[live.row] = now_s
            else:
                last_tokens_s.append(live.last_token_s)
            live.last_token_s = now_s
            if not live.num_left:
                self.requests.finish_s[live.row] = now_s
            results.append((row.slot, 1, not live.num_left))
        for gap_s, count in Counter(now_s - last_s for last_s in last_tokens_s).items():
            self.outcome.gaps.add(gap_s, count)
        closed = self.scheduler.complete(batch, self.now_s, results, passage.busy_s)
        for slot in closed:
            self._note(self._live.pop(slot))
            self._free_slots.append(slot)
        if closed:
            self.on_progress(len(closed))
        self._note_usage()

    def _note_usage(self) -> None:
        memory = self.scheduler.memory
        self.outcome.usage_at_s.append(self.now_s)
        self.outcome.usage.append(memory.num_used / (memory.num_blocks * memory.num_groups))

    def _note(self, live: _Live) -> None:
        """Enter what was kept of a request apart from the columns."""
        self.requests.num_tokens[live.row] = self.trace.output_tokens[live.row] - live.num_left
