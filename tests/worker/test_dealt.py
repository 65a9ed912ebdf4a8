"""Dealt rows from plans made by hand, on all groups in one process: every token sees each token before it once."""

from collections import Counter, defaultdict
from itertools import count
from typing import NamedTuple

import pytest
import torch

from medha.attention.interface import LayerShape
from medha.batch import Batch, Deal, Extent, Row, even_shares
from medha.worker.kv_cache import KVCache
from medha.worker.step_input import DeviceStep, Slots
from tests.attention.reference import visible

CPU = torch.device("cpu")
BLOCK, NUM_BLOCKS = 16, 40


class Chunk(NamedTuple):
    """A chunk of a plan: its run, and whether it is dealt or the last group of the run takes its keys."""

    q_len: int
    group: int
    num_groups: int
    is_dealt: bool = True


Plan = list[Chunk]

# Dealt and gathered chunks on one request and in one batch, one that begins away from group 0, rings of two sizes.
TWO = [
    [Chunk(70, 0, 1), Chunk(90, 0, 2), Chunk(33, 0, 2, False), Chunk(61, 0, 2)],
    [Chunk(65, 1, 1), Chunk(40, 0, 2, True), Chunk(31, 0, 2), Chunk(4, 0, 2)],
    [Chunk(50, 0, 2, True), Chunk(9, 0, 2, False)],
]
FOUR = [
    [Chunk(60, 1, 1), Chunk(90, 0, 2), Chunk(130, 0, 4), Chunk(21, 0, 4)],
    [Chunk(41, 2, 1), Chunk(20, 2, 1), Chunk(83, 2, 2), Chunk(40, 1, 3, False)],
    [Chunk(64, 0, 2), Chunk(20, 0, 2, False), Chunk(50, 0, 4), Chunk(50, 0, 4, False)],
]
THREE = [[Chunk(50, 1, 1), Chunk(60, 1, 2), Chunk(100, 0, 3)], [Chunk(64, 0, 3), Chunk(6, 0, 3), Chunk(30, 0, 3)]]
EIGHT = [[Chunk(40, 3, 1), Chunk(40, 2, 2), Chunk(60, 0, 4), Chunk(101, 0, 8)], [Chunk(33, 6, 2), Chunk(80, 0, 8)]]


