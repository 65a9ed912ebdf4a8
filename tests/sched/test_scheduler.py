"""What all schedulers share: the rules under any load, and journals that replay; where requests begin; wrong calls."""

import io
import math
from collections import defaultdict
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings, strategies as st

from medha.config import SCHEDULERS, SchedulerConfig
from medha.engine.journal import Journal
from medha.engine.replay import replay
from medha.params import SLO
from medha.sched.decision import SchedulerRequest
from medha.sched.memory import KVMemory
from medha.sched.scheduler import Scheduler
from tests.sched.virtual import Drive, Job, by_tokens, finish, make_scheduler, new_scheduler, next_batch, step, worlds


@settings(max_examples=100, deadline=None, derandomize=True)
@given(worlds(any_scheduler=True), st.sampled_from([0.1, 1.0, 10.0, math.nan, math.inf]))
def test_any_load_ends_leaves_nothing_and_replays(world: dict[str, Any], factor: float) -> None:
    """Swaps included; with predictions that are off by a factor, or hear nonsense."""
    scheduler, file = make_scheduler(world), io.StringIO()
    told = {"busy": lambda real_s: real_s * factor, "observers": [Journal(scheduler, file)]}
    drive = Drive(scheduler, world["load"], lambda batch: 1e-3 + 1e-4 * batch.num_tokens, **told).run()
    replayed = replay(file.getvalue().splitlines())
    assert (replayed.mismatch, replayed.num_batches) == (None, len(drive.batches))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(worlds(any_scheduler=True))
def test_any_load_ends_where_requests_are_spread_as_that_pays(world: dict[str, Any]) -> None:
    """Their share of a group is that of the pool, or less if the others have less to read."""
    scheduler = make_scheduler({**world, "config": replace(world["config"], max_kv_per_group=None)})
    scheduler.memory.spread_kv = world["config"].max_kv_per_group
    Drive(scheduler, world["load"], lambda batch: 1e-3 + 1e-4 * batch.num_tokens).run()


def in_chunks(num_groups: int, num_blocks: int = 1 << 12, **options: Any) -> Scheduler:
    options = {"max_batch_tokens": 512, "chunk_size": 512, "depth": 1} | options
    return new_scheduler("sarathi", num_blocks=num_blocks, num_groups=num_groups, predictor=by_tokens(), **options)


def add(sched: Scheduler, *requests: tuple[int, int, int]) -> None:
    """Queue requests given as (slot, prompt tokens, new tokens)."""
    for request in requests:
        sched.add(SchedulerRequest(*request, arrival_s=0.0))


def started(*requests: tuple[int, int, int], **options: int) -> Scheduler:
    """A small scheduler to which requests were added, with all in flight that can be."""
    sched = in_chunks(1, 16, **{"block_size": 4, "max_batch_tokens": 16, "chunk_size": 8} | options)
    add(sched, *requests)
    while sched.schedule(0.0).batch is not None:
        pass
    return sched


def test_with_one_batch_in_flight_nothing_changes() -> None:
    load = [Job(0.1 * i, 300 + 170 * i, 4) for i in range(8)]
    found = defaultdict(list)
    for scheduler in SCHEDULERS:
        for stream in (True, False):
            config = SchedulerConfig(scheduler, max_batch_tokens=256, chunk_size=128, depth=1, stream=stream)
            drive = Drive(new_scheduler(config, num_blocks=64, block_size=64), load, lambda batch: 0.1).run()
            found[scheduler].append((drive.batches, drive.token_s))
    assert all(one == other for one, other in found.values())


# -- groups ----------------------------------------------------------------------------------------------------


def first_groups(sched: Scheduler, *lengths: int) -> dict[int, int]:
    """Where requests begin that are there at once; each ends with its first token."""
    groups: dict[int, int] = {}
    add(sched, *((slot, length, 1) for slot, length in enumerate(lengths)))
    while (batch := sched.schedule(0.0).batch) is not None:
        groups |= {row.slot: row.group for row in batch.rows if row.position == 0}
        finish(sched, batch, ended=groups)
    return groups


