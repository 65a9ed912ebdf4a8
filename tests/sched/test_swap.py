"""Who is swapped to host memory instead of computed again, what its batches say, and what that costs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from medha.batch import Batch
from medha.sched.queue import SchedulerRequest, State
from medha.sched.scheduler import Scheduler
from medha.sim.pipeline import Pipeline, parts_of
from tests.sched.test_preempt import BLOCK, Watched, make
from tests.sched.virtual import Job

DECODES = [Job(0.0, 16, 64), Job(0.01, 16, 64), Job(0.02, 16, 64)]
"""They grow until nothing of eight blocks is free."""


class Kept(Watched):
    """A drive that keeps its batches."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kept: list[Batch] = []

    def on_schedule(self, batch: Batch | None) -> None:
        super().on_schedule(batch)
        if batch is not None:
            self.kept.append(batch)


def play(load: list[Job], num_blocks: int = 8, **options: Any) -> Kept:
    options = {"overcommit": True, "num_swap_blocks": 8} | options
    drive = Kept(make(num_blocks, **options), load, lambda batch: 0.1)
    drive.run()
    return drive


def num_computed(drive: Kept) -> int:
    return sum(batch.num_tokens for batch in drive.kept)


def test_what_is_swapped_is_not_computed_again() -> None:
    swapped, recomputed = play(DECODES), play(DECODES, num_swap_blocks=0)
    assert swapped.num_swapped == len(swapped.gave_way) > 0 == recomputed.num_swapped
    assert recomputed.gave_way
    assert num_computed(swapped) == sum(job.num_kv_tokens for job in DECODES) < num_computed(recomputed)
    moved = [sum(extent.count for batch in swapped.kept for extent in way(batch)) for way in (outs, ins)]
    assert moved[0] == moved[1] > 0


def outs(batch: Batch) -> Any:
    return batch.swaps_out


def ins(batch: Batch) -> Any:
    return batch.swaps_in


@pytest.mark.parametrize(("swap_block_s", "is_swap"), [(0.0, True), (10.0, False)])
def test_the_cheaper_way_is_taken(swap_block_s: float, is_swap: bool) -> None:
    drive = play(DECODES, swap_block_s=swap_block_s)
    assert drive.gave_way and drive.num_swapped == is_swap * len(drive.gave_way)


def test_who_does_not_fit_the_host_is_computed_again() -> None:
    drive = play(DECODES, num_swap_blocks=1)
    assert drive.gave_way and drive.num_swapped == 0


def test_who_lies_on_several_groups_is_computed_again_and_others_come_back_to_theirs() -> None:
    """That a request comes back to its group is checked by every drive."""
    grown = [Job(0.0, 16, 60), Job(0.01, 90, 40), Job(0.02, 90, 40)]
    drive = play(grown, num_blocks=7, num_groups=2, max_kv_per_group=5 * BLOCK, num_swap_blocks=50)
    shared = {row.slot for batch in drive.kept for row in batch.rows if row.is_shared}
    assert shared and len(drive.gave_way) > drive.num_swapped
    many = [*DECODES, *(Job(0.03 + i / 100, 16, 64) for i in range(5))]
    swapped = play(many, num_blocks=8, num_groups=2, num_swap_blocks=50)
    assert swapped.num_swapped == len(swapped.gave_way) > 0
    assert {extent.group for batch in swapped.kept for extent in batch.swaps_in} == {0, 1}


def running(scheduler: Scheduler, *lengths: int) -> list[State]:
    """Requests whose prompts are computed, one batch each, and whose first tokens are known."""
    for slot, length in enumerate(lengths):
        scheduler.add(SchedulerRequest(slot, length, 20, float(slot)))
        batch = scheduler.schedule(0.0).batch
        assert batch is not None
        scheduler.complete(batch, 0.0, [(row.slot, 1, False) for row in batch.rows], 0.1)
    return [scheduler._queue.running[slot] for slot in range(len(lengths))]


def preempt(scheduler: Scheduler, *states: State) -> None:
    """Preempt requests for a batch that is never made."""
    scheduler._preemption.preempt(states, 1.0)
    assert [p.slot for p in scheduler._preemption.preempted if p.swapped_tokens] == [state.slot for state in states]
    scheduler._preemption.preempted.clear()


