"""Who gives way when KV memory is short: overcommit and priority classes, on a virtual clock; who is swapped to host
memory instead of computed again, what its batches say, and what that costs."""

from collections import Counter
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, strategies as st

from medha.batch import Batch
from medha.config import SchedulerConfig
from medha.cost.prefill_time import PrefillTimes
from medha.engine.prefix import PrefixIds
from medha.params import SLO
from medha.sched.batch_builder import BatchBuilder
from medha.sched.decision import SchedulerRequest
from medha.sched.memory import KVMemory, parts_of
from medha.sched.packer import MedhaPacker
from medha.sched.preempt import Preemption, fewest
from medha.sched.queue import Queue, State
from medha.sched.scheduler import Scheduler
from medha.sim.pipeline import Pipeline
from tests.sched.virtual import BLOCK, Drive, Job, add, by_tokens, finish, new_scheduler, next_batch, step


def make(num_blocks: int, **options: Any) -> Scheduler:
    options = {"min_chunk": 8, "max_batch_tokens": 64, "max_prompt_tokens": 2000} | options
    return new_scheduler(num_blocks=num_blocks, **options)


def play(scheduler: Scheduler, load: Sequence[Job]) -> Drive:
    return Drive(scheduler, load, lambda batch: 0.1).run()


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 60))
def test_the_fewest_that_give_way(blocks: list[int], needed: int) -> None:
    """As one more is tried after the other; many that are too few are told at once."""
    states = [cast(State, SimpleNamespace(slot=slot)) for slot in range(len(blocks))]
    asked = []

    def fits(gone: Collection[int]) -> bool:
        asked.append(set(gone))
        return sum(blocks[slot] for slot in gone) >= needed

    found, wanted = fewest(states, fits), set(range(next((n for n in range(13) if sum(blocks[:n]) >= needed), 13)))
    assert len(asked) <= 1 + 4 + len(blocks)
    if sum(blocks) < needed:
        assert found is None and len(asked) == 1
        return
    for slot in sorted(wanted)[:-1]:
        if sum(blocks[other] for other in wanted - {slot}) >= needed:
            wanted.remove(slot)
    assert found is not None and {state.slot for state in found} == wanted


def test_prefills_give_way_before_decodes_and_whoever_loses_least_first() -> None:
    predictor = by_tokens()
    times = PrefillTimes(predictor, lambda num_cached: 64, max_tokens=1000)
    queue = Queue(SchedulerConfig(), lambda num_prompt: times)
    memory = KVMemory(SchedulerConfig(), num_blocks=100, block_size=BLOCK)
    scheduled = {0: 90, 1: 10, 2: 70, 3: 30, 4: 50, 5: 20}
    for slot, num_tokens in scheduled.items():
        state = queue.add(SchedulerRequest(slot, 10 if slot == 1 else 100, 5, float(slot), priority=slot % 3), 1.0)
        queue.start(state)
        memory.start(slot, 0, 105)
        state.num_scheduled_tokens = num_tokens
    queue.running[5].num_in_flight = 1
    four = queue.running[4]

    def slots(states: list[State]) -> list[int]:
        return [state.slot for state in states]

    preemption = Preemption(queue, memory, predictor)
    assert slots(preemption.by_loss(four)) == [3, 2, 1], "not the oldest, nor one in flight"
    preemption.by_class = True
    assert slots(preemption.by_loss(four)) == [2, 1], "nor one of a higher class"
    assert slots(preemption.of_lower_class(queue.running[0].request.priority)) == [5, 2, 4], (
        "in flight or not, but not what is kept"
    )
    assert slots(preemption.of_lower_class(four.request.priority)) == [5, 2]


ASYNC = {"async_scheduling": True}
AHEAD = [{}, {"depth": 2}, {"depth": 3}, ASYNC, {**ASYNC, "depth": 3}, {**ASYNC, "num_swap_blocks": 50}]
"""How far batches are made ahead: with async scheduling some token of a decode is always in flight."""