def test_a_request_begins_where_least_work_is_pending_at_its_first_chunk() -> None:
    """Of two long and two short ones the short go where nothing is pending; when the long are done that has changed."""
    assert list(first_groups(in_chunks(2), 5000, 100, 100, 5000).items()) == [(0, 0), (1, 1), (2, 1), (3, 1)]
    # The work of one that lies on two groups is split between them: each has less to do than the third.
    assert first_groups(in_chunks(3, max_kv_per_group=4000), 7000, 3900, 100) == {0: 0, 1: 2, 2: 1}


def test_decodes_are_spread_over_the_groups() -> None:
    """Chats that come one by one, while nothing is pending anywhere, go where the least is to be read."""
    sched, groups = in_chunks(4), []
    for slot in range(12):
        add(sched, (slot, 200 + 10 * slot, 50))
        groups += [row.group for row in step(sched).rows if row.slot == slot]
    assert [groups.count(group) for group in range(4)] == [3, 3, 3, 3]


def test_a_group_without_memory_is_passed_over() -> None:
    sched = in_chunks(2, num_blocks=8)
    add(sched, (0, 100, 2), (1, 120, 2), (2, 20, 2))
    batch = next_batch(sched)
    assert {row.slot: row.group for row in batch.rows} == {0: 0, 1: 1}  # one block is left on group 0, and none on 1
    finish(sched, batch, ended=[1])
    assert {row.slot: row.group for row in next_batch(sched).rows} == {0: 0, 2: 1}


FEW_TOKENS = {"max_batch_tokens": 512, "predictor": by_tokens()}


@pytest.mark.parametrize(
    ("num_prompt", "num_new", "options"),
    [
        (3000, 100, {}),  # no time is left
        (3000, 100, {**FEW_TOKENS, "t_target_s": 0.5}),  # nor many tokens
        (3000, 100, {"num_blocks": 210, "policy": "fcfs"}),  # no memory
        (40_000, 8000, {**FEW_TOKENS, "num_blocks": 1000}),  # where they could begin another long prompt is read
    ],
)
def test_of_those_who_find_no_room_on_any_group_few_are_tried(
    num_prompt: int, num_new: int, options: dict[str, Any]
) -> None:
    sched = new_scheduler(num_groups=4, late_share=0.0, **options)
    add(sched, *((slot, num_prompt, num_new) for slot in range(200)))
    with mock.patch.object(KVMemory, "start", autospec=True, side_effect=KVMemory.start) as bound:
        for _ in range(40):
            bound.reset_mock()
            batch = step(sched)
            assert bound.call_count <= 16 + 8 * len(batch.chunks)
    assert sched.num_waiting > 100


@pytest.mark.parametrize("num_prompt", [63, 64, 65])
def test_a_short_prompt_that_finds_no_memory_does_not_speak_for_longer_ones(num_prompt: int) -> None:
    """Where its first chunk is its last, all that it may take has to be there; the longer one ends sooner."""
    sched = new_scheduler(num_blocks=200, late_share=0.0, interactive_share=0.0)
    add(sched, (0, 1600, 100))
    while not step(sched).num_decodes:
        pass
    add(sched, (1, num_prompt, 1600), (2, 1400, 300))
    assert step(sched).rows[-1].slot == 2


def test_who_finds_no_time_in_the_guards_share_does_not_speak_for_others_behind_it() -> None:
    """One group's pool is full; the other's time for late requests is, which is less than the batch's."""
    options: dict[str, Any] = {"late_share": 0.5, "interactive_share": 0.0, "rho_max": 0.0, "quantum_s": 1.0}
    sched = new_scheduler(num_blocks=300, num_groups=2, predictor=by_tokens(), policy="priority", **options)
    add(sched, (0, 100, 4650))
    step(sched)
    sched.add(SchedulerRequest(1, 4000, 5, 5.0, SLO(0.01)))
    sched.add(SchedulerRequest(2, 200, 5, 5.1, SLO(0.01)))
    sched.add(SchedulerRequest(3, 300, 5, 10.0, SLO(60.0), priority=1))
    assert 3 in {row.slot for row in step(sched, 10.0).rows}
    assert sched.schedule(11.0).preempted == ()


