"""A discrete-event simulator around the engine's own scheduler.

The loop is that of :class:`medha.engine.Engine` under :func:`~medha.engine.arrivals.drive`: add who has arrived, fill
the pipeline to its depth, wait for its oldest batch. Time is virtual: what a batch takes is predicted, and who gets
tokens and when a request ends is read off the trace. The scheduler is the very object of the engine and knows nothing
of it. Where chunks are dealt, batches that share no group complete beside each other, the one that is done first first,
and who arrives meanwhile is added at once.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, replace

import numpy as np

from medha.batch import Batch
from medha.cost.predictor import MIN_SECONDS
from medha.params import SLO
from medha.sched.decision import Prediction, SchedulerRequest
from medha.sched.scheduler import Scheduler
from medha.sim.outcome import Outcome, Requests
from medha.sim.pipeline import Passage, Pipeline
from medha.sim.steady import go_round, is_steady, may_go_round
from medha.workload.trace import NORMAL, Row, Trace, prefix_ids


@dataclass(slots=True)
class _Live:
    """A request that is not closed."""

    row: int
    num_left: int
    last_token_s: float = math.nan


@dataclass(slots=True)
class _Round:
    """A batch of decodes that goes round: completed and scheduled again with the next tokens."""

    lives: list[_Live]
    num_left: int  # tokens until one of its requests ends, at least 1
    total_kv: int  # cached tokens of its rows
    max_kv: int  # of one of them at most
    passage: Passage  # as it is in flight, like predicted_s and factor
    prediction: Prediction | None  # when it was first sent
    predicted_s: float
    factor: float
    new_blocks: Counter[int]  # rows that take a block when it is scheduled again, by how often, modulo the block size
    last_token_s: float = math.nan  # of all its requests; NaN before the first round
    num_tokens: int = 0  # how often it was scheduled again


@dataclass(eq=False, repr=False)
class Simulation:
    """One run of a trace, whose :attr:`outcome` is that of all requests once :meth:`run` has ended.

    Scheduler and pipeline are fresh, and of as many groups. ``stop_s`` is the virtual time at which to stop. An engine
    on the CPU ``driver_waits``: rank 0 decides the next batch only when its own stage is done with this one. With
    ``skips`` stretches of steady decoding are stepped over in one go; the outcome is the same. ``on_progress`` is told
    now and then how many more requests are closed.
    """

    scheduler: Scheduler
    pipeline: Pipeline
    trace: Trace
    _: KW_ONLY
    stop_s: float | None = None
    driver_waits: bool = False
    skips: bool = True
    on_progress: Callable[[int], None] = lambda count: None

    def __post_init__(self) -> None:
        pipeline = self.pipeline
        self.requests = Requests(len(self.trace))
        self.outcome = Outcome(
            self.trace, self.requests, stage_busy_s=pipeline.busy_s, stage_bubble_s=pipeline.bubble_s
        )
        self.series, self.gaps = self.outcome.series, self.outcome.gaps
        self.now_s = 0.0
        self._stop_s = math.inf if self.stop_s is None else self.stop_s
        self._skips = self.skips and may_go_round(self.scheduler)
        self._lanes = self.scheduler.dealing is not None
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
            first_s = float(self.trace.arrival_s[0]) if len(self.trace) else 0.0
            self.outcome.duration_s = self.now_s - first_s
            self.outcome.is_stopped = bool(self._live) or self._next is not None
        return self.outcome

    def _play(self) -> None:
        while self.now_s < self._stop_s:
            while self._next is not None and self._arrival_s() <= self.now_s:
                self._add(*self._next)
                self._next = next(self._arrivals, None)
            self._fill()
            if self._in_flight:
                if self._lanes and self._next is not None and self._arrival_s() < self._bring_first():
                    self.now_s = max(self.now_s, self._arrival_s())
                    continue
                if self._skips:
                    self._go_round()
                self._complete()
            elif self._next is not None:
                self.now_s = min(max(self.now_s, self._arrival_s()), self._stop_s)
            elif self._live:
                raise RuntimeError(f"the scheduler runs none of {len(self._live)} unfinished requests")
            else:
                break

    def _bring_first(self) -> float:
        """Bring the batch that is done first to the front; returns when that is."""
        first = min(range(len(self._in_flight)), key=lambda at: self._in_flight[at][1].end_s)
        self._in_flight.rotate(-first)
        return self._in_flight[0][1].end_s

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
        head = SchedulerRequest(
            slot, *lengths, arrival_s, slo, priority, tenant=row.tenant or "", prefix=self._prefix(index, row)
        )
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
            for shared in batch.shared:
                if math.isnan(self.requests.first_scheduled_s[self._live[shared.slot].row]):
                    self.outcome.num_cached_tokens += shared.num_tokens
            for row in batch.rows:
                if not row.is_decode:
                    index = self._live[row.slot].row
                    if math.isnan(self.requests.first_scheduled_s[index]):
                        self.requests.first_scheduled_s[index] = self.now_s
            self._in_flight.append((batch, passage))
            if self.driver_waits:
                self.now_s = max(self.now_s, passage.first_end_s)

    def _go_round(self) -> None:
        """Step over batches that can be foreseen: decodes alone, until a request is about to end or one arrives."""
        if not (self.pipeline.is_plain and is_steady(self.scheduler)):
            return
        until_s = self._stop_s if self._next is None else min(self._stop_s, self._arrival_s())
        oldest, passage = self._in_flight[0]
        if max(self.now_s, passage.end_s) >= until_s or min(self._live[r.slot].num_left for r in oldest.rows) == 1:
            return
        going = deque(self._round(batch, passage) for batch, passage in self._in_flight)
        num_batches, num_blocks = 0, self.scheduler.memory.num_used
        while (first := going[0]).num_left > 1 and max(self.now_s, first.passage.end_s) < until_s:
            going.rotate(-1)
            num_blocks = self._send_again(first, num_blocks)
            num_batches += 1
        self.outcome.num_batches += num_batches
        self.outcome.num_skipped += num_batches
        predictions = [r.prediction and replace(r.prediction, seconds=r.predicted_s, factor=r.factor) for r in going]
        go_round(self.scheduler, num_batches, predictions)
        self._in_flight = deque(zip(self.scheduler.in_flight, [r.passage for r in going], strict=True))
        for r in going:
            for live in r.lives if r.num_tokens else ():  # what its requests got while it went round
                live.num_left -= r.num_tokens
                live.last_token_s = r.last_token_s

    def _round(self, batch: Batch, passage: Passage) -> _Round:
        """A batch that goes round."""
        lives = [self._live[row.slot] for row in batch.rows]
        positions = [row.position for row in batch.rows]
        prediction, block_size = self.scheduler.prediction_of(batch), self.scheduler.memory.block_size
        predicted = (prediction.seconds, prediction.factor) if prediction else (0.0, 1.0)
        blocks = Counter(-position % block_size for position in positions)
        num_left = min(live.num_left for live in lives)
        return _Round(lives, num_left, sum(positions), max(positions), passage, prediction, *predicted, blocks)

    def _send_again(self, going: _Round, num_blocks: int) -> int:
        """The oldest batch in flight is done, and goes in again; blocks in use after it."""
        scheduler, memory, count = self.scheduler, self.scheduler.memory, len(going.lives)
        self.now_s = now_s = max(self.now_s, going.passage.end_s)
        if going.num_tokens:
            self.gaps.add(now_s - going.last_token_s, count)
        else:
            self._add_gaps(live.last_token_s for live in going.lives)
        going.last_token_s = now_s
        self.series.add(now_s, num_blocks / memory.num_blocks)
        going.num_left -= 1
        going.num_tokens += 1
        going.total_kv += count
        going.max_kv += 1
        mean_kv = going.total_kv / count
        if going.prediction is not None and (predictor := scheduler.predictor) is not None:
            kind = going.prediction.kind
            predictor.observe(kind, going.predicted_s, going.passage.busy_s, factor=going.factor)
            going.factor = predictor.factor("decode")
            raw_s = predictor.steady_decodes(count)(mean_kv, going.max_kv)
            going.predicted_s = max(raw_s * going.factor, MIN_SECONDS)
        going.passage = self.pipeline.send_decodes(count, mean_kv, going.max_kv, now_s)
        if self.driver_waits:
            self.now_s = max(now_s, going.passage.first_end_s)
        return num_blocks + going.new_blocks[going.num_tokens % memory.block_size]

    def _add_gaps(self, last_tokens_s: Iterable[float]) -> None:
        """Waits of requests that had their last tokens at these times."""
        for gap_s, count in Counter(self.now_s - last_s for last_s in last_tokens_s).items():
            self.gaps.add(gap_s, count)

    def _complete(self) -> None:
        if self._lanes:
            self._bring_first()
        batch, passage = self._in_flight.popleft()
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
        self._add_gaps(last_tokens_s)
        closed = self.scheduler.complete(batch, self.now_s, results, passage.busy_s)
        for slot in closed:
            self._note(self._live.pop(slot))
            self._free_slots.append(slot)
        if closed:
            self.on_progress(len(closed))
        memory = self.scheduler.memory
        share = memory.num_used / (memory.num_blocks * memory.num_groups)
        self.series.add(self.now_s, share)

    def _note(self, live: _Live) -> None:
        """Enter what was kept of a request apart from the columns."""
        self.requests.num_tokens[live.row] = self.trace.output_tokens[live.row] - live.num_left
