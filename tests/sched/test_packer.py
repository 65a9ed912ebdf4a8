"""The paper's scheduler over random workloads on a virtual clock."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings

from medha.batch import Batch, Row
from medha.config import SchedulerConfig
from medha.cost.predictor import Work
from medha.params import SLO
from medha.sched.packer import MedhaPacker
from medha.sched.policy import BUILT_IN
from medha.sched.scheduler import Scheduler
from tests.sched.costs import efficient_kv
from tests.sched.virtual import BLOCK, POLICIES, Drive, Job, Steps, add, make_scheduler, new_scheduler, step, worlds


class Checked(Drive):
    """A drive that checks each batch against the rules of the paper's packer, group by group."""

    def __init__(self, scheduler: Scheduler, *args: Any, **options: Any) -> None:
        super().__init__(scheduler, *args, **options)
        assert isinstance(scheduler.packer, MedhaPacker)
        self.packer, self.config = scheduler.packer, scheduler.config
        self.num_shared = 0  # batches with a chunk on several groups

    def _check_batch(self, batch: Batch) -> None:
        super()._check_batch(batch)
        prediction = self.decision.prediction
        assert prediction is not None and 0 < prediction.seconds < math.inf
        self.num_shared += any(row.is_shared and not row.is_decode for row in batch.rows)
        for group in range(self.scheduler.memory.num_groups):
            rows = [row for row in batch.rows if row.concerns(group)]
            self.check_one_long(rows)
            self.check_budget(group, rows)

    def check_one_long(self, rows: list[Row]) -> None:
        """Never two long prefills in a batch and group."""
        prompts = [self.live[row.slot].num_prefill for row in rows if not row.is_decode]
        assert sum(num_prompt >= self.config.long_threshold for num_prompt in prompts) <= 1

    def check_budget(self, group: int, rows: list[Row]) -> None:
        """The budget is kept, but for a single chunk of the least size, or for decodes alone."""
        time = self.packer._groups[group]
        works = [self.work_of(row, group) for row in rows]
        assert time.tick.seconds == pytest.approx(self.packer.predictor.predict(works))
        if time.tick.seconds <= 1.01 * time.budget_s:
            return  # what was added to a chunk was measured apart from it
        if time.tick.seconds <= time.decodes_s:
            return  # decodes alone, to which chunks add nothing
        if time.tick.seconds < max(other.tick.seconds for other in self.packer._groups):
            return  # it would be idle for as long as another group, which is held to the rule, takes
        chunks = [row for row in rows if not row.is_decode]
        assert len(chunks) == 1 and chunks[0].q_len <= self.config.min_chunk

    def work_of(self, row: Row, group: int) -> Work:
        """What a group has of a row."""
        shards = self.tables[row.slot]
        kv = (shards[group + 1].start if group + 1 in shards else row.position) - shards[group].start
        run = row.span if row.is_shared else None
        return Work(row.q_len, kv, row.is_decode, run, row.samples and (row.is_decode or group == row.group))


def noisy(scheduler: Scheduler, seed: int) -> Callable[[Batch], float]:
    """Batches take what was predicted at factor 1, times a random number."""
    draws = random.Random(seed)

    def seconds(batch: Batch) -> float:
        _, prediction = scheduler._in_flight[-1]
        assert prediction is not None
        return prediction.seconds / prediction.factor * draws.uniform(0.7, 1.4)

    return seconds


def play(world: dict[str, Any]) -> Checked:
    scheduler = make_scheduler(world)
    return Checked(scheduler, world["load"], noisy(scheduler, world["seed"])).run()


# -- any load ---------------------------------------------------------------------------------------------


IDLE = SchedulerConfig(
    policy="fcfs", max_num_seqs=2, max_batch_tokens=16, depth=1, max_kv_per_group=16, rho_max=0.0, long_threshold=300,
    late_share=0.0, t_target_s=0.02, quantum_s=0.1, min_chunk=8, chunk_granularity=1, patience_s=0.5,
)  # fmt: skip


