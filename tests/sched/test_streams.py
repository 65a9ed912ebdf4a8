"""Hard cases on the virtual clock: streams without end that could starve somebody, a full pool for an hour, deadlines
that have passed. Who is served before a stream ends waits no longer however long that is, as a scheduler decides by
what has come."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from medha.batch import Batch
from medha.config import SchedulerConfig
from medha.params import SLO
from medha.sched.policy import BUILT_IN
from tests.sched.virtual import BLOCK, Drive, Job, add, by_tokens, gpu_predictor, new_scheduler, next_batch, step

DEFAULT = SchedulerConfig()


def alone_s(num_tokens: int) -> float:
    """Seconds of a prefill that runs alone."""
    return Drive(new_scheduler(num_blocks=1 << 16), [Job(0.0, num_tokens)], None).run().first_token_s[0]


LONG, SHORT = DEFAULT.long_threshold, 1000


@pytest.mark.parametrize("load", [0.7, 1.0, 1.5])
def test_a_long_request_ends_within_its_bound_while_a_stream_of_short_ones_goes_on(load: float) -> None:
    """The guard's bound with the default configuration: from its deadline on at the latest its share for the late."""
    long_s, short_s = alone_s(LONG), alone_s(SHORT)
    deadline_s = DEFAULT.deadline_factor * long_s
    assert deadline_s > max(DEFAULT.patience_s, DEFAULT.deadline_floor_s)
    bound_s = deadline_s + long_s / DEFAULT.guarded_share
    stream = [Job(at_s, SHORT, 2) for at_s in np.arange(0.0, bound_s + 10.0, short_s / load).tolist()]
    drive = Drive(new_scheduler(num_blocks=1 << 16), [Job(0.0, LONG, 2), *stream], None).run()
    assert drive.first_token_s[0] < bound_s < stream[-1].arrival_s
    if load < 1:  # nobody waits much longer than the queue of the short ones alone would make it
        assert max([drive.first_token_s[i] - job.arrival_s for i, job in enumerate(stream, 1)]) < 10 * short_s


@pytest.mark.parametrize("load", [0.7, 1.5])
def test_short_requests_wait_seconds_while_a_stream_of_long_ones_goes_on(load: float) -> None:
    """Even where the long ones are more than can be served, and queue up without end."""
    long_s, short_s = alone_s(LONG), alone_s(SHORT)
    stream = [Job(i * long_s / load, LONG, 2) for i in range(8)]
    shorts = [Job(at_s, SHORT, 2) for at_s in np.linspace(1.0, stream[-1].arrival_s, 8).tolist()]
    drive = Drive(new_scheduler(num_blocks=1 << 16), stream + shorts, None).run()
    waits_s = [drive.first_token_s[i] - job.arrival_s for i, job in enumerate(shorts, len(stream))]
    deadline_s = max(DEFAULT.deadline_floor_s, DEFAULT.deadline_factor * short_s)
    assert max(waits_s) < deadline_s < long_s


@pytest.mark.parametrize("first_s", [0.0, 0.3, 0.7])
def test_a_decode_over_two_groups_beside_one_on_each(first_s: float) -> None:
    """The neighbours come round in turns, so that in no batch both groups are free of them."""
    scheduler = new_scheduler(num_blocks=200, num_groups=2, max_batch_tokens=512, depth=2, max_kv_per_group=1024)
    jobs = [Job(0.0, 700, 300), Job(first_s, 700, 300), Job(0.0, 1500, 100)]
    gaps = {job: np.diff(times) for job, times in Drive(scheduler, jobs, None).run().token_s.items()}
    assert gaps[2].max() <= 3 * gaps[2].min()


def test_a_decision_while_nothing_can_enter() -> None:
    """One request holds the pool and is in flight: only the first of the order are looked at."""
    scheduler = new_scheduler(num_blocks=100, max_batch_tokens=512, depth=2)
    add(scheduler, 0, 1000, 600, 0.0)
    now_s = 0.0
    while 0 not in scheduler._queue.decoding:
        now_s += 0.1
        step(scheduler, now_s, 0.1)
    assert next_batch(scheduler, now_s).num_decodes
    for slot in range(1, 4001):
        add(scheduler, slot, 1000, 100, now_s)
    asked = []
    scheduler.memory.can_take = lambda *args, **options: asked.append(args) and False  # type: ignore[method-assign]
    assert scheduler.schedule(now_s).batch is None and len(asked) < 1000