def test_what_is_left_of_a_swapped_request_is_a_prefill_that_begins_behind_it() -> None:
    scheduler = make(20, overcommit=True, num_swap_blocks=20)
    first, second = running(scheduler, 40, 20)
    preempt(scheduler, first)
    queue = scheduler._queue
    assert (first.num_scheduled_tokens, first.num_computed_tokens, first.num_prefill_tokens) == (41, 41, 42)
    assert first.prefilling and not first.can_decode and not first.has_started
    columns, row = queue.columns(1.0), queue.rows_of([first.slot])[0]
    times = queue._times
    assert times is not None
    assert columns.num_computed_tokens[row] == 41 and columns.num_prompt_tokens[row] == 42
    assert columns.work_left_s[row] == times.remaining_s(41, 42) < columns.work_total_s[row]
    assert columns.work_total_s[row] == times.total_s(42)
    batch = scheduler.schedule(2.0).batch
    assert batch is not None and {row.slot for row in batch.rows} == {first.slot, second.slot}
    found = next(row for row in batch.rows if row.slot == first.slot)
    assert (found.position, found.q_len, found.is_decode, found.samples) == (41, 1, False, True)
    assert [e.slot for e in (*batch.swaps_out, *batch.swaps_in)] == [first.slot] * 2
    assert batch.swaps_out[0].count == 3 and batch.frees == (first.slot,)
    assert scheduler.memory.host_pools[0].num_used == 0


def test_who_ends_in_host_memory_gives_it_back() -> None:
    scheduler = make(20, overcommit=True, num_swap_blocks=8)
    first, second, third = running(scheduler, 40, 20, 50)
    preempt(scheduler, first, second)
    host = scheduler.memory.host_pools[0]
    assert host.num_used == 5
    assert scheduler.cancel(first.slot) == (first.slot,)
    assert host.num_used == 2
    preempt(scheduler, third)  # to the very blocks
    batch = scheduler.schedule(2.0).batch
    assert batch is not None
    counts = Counter({state.slot: 0 for state in (second, third)})
    for extent in batch.swaps_out:
        counts[extent.slot] += extent.count
    assert counts == {second.slot: 2, third.slot: 4}
    assert set(batch.frees) == {first.slot, second.slot, third.slot}


def test_host_blocks_are_given_back_behind_the_batch_that_reads_them() -> None:
    scheduler = make(20, overcommit=True, num_swap_blocks=8)
    first, second = running(scheduler, 40, 20)
    preempt(scheduler, first)
    _, host = scheduler.memory.swap_in(first.slot, first.request.num_kv_tokens)
    scheduler.memory.forget_swapped(first.slot)  # which is not in the host's pool any more
    scheduler.memory.swaps_out.clear()
    scheduler.memory.swap_out(second.slot)
    out = list(scheduler.memory.swaps_out)
    blocks = [{block for e in extents for block in range(e.first, e.first + e.count)} for extents in (host, out)]
    assert not blocks[0] & blocks[1]
    scheduler.memory.batch_sent()
    assert scheduler.memory.host_pools[0].num_used == 2


def test_a_step_takes_as_long_as_the_longer_of_compute_and_moves() -> None:
    found: set[bool] = set()

    class Timed(Kept):
        def on_schedule(self, batch: Batch | None) -> None:
            super().on_schedule(batch)
            if batch is None or not batch.moves:
                return
            scheduler, predictor = self.scheduler, self.scheduler.predictor
            assert predictor is not None and self.decision.prediction is not None
            computed_s = predictor.tick(*parts_of(batch, scheduler.memory, 0)).seconds
            moved_s = batch.num_moved_blocks(0) * scheduler.config.swap_block_s
            longer_s = max(computed_s, moved_s)
            assert self.decision.prediction.seconds == pytest.approx(longer_s)
            assert Pipeline([predictor]).send(batch, scheduler.memory, 0.0).busy_s == pytest.approx(longer_s)
            found.add(moved_s > computed_s)

    load = [Job(i / 100, 200, 64) for i in range(3)]
    for swap_block_s in (1e-6, 4e-3):
        Timed(make(40, overcommit=True, num_swap_blocks=40, swap_block_s=swap_block_s), load, lambda batch: 0.1).run()
    assert found == {True, False}


def test_batches_that_move_teach_the_predictor_nothing() -> None:
    scheduler = make(8, overcommit=True, num_swap_blocks=8)
    predictor = scheduler.predictor
    assert predictor is not None
    drive = Kept(scheduler, DECODES, lambda batch: 5.0 if batch.moves else 0.02)
    drive.run()
    assert drive.num_swapped
    taught = sum(not batch.moves for batch in drive.kept)
    assert predictor.correction.num_seen == taught < len(drive.kept)
