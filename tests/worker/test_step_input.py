"""A rank's block tables and what it makes of a batch, against a plain account of where each position lies.

Batches are drawn as a scheduler may send them: requests begin on any group, grow over groups, are freed and swapped,
and slots are used again.
"""

import random
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import chain, count

import pytest
import torch

from medha.attention.interface import LayerShape
from medha.batch import Batch, Extent, Row, Shared, append_extent
from medha.sched.blocks import facing
from medha.worker.kv_cache import KVCache
from medha.worker.step_input import DeviceStep, Slots, StepInput
from medha.worker.swap import HostCache
from tests.attention.reference import visible

CPU = torch.device("cpu")
GROUPS, BLOCK, NUM_BLOCKS, MOST_TOKENS = 3, 4, 120, 60
SLOTS = (0, 1, 2, 5, 70, 300)


@dataclass
class Request:
    """A number for each position, the first position and the blocks on each group of its run."""

    group: int
    starts: dict[int, int]
    num_groups: int = 1
    values: list[float] = field(default_factory=list)
    blocks: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def shard(self, group: int) -> slice:
        """Positions that lie on a group."""
        end = len(self.values) if self.blocks[group] else 0
        return slice(self.starts.get(group, 0), self.starts.get(group + 1, end))

    def tokens(self, group: int) -> list[int]:
        """The pool tokens at which they lie."""
        shard = self.shard(group)
        return [self.blocks[group][i // BLOCK] * BLOCK + i % BLOCK for i in range(shard.stop - shard.start)]


class Plans:
    """Draws batches and keeps account of them."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.live: dict[int, Request] = {}
        self.away: dict[int, tuple[Request, list[int]]] = {}  # with its host blocks
        self._free, self._host = ([[*range(NUM_BLOCKS)] for _ in range(GROUPS)] for _ in range(2))
        self._values = count(1)

    def batch(self, batch_id: int) -> Batch:
        rng, out, back, new, rows = self.rng, [], [], [], []
        frees = [slot for slot in self.live if rng.random() < 0.25]
        for slot in frees:
            gone = self.live.pop(slot)
            held = gone.blocks[gone.group][: -(-len(gone.values) // BLOCK)]
            if gone.num_groups == 1 and held and rng.random() < 0.5:
                self.away[slot] = gone, self._take(self._host[gone.group], len(held))
                out += facing(gone.group, held, self.away[slot][1])
            for group, blocks in gone.blocks.items():
                self._free[group] += blocks
        came = {slot: self.away.pop(slot) for slot in list(self.away) if rng.random() < 0.5}
        for slot, (request, host) in came.items():
            self.live[slot] = request
            request.blocks.clear()
            self._host[request.group] += host
        for slot in rng.sample(SLOTS, 2):
            if slot not in self.live and slot not in self.away:
                group = rng.randrange(GROUPS)
                self.live[slot] = Request(group, {group: 0})
        for slot, request in self.live.items():
            if slot in came or (len(request.values) < MOST_TOKENS and rng.random() < 0.6):
                row, more = self._row(slot, request, grows=slot not in came and rng.random() < 0.25)
                rows.append(row)
                new += more
        rows.sort(key=lambda row: not row.is_decode)
        for request, host in came.values():
            back += facing(request.group, request.blocks[request.group][: len(host)], host)
        return Batch(batch_id, tuple(rows), tuple(new), tuple(frees), tuple(out), tuple(back))

    def _row(self, slot: int, request: Request, *, grows: bool, decodes: bool = False) -> tuple[Row, list[Extent]]:
        position, holder = len(request.values), request.group + request.num_groups - 1
        is_decode = decodes or (position > 0 and self.rng.random() < 0.5)
        q_len = 1 if is_decode else self.rng.randint(1, 9)
        if grows and position and holder + 1 < GROUPS:
            holder += 1
            request.num_groups += 1
            request.starts[holder] = position
        request.values += [float(next(self._values)) for _ in range(q_len)]
        needed = -(-(position + q_len - request.starts[holder]) // BLOCK) - len(request.blocks[holder])
        blocks = self._take(self._free[holder], max(needed + self.rng.randrange(2), 0))
        request.blocks[holder] += blocks
        samples = is_decode or self.rng.random() < 0.5
        row = Row(slot, position, q_len, is_decode, samples, request.group, request.num_groups)
        runs: list[tuple[int, int]] = []
        for block in blocks:
            append_extent(runs, block, 1)
        return row, [Extent(slot, *run, holder) for run in runs]

    def _take(self, pool: list[int], number: int) -> list[int]:
        if self.rng.random() < 0.5:
            self.rng.shuffle(pool)
        else:
            pool.sort()
        return [pool.pop(0) for _ in range(number)]


class Decodes(Plans):
    """Draws mostly batches in which the same requests decode on."""

    def batch(self, batch_id: int) -> Batch:
        ready = [item for item in self.live.items() if 0 < len(item[1].values) < MOST_TOKENS]
        if not ready or self.rng.random() < 0.1:
            return super().batch(batch_id)
        rows, new = zip(*(self._row(*item, grows=False, decodes=True) for item in ready), strict=True)
        return Batch(batch_id, rows, tuple(chain(*new)))


def check(step: StepInput, group: int, live: dict[int, Request]) -> None:
    """A step says of each row what the account does."""
    rows = step.batch.rows
    token = 0
    kept, targets, decodes, drawn = [], [], [], []
    for row in rows:
        if row.writer == group:
            kept += range(token, token + row.q_len)
            targets += live[row.slot].tokens(group)[-row.q_len :]
        decodes += [(token, row.slot)] * row.is_decode
        token += row.q_len
        drawn += [(row, token - 1, row.slot)] * (row.samples and row.group == group)
    assert step.positions.tolist() == [p for row in rows for p in range(row.position, row.kv_len)]
    assert step.targets.tolist() == targets
    assert (list(range(token)) if step.kept is None else step.kept.tolist()) == kept
    assert list(zip(step.decode_tokens.tolist(), step.decode_slots.tolist(), strict=True)) == decodes
    assert list(zip(step.drawn_rows, step.drawn_tokens.tolist(), step.drawn_slots.tolist(), strict=True)) == drawn
    for part, is_shared in ((step.own, False), (step.shared, True)):
        its_rows = [row for row in rows if row.is_shared == is_shared]
        assert (part is None) == (not its_rows)
        for i, row in enumerate(its_rows):
            assert visible(part, i)[0].tolist() == live[row.slot].tokens(group)
            assert (part.q_len[i], part.causal[i]) == (row.q_len, row.writer == group)


@pytest.mark.parametrize("kind", [Plans, Decodes])
@pytest.mark.parametrize("seed", range(20))
def test_what_is_written_at_a_position_is_read_back(seed: int, kind: type[Plans]) -> None:
    plans = kind(random.Random(seed))
    slots = [Slots(BLOCK, group) for group in range(GROUPS)]
    shape = {"num_layers": 1, "num_blocks": NUM_BLOCKS, "block_size": BLOCK}
    caches = [KVCache(LayerShape(1, 1, 1, torch.float32), **shape, device=CPU) for _ in range(GROUPS)]
    hosts = [HostCache(cache, NUM_BLOCKS) for cache in caches]
    for batch_id in range(30):
        batch = plans.batch(batch_id)
        for group, (tables, cache, host) in enumerate(zip(slots, caches, hosts, strict=True)):
            step = tables.prepare(batch.part_of(group))
            host.move(step.swaps_out, step.swaps_in)[-1]()
            if step.batch.rows:
                check(step, group, plans.live)
                sent = DeviceStep.of(step, CPU)
                values = [v for row in step.batch.rows for v in plans.live[row.slot].values[row.position : row.kv_len]]
                new = torch.tensor(values).view(-1, 1, 1)
                cache.write(0, new, -new, cache.places(sent.targets, sent.kept))
                for part in filter(None, (step.own, step.shared)):
                    assert part.device_pages is not None and part.device_pages.tolist() == part.pages.tolist()
            num_blocks = sum(len(tables.blocks(slot)) for slot in range(len(tables.held)))
            assert num_blocks == sum(len(request.blocks[group]) for request in plans.live.values())
            for slot, request in plans.live.items():
                tokens, values = request.tokens(group), request.values[request.shard(group)]
                assert cache.k[0][tokens].flatten().tolist() == values
                assert cache.v[0][tokens].flatten().tolist() == [-value for value in values]
                assert tables.blocks(slot).tolist() == request.blocks[group]


def test_a_row_beyond_the_blocks_of_its_slot_is_an_error() -> None:
    slots = Slots(BLOCK)
    slots.prepare(Batch(0, (Row(1, 0, 5, False, False),), (Extent(1, 3, 1), Extent(1, 0, 1))))
    for row, reason in (
        (Row(1, 5, 4, False, True), "slot 1 has blocks for 8 tokens, 9 are to lie there"),
        (Row(7, 0, 1, False, True), "slot 7 has blocks for 0 tokens, 1 are to lie there"),
    ):
        with pytest.raises(IndexError, match=f"^{reason}$"):
            slots.prepare(Batch(1, (row,)))


def test_a_request_that_is_handed_over_takes_a_slot_whose_decode_ended_just_before() -> None:
    """The row that comes next is the one that the former request would have had; its blocks are others."""
    slots = Slots(BLOCK)
    slots.prepare(Batch(0, (Row(3, 0, 7, False, True),), (Extent(3, 0, 2),)))
    slots.prepare(Batch(1, (Row(3, 7, 1, True, True),)))
    slots.prepare(Batch(2, (), (Extent(3, 10, 3),), frees=(3,), shared=(Shared(3, 0, 0, 8),)))
    step = slots.prepare(Batch(3, (Row(3, 8, 1, True, True),)))
    assert step.own.pages.tolist() == [10, 11, 12]
    assert (step.own.kv_len.tolist(), step.targets.tolist()) == ([9], [12 * BLOCK])


def test_a_request_that_comes_to_a_group_where_the_former_one_of_its_slot_ended_has_its_own_blocks() -> None:
    """Also where nothing ran there meanwhile, and its first row is the one that the former request would have had."""
    slots = Slots(BLOCK, 1)
    slots.prepare(Batch(0, (Row(3, 7, 1, True, True, 0, 2),), (Extent(3, 5, 1, 1),)))
    slots.prepare(Batch(1, (), frees=(3,)))
    step = slots.prepare(Batch(2, (Row(3, 8, 1, True, True, 0, 2),), (Extent(3, 9, 1, 1),)))
    assert (step.shared.pages.tolist(), step.shared.kv_len.tolist(), step.targets.tolist()) == ([9], [1], [9 * BLOCK])


def test_a_block_begins_for_the_row_that_grows_here_behind_one_that_grows_elsewhere() -> None:
    slots = Slots(BLOCK, 2)
    first = Row(0, 8, 4, False, False, 0, 3), Row(1, 4, 3, False, False, 1, 2)
    slots.prepare(Batch(0, first, (Extent(0, 5, 1, 2), Extent(1, 9, 1, 2))))
    slots.prepare(Batch(1, (Row(0, 12, 1, True, True, 0, 4), Row(1, 7, 1, True, True, 1, 2))))
    rows = Row(0, 13, 1, True, True, 0, 4), Row(1, 8, 1, True, True, 1, 2)
    step = slots.prepare(Batch(2, rows, (Extent(1, 20, 1, 2),)))
    assert (step.shared.pages.tolist(), step.shared.kv_len.tolist()) == ([5, 9, 20], [4, 5])
    assert (step.kept.tolist(), step.targets.tolist()) == ([1], [20 * BLOCK])