@pytest.mark.parametrize("ahead", AHEAD)
def test_a_class_makes_the_lower_ones_give_way_decodes_too(ahead: dict[str, Any]) -> None:
    load = [Job(0.0, 16, 60, priority=3), Job(0.0, 16, 60, priority=1), Job(3.0, 48, 2, priority=0)]
    patient = play(make(10, policy="lars", **ahead), load)
    classes = play(make(10, policy="priority", **ahead), load)
    assert patient.gave_way == []
    assert classes.gave_way == [0], "the lowest class, once, and nobody else"
    assert classes.first_token_s[2] < (4.0 if ahead else 3.5) < patient.first_token_s[2]  # what is in flight ends first


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("num_high", [10, 20])
def test_nobody_gives_way_more_often_than_requests_of_higher_classes_come(num_high: int, ahead: dict[str, Any]) -> None:
    high = [Job(1.0 + i / 2, 48, 2, priority=i % 2) for i in range(num_high)]
    low = [Job(0.0, 16, 60, priority=3) for _ in range(2)]
    drive = play(make(10, policy="priority", **ahead), [*high, *low])
    counts = Counter(drive.gave_way)
    assert counts.keys() <= {num_high, num_high + 1} and 0 < max(counts.values()) <= num_high
    assert all(drive.first_token_s[job] < high[job].arrival_s + 2.0 for job in range(num_high))


@pytest.mark.parametrize("tpot_s", [0.0454, 0.0463, 0.0472])
def test_a_wide_decode_of_a_lower_class_does_not_take_the_place_of_a_higher_one(tpot_s: float) -> None:
    """Then it was left out, and both waited for ever: no batch has time for both."""
    scheduler = new_scheduler(num_blocks=200, num_groups=2, depth=2, max_kv_per_group=1600, quantum_s=0.25)
    jobs = [Job(0.0, 100, 40, slo=SLO(tpot_s=tpot_s), priority=0), Job(0.0, 3000, 40, priority=1)]
    assert len(Drive(scheduler, jobs, lambda batch: 0.0).run().token_s[0]) == 40


def test_nobody_gives_way_in_vain() -> None:
    """If all of the lower classes would not be enough, none gives way; nor for one of its own class."""
    load = [Job(0.0, 100, 60, priority=0), Job(0.5, 16, 20, priority=3), Job(1.0, 100, 2, priority=0)]
    assert play(make(12, policy="priority"), load).gave_way == []


def test_a_wide_decode_without_a_block_takes_no_turn_of_the_oldest_that_has_it() -> None:
    """The second request fills group 1, the third one lies on group 0 and is to grow into group 1."""
    load = [Job(0.0, 40), Job(0.0, 60, 21), Job(0.05, 70, 40)]
    options = {"scheduler": "sarathi", "overcommit": True, "depth": 4, "async_scheduling": True}
    drive = play(make(5, num_groups=2, max_kv_per_group=5 * BLOCK, **options), load)
    assert len(drive.first_token_s) == 3  # and none was stuck


@pytest.mark.parametrize("ahead", AHEAD)
def test_a_class_takes_a_place_among_the_running(ahead: dict[str, Any]) -> None:
    load = [Job(0.0, 16, 60, priority=2), Job(0.0, 16, 60, priority=2), Job(1.0, 16, 2, priority=1)]
    assert play(make(100, policy="lars", max_num_seqs=2, **ahead), load).gave_way == []
    drive = play(make(100, policy="priority", max_num_seqs=2, **ahead), load)
    assert len(drive.gave_way) == 1
    assert drive.first_token_s[2] < 2.0


def test_what_others_hold_as_well_is_not_lost() -> None:
    scheduler = make(60, scheduler="sarathi", chunk_size=64)
    ids = PrefixIds(16, key=b"of tests").of(np.arange(320, dtype=np.int32))
    for slot in range(2):
        add(scheduler, slot, 320 - 50 * slot, 40, 0.0, prefix=ids[: len(ids) - 48 * slot])
        while slot not in scheduler._queue.decoding:
            finish(scheduler, next_batch(scheduler), 0.0, 0.1)
    first, second = scheduler._queue.running.values()
    assert second.num_cached == 256
    scheduler.memory.note(0, first.num_computed_tokens)
    left_s, preemption = scheduler._queue.left_s, scheduler._preemption
    for state in (first, second):  # each would lose what lies behind the 16 blocks that both hold
        assert preemption.loss(state) == (pytest.approx(left_s(256, state.num_computed_tokens)), False)
    scheduler.cancel(1)
    assert preemption.loss(first)[0] == pytest.approx(left_s(0, first.num_computed_tokens))


def run(scheduler: Scheduler, count: int = 1) -> list[int]:
    """Run so many batches, none of whose tokens ends a request; who gave way."""
    gone = []
    for _ in range(count):
        decision = scheduler.schedule(0.0)
        gone += [preempted.slot for preempted in decision.preempted]
        if (batch := decision.batch) is not None:
            finish(scheduler, batch, 0.0, 0.1)
    return gone


