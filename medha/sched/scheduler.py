"""First come, first served, with chunked prefill and a token budget: the baseline that the paper's policies replace.

Each step takes the running requests' decodes, then prefill chunks in order of arrival, each at most ``chunk_size``
tokens, until ``max_batch_tokens`` are in the batch (chunked prefill and "decodes first" as in Sarathi-Serve, arXiv
2403.02310; the paper's section 2.6 starts from it).

The seam is four calls, and nothing else crosses it: :meth:`Scheduler.add`, :meth:`~Scheduler.cancel`,
:meth:`~Scheduler.schedule`, :meth:`~Scheduler.complete`. The scheduler knows slots and lengths, never token ids; time
is handed in; it decides the same whenever it is called the same.

Memory: :mod:`medha.sched.memory`. Groups: with KV parallelism a batch spans all groups, each with its own token budget;
a request is bound to a run of them at its first chunk (:mod:`medha.sched.balancer`), and a chunk of a request that lies
on several is bounded by the least budget left among them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from medha.batch import Batch, Extent, Row
from medha.config import SchedulerConfig
from medha.request import SLO
from medha.sched.balancer import choose_group, pending_work, prefill_work
from medha.sched.memory import KVMemory


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What the scheduler knows of a request at arrival.

    Attributes:
        slot: integer handle; unique among requests not yet closed.
        num_prompt_tokens: at least 1.
        max_new_tokens: at least 1; with the prompt it makes the claim on KV memory.
        arrival_s: when it arrived, in seconds of the engine's clock.
        slo: its objectives, if any.
    """

    slot: int
    num_prompt_tokens: int
    max_new_tokens: int
    arrival_s: float
    slo: SLO | None = None

    @property
    def num_kv_tokens(self) -> int:
        """Its claim on KV memory in tokens; the last sampled token is never written."""
        return self.num_prompt_tokens + self.max_new_tokens - 1


@dataclass(slots=True)
class _State:
    """Progress of one request.

    ``num_scheduled_tokens`` moves when a chunk is sent, ``num_computed_tokens`` when its batch is complete; only the
    second leads to decodes and frees. ``num_known_tokens`` counts the prompt and the tokens sampled so far: a request
    has work to schedule while fewer are scheduled than known, be it prefill or decode.
    """

    head: RequestHead
    num_known_tokens: int
    num_scheduled_tokens: int = 0
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    ended: bool = False

    @property
    def prefilling(self) -> bool:
        return self.num_scheduled_tokens < self.head.num_prompt_tokens

    @property
    def can_decode(self) -> bool:
        return not self.prefilling and self.num_scheduled_tokens < self.num_known_tokens


@dataclass(slots=True)
class _Draft:
    """A batch that is being filled.

    Attributes:
        budgets: tokens that each group may still get.
    """

    budgets: list[int]
    rows: list[Row] = field(default_factory=list)
    extents: list[Extent] = field(default_factory=list)


