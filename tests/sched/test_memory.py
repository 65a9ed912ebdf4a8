"""Reservations of the KV pools of several groups: where shards lie, who may take blocks, and no endless wait."""

from dataclasses import dataclass
from itertools import permutations

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from medha.batch import Row
from medha.config import SchedulerConfig
from medha.sched.memory import KVMemory
from tests.sched.virtual import can_start

# -- where shards lie ------------------------------------------------------------------------------------


def three_groups() -> KVMemory:
    """Eight blocks of four tokens a group, six of them for one request."""
    return KVMemory(SchedulerConfig(max_kv_per_group=24), num_blocks=8, block_size=4, num_groups=3)


@pytest.mark.parametrize(
    ("num_tokens", "blocks", "num_firsts"),
    [(1, [1], 3), (24, [6], 3), (25, [6, 1], 2), (49, [6, 6, 1], 1), (72, [6] * 3, 1), (73, [6, 6, 6, 1], 0)],
)
def test_reservations(num_tokens: int, blocks: list[int], num_firsts: int) -> None:
    memory = three_groups()
    assert memory.reservation(num_tokens) == blocks
    assert memory.first_groups(num_tokens) == range(num_firsts)
    assert memory.max_request_tokens == 72
    assert KVMemory(SchedulerConfig(), num_blocks=8, block_size=4, num_groups=3).max_request_tokens == 96


@pytest.mark.parametrize("tokens", [6, 36])
def test_a_share_of_no_whole_blocks_or_beyond_the_pool_is_refused(tokens: int) -> None:
    message = rf"^max_kv_per_group={tokens}; accepted: a multiple of the block size 4, at mo"
    with pytest.raises(ValueError, match=message):
        KVMemory(SchedulerConfig(max_kv_per_group=tokens), num_blocks=8, block_size=4, num_groups=2)


def test_a_request_that_has_filled_its_span_grows_no_further() -> None:
    """Its last token has been scheduled and not come back: it is asked for its place, and there is no group behind."""
    memory = three_groups()
    memory.start(0, 2, 24)
    memory.take(Row(0, 0, 24, False, True, *memory.place(0, 0)))
    assert memory.place(0, 24) == (2, 1)


def test_a_request_that_was_bound_and_got_nothing_gives_nothing_back() -> None:
    memory = three_groups()
    memory.start(0, 0, 30)
    memory.release(0)
    assert memory.frees == []
    assert can_start(memory, 0, 72, 24, set_aside=True)


# -- the banker's test ------------------------------------------------------------------------------------


@dataclass
class Request:
    """A request of the machine, and how far it is."""

    first: int
    num_tokens: int
    num_prompt: int
    num_done: int = 0