OVER = {"overcommit": True}
SWAP = {**OVER, "num_swap_blocks": 300, "swap_block_s": 1e-4}


@pytest.mark.parametrize(("num_new", "options"), [(30, {}), (30, OVER), (80, OVER), (30, SWAP)])
def test_a_long_prompt_in_a_pool_full_of_chats(num_new: int, options: dict[str, Any]) -> None:
    """Once it is guarded what comes free is kept for it: 2,900 of 3,200 tokens, while chats come."""
    scheduler = new_scheduler(num_blocks=200, max_batch_tokens=512, depth=1, **options)
    chats = [Job(at_s, 230 - num_new, num_new) for at_s in np.arange(0.0, 35.0, 0.25).tolist()]
    assert Drive(scheduler, [Job(1.0, 2900, 4), *chats], None).run().first_token_s[0] < 35.0


def test_long_prompts_that_do_not_fit_together_beside_chats() -> None:
    """They end one after the other: half read, two would hold what none of them can end with."""
    random = np.random.default_rng(1)
    at_s, documents_s = np.cumsum(random.exponential(1 / 6, 300)), 2.0 + np.cumsum(random.exponential(4.5, 8))
    jobs = [Job(at, int(random.integers(100, 2000)), int(random.integers(50, 400))) for at in at_s.tolist()]
    jobs += [Job(at, int(random.integers(50_000, 66_000)), 100) for at in documents_s.tolist()]
    scheduler = new_scheduler(num_blocks=320, block_size=256, predictor=gpu_predictor("h100-80g"))
    first_s = Drive(scheduler, jobs, None).run().first_token_s
    waits = [first_s[index] - job.arrival_s for index, job in enumerate(jobs)]
    assert max(waits[:300]) < 4.0 and np.median(waits[300:]) < 15.0


def test_a_long_prompt_beside_less_long_ones_in_a_small_pool() -> None:
    """They leave each other memory by what is left of them, but do not begin before one that has waited for long."""
    scheduler = new_scheduler(num_blocks=300, block_size=256, predictor=gpu_predictor(max_tokens=2048))
    others = [Job(float(at_s), 9000, 100) for at_s in range(80)]
    assert Drive(scheduler, [Job(1.0, 66_000, 4), *others], None).run().first_token_s[0] < 80.0


def test_who_can_end_is_not_held_back_for_one_that_cannot() -> None:
    """The second lacks less of its prompt than the third, but cannot have what its answer may take."""
    sizes, options = {"num_blocks": 34, "block_size": 64, "max_batch_tokens": 50}, {"min_chunk": 8, "depth": 3}
    more: dict[str, Any] = {"policy": "lars", "late_share": 0.1, "long_threshold": 300, "patience_s": 0.5}
    scheduler = new_scheduler(quantum_s=0.25, rho_max=0.0, **sizes, **options, **more)
    jobs = [Job(0.776, 588, 5), Job(0.0018, 1688, 300), Job(0.0085, 1728), Job(1.009, 2159)]
    assert len(Drive(scheduler, jobs, lambda batch: 0.01 + 0.001 * batch.num_tokens).run().first_token_s) == 4


def test_a_context_so_deep_that_the_share_holds_no_chunk() -> None:
    """Its least chunk takes longer than a batch; more short prompts than can be served come when most of it is read."""
    begin_s, num_tokens = 20.0, 220_000

    def first_token_s(stream_s: float) -> float:
        scheduler = new_scheduler(block_size=256, num_blocks=4000, predictor=gpu_predictor("h100-80g"))
        shorts = [Job(at_s, 3000, 2) for at_s in np.arange(begin_s, begin_s + stream_s, 0.05).tolist()]
        return Drive(scheduler, [Job(0.0, num_tokens, 2), *shorts], None).run().first_token_s[0]

    config = new_scheduler(predictor=gpu_predictor("h100-80g")).config
    left_s = first_token_s(0.0) - begin_s
    bound_s = begin_s + config.patience_s + (1 + config.spare_share) * left_s / config.guarded_share + 1.0
    assert left_s > 2.0
    assert first_token_s(60.0) < bound_s < begin_s + 60.0


