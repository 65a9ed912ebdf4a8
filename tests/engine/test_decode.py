"""Who is handed over to which decode instance, and when: schedulers alone, no model and no ranks."""

import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from medha.batch import Batch, Extent, Shared
from medha.config import SchedulerConfig
from medha.cost.chunk_times import ChunkTimes
from medha.cost.predictor import Predictor
from medha.engine.decode import DecodeInstance, HandOvers
from medha.sched.cdsp import Planner
from medha.sched.decision import SchedulerRequest
from medha.sched.scheduler import Scheduler
from medha.sim.pipeline import Pipeline
from tests.sched.costs import PLAIN
from tests.sched.test_lanes import TIMES
from tests.sched.virtual import make_predictor, new_scheduler
from tools.transfer_buffers import Play

BLOCK = 16
SLOW = Predictor(replace(PLAIN, host_s=0.15))  # a decode takes that and a little more


def scheduler(num_blocks: int, num_groups: int = 1, max_num_seqs: int = 64, *, is_async: bool = False) -> Scheduler:
    room = num_blocks * BLOCK
    options = {"max_num_seqs": max_num_seqs, "max_kv_per_group": room, "async_scheduling": is_async}
    return new_scheduler(num_blocks=num_blocks, num_groups=num_groups, **options)


def request(slot: int, num_prompt: int, max_new: int = 17) -> SchedulerRequest:
    return SchedulerRequest(slot, num_prompt, max_new, 0.0)


def hand_overs(*num_blocks: int, most: int = 2, max_num_seqs: int = 64) -> HandOvers:
    schedulers = [scheduler(size, max_num_seqs=max_num_seqs) for size in num_blocks]
    return HandOvers([DecodeInstance(1 + i, one) for i, one in enumerate(schedulers)], most)


def wait(waits: HandOvers, *requests: SchedulerRequest) -> list[tuple[int, int]]:
    """(slot, group) of those that are granted now."""
    waits.waiting.update({one.slot: one for one in requests})
    return [(request.slot, batch.shared[0].group) for request, batch in waits.grants()]


def arrive(waits: HandOvers, *slots: int, instance: int = 0, wanted: bool = True) -> DecodeInstance:
    """What comes to an instance, the first if not told, is there."""
    its = waits.instances[instance]
    for slot in slots:
        its.scheduler.arrived(its.coming.pop(slot), wanted=wanted)
    return its


def test_a_grant_says_which_blocks_take_the_kv() -> None:
    waits = hand_overs(8)
    waits.waiting[3] = request(3, 40, 30)
    ((asked, batch),) = waits.grants()
    assert asked == request(3, 40, 30)
    assert batch == Batch(0, (), (Extent(3, 0, 3, 1),), shared=(Shared(3, 1, 0, 40),))
    assert batch == Batch.from_ints(batch.to_ints())
    assert (waits.instances[0].scheduler.memory.num_used, waits.waiting) == (3, {})
    decode = arrive(waits, 3).scheduler.schedule(0.0).batch
    assert (str(decode.rows[0]), decode.batch_id, decode.num_decodes) == ("slot 3 decode [40]", 1, 1)


def test_the_instance_with_most_room_for_each_of_its_requests_is_next() -> None:
    """(free - virtual) / max(1, batch), where virtual is the whole claim of what is on its way."""
    waits = hand_overs(20, 30, most=9)
    assert wait(waits, request(0, 32)) == [(0, 2)]  # 30 > 20; then 30 - 3 = 27
    assert wait(waits, request(1, 10 * BLOCK)) == [(1, 2)]  # then 27 - 11 = 16
    assert wait(waits, request(2, 32)) == [(2, 1)]  # 20 > 16
    second = arrive(waits, 0, 1, instance=1)
    assert second.freeness == pytest.approx((30 - 12) / 2)  # what has arrived counts as what it holds
    assert waits.instances[0].freeness == pytest.approx(20 - 3)
    assert wait(waits, request(3, 32)) == [(3, 1)]


def test_there_is_no_grant_without_room_for_the_whole_claim_and_nobody_overtakes() -> None:
    waits = hand_overs(10)
    assert wait(waits, request(0, 64, 49)) == [(0, 1)]  # 7 blocks in the end, 4 now
    assert wait(waits, request(1, 33, 17), request(2, 16, 2)) == []  # 4 of the 3 that nobody claims
    instance = arrive(waits, 0)
    assert list(waits.grants()) == []
    assert instance.scheduler.cancel(0) == (0,)
    assert wait(waits) == [(1, 1), (2, 1)]


def test_an_instance_takes_over_so_many_at_once_and_runs_so_many() -> None:
    waits = hand_overs(99, most=2, max_num_seqs=3)
    assert wait(waits, *(request(slot, 16) for slot in range(5))) == [(0, 1), (1, 1)]
    arrive(waits, 0, 1)
    assert wait(waits) == [(2, 1)]


