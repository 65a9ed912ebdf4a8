"""The scheduler: what runs next, behind four calls.

The seam is :meth:`Scheduler.add`, :meth:`~Scheduler.cancel`, :meth:`~Scheduler.schedule`, :meth:`~Scheduler.complete`,
and nothing else changes it. The scheduler knows slots and lengths, never token ids; time is handed in; it decides the
same whenever it is called the same. Here is what all schedulers share: the life of a request and of a batch. Whose turn
it is, and how much, is a packer's affair: the paper's (:mod:`medha.sched.packer`) or a classical one
(:mod:`medha.sched.baselines`).

Memory: :mod:`medha.sched.memory`. Groups: with KV parallelism a batch spans all groups; a request is bound to a run of
them at its first chunk (:mod:`medha.sched.balancer`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from medha.batch import Batch, Row
from medha.config import SchedulerConfig
from medha.cost.predictor import Predictor
from medha.cost.prefill_time import PrefillTimes, budgeted_chunk
from medha.sched.baselines import classical_packer
from medha.sched.batch_builder import Draft, LearningPacker, Leaving, Packer
from medha.sched.memory import KVMemory
from medha.sched.packer import MedhaPacker, Prediction
from medha.sched.queue import Queue, RequestHead

__all__ = ["RequestHead", "Scheduler"]


class Scheduler:
    """Decides what runs next.

    Args:
        config: which scheduler and policy, budgets and depth.
        num_blocks: KV blocks in the pool of each group.
        block_size: tokens a block.
        num_groups: KV-parallel groups.
        predictor: of the slowest stage of a group; the medha scheduler needs one.
        max_prompt_tokens: longest prompt whose time is predicted apart.

    Attributes:
        memory: who holds which blocks.
        predictor: as given; it learns from completed batches.

    Raises:
        ValueError: ``config.max_kv_per_group`` does not fit the pool, or there is no predictor where one is needed.
        ConfigError: the policy is unknown.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        block_size: int,
        num_groups: int = 1,
        predictor: Predictor | None = None,
        max_prompt_tokens: int = 10_000_000,
    ) -> None:
        self.config = config
        self.depth = config.depth or (2 if config.decode_lag else 1)
        # In how many batches a decode comes round again: with a decode lag in every one.
        self._period = 1 if config.decode_lag else self.depth
        self.predictor = predictor
        self.max_prompt_tokens = max_prompt_tokens
        self.memory = KVMemory(
            num_blocks=num_blocks,
            block_size=block_size,
            num_groups=num_groups,
            max_kv_per_group=config.max_kv_per_group,
            overcommit=config.overcommit,
            num_swap_blocks=config.num_swap_blocks,
            swap_block_s=config.swap_block_s,
        )
        self.packer = _packer(config, predictor, self.depth)
        self._learner = self.packer if isinstance(self.packer, LearningPacker) else None
        self._may_go_round = (
            num_groups == 1 and not config.overcommit and not config.decode_lag and self._learner is None
        )
        times = None if predictor is None else _prefill_times(config, predictor, max_prompt_tokens)
        self._queue = Queue(
            times,
            deadline_floor_s=config.deadline_floor_s,
            deadline_factor=config.deadline_factor,
            decode_lag=bool(config.decode_lag),
        )
        self._in_flight: deque[tuple[Batch, Prediction | None]] = deque()
        self._leaving = Leaving()
        self._no_memory: tuple[int, ...] = ()
        self._displaced: tuple[tuple[int, float], ...] = ()
        self._swapped: tuple[tuple[int, int], ...] = ()
        self._next_batch_id = 0

    def fresh(self) -> Scheduler:
        """A scheduler of the same configuration that knows no request; what the predictor has learned stays."""
        memory = self.memory
        return Scheduler(
            self.config,
            num_blocks=memory.num_blocks,
            block_size=memory.block_size,
            num_groups=memory.num_groups,
            predictor=self.predictor,
            max_prompt_tokens=self.max_prompt_tokens,
        )

    @property
    def num_waiting(self) -> int:
        """Requests that have not started."""
        return len(self._queue.waiting)

    @property
    def num_running(self) -> int:
        """Requests started and not yet closed."""
        return len(self._queue.running)

    @property
    def in_flight(self) -> tuple[Batch, ...]:
        """Batches scheduled and not yet complete, oldest first."""
        return tuple(batch for batch, _ in self._in_flight)

    @property
    def last_prediction(self) -> Prediction | None:
        """What was predicted of the batch scheduled last, where the packer predicts."""
        return self._in_flight[-1][1] if self._in_flight else None

    def prediction_of(self, batch: Batch) -> Prediction | None:
        """What was predicted of a batch in flight, where the packer predicts."""
        return next(prediction for sent, prediction in self._in_flight if sent is batch)

    @property
    def no_memory(self) -> tuple[int, ...]:
        """Slots of prefills that the last call of :meth:`schedule` refused for want of KV memory."""
        return self._no_memory

    @property
    def displaced(self) -> tuple[tuple[int, float], ...]:
        """(slot, predicted seconds of work lost) of requests that gave way in the last call of :meth:`schedule`."""
        return self._displaced

    @property
    def swapped(self) -> tuple[tuple[int, int], ...]:
        """(slot, tokens moved out) of those of :attr:`displaced` that are swapped; the others are computed again."""
        return self._swapped

    def slack_s(self, slot: int, now_s: float) -> float:
        """Seconds for which a request can still wait and have its first token in time; inf without a deadline.

        Args:
            slot: of a request that is not closed.
            now_s: time.
        """
        state = self._queue.waiting.get(slot) or self._queue.running[slot]
        left_s = 0.0
        if self.predictor is not None and state.prefilling and not state.ended:
            _, left_s = self._queue.work_s(state, self.predictor.factor("prefill"))
        return float(state.head.arrival_s + state.deadline_s - now_s - left_s)

    def num_computed_tokens(self, slot: int) -> int:
        """Tokens of a request that are done in every stage, in host memory too; 0 for a slot not in use."""
        state = self._queue.running.get(slot) or self._queue.waiting.get(slot)
        return 0 if state is None else state.num_computed_tokens

    def admission_s(self, head: RequestHead, now_s: float) -> float | None:
        """Predicted TTFT of a request that cannot meet its objective; whether it is then added is the caller's affair.

        It is what the request would have if it ran next: the wait so far, the batches in flight, its prefill alone.

        Args:
            head: not added yet.
            now_s: time.

        Returns:
            Seconds; None where it may be in time, has no TTFT objective, or ``config.admission`` is ``all``.
        """
        objective_s = None if head.slo is None else head.slo.ttft_s
        if objective_s is None or self.config.admission == "all" or self.predictor is None:
            return None
        in_flight_s = sum(prediction.seconds for _, prediction in self._in_flight if prediction is not None)
        alone_s = self._queue.prefill_s(head.num_prompt_tokens) * self.predictor.factor("prefill")
        predicted_s = max(now_s - head.arrival_s, 0.0) + in_flight_s + alone_s
        return predicted_s if predicted_s > objective_s else None

    def add(self, head: RequestHead) -> float:
        """Queue a request.

        Returns:
            Seconds from its arrival to its deadline, given or derived; inf for none.

        Raises:
            ValueError: its slot is in use, a length is below 1, or its claim exceeds the pools.
        """
        if head.slot in self._queue:
            raise ValueError(f"slot {head.slot} is in use")
        if head.num_prompt_tokens < 1 or head.max_new_tokens < 1:
            raise ValueError(f"{head}: lengths must be at least 1")
        if head.num_kv_tokens > self.memory.max_request_tokens:
            most = self.memory.max_request_tokens
            raise ValueError(f"{head}: needs {head.num_kv_tokens} KV tokens, at most {most} fit")
        factor = 1.0 if self.predictor is None else self.predictor.factor("prefill")
        return self._queue.add(head, factor).deadline_s

    def cancel(self, slot: int) -> tuple[int, ...]:
        """Stop scheduling a request at once; no-op for a slot that is not in use.

        Returns:
            The slots closed by this call: ``(slot,)``, or nothing while chunks of it are in flight, in which case the
            ``complete`` of its last batch closes it.
        """
        state = self._queue.waiting.get(slot) or self._queue.running.get(slot)
        if state is None or state.ended:
            return ()
        self._queue.end(state)
        if not state.has_started:
            self._queue.drop(slot)
            if self.memory.forget_swapped(slot):  # also what has not gone out yet: its host blocks are others' now
                self._leaving.swaps_out = [extent for extent in self._leaving.swaps_out if extent.slot != slot]
            return (slot,)
        return self._close_ended((slot,))

    def schedule(self, now_s: float) -> Batch | None:
        """The next batch, or None when nothing can enter.

        At most ``depth`` batches are in flight: beyond that the answer is None.

        Raises:
            PolicyError: a user's policy failed.
        """
        self._no_memory = self._displaced = self._swapped = ()
        if len(self._in_flight) >= self.depth:
            return None
        draft = Draft(
            self.config,
            self._queue,
            self.memory,
            depth=self._period,
            now_s=now_s,
            leaving=self._leaving,
            predictor=self.predictor,
        )
        self.packer.fill(self._queue, draft, now_s)
        self._no_memory, self._displaced = tuple(draft.no_memory), tuple(draft.displaced)
        self._swapped = tuple(draft.swapped)
        if not draft.rows:
            return None
        batch = Batch(
            self._next_batch_id,
            tuple(draft.rows),
            tuple(draft.extents),
            tuple(self._leaving.frees),
            tuple(self._leaving.swaps_out),
            tuple(draft.swaps_in),
        )
        self.memory.give_back()
        self._next_batch_id += 1
        self._leaving.clear()
        self._in_flight.append((batch, getattr(self.packer, "prediction", None)))
        return batch

    def complete(
        self, batch_id: int, now_s: float, results: Iterable[tuple[int, int, bool]], busy_s: float
    ) -> tuple[int, ...]:
        """Record that a batch is done in every stage. Batches complete in the order in which they were scheduled.

        Args:
            batch_id: the oldest batch in flight.
            now_s: time.
            results: (slot, number of new tokens, finished) of the rows that sampled.
            busy_s: seconds the slowest group computed, waits excluded.

        Returns:
            Slots closed by this call: their blocks are free and the slot numbers may be used again.

        Raises:
            ValueError: another batch is the oldest in flight.
        """
        if not self._in_flight or self._in_flight[0][0].batch_id != batch_id:
            oldest = self._in_flight[0][0].batch_id if self._in_flight else None
            raise ValueError(f"batch {batch_id} completed, but the oldest in flight is {oldest}")
        batch, prediction = self._in_flight.popleft()
        if prediction is not None and self.predictor is not None and not batch.moves:  # moves say nothing of compute
            self.predictor.observe(prediction.kind, prediction.seconds, busy_s, factor=prediction.factor)
        if self._learner is not None:
            self._learner.completed(batch, busy_s)
        self._queue.computed(batch.rows)
        for slot, num_new_tokens, finished in results:
            state = self._queue.running[slot]
            state.num_known_tokens += 0 if self.config.decode_lag else num_new_tokens  # foreseen when it was sent
            if finished:
                self._queue.end(state)
        ending = self._queue.ending
        return self._close_ended(row.slot for row in batch.rows if row.slot in ending) if ending else ()

    @property
    def is_steady(self) -> bool:
        """Whether the batches in flight go round until a request ends or another arrives: each, when it is complete, is
        scheduled again with the next token of the same requests.

        Says False where it might be so and :meth:`go_round` could not come to the same: with several groups,
        overcommitted memory, and packers that learn from each batch.
        """
        queue, depth = self._queue, self.depth
        if queue.num_prefills or self._leaving.frees or not self._in_flight or not self._may_go_round:
            return False
        num_running = len(queue.running)
        if len(queue.decoding) != num_running or sum(len(batch.rows) for batch, _ in self._in_flight) != num_running:
            return False
        most = min(-(-num_running // depth), self.config.max_batch_tokens)
        return all(len(batch.rows) == batch.num_decodes <= most for batch, _ in self._in_flight)

    def go_round(self, num_batches: int, predictions: Sequence[Prediction | None]) -> None:
        """What so many calls of :meth:`complete` and :meth:`schedule` in turn do while :attr:`is_steady`, in one go.

        For a simulator. The predictor is not told of the batches, and where blocks lie may differ.

        Args:
            num_batches: completed and scheduled again, the oldest first; none of their requests has ended.
            predictions: of the batches in flight after it, oldest first.
        """
        assert self.is_steady, "batches can be foreseen"
        size = len(self._in_flight)
        for index, (batch, _) in enumerate(self._in_flight):
            rounds = (num_batches - index + size - 1) // size if num_batches > index else 0
            if rounds:
                last = num_batches - 1 - (num_batches - 1 - index) % size  # of the batches that these rows were
                rows = tuple(self._after(row, rounds) for row in batch.rows)
                self._in_flight[index] = Batch(self._next_batch_id + last, rows), None
        self._in_flight.rotate(-num_batches)
        together = zip(self._in_flight, predictions, strict=True)
        self._in_flight = deque((batch, prediction) for (batch, _), prediction in together)
        self._next_batch_id += num_batches

    def _after(self, row: Row, rounds: int) -> Row:
        """The row of a decode so many tokens later; its state follows."""
        state = self._queue.running[row.slot]
        position, block_size = state.num_scheduled_tokens, self.memory.block_size
        if (position - 1) // block_size != (position - 1 + rounds) // block_size:
            self.memory.take(Row(row.slot, position, rounds, True, True))
        state.num_scheduled_tokens += rounds
        state.num_computed_tokens += rounds
        state.num_known_tokens += rounds
        return Row(row.slot, row.position + rounds, 1, True, True)

    def _close_ended(self, slots: Iterable[int]) -> tuple[int, ...]:
        """Free the ended requests among ``slots`` that have nothing in flight."""
        closed = []
        for slot in slots:
            state = self._queue.running.get(slot)
            if state is None or not state.ended or state.num_in_flight:
                continue
            self._queue.drop(slot)
            if self.memory.release(slot):
                self._leaving.frees.append(slot)
            closed.append(slot)
        return tuple(closed)


def _packer(config: SchedulerConfig, predictor: Predictor | None, depth: int) -> Packer:
    if config.scheduler != "medha":
        return classical_packer(config)
    if predictor is None:
        raise ValueError("scheduler='medha' needs a predictor")
    return MedhaPacker(config, predictor, depth)


def _prefill_times(config: SchedulerConfig, predictor: Predictor, max_prompt_tokens: int) -> PrefillTimes:
    """Seconds of a prefill alone, in the chunks that the packer would take."""
    budget_s = config.t_target_s or config.quantum_s
    chunk = budgeted_chunk(
        predictor,
        budget_s,
        config.max_batch_tokens,
        granularity=config.chunk_granularity,
        min_tokens=config.min_chunk,
    )
    return PrefillTimes(predictor, chunk, max_tokens=max_prompt_tokens)