def test_a_guarded_prompt_beside_prompts_that_fill_every_batch() -> None:
    """It ends within (its work left) / share on a machine that is slower by the share of short ones, as its share waits
    for efficient chunks: the smallest one takes most of a batch's time on a GPU."""
    scheduler = new_scheduler(predictor=gpu_predictor(), num_blocks=20_000, max_prompt_tokens=20_000)
    work_s, short_s = (scheduler._queue.times(length).total_s(length) for length in (20_000, 3_000))
    config, at_s = scheduler.config, np.arange(0.0, 22.0 * work_s, short_s / 1.5)
    jobs = [Job(0.0, 20_000), *(Job(arrival_s, 3_000) for arrival_s in at_s.tolist())]
    end_s = Drive(scheduler, jobs, None).run().first_token_s[0]
    bound_s = config.deadline_factor * work_s + work_s / config.guarded_share / (1 - config.spare_share)
    assert 0.8 * bound_s < end_s < bound_s


def test_a_guarded_prompt_behind_many_that_gave_way() -> None:
    """They came before, more than a round looks at, and do not start while prompts of the highest class come."""
    scheduler = new_scheduler(num_blocks=400, max_prompt_tokens=5000, max_batch_tokens=512)
    lows, highs = [Job(0.0, 20, 60, priority=3)] * 80, [Job(at, 5000, priority=0) for at in np.arange(1.0, 90.0, 15.0)]
    jobs = [Job(2.0, 2000), *lows, *highs, *(Job(at, 900) for at in np.arange(2.0, 90.0, 0.6))]
    assert Drive(scheduler, jobs, None).run().first_token_s[0] < 60.0


@pytest.mark.parametrize("options", [{}, {"quantum_s": 0.03}])
def test_a_guarded_prompt_gets_the_one_place_that_there_is(options: dict[str, Any]) -> None:
    """When a chat leaves it the batch has no decodes, and is longer than those in which the share was owed."""
    options = options | {"max_batch_tokens": 8192, "max_num_seqs": 1, "block_size": 256}
    scheduler = new_scheduler(num_blocks=4000, predictor=gpu_predictor(max_tokens=8192), **options)
    chats = [Job(at_s, 500, 40, slo=SLO(tpot_s=0.02)) for at_s in np.arange(0.0, 22.0, 0.2).tolist()]
    assert Drive(scheduler, [Job(1.0, 40_000, 1), *chats], None).run().first_token_s[0] < 21.0


def test_one_impossible_cadence_holds_up_nobody() -> None:
    """Batches as short as it asks for would read no prompt at the speed of the machine."""

    def first_tokens_s(slo: SLO | None) -> dict[int, float]:
        scheduler = new_scheduler(block_size=256, predictor=gpu_predictor(tp=8))
        prompts = [Job(float(second), (500, 2000, 20_000)[second % 3], 20) for second in range(30)]
        return Drive(scheduler, [Job(0.0, 500, 3000, slo=slo), *prompts], None).run().first_token_s

    assert first_tokens_s(SLO(tpot_s=0.001)) == first_tokens_s(None) != first_tokens_s(SLO(tpot_s=0.02))


def gaps_s(high: list[Job], low: list[Job], **options: Any) -> list[np.ndarray[Any, np.dtype[np.float64]]]:
    """Seconds between the tokens of each job, where a batch takes a millisecond for each of its tokens."""
    scheduler = new_scheduler(num_blocks=1000, predictor=by_tokens(), min_chunk=8, **options)
    drive = Drive(scheduler, [*high, *low], None).run()
    return [np.diff(drive.token_s[job]) for job in range(len(drive.jobs))]