def test_one_that_ended_on_the_way_gives_its_blocks_back() -> None:
    waits = hand_overs(10)
    assert wait(waits, request(0, 64)) == [(0, 1)]
    instance = arrive(waits, 0, wanted=False)
    assert (instance.scheduler.memory.num_used, instance.scheduler.num_running) == (0, 0)
    waits.waiting[0] = request(0, 16)
    ((_, batch),) = waits.grants()
    assert batch.frees == (0,)  # whoever has the slot next comes behind


def lanes(num_blocks: int, num_groups: int) -> Scheduler:
    config = SchedulerConfig("cdsp", improvement_rate=0.1)
    planner = Planner(ChunkTimes((1, 2), TIMES.coefficients[:2]), num_groups, rates=0.1)
    sizes: dict[str, Any] = {"num_blocks": num_blocks, "block_size": BLOCK, "num_groups": num_groups}
    return Scheduler(config, planner, **sizes, predictor=make_predictor(kvp=num_groups))


@pytest.mark.parametrize("seed", range(40))
def test_everybody_ends_in_any_order_though_both_sides_are_full(seed: int) -> None:
    """Prefills, transfers and decodes end in random order, with a quarter of the usual buffers; pools hold a few
    requests each. On lanes any of the batches is done first, else the oldest."""
    draw, on_lanes = random.Random(seed), seed % 3 == 0
    prefill = lanes(12, 2) if on_lanes else scheduler(12, num_groups=2, is_async=seed % 2 == 0)
    waits = hand_overs(14, 11, most=1)
    wanted = [request(slot, draw.randint(1, 150), draw.randint(2, 40)) for slot in range(14)]
    in_flight: deque[Batch] = deque()
    decoding: dict[int, int] = {}  # by slot, tokens to come
    num_done = turn = 0
    for one in wanted:
        prefill.add(replace(one, max_new_tokens=1))
    while num_done < len(wanted):
        assert turn < 20_000, "somebody waits for ever"
        now_s = 0.01 * (turn := turn + 1)
        choice = draw.randrange(4)
        if choice == 0 and (batch := prefill.schedule(now_s).batch) is not None:
            in_flight.append(batch)
        elif choice == 1 and in_flight:
            in_flight.rotate(draw.randrange(len(in_flight)) if on_lanes else 0)
            batch = in_flight.popleft()
            drawn = [row.slot for row in batch.rows if row.samples]
            assert prefill.complete(batch, now_s, [(slot, 0, False) for slot in drawn], 0.01) == ()
            for slot in drawn:
                prefill.keep(slot)
                held = prefill.memory.held_by_group(slot, wanted[slot].num_prompt_tokens)
                assert sum(count for _, count in held) == wanted[slot].num_prompt_tokens
                waits.waiting[slot] = wanted[slot]
        elif choice == 2:
            decoding.update({one.slot: one.max_new_tokens - 1 for one, _ in waits.grants()})
            for instance in waits.instances:
                if instance.coming and draw.random() < 0.5:
                    slot = draw.choice(list(instance.coming))
                    assert prefill.let_go(slot) == (slot,)
                    instance.scheduler.arrived(instance.coming.pop(slot), wanted=True)
        elif choice == 3:
            for instance in waits.instances:
                if (batch := instance.scheduler.schedule(now_s).batch) is None:
                    continue
                assert all(row.is_decode for row in batch.rows)
                results = []
                for row in batch.rows:
                    decoding[row.slot] -= 1
                    results.append((row.slot, 1, decoding[row.slot] == 0))
                num_done += len(instance.scheduler.complete(batch, now_s, results, 0.01))
    assert [one.memory.num_used for one in (prefill, *(i.scheduler for i in waits.instances))] == [0, 0, 0]


@pytest.mark.parametrize("on_lanes", [False, True])
def test_everybody_ends_behind_a_decode_pool_that_is_full_for_a_minute(on_lanes: bool) -> None:
    """On a virtual clock: one request claims the whole pool and decodes for more than a minute. Prompts are read until
    those that wait fill the prefill groups as well; then nobody starts until it has ended."""
    num_blocks, draw = 30, random.Random(0)
    prefills = lanes(24, 2) if on_lanes else scheduler(24, num_groups=2)
    times = prefills.planner.times if prefills.planner is not None else None
    pipeline = Pipeline([make_predictor()], 2, chunk_times=times)
    play = Play((prefills, pipeline), [(scheduler(num_blocks), Pipeline([SLOW]))], 1, (1e-5, 1e-5))
    longest = request(0, 40, num_blocks * BLOCK - 39)
    others = [SchedulerRequest(slot, draw.randint(1, 150), draw.randint(2, 60), 1.0 + slot) for slot in range(1, 40)]
    play.run([longest, *others])
    freed_s = play.tokens_s[0][-1]
    assert freed_s - play.granted_s[0] > 60
    assert min(play.granted_s[one.slot] for one in others) >= freed_s
    read = [one.slot for one in others if play.tokens_s[one.slot][0] < freed_s]
    assert 2 <= len(read) < len(others)  # the rest found no memory
    assert all(len(play.tokens_s[one.slot]) == one.max_new_tokens for one in others)
