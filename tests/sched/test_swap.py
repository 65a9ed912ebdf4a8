"""Who is swapped to host memory instead of computed again, what its batches say, and what that costs."""

from typing import Any

import pytest

from medha.batch import Batch
from medha.sched.batch_builder import parts_of
from medha.sim.pipeline import Pipeline
from tests.sched.test_preempt import make
from tests.sched.virtual import BLOCK, Drive, Job

DECODES = [Job(0.0, 16, 64), Job(0.01, 16, 64), Job(0.02, 16, 64)]
"""They grow until nothing of eight blocks is free."""


def play(load: list[Job], num_blocks: int = 8, *, drive: type[Drive] = Drive, **options: Any) -> Drive:
    options = {"overcommit": True, "num_swap_blocks": 8} | options
    return drive(make(num_blocks, **options), load, lambda batch: 0.1).run()


def num_computed(drive: Drive) -> int:
    return sum(batch.num_tokens for batch in drive.batches)


def test_what_is_swapped_is_not_computed_again() -> None:
    swapped, recomputed = play(DECODES), play(DECODES, num_swap_blocks=0)
    assert swapped.num_swapped == len(swapped.gave_way) > 0 == recomputed.num_swapped
    assert recomputed.gave_way
    assert num_computed(swapped) == sum(job.num_kv_tokens for job in DECODES) < num_computed(recomputed)
    ways = ("swaps_out", "swaps_in")
    moved = [sum(extent.count for batch in swapped.batches for extent in getattr(batch, way)) for way in ways]
    assert moved[0] == moved[1] > 0


@pytest.mark.parametrize(
    ("options", "is_swap"),
    [({"swap_block_s": 0.0}, True), ({"swap_block_s": 10.0}, False), ({"num_swap_blocks": 1}, False)],
)
def test_the_cheaper_way_that_fits_the_host_is_taken(options: dict[str, Any], is_swap: bool) -> None:
    drive = play(DECODES, **options)
    assert drive.gave_way and drive.num_swapped == is_swap * len(drive.gave_way)


def test_who_lies_on_several_groups_is_computed_again_and_others_come_back_to_theirs() -> None:
    """That a request comes back to its group is checked by every drive."""
    grown = [Job(0.0, 16, 60), Job(0.01, 90, 40), Job(0.02, 90, 40)]
    drive = play(grown, num_blocks=8, num_groups=2, max_kv_per_group=5 * BLOCK, num_swap_blocks=50)
    shared = {row.slot for batch in drive.batches for row in batch.rows if row.is_shared}
    assert shared and len(drive.gave_way) > drive.num_swapped
    many = [*DECODES, *(Job(0.03 + i / 100, 16, 64) for i in range(5))]
    swapped = play(many, num_blocks=8, num_groups=2, num_swap_blocks=50)
    assert swapped.num_swapped == len(swapped.gave_way) > 0
    assert {extent.group for batch in swapped.batches for extent in batch.swaps_in} == {0, 1}


def test_a_step_takes_as_long_as_the_longer_of_compute_and_moves() -> None:
    found: set[bool] = set()

    class Timed(Drive):
        def on_schedule(self, batch: Batch | None) -> None:
            super().on_schedule(batch)
            if batch is None or not batch.moves:
                return
            scheduler, predictor = self.scheduler, self.scheduler.predictor
            assert predictor is not None and self.decision.prediction is not None
            computed_s = predictor.tick(*parts_of(batch.rows, batch.num_decodes, scheduler.memory, 0)).seconds
            moved_s = batch.num_moved_blocks(0) * scheduler.config.swap_block_s
            longer_s = max(computed_s, moved_s)
            assert self.decision.prediction.seconds == pytest.approx(longer_s)
            assert Pipeline([predictor]).send(batch, scheduler.memory, 0.0).busy_s == pytest.approx(longer_s)
            found.add(moved_s > computed_s)

    load = [Job(i / 100, 200, 64) for i in range(3)]
    for swap_block_s in (1e-6, 1e-2):
        play(load, 40, drive=Timed, num_swap_blocks=40, swap_block_s=swap_block_s)
    assert found == {True, False}


def test_batches_that_move_teach_the_predictor_nothing() -> None:
    scheduler = make(8, overcommit=True, num_swap_blocks=8, swap_block_s=1e-3)
    predictor = scheduler.predictor
    assert predictor is not None
    drive = Drive(scheduler, DECODES, lambda batch: 5.0 if batch.moves else 0.02).run()
    assert drive.num_swapped
    taught = sum(not batch.moves for batch in drive.batches)
    assert sum(count for _, count in predictor.correction.learned.values()) == taught < len(drive.batches)