class Scheduler:
    """Decides what runs next.

    Args:
        config: budgets and depth.
        num_blocks: KV blocks in the pool of each group.
        block_size: tokens a block.
        num_groups: KV-parallel groups.

    Attributes:
        memory: who holds which blocks.

    Raises:
        ValueError: ``config.max_kv_per_group`` does not fit the pool.
    """

    def __init__(self, config: SchedulerConfig, *, num_blocks: int, block_size: int, num_groups: int = 1) -> None:
        self.config = config
        self.depth = config.depth or 1
        self.memory = KVMemory(
            num_blocks=num_blocks,
            block_size=block_size,
            num_groups=num_groups,
            max_kv_per_group=config.max_kv_per_group,
        )
        self._waiting: dict[int, _State] = {}  # insertion order is arrival order
        self._running: dict[int, _State] = {}  # insertion order is the order of first chunks
        self._in_flight: deque[Batch] = deque()
        self._frees: list[int] = []
        self._next_batch_id = 0

    def fresh(self) -> Scheduler:
        """A scheduler of the same configuration that knows no request."""
        memory = self.memory
        return Scheduler(
            self.config, num_blocks=memory.num_blocks, block_size=memory.block_size, num_groups=memory.num_groups
        )

    @property
    def num_waiting(self) -> int:
        """Requests not yet admitted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests admitted and not yet closed."""
        return len(self._running)

    @property
    def in_flight(self) -> tuple[Batch, ...]:
        """Batches scheduled and not yet complete, oldest first."""
        return tuple(self._in_flight)

    def num_computed_tokens(self, slot: int) -> int:
        """Tokens of a request that are done in every stage; 0 while it waits or for a slot not in use."""
        state = self._running.get(slot)
        return 0 if state is None else state.num_computed_tokens

    def add(self, head: RequestHead) -> None:
        """Queue a request.

        Raises:
            ValueError: its slot is in use, a length is below 1, or its claim exceeds the pools.
        """
        if head.slot in self._waiting or head.slot in self._running:
            raise ValueError(f"slot {head.slot} is in use")
        if head.num_prompt_tokens < 1 or head.max_new_tokens < 1:
            raise ValueError(f"{head}: lengths must be at least 1")
        if head.num_kv_tokens > self.memory.max_request_tokens:
            most = self.memory.max_request_tokens
            raise ValueError(f"{head}: needs {head.num_kv_tokens} KV tokens, at most {most} fit")
        self._waiting[head.slot] = _State(head, num_known_tokens=head.num_prompt_tokens)

    def cancel(self, slot: int) -> tuple[int, ...]:
        """Stop scheduling a request at once; no-op for a slot that is not in use.

        Returns:
            The slots closed by this call: ``(slot,)``, or nothing while chunks of it are in flight, in which case the
            ``complete`` of its last batch closes it.
        """
        if self._waiting.pop(slot, None) is not None:
            return (slot,)
        state = self._running.get(slot)
        if state is None or state.ended:
            return ()
        state.ended = True
        return self._close_ended((slot,))

    def schedule(self, now_s: float) -> Batch | None:
        """The next batch, or None when nothing can enter.

        At most ``depth`` batches are in flight: beyond that the answer is None.
        """
        if len(self._in_flight) >= self.depth:
            return None
        budgets = [self.config.max_batch_tokens] * self.memory.num_groups
        draft = _Draft(budgets)
        self._add_decodes(draft)
        self._add_prefills(draft)
        self._start_prefills(draft)
        if not draft.rows:
            return None
        batch = Batch(self._next_batch_id, tuple(draft.rows), tuple(draft.extents), tuple(self._frees))
        self._next_batch_id += 1
        self._frees.clear()
        self._in_flight.append(batch)
        return batch

    def complete(
        self, batch_id: int, now_s: float, results: Iterable[tuple[int, int, bool]], busy_s: float
    ) -> tuple[int, ...]:
        """Record that a batch is done in every stage. Batches complete in the order in which they were scheduled.

        Args:
            batch_id: the oldest batch in flight.
            now_s: time.
            results: (slot, number of new tokens, finished) of the rows that sampled.
            busy_s: seconds the stage computed, waits excluded.

        Returns:
            Slots closed by this call: their blocks are free and the slot numbers may be used again.

        Raises:
            ValueError: another batch is the oldest in flight.
        """
        if not self._in_flight or self._in_flight[0].batch_id != batch_id:
            oldest = self._in_flight[0].batch_id if self._in_flight else None
            raise ValueError(f"batch {batch_id} completed, but the oldest in flight is {oldest}")
        batch = self._in_flight.popleft()
        for row in batch.rows:
            state = self._running[row.slot]
            state.num_in_flight -= 1
            state.num_computed_tokens += row.q_len
        for slot, num_new_tokens, finished in results:
            state = self._running[slot]
            state.num_known_tokens += num_new_tokens
            state.ended |= finished
        return self._close_ended(row.slot for row in batch.rows)

    def _add_decodes(self, draft: _Draft) -> None:
        """One row for each request whose next token can be computed, dealt over the batches in flight."""
        decoding = [s for s in self._running.values() if not s.prefilling and not s.ended]
        placed = [(state, self.memory.place(state.head.slot, state.num_scheduled_tokens)) for state in decoding]
        num_decoding = [0] * self.memory.num_groups
        for _, (first, count) in placed:
            for group in range(first, first + count):
                num_decoding[group] += 1
        shares = [min(-(-n // self.depth), left) for n, left in zip(num_decoding, draft.budgets, strict=True)]
        for state, (first, count) in placed:
            groups = range(first, first + count)
            if state.can_decode and all(shares[group] > 0 for group in groups):
                for group in groups:
                    shares[group] -= 1
                self._send(draft, Row(state.head.slot, state.num_scheduled_tokens, 1, True, True, first, count))

    def _add_prefills(self, draft: _Draft) -> None:
        """Chunks of prefills that have begun, in the order in which they began; one that gets no memory waits."""
        for state in self._running.values():
            if state.ended or not state.prefilling:
                continue
            position = state.num_scheduled_tokens
            first, count = self.memory.place(state.head.slot, position)
            q_len = min(self._chunk(state, draft, first, count), self.memory.room(state.head.slot, position))
            if q_len > 0:
                row = self._chunk_row(state, q_len, first, count)
                if self.memory.can_take(row):
                    self._send(draft, row)

    def _start_prefills(self, draft: _Draft) -> None:
        """First chunks in order of arrival, until one finds no memory or no budget on any group that it may go to."""
        while self._waiting and len(self._running) < self.config.max_num_seqs and max(draft.budgets) > 0:
            slot, state = next(iter(self._waiting.items()))
            row = self._first_row(state, draft)
            if row is None:
                return
            self._running[slot] = self._waiting.pop(slot)
            self.memory.start(slot, row.group, state.head.num_kv_tokens)
            self._send(draft, row)

    def _first_row(self, state: _State, draft: _Draft) -> Row | None:
        """The first chunk of a request on the group to which it is bound."""
        num_tokens = state.head.num_kv_tokens
        limit = self.memory.max_kv_per_group

        def row_at(first: int) -> Row:
            return self._chunk_row(state, min(self._chunk(state, draft, first, 1), limit), first, 1)

        def has_room(first: int) -> bool:
            row = row_at(first)
            return row.q_len > 0 and self.memory.can_start(first, num_tokens, row.kv_len, set_aside=row.samples)

        firsts = self.memory.first_groups(num_tokens)
        width = self.memory.num_groups - firsts[-1]
        first = choose_group(self._pending_work(), width, firsts, has_room)
        return None if first is None else row_at(first)

    def _pending_work(self) -> list[float]:
        """Prefill work of each group that is not yet scheduled."""
        return pending_work(
            self.memory.num_groups,
            (
                (*self.memory.run(s.head.slot), prefill_work(s.num_scheduled_tokens, s.head.num_prompt_tokens))
                for s in self._running.values()
                if s.prefilling and not s.ended
            ),
        )

    def _chunk(self, state: _State, draft: _Draft, first: int, count: int) -> int:
        """Tokens of a request's next chunk within the budgets of its groups."""
        left = state.head.num_prompt_tokens - state.num_scheduled_tokens
        return min(left, self.config.chunk_size, min(draft.budgets[first : first + count]))

    def _chunk_row(self, state: _State, q_len: int, first: int, count: int) -> Row:
        position = state.num_scheduled_tokens
        is_last = position + q_len == state.head.num_prompt_tokens
        return Row(state.head.slot, position, q_len, False, is_last, first, count)

    def _send(self, draft: _Draft, row: Row) -> None:
        """Put a row into the batch, count it as scheduled and allocate the blocks it fills."""
        state = self._running[row.slot]
        state.num_scheduled_tokens = row.kv_len
        state.num_in_flight += 1
        draft.rows.append(row)
        draft.extents += self.memory.take(row)
        for group in range(row.group, row.holder + 1):
            draft.budgets[group] -= row.q_len

    def _close_ended(self, slots: Iterable[int]) -> tuple[int, ...]:
        """Free the ended requests among ``slots`` that have nothing in flight."""
        closed = []
        for slot in slots:
            state = self._running.get(slot)
            if state is None or not state.ended or state.num_in_flight:
                continue
            del self._running[slot]
            if self.memory.release(slot):
                self._frees.append(slot)
            closed.append(slot)
        return tuple(closed)