# -- wrong calls -----------------------------------------------------------------------------------------------


def test_complete_out_of_order_is_refused() -> None:
    sched = started((0, 8, 1), depth=2, chunk_size=4)
    first, second = sched.in_flight
    for wrong in (second, replace(first, batch_id=7)):
        with pytest.raises(ValueError, match=rf"^batch {wrong.batch_id} completed, but the oldest of its groups is 0$"):
            sched.complete(wrong, 0.0, [], 0.0)
    assert sched.complete(first, 0.0, [], 0.0) == ()
    with pytest.raises(ValueError, match=r"^batch 0 completed, but the oldest of its groups is 1$"):
        sched.complete(first, 0.0, [], 0.0)
    assert finish(sched, second, ended=[0]) == (0,)
    with pytest.raises(ValueError, match=r"^batch 1 completed, but it is not in flight$"):
        sched.complete(second, 0.0, [], 0.0)


def test_add_with_a_slot_in_use_is_refused() -> None:
    sched = started((0, 8, 2), (1, 8, 2), max_num_seqs=1)
    for slot in (0, 1):  # running, waiting
        with pytest.raises(ValueError, match=f"^slot {slot} is in use$"):
            add(sched, (slot, 1, 1))
    sched.cancel(0)  # still in flight
    with pytest.raises(ValueError, match=r"^slot 0 is in use$"):
        add(sched, (0, 1, 1))
    sched.complete(sched.in_flight[0], 0.0, [], 0.0)
    add(sched, (0, 1, 1))


def test_a_reservation_beyond_the_pool_is_refused() -> None:
    sched = in_chunks(1, num_blocks=5, block_size=4)
    add(sched, (0, 20, 1), (1, 1, 20))  # the last token sampled is never written, so 20 tokens fill 5 blocks
    for num_prompt, num_new in ((21, 1), (20, 2), (1, 21), (10**9, 1)):
        with pytest.raises(ValueError, match=r"slot=2.*: needs \d+ KV tokens, at most 20 fit$"):
            add(sched, (2, num_prompt, num_new))
    assert sched.num_waiting == 2


def test_cancel_unknown_or_twice_does_nothing() -> None:
    sched = started(max_num_seqs=1)
    assert sched.cancel(0) == ()
    add(sched, (0, 8, 2), (1, 8, 2))
    batch = next_batch(sched)
    assert sched.cancel(1) == (1,)  # waiting
    assert sched.cancel(1) == ()
    assert sched.cancel(0) == ()  # in flight
    assert sched.cancel(0) == ()
    assert sched.complete(batch, 0.0, [], 0.0) == (0,)
    assert sched.cancel(0) == ()
    assert (sched.num_running, sched.num_waiting, sched.memory.num_used) == (0, 0, 0)
    assert sched.schedule(0.0).batch is None


def test_those_who_wait_are_not_all_tried_while_one_is_on_its_way_elsewhere() -> None:
    """Its memory comes back without a batch."""
    scheduler = new_scheduler(num_blocks=10, policy="fcfs", late_share=0.0, max_prompt_tokens=1000)
    add(scheduler, (0, 150, 1))
    batch = next_batch(scheduler)
    scheduler.keep(0)
    finish(scheduler, batch, 0.0, 0.1)
    add(scheduler, *((slot, 150, 1) for slot in range(1, 1000)))
    with mock.patch.object(scheduler._queue, "order", wraps=scheduler._queue.order) as asked:
        assert scheduler.schedule(0.0).batch is None and asked.call_count <= 2
    assert scheduler.let_go(0) == (0,)
    assert scheduler.schedule(0.0).batch is not None