@pytest.mark.parametrize(("num_blocks", "max_new", "low", "gone"), [(95, 240, (280, 40), [1]), (94, 510, (16, 16), [])])
def test_a_class_needs_no_room_for_what_it_shares(
    num_blocks: int, max_new: int, low: tuple[int, int], gone: list[int]
) -> None:
    """One of the highest class decodes behind 60 blocks, as one of the lowest does; then one of the highest comes that
    shares those 60 and needs 11 more, where all that are free are set aside. The 20 blocks of the lowest class are
    enough; where it has 2, the other is queued as before, by what it has to compute itself."""
    scheduler = make(num_blocks, policy="priority", max_batch_tokens=512)
    ids = PrefixIds(16, key=b"of tests").of(np.arange(1120, dtype=np.int32))
    add(scheduler, 0, 961, max_new, priority=0, prefix=ids[: 60 * 16])
    add(scheduler, 1, *low, priority=3)
    run(scheduler, 5)
    queue = scheduler._queue
    assert set(queue.decoding) == {0, 1}
    add(scheduler, 2, 1120, 17, priority=0, prefix=ids)
    assert run(scheduler, 3) == gone
    assert (queue.running if gone else queue.waiting)[2].num_cached == 960


def test_nobody_gives_way_to_one_that_may_not_start() -> None:
    """The second has given way to a long prompt of the highest class, and may not come back before that is read."""
    scheduler = make(500, policy="priority", max_num_seqs=2, max_batch_tokens=64)
    add(scheduler, 0, 16, 400, priority=1)
    add(scheduler, 1, 16, 400, priority=1)
    run(scheduler, 2)
    add(scheduler, 2, 2000, 2, priority=0)
    (gone,) = run(scheduler, 2)
    scheduler.cancel(1 - gone)
    add(scheduler, 3, 16, 400, priority=3)
    for _ in range(20):  # until time is spared for a batch without the long one
        assert scheduler.num_running == 2 or run(scheduler) == []
    assert set(scheduler._queue.running) == {2, 3}
    assert run(scheduler, 5) == []
    add(scheduler, 4, 16, 400, priority=1)  # as high as who waits, and has not given way
    assert run(scheduler, 2) == [3]
    assert set(scheduler._queue.running) == {2, 4}


