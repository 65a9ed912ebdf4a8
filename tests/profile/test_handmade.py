"""Hand-made steps: every group knows what a row has cached there, and the batch that is timed is as asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from medha.batch import Batch
from medha.profile.steps import FIRST_SLOT, Part, Step, StepRunner, chunk, decodes, step_of
from medha.worker.kv_cache import BlockTables
from medha.worker.step import PendingStep, StepResult

BLOCK = 16


@dataclass
class Replicas:
    """A runner that keeps the block tables of each group, checks that rows find their tokens, computes nothing."""

    num_groups: int = 1
    batches: list[Batch] = field(default_factory=list)
    tables: list[BlockTables] = field(init=False)
    opened: set[int] = field(default_factory=set)
    sampled: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.tables = [BlockTables(BLOCK, group) for group in range(self.num_groups)]

    def open(self, slot: int, prompt_ids: Any, params: Any, *, seed: int, end_ids: tuple[int, ...]) -> None:
        self.opened.add(slot)

    def close(self, slot: int) -> None: ...

    def reset(self) -> None: ...

    def submit(self, batch: Batch) -> PendingStep:
        self.batches.append(batch)
        for group, tables in enumerate(self.tables):
            part = batch.part_of(group)
            tables.apply(part)
            for row in part.rows:
                tables.ranges(row.slot, *tables.shard(row.slot))
        for row in batch.rows:
            assert row.slot in self.opened
            assert not row.is_decode or row.slot in self.sampled  # it has a token to go on from
            self.sampled |= {row.slot} if row.samples else set()
        return PendingStep(lambda: StepResult((), [], 0.25))


def hand_made(runner: Replicas, num_blocks: int = 8) -> StepRunner:
    return StepRunner(runner, block_size=BLOCK, num_blocks=num_blocks, vocab_size=10)


@pytest.mark.parametrize(
    "step", [chunk(5, 0), chunk(40, 70), (*decodes(2, 100), Part(17, 0), Part(3, 64, samples=True))]
)
def test_rows_hold_what_they_have_cached(step: Step) -> None:
    runner = Replicas()
    hand = hand_made(runner)
    for number in range(2):  # a second time the same blocks are handed out again
        batch_id, busy_s = hand.run(step)
        assert busy_s == 0.25
        timed = runner.batches[-1]
        assert timed.batch_id == batch_id
        assert step_of(timed) == step
        assert len(runner.batches) == (number + 1) * (2 if any(part.kv_before for part in step) else 1)
        for slot, part in enumerate(step, FIRST_SLOT):
            assert runner.tables[0].shard(slot) == (0, part.kv_before + part.q_len)
    assert [batch.batch_id for batch in runner.batches] == list(range(len(runner.batches)))


def test_rows_lie_side_by_side_until_the_pool_is_full() -> None:
    runner = Replicas()
    hand_made(runner).run(decodes(4, 40))
    firsts = [runner.tables[0].ranges(FIRST_SLOT + i, 0, 1)[0][0] for i in range(4)]
    assert firsts == [0, 3 * BLOCK, 0, 3 * BLOCK]


@pytest.mark.parametrize("num_groups", [2, 3])
def test_a_shared_row_lies_on_every_group_of_its_run(num_groups: int) -> None:
    runner = Replicas(num_groups)
    kv = 2 * num_groups * BLOCK + 5
    hand_made(runner, 16).run(chunk(7, kv, num_groups=num_groups))
    shards = [tables.shard(FIRST_SLOT) for tables in runner.tables]
    assert shards[0][0] == 0 and shards[-1][1] == kv + 7
    assert [end for _, end in shards[:-1]] == [start for start, _ in shards[1:]]
    assert all(start % BLOCK == 0 for start, _ in shards)
    assert str(runner.batches[-1].rows[0]).endswith(f"on groups 0-{num_groups - 1}")