class Hand:
    """Makes batches of requests whose chunks are planned; blocks of a slot lie scattered over each group's pool."""

    def __init__(self, plans: list[Plan]) -> None:
        self.plans = plans
        self.held: list[defaultdict[int, int]] = [defaultdict(int) for _ in plans]  # tokens of each slot by group
        self._num_blocks: list[defaultdict[int, int]] = [defaultdict(int) for _ in plans]
        self._free: defaultdict[int, list[int]] = defaultdict(lambda: [(7 * i) % NUM_BLOCKS for i in range(NUM_BLOCKS)])
        self._ids = count()

    def prefills(self) -> list[Batch]:
        """The plans side by side, a chunk of each in a batch."""
        batches = []
        for at in range(max(map(len, self.plans))):
            slots = [slot for slot, plan in enumerate(self.plans) if at < len(plan)]
            batches.append(self._batch([self._chunk(slot, at) for slot in slots]))
        return batches

    def decode(self) -> Batch:
        """The next token of every request, on the run of its last chunk."""
        rows = []
        for slot, plan in enumerate(self.plans):
            position, last = sum(self.held[slot].values()), plan[-1]
            rows.append(Row(slot, position, 1, True, True, last.group, last.num_groups))
        return self._batch(rows)

    def _chunk(self, slot: int, at: int) -> Row:
        plan = self.plans[slot]
        chunk, position = plan[at], sum(chunk.q_len for chunk in plan[:at])
        is_dealt = chunk.is_dealt and chunk.num_groups > 1
        return Row(slot, position, chunk.q_len, False, at + 1 == len(plan), *chunk[1:3], is_dealt)

    def _batch(self, rows: list[Row]) -> Batch:
        deals, extents = [], []
        for row in rows:
            held, blocks = self.held[row.slot], self._num_blocks[row.slot]
            for group, share in zip(row.groups, even_shares(row.position, row.num_groups), strict=True):
                if row.is_dealt:
                    deals.append(Deal(row.slot, group, held[group], share))
                    kept = -(-(share + row.tokens_on(group)) // BLOCK)
                    blocks[group] = min(blocks[group], kept) if share < held[group] else blocks[group]
                    held[group] = share + row.tokens_on(group)
                elif group == row.writer:
                    held[group] += row.q_len
                needed = -(-held[group] // BLOCK) - blocks[group]
                extents += [Extent(row.slot, self._free[group].pop(), 1, group) for _ in range(needed)]
                blocks[group] += max(needed, 0)
        return Batch(next(self._ids), tuple(rows), tuple(extents), deals=tuple(deals))


@pytest.mark.parametrize(("plans", "groups"), [(TWO, 2), (THREE, 3), (FOUR, 4), (EIGHT, 8)])
def test_who_sees_what(plans: list[Plan], groups: int) -> None:
    """Wherever it lies."""
    slots = [Slots(BLOCK, group) for group in range(groups)]
    shape = {"num_layers": 1, "num_blocks": NUM_BLOCKS, "block_size": BLOCK, "device": CPU}
    caches = [KVCache(LayerShape(1, 1, 1, torch.float32), **shape) for _ in range(groups)]
    hand, num_rings = Hand(plans), 0
    for batch in [*hand.prefills(), hand.decode(), hand.decode()]:
        steps = [one.prepare(batch.part_of(group)) for group, one in enumerate(slots)]
        sent: dict[tuple[int, int], list[torch.Tensor]] = {}
        for group, (step, cache) in enumerate(zip(steps, caches, strict=True)):
            for move in step.sends:
                memory = torch.empty(cache.block_size_of(move.num_tokens))
                sent.setdefault((group, move.group), []).append(cache.pack(0, move.runs, memory))
        for group, (step, cache) in enumerate(zip(steps, caches, strict=True)):
            for move in step.receives:
                cache.pack(0, move.runs, sent[move.group, group].pop(0), is_back=True)
            if step.batch.rows:
                new = named(step.batch, group)
                written = DeviceStep.of(step, CPU)
                cache.write(0, new, -new, cache.places(written.targets, written.kept))
        assert not any(sent.values())
        for group, step in enumerate(steps):
            for rows in step.dealt:
                num_rings += 1
                its = named(step.batch, group).flatten().tolist()
                its = its[len(its) - sum(one.shared.tokens.stop - one.shared.tokens.start for one in step.dealt) :]
                run, seen = rows.shared.groups, [Counter[float]() for _ in its[rows.shared.tokens]]
                for owner, part in enumerate(rows.seen):
                    cache, theirs = caches[run[owner]], steps[run[owner]]
                    (block,) = [one for one in theirs.dealt if one.shared.groups == run]
                    assert block.shared.digest == rows.shared.digest
                    keys = cache.k[0].flatten()
                    if run[owner] != group:
                        memory = torch.full((cache.block_size_of(block.block_tokens[owner]),), torch.nan)
                        keys = cache.block(cache.pack(0, block.packed, memory))[0].flatten()
                    query = 0
                    for row in range(len(part)):
                        tokens, sees = visible(part, row)
                        for one in sees:
                            seen[query].update(keys[tokens[one]].tolist())
                            query += 1
                    assert query == len(seen)
                for token, keys_seen in zip(its[rows.shared.tokens], seen, strict=True):
                    slot, position = divmod(int(token), 1000)
                    assert keys_seen == Counter(1000.0 * slot + before for before in range(position + 1))
    assert num_rings >= 6


def named(batch: Batch, group: int) -> torch.Tensor:
    """A number for each token of a group's part of a batch: 1000 times its slot, and its position."""
    spans = [(row.slot, span) for row in batch.rows for span in row.spans(group)]
    return torch.tensor([1000.0 * slot + at for slot, span in spans for at in span]).view(-1, 1, 1)


def test_what_a_group_holds_is_what_the_batch_says() -> None:
    slots = Slots(BLOCK)
    row = Row(3, 20, 8, False, False, 0, 2, is_dealt=True)
    batch = Batch(0, (row,), deals=(Deal(3, 0, 20, 10), Deal(3, 1, 0, 10)))
    with pytest.raises(ValueError, match="slot 3 has 0 tokens on group 0, not 20"):
        slots.prepare(batch.part_of(0))
    with pytest.raises(IndexError, match="slot 3 has 0 blocks, 10 tokens are to lie there"):
        Slots(BLOCK, 1).prepare(batch.part_of(1))