class MemoryMachine(RuleBasedStateMachine):
    """Any sequence of first chunks, chunks, decodes and releases on small pools, beside brute force."""

    @initialize(
        num_groups=st.integers(1, 3), num_blocks=st.integers(1, 6), block_size=st.integers(1, 3), data=st.data()
    )
    def start(self, num_groups: int, num_blocks: int, block_size: int, data: st.DataObject) -> None:
        self.share = block_size * data.draw(st.integers(1, num_blocks))
        self.block_size, self.num_blocks = block_size, num_blocks
        config = SchedulerConfig(max_kv_per_group=self.share)
        self.memory = KVMemory(config, num_blocks=num_blocks, block_size=block_size, num_groups=num_groups)
        self.requests: dict[int, Request] = {}

    def blocks(self, first: int, num_tokens: int) -> list[int]:
        """Blocks of each group that the first tokens of a request take."""
        blocks = [0] * self.memory.num_groups
        for group, start in enumerate(range(0, num_tokens, self.share), first):
            blocks[group] = -(-min(self.share, num_tokens - start) // self.block_size)
        return blocks

    def is_safe_with(self, slot: int, request: Request, num_done: int) -> bool:
        """By brute force: whether all come to their ends, decodes at any time and the prefills in some order."""
        done = {s: (r, r.num_done) for s, r in self.requests.items()} | {slot: (request, num_done)}
        held = {s: self.blocks(r.first, n) for s, (r, n) in done.items()}
        rest = {s: np.subtract(self.blocks(r.first, r.num_tokens), held[s]) for s, (r, _) in done.items()}
        decodes = [s for s, (r, n) in done.items() if n >= r.num_prompt]
        free = self.num_blocks - sum(map(np.array, held.values()))
        if (sum((rest[s] for s in decodes), np.zeros(len(free))) > free).any() or free.min() < 0:
            return False
        back = sum((held[s] for s in decodes), free) if decodes else free

        def ends(order: tuple[int, ...]) -> bool:
            available = np.array(back)
            for s in order:
                if (rest[s] > available).any():
                    return False
                available = available + held[s]
            return True

        return any(map(ends, permutations(done.keys() - set(decodes))))

    @precondition(lambda self: len(self.requests) < 4)
    @rule(data=st.data())
    def first_chunk(self, data: st.DataObject) -> None:
        num_tokens = data.draw(st.integers(1, self.memory.max_request_tokens))
        num_prompt = data.draw(st.integers(1, num_tokens))
        request = Request(data.draw(st.sampled_from(self.memory.first_groups(num_tokens))), num_tokens, num_prompt)
        kv_len = data.draw(st.integers(1, min(num_prompt, self.share)))
        can = can_start(self.memory, request.first, num_tokens, kv_len, set_aside=kv_len == num_prompt)
        assert can == self.is_safe_with(-1, request, kv_len)
        if can:
            slot = next(s for s in range(5) if s not in self.requests)
            self.memory.start(slot, request.first, num_tokens)
            assert self.memory.span(slot) == (request.first, -(-num_tokens // self.share))
            self.requests[slot] = request
            self.take(slot, kv_len)

    @precondition(lambda self: any(r.num_done < r.num_tokens for r in self.requests.values()))
    @rule(data=st.data())
    def next_row(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from([s for s, r in self.requests.items() if r.num_done < r.num_tokens]))
        request = self.requests[slot]
        room, left = self.memory.room(slot, request.num_done), request.num_prompt - request.num_done
        assert room == self.share - request.num_done % self.share
        q_len = data.draw(st.integers(1, min(room, left))) if left > 0 else 1
        can = self.memory.can_take(self.row(slot, q_len))
        assert can == (left <= 0 or self.is_safe_with(slot, request, request.num_done + q_len))  # a decode never waits
        if can:
            self.take(slot, q_len)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.requests)))
        self.memory.release(slot)
        assert self.memory.frees[-1] == slot
        del self.requests[slot]

    def row(self, slot: int, q_len: int) -> Row:
        request = self.requests[slot]
        first, count = self.memory.place(slot, request.num_done)
        assert (first, count) == (request.first, request.num_done // self.share + 1)
        samples = request.num_done + q_len >= request.num_prompt
        return Row(slot, request.num_done, q_len, request.num_done >= request.num_prompt, samples, first, count)

    def take(self, slot: int, q_len: int) -> None:
        """Take a row's blocks: as many as it fills, of the group that holds its keys."""
        row, request = self.row(slot, q_len), self.requests[slot]
        before, after = (self.blocks(request.first, n) for n in (request.num_done, row.kv_len))
        extents = self.memory.take(row)
        assert all((e.slot, e.group) == (slot, row.writer) for e in extents)
        assert sum(e.count for e in extents) == after[row.writer] - before[row.writer]
        request.num_done = row.kv_len
        for group in row.groups:
            held = min(self.share, request.num_done - (group - row.group) * self.share)
            assert self.memory.kv_before(slot, row.kv_len, group) == held

    @invariant()
    def everybody_can_end(self) -> None:
        held = [0] * self.memory.num_groups
        for request in self.requests.values():
            held = [a + b for a, b in zip(held, self.blocks(request.first, request.num_done), strict=True)]
        for slot, request in list(self.requests.items())[:1]:  # as for any other
            assert self.is_safe_with(slot, request, request.num_done)
        assert [pool.num_used for pool in self.memory.pools] == held
        assert self.memory.num_used == sum(held)

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        for slot in self.requests:
            self.memory.release(slot)
        assert self.memory.num_used == 0
        assert can_start(self.memory, 0, self.memory.max_request_tokens, self.share, set_aside=True)


MemoryMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None, derandomize=True)
TestMemoryMachine = MemoryMachine.TestCase


def test_what_is_gathered_finds_room_on_the_last_group() -> None:
    memory = KVMemory(SchedulerConfig(max_kv_per_group=160), num_blocks=10, block_size=16, num_groups=2)
    memory.deal_pays = lambda num_prompt, count: True
    memory.start(0, 0, 200, num_prompt=200)
    assert memory.gather_room(0) > 48
    memory.start(1, 1, 112)
    memory.begin(Row(1, 0, 112, False, False, 1))
    assert memory.gather_room(0) == 48
