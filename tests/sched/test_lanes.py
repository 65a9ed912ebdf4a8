"""The packer of CDSP: tasks on lanes, queue times that follow what happens, memory, cancels, who is planned first."""

import heapq
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medha.batch import PIECES, Batch
from medha.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from medha.cost.chunk_times import ChunkTimes
from medha.cost.improvement import LoadWindow, RateTable, read_rates
from medha.errors import ConfigError
from medha.params import SLO
from medha.sched.cdsp import Planner
from medha.sched.decision import SchedulerRequest
from medha.sched.scheduler import Scheduler, complete_config
from medha.workload.trace import Trace
from tests.sched.virtual import gpu_predictor
from tools.best_rates import best_rate, played_ttft_s

BLOCK = 256
TIMES = ChunkTimes((1, 2, 4, 8), tuple((0.05 * n, 8e-5 / n, 2e-9 / n, 1e-9 / n, 0.0) for n in (1, 2, 4, 8)))


@dataclass
class Driver:
    """Runs batches as they come, every third for the predicted time, the next for a share of it more, the last of three
    for twice that share."""

    num_blocks: int = 4096
    slower: float = 0.0
    options: dict[str, object] = field(default_factory=dict)
    times: ChunkTimes = TIMES
    late: dict[int, float] = field(default_factory=dict)  # by slot, how many times as long its chunks take

    def __post_init__(self) -> None:
        config = SchedulerConfig("cdsp", prefix_caching=False, **self.options)  # type: ignore[arg-type]
        sizes = {"num_blocks": self.num_blocks, "block_size": BLOCK, "num_groups": 8}
        planner = Planner(self.times, 8, max_chunks=config.max_chunks, rates=0.3)
        predictor = gpu_predictor(max_tokens=1 << 18)
        self.scheduler = Scheduler(config, planner, predictor=predictor, max_prompt_tokens=1 << 18, **sizes)
        self.now_s, self.ran = 0.0, list[tuple[Batch, float, float]]()  # batch, from, to
        self.events: list[tuple[float, int, Batch, float]] = []
        self.closed: dict[int, float] = {}

    def add(self, slot: int, prompt: int, slo: SLO | None = None) -> None:
        self.scheduler.add(SchedulerRequest(slot, prompt, 1, self.now_s, slo))
        self.fill()

    def fill(self) -> None:
        while (decision := self.scheduler.schedule(self.now_s)).batch is not None:
            assert decision.prediction is not None
            self.check_shares(decision.batch)
            more = self.slower * (decision.batch.batch_id % 3)
            more += self.late.get(decision.batch.rows[0].slot, 1.0) - 1
            busy_s = decision.prediction.seconds / decision.prediction.factor * (1 + more)
            heapq.heappush(self.events, (self.now_s + busy_s, decision.batch.batch_id, decision.batch, busy_s))
            self.ran.append((decision.batch, self.now_s, self.now_s + busy_s))

    def check_shares(self, batch: Batch) -> None:
        """A share of the prompt so far, even to a piece, lies on each group of its run, and no more is new."""
        (row,), new = batch.rows, Counter[int]()
        for extent in batch.extents:
            new[extent.group] += extent.count
        share, account = row.kv_len // row.num_groups, self.scheduler.memory._accounts[row.slot]
        assert all(account.held[group - account.first] * BLOCK >= share - PIECES for group in row.groups)
        assert max(new.values(), default=0) <= -(-(share + PIECES) // BLOCK)

    def step(self) -> None:
        """Complete the batch that is done first."""
        self.now_s, _, batch, busy_s = heapq.heappop(self.events)
        results = [(row.slot, 1, True) for row in batch.rows if row.samples]
        self.closed |= dict.fromkeys(self.scheduler.complete(batch, self.now_s, results, busy_s), self.now_s)
        self.fill()

    def until(self, time_s: float) -> None:
        while self.events and self.events[0][0] <= time_s:
            self.step()
        self.now_s = time_s

    def finish(self) -> None:
        while self.events:
            self.step()
        assert not self.scheduler.num_waiting and not self.scheduler.num_running


def load(random: np.random.Generator, count: int, every_s: float) -> tuple[list[float], list[int]]:
    return np.cumsum(random.exponential(every_s, count)).tolist(), random.integers(1, 120_000, count).tolist()


def tasks_of(driver: Driver) -> list[Any]:
    """Those in flight, then the others."""
    return [*driver.scheduler.packer._running, *driver.scheduler.packer._waiting]


def finish_and_check(driver: Driver, prompts: list[int]) -> None:
    """No two batches at once on a group; each prompt whole and in order, on growing runs; nothing of memory is left."""
    driver.finish()
    until_s, done, runs = [0.0] * 8, [0] * len(prompts), dict[int, range]()
    for batch, from_s, to_s in driver.ran:
        (row,) = batch.rows
        for group in row.groups:
            assert from_s >= until_s[group] - 1e-9
            until_s[group] = to_s
        assert row.position == done[row.slot]
        done[row.slot] = row.kv_len
        before = runs.get(row.slot, row.groups)
        assert before.start >= row.groups.start and before.stop <= row.groups.stop
        runs[row.slot] = row.groups
        assert row.samples == (row.kv_len == prompts[row.slot])
    assert done == prompts
    memory = driver.scheduler.memory
    assert memory.num_used == 0 and memory._open == memory._set_aside == [0] * 8
    assert not tasks_of(driver) and not memory._accounts


@pytest.mark.parametrize("options", [{}, {"plan_order": "edf"}, {"plan_order": "srpt"}, {"max_chunks": 1}], ids=str)
@pytest.mark.parametrize("num_blocks", [4096, 70])
def test_any_load_comes_to_its_end(options: dict[str, object], num_blocks: int) -> None:
    """Also with memory for few prompts at a time, and with batches that take longer than predicted."""
    most = 0
    for seed in range(3):
        random = np.random.default_rng(seed)
        arrivals_s, prompts = load(random, 40, float(random.choice([0.05, 0.5, 2.0])))
        driver = Driver(num_blocks=num_blocks, slower=float(random.choice([0.0, 0.5, -0.3])), options=options)
        for slot, (arrival_s, prompt) in enumerate(zip(arrivals_s, prompts, strict=True)):
            driver.until(arrival_s)
            driver.add(slot, prompt)
        finish_and_check(driver, prompts)
        most = max(most, max(prompts))
    assert most > 6 * 70 * BLOCK  # one of them needs nearly all of the small memory


def test_queue_times_follow_what_happens() -> None:
    """Batches take up to twice as long as predicted at first: the queues at each arrival are those of tasks in flight,
    from when they began, and of the tasks behind them, as predicted by then."""
    arrivals_s, prompts = load(np.random.default_rng(3), 60, 0.8)
    driver, num_late = Driver(slower=0.5), 0
    for slot, (arrival_s, prompt) in enumerate(zip(arrivals_s, prompts, strict=True)):
        driver.until(arrival_s)
        driver.fill()
        factor = driver.scheduler.predictor.factor("prefill")  # type: ignore[union-attr]
        free_s = [arrival_s] * 8
        for task in tasks_of(driver):
            is_running = task in driver.scheduler.packer._running
            began_s = task.start_s if is_running else max(free_s[group] for group in task.chunk.groups)
            num_late += began_s + task.seconds * factor < arrival_s
            end_s = began_s + task.seconds * factor
            for group in task.chunk.groups:
                free_s[group] = max(end_s, 2 * arrival_s - end_s)
        ours = driver.scheduler.packer._queue_s(arrival_s, factor)
        assert ours == pytest.approx([(one - arrival_s) / factor for one in free_s], abs=1e-4)
        driver.add(slot, prompt)
    finish_and_check(driver, prompts)
    assert num_late
    assert 1.2 < driver.scheduler.predictor.factor("prefill") < 1.8  # type: ignore[union-attr]


@pytest.mark.parametrize("num_blocks", [2, 3, 10])
def test_what_is_accepted_is_planned_and_what_fills_the_pools_is_refused(num_blocks: int) -> None:
    """Shares are even to a block and a piece, for which a plan needs room as well."""
    driver = Driver(num_blocks=num_blocks)
    most = driver.scheduler.memory.max_request_tokens
    assert most == 8 * ((num_blocks - 1) * BLOCK - PIECES)
    prompts = [most, most // 8, 1, most - 1]
    for slot, prompt in enumerate(prompts):
        driver.add(slot, prompt)
    finish_and_check(driver, prompts)
    with pytest.raises(ValueError, match=f"needs {most + 1} KV tokens, at most {most} fit"):
        driver.add(9, most + 1)


def test_who_would_queue_behind_a_chunk_that_does_not_end_is_planned_anew() -> None:
    """One of eight chunks takes a hundred times what was predicted, and a prompt is planned behind it, as it was to end
    first. The others end; the prompt keeps its plan for a while, then it goes to one of their groups."""
    driver = Driver(times=ChunkTimes((1,), TIMES.coefficients[:1]), late={0: 100.0})
    prompts = [20_000, 15_000, *[21_000] * 6, 10_000, 10_000, 10_000]
    for slot in range(10):
        driver.add(slot, prompts[slot])
    late_s = TIMES.seconds(1, 0, 20_000)
    driver.until(0.9 * late_s)
    groups = {task.state.slot: task.chunk.groups for task in tasks_of(driver)}
    assert groups[8] == range(1, 2) and groups[9] == range(1)
    driver.until(1.9 * late_s)
    driver.add(10, prompts[10])
    assert sorted(driver.closed) == [1, 2, 3, 4, 5, 6, 7, 8] and driver.ran[-1][0].rows[0].slot == 10
    driver.until(2.1 * late_s)
    driver.fill()
    assert driver.ran[-1][0].rows[0].slot == 9
    finish_and_check(driver, prompts)
    assert driver.closed[9] < 3 * late_s < 99 * late_s < driver.closed[0]


def test_cancelling_at_any_time() -> None:
    for after in range(8):
        driver, random = Driver(), np.random.default_rng(after)
        prompts = random.integers(20_000, 120_000, 6).tolist()
        for slot, prompt in enumerate(prompts):
            driver.add(slot, prompt)
        for _ in range(after):
            driver.step()
        full_s = sum(driver.scheduler.packer._queue_s(driver.now_s, 1.0))
        closed = [slot for slot in (1, 3, 5) for slot in driver.scheduler.cancel(slot)]
        driver.fill()
        if closed:  # their queue time is given back
            assert sum(driver.scheduler.packer._queue_s(driver.now_s, 1.0)) < 0.9 * full_s
        for slot in closed:  # the slot is used again at once
            driver.add(slot, 30_000)
        driver.finish()
        memory = driver.scheduler.memory
        assert not tasks_of(driver) and not memory._accounts and memory._set_aside == [0] * 8


def test_slack_decides_who_is_planned_first() -> None:
    """All groups are busy; then a long request without haste and a short one in haste arrive."""
    waits_s = {}
    for plan_order in ("arrival", "lrs"):
        driver = Driver(options={"plan_order": plan_order})
        driver.add(0, 120_000)
        driver.until(0.1)
        driver.add(1, 120_000, SLO(ttft_s=1000.0))
        driver.add(2, 4_000, SLO(ttft_s=5.0))
        driver.finish()
        waits_s[plan_order] = driver.closed[2]
    assert waits_s["lrs"] < waits_s["arrival"]


# -- the improvement rate --------------------------------------------------------------------------------------

TABLE = RateTable("gpu", "model", "tp 1", "tetris-long", (0.5, 1.0, 2.0), (0.1, 0.3, 0.7), (1.0, 2.0, 3.0))


def test_the_rate_follows_the_load_of_the_last_minute() -> None:
    window = LoadWindow(TABLE)
    assert window.rate == 0.1
    rates = []
    for second in range(400):  # two requests a second for 200 s, then one every two
        for arrival_s in (second, second + 0.5) if second < 200 else (second,) * (second % 2):
            window.arrived(float(arrival_s))
        rates.append(window.rate)
    assert rates[0] == rates[10] == rates[190] == 0.7 and rates[300] == 0.1
    assert 0.3 in rates[200:300]
    window.arrived(1000.0)
    window.arrived(1000.0)
    assert window.rate == 0.1  # whom nobody has come before
    window.arrived(1000.1)
    assert window.rate == 0.7
    assert LoadWindow(0.25).rate == 0.25


def test_the_best_rate_is_the_one_with_the_least_mean() -> None:
    planner = Planner(TIMES, 8)
    arrivals_s, prompts = map(np.array, load(np.random.default_rng(5), 150, 0.4))
    trace = Trace(arrivals_s, prompts, np.ones_like(prompts))
    rate, mean_s = best_rate(planner, trace)
    means = {r: played_ttft_s(planner, trace, LoadWindow(r)).mean() for r in (0.05, 0.3, 0.5, 0.75)}
    assert mean_s <= min(means.values()) + 1e-12 and rate > 0.05
    assert best_rate(planner, replace(trace, arrival_s=1e4 * np.arange(150)))[0] == 0.05  # nobody waits


def test_a_table_is_read_and_checked(tmp_path: Path) -> None:
    (path := tmp_path / "rates.json").write_text(TABLE.to_json())
    again = read_rates(str(path), hardware="gpu", model="model", layout="tp 1")
    assert isinstance(again, RateTable) and again == TABLE and again.at(1.4) == 0.3 and again.at(100) == 0.7
    with pytest.raises(ConfigError, match=r"rates=0.99; accepted: a finite number of at least 0, at most 0.75"):
        RateTable("gpu", "model", "tp 1", "x", (1.0,), (0.99,), (1.0,))
    with pytest.raises(ConfigError, match=r"qps=\(2.0, 1.0\); accepted: ascending loads"):
        RateTable("gpu", "model", "tp 1", "x", (2.0, 1.0), (0.1, 0.1), (1.0, 1.0))


# -- what is refused -------------------------------------------------------------------------------------------


WITHOUT: dict[str, object] = {"num_swap_blocks": 5, "chunk_size": 512, "depth": 2}
WITHOUT |= dict.fromkeys(("prefix_caching", "overcommit", "async_scheduling"), True)


@pytest.mark.parametrize("name", WITHOUT)
def test_what_dealt_chunks_do_not_have_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={WITHOUT[name]!r} with scheduler='cdsp'; accepted: without it"):
        SchedulerConfig("cdsp", **{name: WITHOUT[name]})  # type: ignore[arg-type]


def test_what_is_refused_elsewhere() -> None:
    config = SchedulerConfig("cdsp")
    assert config.prefix_caching is False and config.async_scheduling is False and config.chunk_size is None
    with pytest.raises(ConfigError, match="spp=2 with scheduler='cdsp'; accepted: 1"):
        EngineConfig("model", scheduler=config, parallel=ParallelConfig(spp=2))
    for dealt, what in ((config, "scheduler='cdsp'"), (SchedulerConfig(ring=True), "ring")):
        with pytest.raises(ConfigError, match=f"swap_space=4096 with {what}; accepted: 0"):
            EngineConfig("model", scheduler=dealt, cache=CacheConfig(swap_bytes=4096))
    sizes = {"longest": 1000, "num_blocks": 10, "block_size": BLOCK}
    with pytest.raises(ConfigError, match="spp=2 with scheduler='cdsp'; accepted: 1"):
        complete_config(config, gpu_predictor(), ParallelConfig(spp=2, kvp=2), **sizes)
    scheduler = Driver(num_blocks=10).scheduler
    for wrong in (SchedulerRequest(0, 100, 2, 0.0), SchedulerRequest(0, 100, 1, 0.0, prefix=b"x" * 16)):
        with pytest.raises(ValueError, match="one new token, and no prefix ids"):
            scheduler.add(wrong)
    with pytest.raises(ConfigError, match="max_num_seqs=7 with scheduler='cdsp'; accepted: 8 at least"):
        Driver(options={"max_num_seqs": 7})
    Driver(options={"max_num_seqs": 8})