def test_one_that_has_just_given_way_has_no_room_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of the highest class and a started prefill were refused; the second gives way to the first, and may not
    start before it."""
    scheduler = make(100, policy="priority", max_batch_tokens=64)
    add(scheduler, 2, 16, 40, priority=3)
    run(scheduler)
    add(scheduler, 1, 600, 2, priority=1)
    queue, packer, preemption, asked = scheduler._queue, scheduler.packer, scheduler._preemption, list[int]()
    assert isinstance(packer, MedhaPacker)
    packer._spare_s = 0.0
    run(scheduler, 2)
    assert queue.running[1].prefilling and 2 in queue.decoding
    add(scheduler, 0, 600, 2, priority=0)
    builder = BatchBuilder(scheduler.config, preemption, batch_id=9, now_s=0.0, is_idle=True)

    def make_room(state: State, _: list[State]) -> bool:
        asked.append(state.slot)
        preemption.preempt([queue.running[1]], 0.0)
        return True

    monkeypatch.setattr(builder, "make_room", make_room)
    packer._refused = [0, 1]
    assert [state.slot for state in packer._make_room(queue, builder)] == asked == [0]


def test_one_looks_for_room_while_those_who_give_way_are_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    make_room, left_out = BatchBuilder.make_room, list[tuple[int, int]]()

    def looked(self: BatchBuilder, *args: Any) -> bool:
        before, made = len(self.left_out), make_room(self, *args)
        left_out.append((before, len(self.left_out)))
        return made

    monkeypatch.setattr(BatchBuilder, "make_room", looked)
    load = [*[Job(0.0, 16, 60, priority=3)] * 2, *[Job(3.0, 48, 2, priority=0)] * 8]
    assert play(make(10, policy="priority", **ASYNC), load).gave_way
    assert any(after for _, after in left_out) and not any(before for before, _ in left_out)


def test_a_class_that_asked_for_room_is_not_forgotten() -> None:
    """Every second batch is one without long prefills: also that which leaves a decode out so that it can give way."""
    scheduler = make(87, policy="priority", depth=2, async_scheduling=True, max_batch_tokens=64)
    packer = scheduler.packer
    assert isinstance(packer, MedhaPacker)
    add(scheduler, 0, 16, 1000, priority=3)
    add(scheduler, 1, 64, 300, priority=1)
    run(scheduler, 3)
    assert set(scheduler._queue.decoding) == {0, 1}
    in_flight, gone = [scheduler.schedule(0.0).batch], list[int]()
    add(scheduler, 2, 1000, 2, priority=0)
    for at in range(8):
        packer._spare_s = at % 2 * packer._most_spare_s
        decision = scheduler.schedule(0.0)
        gone += [preempted.slot for preempted in decision.preempted]
        in_flight.append(decision.batch)
        if (batch := in_flight.pop(0)) is not None:
            finish(scheduler, batch, 0.0, 0.1)
    assert gone == [0]


def test_room_made_for_one_is_not_counted_for_the_next() -> None:
    scheduler = new_scheduler(num_blocks=20)
    for slot in (0, 1):
        add(scheduler, slot, 16, 145, 0.0, priority=3)  # ten blocks each
    step(scheduler)
    for slot, new, priority in ((2, 145, 0), (3, 225, 1), (4, 97, 3)):  # ten, fifteen, seven
        add(scheduler, slot, 16, new, 1.0, priority=priority)
    step(scheduler, 1.3)
    assert {row.slot for row in step(scheduler, 1.4).rows} == {1, 2}


# -- swapping -----------------------------------------------------------------------------------------------------

DECODES = [Job(0.0, 16, 64), Job(0.01, 16, 64), Job(0.02, 16, 64)]
"""They grow until nothing of eight blocks is free."""


SWAPS: dict[str, Any] = {"overcommit": True, "num_swap_blocks": 8}


def test_decodes_that_fill_the_pool_give_way_and_what_is_swapped_is_not_computed_again() -> None:
    """D8: three decodes grow until nothing is free; reservations would have let one run at a time."""
    options = ({}, SWAPS, {"overcommit": True})
    with_reservations, swapped, recomputed = (play(make(8, **some), DECODES) for some in options)
    assert with_reservations.gave_way == []
    for drive in (swapped, recomputed):
        assert drive.gave_way and 0 not in drive.gave_way
        assert drive.num_decodes == len(drive.gave_way)
        assert drive.first_token_s[2] < with_reservations.first_token_s[2]
    assert swapped.num_swapped == len(swapped.gave_way) > 0 == recomputed.num_swapped
    assert swapped.num_computed == sum(job.num_kv_tokens for job in DECODES) < recomputed.num_computed
    ways = ("swaps_out", "swaps_in")
    moved = [sum(extent.count for batch in swapped.batches for extent in getattr(batch, way)) for way in ways]
    assert moved[0] == moved[1] > 0


@pytest.mark.parametrize(
    ("options", "is_swap"),
    [({"swap_block_s": 0.0}, True), ({"swap_block_s": 10.0}, False), ({"num_swap_blocks": 1}, False)],
)
def test_the_cheaper_way_that_fits_the_host_is_taken(options: dict[str, Any], is_swap: bool) -> None:
    drive = play(make(8, **SWAPS | options), DECODES)
    assert drive.gave_way and drive.num_swapped == is_swap * len(drive.gave_way)


def test_who_lies_on_several_groups_is_computed_again_and_others_come_back_to_theirs() -> None:
    """That a request comes back to its group is checked by every drive."""
    grown = [Job(0.0, 16, 60), Job(0.01, 90, 40), Job(0.02, 90, 40)]
    options: dict[str, Any] = {"num_groups": 2, "overcommit": True, "num_swap_blocks": 50}
    drive = play(make(8, max_kv_per_group=5 * BLOCK, **options), grown)
    shared = {row.slot for batch in drive.batches for row in batch.rows if row.is_shared}
    assert shared and len(drive.gave_way) > drive.num_swapped
    many = [*DECODES, *(Job(0.03 + i / 100, 16, 64) for i in range(5))]
    swapped = play(make(8, **options), many)
    assert swapped.num_swapped == len(swapped.gave_way) > 0
    assert {extent.group for batch in swapped.batches for extent in batch.swaps_in} == {0, 1}


def test_a_step_takes_as_long_as_the_longer_of_compute_and_moves() -> None:
    found: set[bool] = set()

    class Timed(Drive):
        def on_schedule(self, batch: Batch | None) -> None:
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
        scheduler = make(40, overcommit=True, num_swap_blocks=40, swap_block_s=swap_block_s)
        Timed(scheduler, load, lambda batch: 0.1).run()
    assert found == {True, False}


def test_batches_that_move_teach_the_predictor_nothing() -> None:
    scheduler = make(8, **SWAPS, swap_block_s=1e-3)
    predictor = scheduler.predictor
    assert predictor is not None
    drive = Drive(scheduler, DECODES, lambda batch: 5.0 if batch.moves else 0.02).run()
    assert drive.num_swapped
    taught = sum(not batch.moves for batch in drive.batches)
    assert sum(count for _, count in predictor.learned.values()) == taught < len(drive.batches)
