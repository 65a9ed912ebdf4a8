"""Batches with dealt rows, from plans made by hand."""

from collections import defaultdict
from itertools import count
from typing import NamedTuple

from medha.batch import Batch, Deal, Extent, Row, even_shares

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
