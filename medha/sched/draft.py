"""A batch while it is filled: the rows so far, the tokens each group may still get, and the memory they take.

A packer says who is next and how many tokens it may get; what bounds a row otherwise (tokens of a batch, the end of a
shard, KV memory, the number of running requests) is checked here, the same for every packer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from medha.batch import Batch, Extent, Row
from medha.config import SchedulerConfig
from medha.sched.balancer import choose_group, pending_work, prefill_work
from medha.sched.memory import KVMemory
from medha.sched.predictor import Work
from medha.sched.queue import Queue, State

SizeFn = Callable[[int, int, int], int]
"""(first group, number of groups, most tokens that may be) -> tokens of a chunk, 0 for none."""
_Bound = Callable[[State, int, int], int]
"""(request, first group, number of groups) -> tokens that its next chunk may have, shards and memory aside."""


class Packer(Protocol):
    """Fills a batch."""

    def fill(self, queue: Queue, draft: Draft, now_s: float) -> None:
        """Add rows to ``draft``."""
        ...


@runtime_checkable
class LearningPacker(Packer, Protocol):
    """A packer that learns from batches that ran."""

    def completed(self, batch: Batch, busy_s: float) -> None:
        """A batch is done, in order; ``busy_s`` as of :meth:`medha.sched.scheduler.Scheduler.complete`."""
        ...


class Draft:
    """A batch that is being filled.

    Args:
        config: budgets.
        queue: the requests.
        memory: the KV pools.
        depth: batches in flight at most.
        now_s: time.

    Attributes:
        rows, extents: so far.
        tokens_left: tokens that each group may still get.
        has_chunk: whether a group has a prefill chunk.
        chunked: index of the row of each slot with a prefill chunk.
        no_memory: slots of prefills that were refused for want of memory.
    """

    def __init__(self, config: SchedulerConfig, queue: Queue, memory: KVMemory, *, depth: int, now_s: float) -> None:
        self.config = config
        self.memory = memory
        self.now_s = now_s
        self.rows: list[Row] = []
        self.extents: list[Extent] = []
        self.tokens_left = [config.max_batch_tokens] * memory.num_groups
        self.has_chunk = [False] * memory.num_groups
        self.chunked: dict[int, int] = {}
        self.no_memory: list[int] = []
        self._queue = queue
        self._depth = depth

    def add_decodes(self) -> None:
        """One row for each of :meth:`due_decodes`."""
        for state in self.due_decodes():
            self.add_decode(state)

    def due_decodes(self) -> list[State]:
        """Requests whose next token can be computed, dealt over the batches in flight, within the tokens left."""
        decoding = self._queue.decoding.values()
        if self.memory.num_groups == 1:
            share = min(-(-len(decoding) // self._depth), self.tokens_left[0])
            return [state for state in decoding if state.can_decode][:share]
        placed = [(state, *self.memory.place(state.slot, state.num_scheduled_tokens)) for state in decoding]
        num_decoding = [0] * self.memory.num_groups
        for _, first, count in placed:
            for group in range(first, first + count):
                num_decoding[group] += 1
        shares = [min(-(-n // self._depth), left) for n, left in zip(num_decoding, self.tokens_left, strict=True)]
        due = []
        for state, first, count in placed:
            groups = range(first, first + count)
            if state.can_decode and all(shares[group] > 0 for group in groups):
                for group in groups:
                    shares[group] -= 1
                due.append(state)
        return due

    def add_decode(self, state: State) -> bool:
        """The next token of a request that can decode; False if a group of its has no token left."""
        position = state.num_scheduled_tokens
        first, count = (0, 1) if self.memory.num_groups == 1 else self.memory.place(state.slot, position)
        if min(self.tokens_left[first : first + count]) < 1:
            return False
        self._send(state, Row(state.slot, position, 1, True, True, first, count))
        return True

    def add_chunk(self, state: State, size: SizeFn) -> int:
        """Give a prefill a chunk, on the groups where it lies or, for its first one, where it is bound to.

        One that has a chunk in the batch already gets a longer one.

        Args:
            state: with prompt tokens left.
            size: asked once for each place that comes into question.

        Returns:
            Tokens added; 0 if it was refused.
        """
        return self._add(state, size, self._most)

    def add_prompt(self, state: State, size: SizeFn) -> int:
        """As :meth:`add_chunk`, but only the end of a shard cuts the prompt: the batch's tokens may be exceeded."""
        return self._add(state, size, lambda state, first, count: state.num_left)

    def put_decodes_first(self) -> None:
        """Bring the rows into the order that a batch has; either kind keeps its own."""
        self.rows.sort(key=lambda row: not row.is_decode)
        self.chunked = {row.slot: index for index, row in enumerate(self.rows) if not row.is_decode}

    def works(self, group: int) -> tuple[list[Work], list[Work]]:
        """Decodes and chunks that a group has by now, as the predictor wants them."""
        decodes: list[Work] = []
        chunks: list[Work] = []
        for row in self.rows:
            if row.group <= group < row.group + row.num_groups:
                if row.num_groups == 1:
                    work = Work(row.q_len, row.position, row.is_decode, None, row.samples)
                else:
                    kv = self.memory.kv_before(row.slot, row.position, group)
                    samples = row.samples and group == row.group
                    work = Work(row.q_len, kv, row.is_decode, row.run, samples)
                (decodes if row.is_decode else chunks).append(work)
        return decodes, chunks

    def _add(self, state: State, size: SizeFn, bound: _Bound) -> int:
        return self._continue(state, size, bound) if state.has_started else self._start(state, size, bound)

    def _continue(self, state: State, size: SizeFn, bound: _Bound) -> int:
        position = state.num_scheduled_tokens
        first, count = self.memory.place(state.slot, position)
        most = min(bound(state, first, count), self.memory.room(state.slot, position))
        q_len = min(most, size(first, count, most)) if most > 0 else 0
        if q_len <= 0:
            return 0
        row = self._chunk_row(state, q_len, first, count)
        index = self.chunked.get(state.slot)
        if index is not None and self.rows[index].run != row.run:
            return 0  # it would be the first chunk of another shard
        if not self.memory.can_take(row):
            self.no_memory.append(state.slot)
            return 0
        self._send(state, row)
        if index is not None:
            self._join(state, index)
        return q_len

    def _join(self, state: State, index: int) -> None:
        """Make one row of a request's former chunk and the one that was just put behind it."""
        before, after = self.rows[index], self.rows.pop()
        self.rows[index] = dataclasses.replace(before, q_len=before.q_len + after.q_len, samples=after.samples)
        self.chunked[state.slot] = index
        state.num_in_flight -= 1

    def _start(self, state: State, size: SizeFn, bound: _Bound) -> int:
        if len(self._queue.running) >= self.config.max_num_seqs:
            return 0
        num_tokens = state.head.num_kv_tokens
        firsts = self.memory.first_groups(num_tokens)
        sizes: dict[int, int] = {}
        for first in firsts:
            most = min(bound(state, first, 1), self.memory.max_kv_per_group)
            sizes[first] = min(most, size(first, 1, most)) if most > 0 else 0
        open_firsts = [first for first in firsts if sizes[first] > 0]

        def has_memory(first: int) -> bool:
            row = self._chunk_row(state, sizes[first], first, 1)
            return self.memory.can_start(first, num_tokens, row.kv_len, set_aside=row.samples)

        width = self.memory.num_groups - firsts[-1]
        chosen = choose_group(self._pending(), width, open_firsts, has_memory)
        if chosen is None:
            if open_firsts:
                self.no_memory.append(state.slot)
            return 0
        self._queue.start(state)
        self.memory.start(state.slot, chosen, num_tokens)
        self._send(state, self._chunk_row(state, sizes[chosen], chosen, 1))
        return sizes[chosen]

    def _pending(self) -> Sequence[float]:
        """Prefill work of each group that is not yet scheduled."""
        if self.memory.num_groups == 1:
            return (0.0,)
        return pending_work(
            self.memory.num_groups,
            (
                (*self.memory.run(s.slot), prefill_work(s.num_scheduled_tokens, s.head.num_prompt_tokens))
                for s in self._queue.prefills()
            ),
        )

    def _most(self, state: State, first: int, count: int) -> int:
        """Tokens of a request's next chunk within the budgets of its groups, and what is left of its own."""
        most = min(state.num_left, *self.tokens_left[first : first + count])
        if self.config.chunk_size is None:
            return most
        index = self.chunked.get(state.slot)
        return min(most, self.config.chunk_size - (0 if index is None else self.rows[index].q_len))

    def _chunk_row(self, state: State, q_len: int, first: int, count: int) -> Row:
        position = state.num_scheduled_tokens
        return Row(state.slot, position, q_len, False, q_len == state.num_left, first, count)

    def _send(self, state: State, row: Row) -> None:
        """Put a row into the batch, count it as scheduled and allocate the blocks it fills."""
        self.rows.append(row)
        self.extents += self.memory.take(row)
        self._queue.sent(state, row, self.now_s)
        for group in range(row.group, row.group + row.num_groups):
            self.tokens_left[group] -= row.q_len
        if not row.is_decode:
            self.chunked[row.slot] = len(self.rows) - 1
            for group in range(row.group, row.group + row.num_groups):
                self.has_chunk[group] = True
