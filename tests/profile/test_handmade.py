"""Hand-made steps: every group knows what a row has cached there, and the batch that is timed is as asked; and what
``medha profile`` finds on a GPU, for which on the emulated one see ``tests/cuda``."""

from typing import Any

import pytest

from medha.batch import Batch, Row
from medha.config import EngineConfig
from medha.cost.predictor import Predictor, Work
from medha.profile.calibrate import Effort, measure
from medha.profile.steps import FIRST_SLOT, Step, StepRunner, chunk, decodes
from medha.worker.step import PendingStep, StepResult
from medha.worker.step_input import Slots
from tests.serving import Model

BLOCK = 16


class Replicas:
    """A runner that keeps the slots of each group, checks that rows find their tokens, computes nothing."""

    def __init__(self, num_groups: int = 1) -> None:
        self.slots = [Slots(BLOCK, group) for group in range(num_groups)]
        self.batches, self.opened, self.sampled = list[Batch](), set[int](), set[int]()

    def open(self, slot: int, *_: Any) -> None:
        self.opened.add(slot)

    def submit(self, batch: Batch) -> PendingStep:
        self.batches.append(batch)
        for group, slots in enumerate(self.slots):
            slots.prepare(batch.part_of(group))
        for row in batch.rows:
            assert row.slot in self.opened
            assert not row.is_decode or row.slot in self.sampled  # it has a token to go on from
            self.sampled |= {row.slot} if row.samples else set()
        return PendingStep(lambda: StepResult((), [], 0.25))


def hand_made(runner: Replicas, num_blocks: int = 8) -> StepRunner:
    return StepRunner(runner, block_size=BLOCK, num_blocks=num_blocks, vocab_size=10)


ENDS = (Row(FIRST_SLOT + 2, 0, 17, False, False), Row(FIRST_SLOT + 3, 64, 3, False, True))


@pytest.mark.parametrize("step", [chunk(5, 0), chunk(40, 70), (*decodes(2, 100), *ENDS)])
def test_rows_hold_what_they_have_cached(step: Step) -> None:
    runner = Replicas()
    hand = hand_made(runner)
    for number in range(2):  # a second time the same blocks are handed out again
        batch_id, busy_s = hand.run(step)
        assert busy_s == 0.25
        timed = runner.batches[-1]
        assert timed.batch_id == batch_id
        assert timed.rows == step
        assert len(runner.batches) == number + 2  # the first one draws a token for each slot
        for part in step:
            assert runner.slots[0].held[part.slot] == part.kv_len
    assert [batch.batch_id for batch in runner.batches] == list(range(len(runner.batches)))


def test_rows_lie_side_by_side_until_the_pool_is_full() -> None:
    runner = Replicas()
    hand_made(runner).run(decodes(4, 40))
    assert [int(runner.slots[0].blocks(FIRST_SLOT + i)[0]) for i in range(4)] == [0, 3, 0, 3]


@pytest.mark.parametrize("num_groups", [2, 3])
def test_a_shared_row_lies_on_every_group_of_its_run(num_groups: int) -> None:
    runner = Replicas(num_groups)
    kv = 2 * num_groups * BLOCK + 5
    hand_made(runner, 16).run(chunk(7, kv, num_groups=num_groups))
    held = [int(slots.held[FIRST_SLOT]) for slots in runner.slots]
    assert sum(held) == kv + 7 and min(held) > 0
    assert all(tokens % BLOCK == 0 for tokens in held[:-1])
    assert str(runner.batches[-1].rows[0]).endswith(f"on groups 0-{num_groups - 1}")


@pytest.mark.gpu
@pytest.mark.parametrize("attention_backend", ["flashinfer", "torch"])
def test_what_grows_with_the_keys_is_told_apart(needle: Model, attention_backend: str) -> None:
    if attention_backend == "flashinfer":
        pytest.importorskip("flashinfer")
    effort = Effort(chunks=(64, 256), batches=(1, 16), lengths=(1024, 16384, 131072), total_s=5.0)
    options = {"num_kv_blocks": 600, "attention_backend": attention_backend}
    config = EngineConfig.from_flat(str(needle.folder), device="cuda", dtype="bfloat16", **options)
    found = measure(config, effort, max_kv=131072)
    assert found is not None
    predictor = Predictor(found[0])
    chunks = [predictor.predict([Work(256, kv, False)]) for kv in (0, 131072)]
    decodes = [predictor.predict([Work(1, kv, True)] * 16) for kv in (1024, 131072)]
    assert chunks[1] > 1.2 * chunks[0] and decodes[1] > decodes[0]