@pytest.mark.parametrize("ahead", [{}, {"async_scheduling": True}, {"depth": 2}])
def test_lower_classes_are_left_out_for_the_cadence_of_a_higher_one(ahead: dict[str, Any]) -> None:
    """Their decodes come in turns, as many as fit."""
    objective_s = 0.0121
    high = [Job(0.2, 8, 150, slo=SLO(tpot_s=objective_s), priority=0)] * 2
    low = [Job(0.0, 8, 100, priority=2)] * 30
    *of_high, of_low = (*(gaps := gaps_s(high, low, **ahead))[:2], np.concatenate(gaps[2:]))
    assert all(gap.mean() <= objective_s for gap in of_high)
    assert of_low.max() <= 5 * objective_s
    assert np.mean(gaps_s(high, [replace(job, priority=0) for job in low], **ahead)[0]) > 1.5 * objective_s


def test_where_no_lower_one_fits_each_has_the_turns_of_the_guard() -> None:
    high = [Job(0.2, 8, 200, slo=SLO(tpot_s=0.0105), priority=0)] * 10
    low = [Job(0.0, 8, 60, priority=2 + i % 2) for i in range(5)]
    gaps = gaps_s(high, low)
    assert max(gap[20:].mean() for gap in gaps[:10]) < 1.01 * 0.0105
    assert max(gap.max() for gap in gaps[10:]) < (len(low) + 1) * 10 * 0.012
    starved = gaps_s(high, low, late_share=0.0)
    assert max(gap.max() for gap in starved[10:]) > 0.8 * 200 * 0.01


def test_nobody_is_left_out_for_an_objective_that_is_broken_all_the_same() -> None:
    high = [Job(0.2, 8, 100, slo=SLO(tpot_s=0.01), priority=0)] * 12
    low = [Job(0.0, 8, 40, priority=2)] * 5
    assert max(gap.max() for gap in gaps_s(high, low)[12:]) < 0.15


@pytest.mark.parametrize("overcommit", [False, True])
def test_a_full_pool_for_an_hour_corrupts_and_stalls_nothing(overcommit: bool) -> None:
    """What every batch may take and what it may not is checked by :class:`Drive`."""
    random, num_blocks, hour_s, step_s = np.random.default_rng(9), 64, 3600.0, 2.0
    held, reserved = list[int](), list[int]()  # blocks, while requests wait

    class FullPool(Drive):
        def on_schedule(self, batch: Batch | None) -> None:
            if batch is not None and self.scheduler.num_waiting:
                held.append(self.scheduler.memory.num_used)
                requests = [self.live[row.slot].request for row in batch.rows]
                reserved.append(sum(-(-request.num_kv_tokens // BLOCK) for request in requests))

    jobs = [Job(at_s, *random.integers(20, 200, 2).tolist()) for at_s in np.arange(0.0, hour_s, 20.0 * step_s).tolist()]
    scheduler = new_scheduler(num_blocks=num_blocks, overcommit=overcommit)
    drive = FullPool(scheduler, jobs, lambda batch: step_s, busy=lambda real_s: 0.0).run()  # which teaches nothing
    assert drive.now_s > hour_s
    assert len(held) > 0.9 * hour_s / step_s  # somebody waits for memory nearly all the time
    if overcommit:
        assert np.mean(held) > 0.8 * num_blocks and max(held) == num_blocks
        assert len(drive.gave_way) > 20
    else:
        assert np.mean(reserved) > 0.85 * num_blocks  # some is kept free for who was passed over
        assert not drive.gave_way
    ends_s = np.sort(list(drive.finish_s.values()))
    assert np.diff(ends_s, prepend=0.0).max() < 300 * step_s  # the longest output, and some


@pytest.mark.parametrize("policy", BUILT_IN)
def test_requests_whose_deadline_has_passed_are_served(policy: str) -> None:
    """Late before they come, by a little and by years; beside others, no one's key is NaN and all end."""
    late = [SLO(ttft_s=1e-9), SLO(ttft_s=0.5, tpot_s=1e-9), None]
    jobs = [*(Job(-1e8, 1 + 50 * i, slo=slo) for i, slo in enumerate(late)), Job(0.0, 151, slo=SLO(ttft_s=1e9))]
    with np.errstate(divide="raise", invalid="raise"):
        Drive(new_scheduler(num_blocks=1 << 16, policy=policy), jobs, lambda batch: 0.1).run()
