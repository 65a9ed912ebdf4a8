"""First come, first served, with chunked prefill and a token budget: the baseline that the paper's policies replace.

Each step takes the running requests' decodes, then prefill chunks in order of arrival, each at most ``chunk_size``
tokens, until ``max_batch_tokens`` are in the batch (chunked prefill and "decodes first" as in Sarathi-Serve, arXiv
2403.02310; the paper's section 2.6 starts from it).

The seam is four calls, and nothing else crosses it: :meth:`Scheduler.add`, :meth:`~Scheduler.cancel`,
:meth:`~Scheduler.schedule`, :meth:`~Scheduler.complete`. The scheduler knows slots and lengths, never token ids; time
is handed in; it decides the same whenever it is called the same.

Memory: a request is admitted when its whole claim (prompt plus ``max_new_tokens``) fits beside the claims of those
already admitted, so no admitted request ever waits for blocks; the blocks themselves are allocated as they fill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from medha.batch import Batch, Extent, Row
from medha.config import SchedulerConfig
from medha.request import SLO
from medha.sched.blocks import BlockPool


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


@dataclass(slots=True)
class _State:
    """Progress of one request.

    ``num_scheduled_tokens`` moves when a chunk is sent, ``num_computed_tokens`` when its batch is complete; only the
    second leads to decodes and frees. ``num_known_tokens`` counts the prompt and the tokens sampled so far: a request
    has work to schedule while fewer are scheduled than known, be it prefill or decode.
    """

    head: RequestHead
    claim_blocks: int
    num_known_tokens: int
    num_scheduled_tokens: int = 0
    num_computed_tokens: int = 0
    num_blocks: int = 0
    num_in_flight: int = 0
    ended: bool = False

    @property
    def prefilling(self) -> bool:
        return self.num_scheduled_tokens < self.head.num_prompt_tokens

    @property
    def can_decode(self) -> bool:
        return not self.prefilling and self.num_scheduled_tokens < self.num_known_tokens


class Scheduler:
    """Decides what runs next on one KV pool.

    Args:
        config: budgets and depth.
        num_blocks: KV blocks in the pool.
        block_size: tokens a block.
    """

    def __init__(self, config: SchedulerConfig, *, num_blocks: int, block_size: int) -> None:
        self.config = config
        self.depth = config.depth or 1
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._waiting: dict[int, _State] = {}  # insertion order is arrival order
        self._running: dict[int, _State] = {}  # insertion order is admission order
        self._in_flight: deque[Batch] = deque()
        self._frees: list[int] = []
        self._claimed_blocks = 0
        self._next_batch_id = 0

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

    def claim_blocks(self, num_prompt_tokens: int, max_new_tokens: int) -> int:
        """KV blocks that a request may need in all; the last sampled token is never written."""
        return -(-(num_prompt_tokens + max_new_tokens - 1) // self.block_size)

    def add(self, head: RequestHead) -> None:
        """Queue a request.

        Raises:
            ValueError: its slot is in use, a length is below 1, or its claim exceeds the whole pool.
        """
        if head.slot in self._waiting or head.slot in self._running:
            raise ValueError(f"slot {head.slot} is in use")
        if head.num_prompt_tokens < 1 or head.max_new_tokens < 1:
            raise ValueError(f"{head}: lengths must be at least 1")
        claim = self.claim_blocks(head.num_prompt_tokens, head.max_new_tokens)
        if claim > self.pool.num_blocks:
            raise ValueError(f"{head}: needs {claim} KV blocks, the pool has {self.pool.num_blocks}")
        self._waiting[head.slot] = _State(head, claim, num_known_tokens=head.num_prompt_tokens)

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
        self._admit()
        rows = self._decode_rows()
        rows += self._prefill_rows(self.config.max_batch_tokens - len(rows), self.config.max_num_seqs - len(rows))
        if not rows:
            return None
        extents = [extent for row in rows for extent in self._send(row)]
        batch = Batch(self._next_batch_id, tuple(rows), tuple(extents), tuple(self._frees))
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

    def _admit(self) -> None:
        """Move requests from waiting to running in order of arrival while their claims fit."""
        while self._waiting and len(self._running) < self.config.max_num_seqs:
            slot, state = next(iter(self._waiting.items()))
            if self._claimed_blocks + state.claim_blocks > self.pool.num_blocks:
                return
            self._claimed_blocks += state.claim_blocks
            self._running[slot] = self._waiting.pop(slot)

    def _decode_rows(self) -> list[Row]:
        """One row for each request whose next token can be computed, dealt over the batches in flight."""
        decoding = sum(not s.prefilling and not s.ended for s in self._running.values())
        share = min(-(-decoding // self.depth), self.config.max_batch_tokens)
        ready = [s for s in self._running.values() if s.can_decode and not s.ended]
        return [Row(s.head.slot, s.num_scheduled_tokens, 1, True, True) for s in ready[:share]]

    def _prefill_rows(self, token_budget: int, row_budget: int) -> list[Row]:
        """Chunks of prefills in admission order within the token budget."""
        rows: list[Row] = []
        for state in self._running.values():
            if token_budget <= 0 or len(rows) >= row_budget:
                break
            if state.ended or not state.prefilling:
                continue
            position = state.num_scheduled_tokens
            left = state.head.num_prompt_tokens - position
            q_len = min(left, self.config.chunk_size, token_budget)
            rows.append(Row(state.head.slot, position, q_len, False, samples=q_len == left))
            token_budget -= q_len
        return rows

    def _send(self, row: Row) -> list[Extent]:
        """Count a row as scheduled and allocate the blocks it fills."""
        state = self._running[row.slot]
        state.num_scheduled_tokens = row.kv_len
        state.num_in_flight += 1
        needed = -(-row.kv_len // self.block_size) - state.num_blocks
        if needed <= 0:
            return []
        extents = self.pool.allocate(row.slot, needed, claim=state.claim_blocks - state.num_blocks)
        state.num_blocks += needed
        return extents

    def _close_ended(self, slots: Iterable[int]) -> tuple[int, ...]:
        """Free the ended requests among ``slots`` that have nothing in flight."""
        closed = []
        for slot in slots:
            state = self._running.get(slot)
            if state is None or not state.ended or state.num_in_flight:
                continue
            del self._running[slot]
            self._claimed_blocks -= state.claim_blocks
            if state.num_blocks:
                self.pool.release(slot)
                self._frees.append(slot)
            closed.append(slot)
        return tuple(closed)
