"""A batch while it is filled: the rows so far, the tokens each group may still get, and the memory they take.

A packer says who is next and how many tokens it may get. What bounds a row otherwise (tokens of a batch, the end of a
shard, KV memory, the number of running requests) is checked here, the same for every packer; so is on which KV-parallel
group the span of a request begins, at its first chunk and not at its arrival: of the spans that have the memory where
the least seconds of prefill are pending, then where the least memory is used (the "just-in-time" load balancer of arXiv
2409.17264 v4 section 4.3). The file is long because every way into a batch changes the same half-filled one.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from operator import attrgetter

from medha.batch import PIECES, Batch, Row
from medha.config import SchedulerConfig
from medha.params import PRIORITIES
from medha.sched.decision import Prediction, SchedulerRequest
from medha.sched.memory import Works, parts_of
from medha.sched.preempt import Preemption, fewest, oldest
from medha.sched.prefix import Chain, Hit
from medha.sched.queue import Queue, State

SizeFn = Callable[[int, int, int], int]
"""(first group, number of groups, most tokens that may be) -> tokens of a chunk, 0 for none."""
Fill = Callable[[Queue, "BatchBuilder"], Prediction | None]
"""Adds rows to a builder; what the batch is predicted to take, None where it is empty, or nothing predicts."""


class Packer:
    """Fills batches by a function, or by a method that stands in its place."""

    def __init__(self, fill: Fill) -> None:
        self.fill = fill

    def completed(self, batch: Batch) -> None:
        """A batch is done."""

    def added(self, request: SchedulerRequest) -> None:
        """A request was queued."""

    def cancelled(self, slot: int) -> None:
        """Nothing more of a request is to be scheduled."""


class BatchBuilder:
    """A batch that is being filled.

    Attributes:
        rows: so far; what else the batch says the memory knows.
        prefers_ring: whether a chunk of a dealt request (position, tokens, first group, groups) is dealt, not gathered.
        is_closed: whether a group surely has no time for a new chunk that is efficient.
        busy_s: predicted seconds of what a group has in the batch by now.
        no_room: least tokens of a request that finds no room in the time that groups have now, by what else decides.
        awaiting: slots of those who wait for groups on which they share, as these have no time now.
    """

    def __init__(
        self, config: SchedulerConfig, preemption: Preemption, *, batch_id: int, now_s: float, is_idle: bool
    ) -> None:
        self.config = config
        self.memory = memory = preemption.memory
        self.batch_id, self.now_s = batch_id, now_s
        self.is_idle = is_idle  # no batch is in flight
        self.closed_from = len(PRIORITIES)  # the first class of which nobody may start: one above waits for memory
        self.left_out: set[int] = set()  # slots of which nothing goes into the batch
        self.preemption = preemption
        self.rows: list[Row] = []
        self.prefers_ring: Callable[[int, int, int, int], bool] = lambda position, q_len, first, count: True
        self.is_closed: Callable[[BatchBuilder, int], bool] = lambda builder, group: False  # it is not held in a circle
        self.busy_s: Callable[[int], float] = lambda group: 0.0
        self.tokens_left = [config.max_batch_tokens] * memory.num_groups  # tokens that each group may still get
        self.has_chunk = [False] * memory.num_groups  # whether a group has a prefill chunk
        self.chunked: dict[int, int] = {}  # index of the row of each slot with a prefill chunk
        self.refused: list[int] = []  # slots of prefills that were refused for want of memory
        self.open_further()
        self._pending: tuple[tuple[int, ...], list[float]] = (), []
        self._leaders: list[State] | None = None  # prefills that others may wait for, at the first question
        self._queue = queue = preemption.queue
        # Over how many batches the decodes are dealt. Where few decode and nobody prefills, a stage would only wait.
        self._period = config.period if queue.num_prefills else max(1, min(config.period, len(queue.decoding)))

    def add_decodes(self) -> None:
        """One row for each of :meth:`due_decodes`."""
        if self.memory.overcommit:
            for state in self.due_decodes():
                self.add_decode(state)
        else:
            self._append_due()

    def due_decodes(self, *, by_class: bool = False) -> list[State]:
        """Requests whose next token can be computed, dealt over the batches in flight, within the tokens left.

        With ``by_class`` the highest class first, and in it whoever was in no batch for longest.
        """
        decoding: Collection[State] = self._queue.decoding.values()
        if by_class:
            by_turn = sorted(decoding, key=attrgetter("last_batch"))
            decoding = sorted(by_turn, key=attrgetter("request.priority"))
        elif self.memory.overcommit:  # who may always preempt comes first: no refused one may take its turn
            decoding = sorted(decoding, key=lambda state: (state.request.arrival_s, state.slot))
        placed = [(state, *self.memory.place(state.slot, state.num_scheduled_tokens)) for state in decoding]
        num_decoding = [0] * self.memory.num_groups
        for _, first, count in placed:
            for group in range(first, first + count):
                num_decoding[group] += 1
        shares = [min(-(-n // self._period), left) for n, left in zip(num_decoding, self.tokens_left, strict=True)]
        due = set()
        # The widest of a class first: one on several groups would wait for ever for narrow ones that come in turns. But
        # with overcommit one that finds no block must not take the turn of the oldest, which holds it.
        always = oldest(decoding) if self.memory.overcommit and not by_class else None
        placed.sort(key=lambda its: (its[0] is not always, by_class * its[0].request.priority, -its[2]))
        for state, first, count in placed:
            groups = range(first, first + count)
            if self.is_due(state) and all(shares[group] > 0 for group in groups):
                for group in groups:
                    shares[group] -= 1
                due.add(state.slot)
        return [state for state in decoding if state.slot in due]

    def is_due(self, state: State) -> bool:
        """Whether the next token of a request can be computed."""
        is_known = not state.num_in_flight or self.batch_id - state.last_batch >= self._period  # its last token
        return is_known and state.can_decode and state.slot not in self.left_out

    def add_decode(self, state: State) -> bool:
        """The next token of a request that can decode; False if a group of its has no token left, or no block."""
        if not state.can_decode:
            return False  # it has just been preempted
        row = self.decode_row(state)
        if min(self.tokens_left[group] for group in row.groups) < 1:
            return False
        if self.memory.overcommit and not self._has_blocks(state, row):
            return False
        self._append_row(state, row)
        return True

    def decode_row(self, state: State) -> Row:
        """Of the next token of a request."""
        position = state.num_scheduled_tokens
        return Row(state.slot, position, 1, True, True, *self.memory.place(state.slot, position))

    def add_chunk(self, state: State, size: SizeFn, *, is_whole: bool = False) -> int:
        """Give a prefill a chunk, or a longer one than it has in the batch; returns the tokens added, 0 if refused.

        Args:
            state: with prompt tokens left.
            size: asked once for each place that comes into question.
            is_whole: only the end of a shard cuts the prompt: the batch's tokens may be exceeded.
        """
        if self.is_held(state):
            return 0
        return (self._continue if state.has_started else self._start)(state, size, is_whole)

    def add_dealt(self, state: State, q_len: int, groups: range) -> None:
        """Give a prefill, whose memory is set aside, a chunk that is dealt to some groups."""
        is_last, is_dealt = q_len == state.num_left, len(groups) > 1
        row = Row(state.slot, state.num_scheduled_tokens, q_len, False, is_last, groups.start, len(groups), is_dealt)
        self._append_row(state, row)

    def is_held(self, state: State) -> bool:
        """Whether a prefill gets no chunk: it is left out, or one of a batch before is in flight (pipelined
        micro-batches)."""
        is_in_flight = state.num_in_flight > (state.slot in self.chunked)
        return (is_in_flight and not self.config.stream) or state.slot in self.left_out

    def leader(self, state: State) -> State | None:
        """Who computes now what a request that has not started would have to compute as well, if that is worth to wait
        for: it takes longer than a batch of next to nothing."""
        if state.has_started or state.chain is None or not self._may_share(state):
            return None
        prefix = self.memory.prefix
        if state.slot in prefix.stale:
            self._queue.look_again(state, prefix)
        unit, done, best = prefix.unit, state.num_scheduled_tokens, None
        for other, chain in self._computing(state.chain, done // unit + 1):
            common = unit * min(state.chain.num_common(chain), (state.num_prefill_tokens - 1) // unit)
            if common > done and self.memory.is_to_note(other.slot, common):
                best, done = other, common
        worth_s = self._queue.left_s(state.num_scheduled_tokens, done) if best is not None else 0.0
        return best if worth_s > self._queue.left_s(0, unit) else None

    def _computing(self, chain: Chain, end: int) -> Iterator[tuple[State, Chain]]:
        """Prefills that run, whose units up to one are those of a chain that has so many."""
        if self._leaders is None:
            self._leaders = [other for other in self._queue.prefills() if other.chain is not None]
        for other in {s.slot: s for s in (*self._leaders, *map(self._queue.running.get, self.chunked)) if s}.values():
            if (theirs := other.chain) and other.has_started and not other.ended and theirs[end] == chain[end] != b"":
                yield other, theirs

    def has_place(self, state: State) -> bool:
        """Whether a prefill has started, or may."""
        if state.has_started:
            return True
        may_start = state.request.priority < self.closed_from and not self.preemption.would_be_in_way(state)
        return may_start and len(self._queue.running) < self.config.max_num_seqs

    def chunk_tokens(self, slot: int) -> int:
        """Tokens of the chunk that a request has in the batch; 0 for none."""
        return self.rows[self.chunked[slot]].q_len if slot in self.chunked else 0

    def make_room(self, state: State, candidates: list[State]) -> bool:
        """Preempt some of the lower classes for a prefill that was refused memory or a place; whether there were any.
        Who is in flight is left out of the batch first."""

        def fits(span: tuple[int, Hit] | None, gone: Collection[int]) -> bool:
            if span is not None:
                if len(self._queue.running) - len(gone) >= self.config.max_num_seqs:
                    return False
                if may_share:
                    self._queue.found(state, span[1].num_tokens(self.memory.block_size))
                self._bind(state, *span, self._most_kv(state))
            room = self.memory.room(state.slot, state.num_scheduled_tokens)
            answer = self._fits(state, max(min(state.num_left, self.config.max_batch_tokens, room), 1), gone)
            if span is not None:
                self.memory.undo_start(state.slot)
            return answer

        spans: list[tuple[int, Hit] | None] = [None]  # of one that has started: it has its own
        may_share, num_cached = not state.has_started and self._may_share(state), state.num_cached
        if not state.has_started:
            hits = self._hits_of(state) if may_share else {}
            spans = [*hits.items(), *((first, Hit()) for first in self._firsts(state, self._most_kv(state)))]
        found = ([] if fits(span, ()) else fewest(candidates, partial(fits, span)) for span in spans)
        victims = next((victims for victims in found if victims is not None), [])
        if may_share:
            self._queue.found(state, num_cached)  # as it is queued
        if any(victim.num_in_flight for victim in victims):
            if not self.preemption.preempted:  # else who got that room starts first
                self.left_out.update(victim.slot for victim in victims)
                self.closed_from = min(self.closed_from, state.request.priority + 1)
            return False
        self.preemption.preempt(victims, self.now_s)
        return bool(victims)

    def put_decodes_first(self) -> None:
        """Bring the rows into the order that a batch has."""
        self.rows.sort(key=lambda row: not row.is_decode)
        self.chunked = {row.slot: index for index, row in enumerate(self.rows) if not row.is_decode}

    def works(self, group: int) -> Works:
        """Decodes, which come first, and chunks that a group has by now, as the predictor wants them."""
        return parts_of(self.rows, len(self.rows) - len(self.chunked), self.memory, group)

    def _continue(self, state: State, size: SizeFn, is_whole: bool) -> int:
        q_len = self._tokens(state, size, is_whole)
        if not q_len:
            return 0
        row, index = self._chunk_row(state, q_len), self.chunked.get(state.slot)
        if index is not None and self.width(state) > 1:
            return 0  # it is dealt, or gathered, as a whole
        if index is not None and self.rows[index].span != row.span:
            return 0  # it would be the first chunk of another shard
        if not self._has_blocks(state, row):
            q_len = self._fitting(state, q_len)
            if not q_len:
                self.refused.append(state.slot)
                return 0
            row = self._chunk_row(state, q_len)
        self._append_row(state, row)
        if index is not None:  # one row of the former chunk and this one
            before, after = self.rows[index], self.rows.pop()
            self.rows[index] = before._replace(q_len=before.q_len + after.q_len, samples=after.samples)
            self.chunked[state.slot] = index
            state.num_in_flight -= 1
        return q_len

    def _start(self, state: State, size: SizeFn, is_whole: bool) -> int:
        """As :meth:`add_chunk` of one that has not started: behind what is there of its tokens, or anew."""
        if not self.has_place(state):
            return 0
        memory, num_tokens, most_kv = self.memory, state.request.num_kv_tokens, self._most_kv(state)
        may_share, cached = self._may_share(state), state.num_cached
        hits, least = self._hits_of(state) if may_share else {}, self.config.min_chunk
        firsts = [first for first in self._firsts(state, most_kv) if first not in hits]
        left = state.num_prefill_tokens - max((hit.num_tokens(memory.block_size) for hit in hits.values()), default=0)
        where = tuple(firsts), tuple(hits.values())
        like = where, len(memory.frees), min(left, least + 1), state.num_preempted > 0, most_kv
        is_plain = self.width(state) == 1 and memory.swapped_on(state.slot) is None
        if is_plain and num_tokens >= self.no_room.get(like, math.inf):  # one like it was just refused
            self.refused.append(state.slot)
            return 0
        is_open, has_room, num_tried = False, False, 0
        for at, shared in self._in_order(state, firsts, hits, most_kv):
            num_tried += len(at)
            if may_share:
                self._queue.found(state, shared.num_tokens(memory.block_size))
            waits = shared.shards and state.num_left >= least and self.is_closed(self, at[0])
            begun = (0, False, True) if waits else self._begin(state, at, shared, most_kv, size, is_whole)
            if q_len := begun[0]:
                return q_len
            is_open, has_room = is_open or begun[1], has_room or begun[2]
            if shared.shards and not begun[1]:
                is_open = False
                if memory.num_groups > 1 and self.has_chunk[at[0]] and state.slot not in self.awaiting:
                    self.awaiting.add(state.slot)  # those behind it may have theirs sooner elsewhere
                    for group, _ in shared.shards:
                        self._awaited_s[group] += self._queue.left_s(state.num_cached, state.num_prefill_tokens)
                break
        if may_share:
            self._queue.found(state, cached)  # as it is queued
        if is_open:
            self.refused.append(state.slot)
            are_all = num_tried == len(firsts) + len(hits)
            if is_plain and are_all and not (has_room or state.num_preempted):
                self.no_room[like] = num_tokens
        return 0

    def _begin(
        self, state: State, firsts: Sequence[int], hit: Hit, most_kv: int, size: SizeFn, is_whole: bool
    ) -> tuple[int, bool, bool]:
        """Let a request begin at the first of some groups that has room for most of it, behind what it shares: the
        tokens added, whether it was given any, and whether any group may have time and room for an efficient chunk."""
        best, chosen, is_open, has_room = 0, None, False, False
        for first in firsts:
            self._bind(state, first, hit, most_kv)
            most = self._tokens(state, size, is_whole)
            q_len = self._fitting(state, most)
            if q_len and (q_len == most or len(firsts) == 1):  # nowhere is there room for more
                self._append_row(state, self._chunk_row(state, q_len))
                return q_len, True, True
            has_room |= q_len > 0 or not (most or self.is_closed(self, first))
            self.memory.undo_start(state.slot)
            is_open |= most > 0
            if q_len > best:
                best, chosen = q_len, first
        if chosen is not None:
            self._bind(state, chosen, hit, most_kv)
            self._append_row(state, self._chunk_row(state, best))
        return best, is_open, has_room

    def _by_work(self, state: State, firsts: Sequence[int], most_kv: int) -> Sequence[int]:
        """Where a request may begin, the least busy span first: by what the busiest of its groups and all would have to
        do, then by what its decodes read."""
        if len(firsts) < 2:
            return firsts
        work = self._pending_work()
        width = len(self.memory.reservation(state.request.num_kv_tokens, most_kv))
        used = [self.memory.used(group) for group in range(self.memory.num_groups)]
        spans = {first: slice(first, first + width) for first in firsts}
        return sorted(firsts, key=lambda g: (max(work[spans[g]]), sum(work[spans[g]]), sum(used[spans[g]])))

    def _bind(self, state: State, first: int, hit: Hit, most_kv: int) -> None:
        """Bind a request to the span that begins at ``first``, behind what it shares."""
        request = state.request
        sizes = (None, None) if hit.shards else (request.num_prompt_tokens, most_kv)
        self.memory.start(state.slot, first, request.num_kv_tokens, state.chain, hit, *sizes)

    def _may_share(self, state: State) -> bool:
        """Whether a request that has not started may begin behind what others have computed."""
        return state.chain is not None and self.memory.swapped_on(state.slot) is None

    def _hits_of(self, state: State) -> dict[int, Hit]:
        """What is there of a request's tokens, by the group on which it begins."""
        assert state.chain is not None
        return self.memory.hits_of(state.chain, state.num_prefill_tokens - 1, state.request.num_kv_tokens)

    def _in_order(
        self, state: State, firsts: Sequence[int], hits: dict[int, Hit], most_kv: int
    ) -> Iterator[tuple[Sequence[int], Hit]]:
        """Where a request may begin, behind a hit or anew at one of ``firsts``, and that first where it is predicted to
        end its prefill soonest; not where others compute what it lacks there, unless no hit is longer."""
        memory, num_tokens = self.memory, state.num_prefill_tokens
        if not hits or memory.num_groups == 1:
            yield list(hits) or self._by_work(state, firsts, most_kv), hits.get(0, Hit())
            return
        done = dict.fromkeys(firsts, 0) | {first: hit.num_tokens(memory.block_size) for first, hit in hits.items()}
        parts = zip(map(self.busy_s, range(memory.num_groups)), self._pending_work(), self._awaited_s, strict=True)
        work, most = list(map(sum, parts)), max(done.values())

        def end(first: int) -> tuple[float, int, int]:
            groups = [group for group, _ in hits[first].shards] if first in hits else [first]
            end_s = max(work[group] for group in groups) + self._queue.left_s(done[first], num_tokens)
            return end_s, -done[first], memory.used(first)

        for first in sorted(done, key=end):
            if done[first] == most or not self._is_read_on(first, state, done[first]):
                yield [first], hits.get(first, Hit())

    def _is_read_on(self, first: int, state: State, num_tokens: int) -> bool:
        """Whether a prefill that began at a group computes what lies behind some tokens of another request."""
        assert state.chain is not None
        others = self._computing(state.chain, num_tokens // self.memory.prefix.unit + 1)
        return any(self.memory.span(other.slot)[0] == first for other, _ in others)

    def open_further(self) -> None:
        """Who was refused, or waits, may be asked again, as a batch may take longer from now on."""
        self.no_room: dict[tuple[object, ...], int] = {}
        self.awaiting: set[int] = set()
        self._awaited_s = [0.0] * self.memory.num_groups  # predicted, of those who wait for a group

    def _fitting(self, state: State, num_tokens: int) -> int:
        """The most tokens of a chunk, up to these, that find memory; 0 where that is no efficient chunk."""
        least = self.config.min_chunk
        if not num_tokens or self._fits(state, num_tokens):
            return num_tokens
        if least >= num_tokens or not self._fits(state, least):
            return 0
        return least - 1 + bisect_left(range(least, num_tokens), True, key=lambda size: not self._fits(state, size))

    def _fits(self, state: State, q_len: int, gone: Collection[int] = ()) -> bool:
        """Whether a bound request finds memory for a chunk without the slots ``gone``."""
        return self.memory.can_take(self._chunk_row(state, q_len), gone=gone, least_kv=self._least_kv(state))

    def width(self, state: State) -> int:
        """Groups of a request's first chunk: of its span where it is dealt, else one."""
        return len(self.memory.dealt_reservation(state.request.num_kv_tokens, state.request.num_prompt_tokens) or [0])

    def _is_dealt(self, state: State, q_len: int, first: int, count: int) -> bool:
        """Whether a chunk of a dealt request is dealt, else gathered."""
        if q_len < PIECES * count:
            return False  # the end of a prompt
        most = min(self.memory.gather_room(state.slot) - PIECES * count, *self.tokens_left[first : first + count])
        return q_len > most or self.prefers_ring(state.num_scheduled_tokens, q_len, first, count)

    def _firsts(self, state: State, most_kv: int) -> Sequence[int]:
        """The groups at which a request may begin; where it was swapped out, the one from which it was."""
        swapped_on = self.memory.swapped_on(state.slot)
        if swapped_on is not None:
            return (swapped_on,)
        return self.memory.first_groups(state.request.num_kv_tokens, most_kv)

    def _most_kv(self, state: State) -> int:
        """Tokens on one group of a request that starts. It is spread rather where no group has room for all of it, or
        the others have less to read than what of it would be read on further groups; else it would hold them up."""
        memory, queue, num_tokens = self.memory, self._queue, state.request.num_kv_tokens
        can_be = memory.spread_kv < num_tokens <= memory.spread_kv * memory.num_groups
        if memory.swapped_on(state.slot) is not None or not can_be:
            return memory.max_kv_per_group
        spread_s = queue.times(state.num_prefill_tokens).span_s(memory.spread_kv, state.num_prefill_tokens)
        others_s = float(queue.column("work_left_s").sum()) - queue.left_s(0, state.num_prefill_tokens)
        has_room = num_tokens <= memory.block_size * max(map(memory.num_free, range(memory.num_groups)))
        return memory.max_kv_per_group if has_room and others_s >= spread_s else memory.spread_kv

    def _least_kv(self, state: State) -> int:
        """Tokens that must be free for a first chunk: with overcommit a hundredth of the pool more than what was lost,
        so that a preempted request does not come back to be preempted at once."""
        if state.has_started or not self.memory.overcommit or not self._queue.running:
            return 0
        spare = max(self.memory.num_blocks // 100, 1) * self.memory.block_size
        return spare + (min(state.num_prefill_tokens, self.memory.max_kv_per_group) if state.num_preempted else 0)

    def _has_blocks(self, state: State, row: Row) -> bool:
        """Whether a row finds its blocks; with overcommit a decode, or the oldest request, preempts others."""
        if self.memory.can_take(row):
            return True
        if not self.memory.overcommit or not (row.is_decode or state is oldest(self._queue.running.values())):
            return False
        victims = fewest(self.preemption.by_loss(state), lambda gone: self.memory.can_take(row, gone=gone))
        self.preemption.preempt(victims or [], self.now_s)
        return victims is not None

    def _pending_work(self) -> list[float]:
        """Predicted seconds of prefill of each group still to schedule; those of a request are split over its span."""
        as_of = *self.tokens_left, len(self._queue.running)
        if self._pending[0] == as_of:
            return self._pending[1]
        work = [0.0] * self.memory.num_groups
        for state in self._queue.prefills():
            first, count = self.memory.span(state.slot)
            _, left = self._queue.work_s(state, 1.0)
            for group in range(first, first + count):
                work[group] += left / count
        self._pending = as_of, work
        return work

    def _tokens(self, state: State, size: SizeFn, is_whole: bool) -> int:
        """Tokens of a bound request's next chunk within the budgets of its groups, its own, its room and what it is
        given."""
        first, count = self.memory.place(state.slot, state.num_scheduled_tokens)
        most = min(state.num_left, self.memory.room(state.slot, state.num_scheduled_tokens))
        width = self.width(state)
        if not is_whole:
            most = min(most, width * min(self.tokens_left[first : first + count]))
            if self.config.chunk_size is not None:
                most = min(most, self.config.chunk_size - self.chunk_tokens(state.slot))
        tokens = max(min(most, size(first, count, most)), 0) if most > 0 else 0
        if tokens and width > 1:
            least = min(PIECES * width, state.num_left)  # two tokens a group, unless it ends the prompt
            return max(tokens, least) if least <= most else 0
        return tokens

    def _chunk_row(self, state: State, q_len: int) -> Row:
        """A chunk of a bound request."""
        position = state.num_scheduled_tokens
        first, count = self.memory.place(state.slot, position)
        is_dealt = count > 1 and self.width(state) > 1 and self._is_dealt(state, q_len, first, count)
        return Row(state.slot, position, q_len, False, q_len == state.num_left, first, count, is_dealt)

    def _append_due(self) -> None:
        """As :meth:`add_decode` of each of :meth:`due_decodes`, where none is refused.

        One on one group is within its request's last block unless that is full: memory is asked for a block's first.
        """
        decoding, left_out, memory = self._queue.decoding, self.left_out, self.memory
        are_several, first, count = memory.num_groups > 1, 0, 1
        share = len(decoding) if are_several else min(-(-len(decoding) // self._period), self.tokens_left[0])
        if are_several:
            decoding = {state.slot: state for state in self.due_decodes()}
        elif left_out:
            decoding = {slot: state for slot, state in decoding.items() if slot not in left_out}
        if not are_several and self.tokens_left[0] < len(decoding) / self._period:  # they take turns
            decoding = dict(sorted(decoding.items(), key=lambda item: item[1].last_batch))
        block_size, new = memory.block_size, tuple.__new__  # half the time of Row(...), and there are hundreds
        rows, batch_id, foresees = self.rows, self.batch_id, self._queue.foresees
        newest = batch_id - self._period  # batch of which the token of a request in flight is known
        for slot, state in decoding.items() if share else ():
            position = state.num_scheduled_tokens
            if position >= state.num_known_tokens or (state.last_batch > newest and state.num_in_flight):
                continue
            state.last_batch = batch_id
            if are_several:
                first, count = memory.place(slot, position)
                for group in range(first, first + count):
                    self.tokens_left[group] -= 1
            row = new(Row, (slot, position, 1, True, True, first, count, False))
            rows.append(row)
            state.num_scheduled_tokens = position + 1
            state.num_in_flight += 1
            if foresees:
                state.foresee()
            if count > 1 or not position % block_size:
                memory.take(row)
            if len(rows) == share:
                break
        self.tokens_left[0] -= 0 if are_several else len(rows)

    def _append_row(self, state: State, row: Row) -> None:
        """Put a row into the batch and allocate the blocks it fills."""
        take = self.memory.take if state.has_started else self.memory.begin
        if not state.has_started:
            self._queue.start(state)
            self.memory.prefix.forget(state.slot)
        take(row)
        self.rows.append(row)
        state.last_batch = self.batch_id
        self._queue.sent(state, row, self.now_s)
        for group in row.groups:
            self.tokens_left[group] -= row.tokens_on(group)
        if not row.is_decode:
            self.chunked[row.slot] = len(self.rows) - 1
            for group in row.groups:
                self.has_chunk[group] = True