@settings(max_examples=100, deadline=None, derandomize=True)
@given(worlds())
@example({"config": IDLE, "num_groups": 3, "num_blocks": 1, "load": [Job(0.0, 1, 1, 1), Job(0.0, 17, 1, 1)], "seed": 0})
def test_any_load_ends_within_budget_and_leaves_nothing(world: dict[str, Any]) -> None:
    """Every request that is not cancelled finishes, no block leaks, no group has two long prefills in a batch, and a
    batch beyond its budget is one that could not be smaller."""
    play(world)


@pytest.mark.parametrize("seed", range(155, 161))
def test_what_a_chunk_over_several_groups_is_given_on_top_keeps_the_budget(seed: int) -> None:
    """The guard's share first, the rest of the batch on top: on the groups before the last it attends as one chunk."""
    options: dict[str, Any] = {"max_num_seqs": 8, "depth": 2, "max_kv_per_group": 848, "t_target_s": 1.0}
    options |= {"late_share": 0.5, "patience_s": 0.5, "min_chunk": 8, "chunk_granularity": 1, "long_threshold": 1000}
    config = SchedulerConfig(policy="fcfs", overcommit=True, **options)
    load = [Job(1.5, 964, 3, 2), Job(0.8, 2499, 4, 1), Job(6.0, 932, 3, 2), Job(6.7, 2467, 4, 2)]
    assert play({"config": config, "num_groups": 3, "num_blocks": 106, "load": load, "seed": seed}).num_shared


# -- order, chunks, refusals ------------------------------------------------------------------------------


def plain(**options: Any) -> Scheduler:
    """In the order of arrival, with no time set aside."""
    options = {"policy": "fcfs", "late_share": 0.0, "rho_max": 0.0, "max_prompt_tokens": 100_000} | options
    return new_scheduler(**options)


def chunks_of(batch: Batch | None) -> list[tuple[int, int]]:
    """(slot, tokens) of its prefills."""
    return [] if batch is None else [(row.slot, row.q_len) for row in batch.chunks]


@pytest.mark.parametrize("policy", POLICIES)
def test_many_are_served_in_the_order_of_the_policy(policy: str) -> None:
    """More than are looked at in one round, as many as there are places; the order is plain Python's, ties too."""
    draws = random.Random(3)
    scheduler = plain(policy=policy, max_num_seqs=20, t_target_s=5.0)
    for slot in draws.sample(range(200), 200):
        slo, priority, arrival_s = SLO(draws.uniform(0.1, 9.0)), draws.randrange(4), -draws.choice([0.25, 0.5])
        add(scheduler, slot, draws.choice([3, 40, 60]), slo=slo, arrival_s=arrival_s, priority=priority)
    queue = scheduler._queue
    columns = queue.columns(1.0)
    name = policy.removeprefix("priority").removeprefix(":") or "srpt"
    keys = BUILT_IN[name](columns, (scheduler.depth + 1) * 5.0)
    classes = columns.priority * policy.startswith("priority")
    order = sorted(zip(classes, keys, columns.arrival_s, queue.column("slot").tolist(), strict=True))
    assert [slot for slot, _ in chunks_of(scheduler.schedule(0.0).batch)] == [slot for *_, slot in order[:20]]


def test_a_refused_request_never_blocks_those_behind_it() -> None:
    """Four causes in turn: a second long one, no memory, no place, no time; and each time the next one is served."""
    scheduler = plain(long_threshold=1000, t_target_s=0.3, rho_max=0.5)
    for slot, num_prompt in enumerate((1000, 1000, 20)):
        add(scheduler, slot, num_prompt)
    assert [slot for slot, _ in chunks_of(scheduler.schedule(0.0).batch)] == [0, 2]

    scheduler = plain(num_blocks=20)
    add(scheduler, 0, 16, 250)
    step(scheduler)
    add(scheduler, 1, 160)
    add(scheduler, 2, 16)
    decision = scheduler.schedule(0.0)
    assert (chunks_of(decision.batch), decision.refused) == ([(2, 16)], (1,))

    scheduler = plain(max_num_seqs=2, policy="srpt", chunk_size=64)
    add(scheduler, 0, 500)
    add(scheduler, 1, 400)
    step(scheduler)
    add(scheduler, 2, 10)
    assert chunks_of(scheduler.schedule(0.0).batch) == [(1, 64), (0, 64)]

    scheduler = plain(t_target_s=0.25, chunk_granularity=16, chunk_size=176)
    for slot, num_prompt in enumerate((176, 600, 20)):
        add(scheduler, slot, num_prompt)
    assert chunks_of(scheduler.schedule(0.0).batch) == [(0, 176), (2, 20)]


def test_a_place_within_its_budget_is_taken_before_one_beyond() -> None:
    """Group 0 has less to read, but a decode whose TPOT leaves no time for a chunk; group 1 reads a long one."""
    scheduler = plain(num_groups=2, max_kv_per_group=32_000, policy="srpt", interactive_share=0.0)
    add(scheduler, 0, 16, 50, slo=SLO(tpot_s=1.01 * scheduler.predictor.predict([Work(1, 16, is_decode=True)])))
    step(scheduler)
    add(scheduler, 1, 5000)
    step(scheduler)
    add(scheduler, 2, 100)
    assert [(row.slot, row.group) for row in step(scheduler).rows] == [(0, 0), (2, 1), (1, 1)]


def test_the_late_and_the_passed_over_are_guarded() -> None:
    """While a decode holds all memory; what is due at 2 s is not late at 2 s."""
    scheduler = plain(num_blocks=1, late_share=0.1, patience_s=4.0)
    add(scheduler, 0, 1, BLOCK)
    step(scheduler)
    add(scheduler, 1, 8, slo=SLO(2.0))
    add(scheduler, 2, 8, slo=SLO(100.0), arrival_s=1.0)
    for now_s, guarded in ((2.0, [False, False]), (2.5, [True, False]), (5.0, [True, True])):
        step(scheduler, now_s)
        assert scheduler._queue.column("guarded").tolist() == guarded


# -- growth for latency ----------------------------------------------------------------------------------


def test_a_request_takes_its_next_group_where_no_efficient_chunk_fits_behind_its_kv() -> None:
    """It grows before its shard is full, and an efficient chunk fits to the end."""
    predictor = new_scheduler(num_groups=2).predictor
    fits = efficient_kv(predictor, 0.2, 64)
    config = SchedulerConfig(quantum_s=0.2, rho_max=0.0, max_kv_per_group=3 * fits // 2 // BLOCK * BLOCK)
    scheduler = new_scheduler(config, num_blocks=8 * fits // BLOCK, num_groups=2, predictor=predictor)
    steps, shards = Steps(scheduler, (19 * fits // 10, 1), is_still=True), dict[int, int]()
    for batch, seconds in steps.until(0):
        (row,) = batch.rows
        shards.setdefault(row.writer, row.position)
        assert seconds <= config.quantum_s
    assert shards[1] % BLOCK == 0 and fits * 0.9 < shards[1] < fits
    assert shards[1] < config.max_kv_per_group


@pytest.mark.parametrize(("jobs", "widths"), [([(48_000, 8)], {1, 2}), ([(48_000, 8)] * 2, {1}), ([(500, 8)], {1})])
def test_a_long_request_that_is_alone_lies_evenly_on_all_groups(jobs: list[tuple[int, int]], widths: set[int]) -> None:
    """It would fit one. Where another one waits each has a group to itself, and a short one gains nothing."""
    scheduler = new_scheduler(num_blocks=64_000, num_groups=2, quantum_s=1.0)
    drive = Drive(scheduler, [Job(0.0, *sizes) for sizes in jobs], lambda batch: 0.0).run()
    rows = [row for batch in drive.batches for row in batch.rows]
    assert {row.num_groups for row in rows} == widths and scheduler.memory.num_used == 0
    if 2 in widths:
        assert next(row.position for row in rows if row.slot == 0 and row.writer) == pytest.approx(24_004, abs=2048)
