"""The CDSP planner: the paper's worked examples, and the algorithms against a literal reading that prunes nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from medha.cost.chunk_times import ChunkTimes
from medha.errors import ConfigError
from medha.sched.cdsp import PIECES, Chunk, Plan, Planner

K = 1024


def through(*seconds: float) -> tuple[float, float, float, float, float]:
    """Coefficients of a size on which prompts of 16K, 32K and 128K tokens take exactly so long."""
    d, b, a = np.polyfit((16, 32, 128), seconds, 2)
    return float(a), float(b) / K, 2 * float(d) / K**2, float(d) / K**2, 0.0


EXAMPLE = ChunkTimes((8, 16), (through(0.31, 0.58, 3.96), through(0.46, 0.53, 2.31)))
"""The cells of Table 1 that section 2.4 calculates with."""


def served(planner: Planner, queue_s: list[float], prompts: list[int], rate: float) -> list[Plan]:
    """Plans of prompts that arrive together."""
    plans = []
    for prompt in prompts:
        plans.append(planner.plan(prompt, queue_s, rate))
        planner.occupy(queue_s, plans[-1].chunks)
    return plans


def test_section_2_4_greedy_expansion() -> None:
    planner = Planner(EXAMPLE, 16, max_chunks=1)
    greedy = served(planner, [1.0] * 16, [32 * K, 16 * K], 0.0)
    assert [plan.ttft_s for plan in greedy] == pytest.approx([1.53, 1.84])
    assert [plan.chunks[0].size for plan in greedy] == [16, 8]
    regulated = served(planner, [1.0] * 16, [32 * K, 16 * K], 0.1)
    assert [plan.ttft_s for plan in regulated] == pytest.approx([1.58, 1.31])
    assert [plan.chunks[0] for plan in regulated] == [Chunk(32 * K, 0, 8), Chunk(16 * K, 8, 8)]


def test_section_2_4_request_level_allocation() -> None:
    planner, queue_s = Planner(EXAMPLE, 16, max_chunks=1), [0.0] * 16
    planner.occupy(queue_s, planner.plan(16 * K, queue_s, 0.0).chunks)
    assert queue_s == pytest.approx([0.31] * 8 + [0.0] * 8)
    wide = planner.plan(128 * K, queue_s, 0.0)
    assert wide.chunks == (Chunk(128 * K, 0, 16),)  # eight instances are idle for 0.31 s
    assert wide.ttft_s == pytest.approx(0.31 + 2.31)
    narrow = Planner(ChunkTimes((8,), EXAMPLE.coefficients[:1]), 16).plan(128 * K, queue_s, 0.0)
    assert narrow.ttft_s - wide.ttft_s == pytest.approx(1.34)
    filled = Planner(EXAMPLE, 16).plan(128 * K, queue_s, 0.0)
    assert filled.chunks[0] == Chunk(pytest.approx(16 * K, abs=1), 8, 8)  # type: ignore[arg-type]
    assert filled.chunks[1].size == 16 and filled.ttft_s < wide.ttft_s < narrow.ttft_s


# -- a literal reading: every plan, each with queues of its own ------------------------------------------------


@dataclass
class Literal:
    """Algorithms 1 to 3 with the queues of Eq. 2 as lists, without pruning, table or memo."""

    times: ChunkTimes
    queue_s: list[float]  # at arrival, by which runs are chosen
    rate: float

    def runs(self, size: int) -> list[range]:
        node, count = self.times.groups_per_node, len(self.queue_s)
        whole = [range(first, first + size) for first in range(count - size + 1)]
        if len(self.times.sizes) == 1:
            whole = [run for run in whole if run.start % size == 0]
        if size > node:
            return [run for run in whole if run.start % node == 0]
        return [run for run in whole if len({group // node for group in run}) == 1]

    def extend(self, held: range, size: int) -> range | None:
        runs = [run for run in self.runs(size) if not len(held) or (held[0] in run and held[-1] in run)]
        return min(runs, key=lambda run: (max(self.queue_s[g] for g in run), run.start), default=None)

    def single(self, left: int, done: int, held: range, sizes: list[int], now: list[float]) -> tuple[float, range]:
        best: tuple[float, range] | None = None
        for size in sizes:
            run = self.extend(held, size)
            if run is None or (best is not None and left < PIECES * size):
                continue
            t = max(now[g] for g in run) + self.times.seconds(size, done, left)
            if best is None or t < (1 - self.rate) * best[0]:
                best = t, run
        assert best is not None
        return best

    def budgeted(self, size: int, done: int, budget_s: float) -> int:
        """The most tokens within a budget, by bisection."""
        low, high = 0, 1 << 22
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.times.seconds(size, done, middle) <= budget_s else (low, middle - 1)
        return low

    def plans(
        self, left: int, done: int, held: range, sizes: list[int], now: list[float]
    ) -> Iterator[tuple[float, tuple[Chunk, ...]]]:
        """Every plan of the rest of a prompt that the algorithm considers."""
        t, widest = self.single(left, done, held, sizes, now)
        yield t, (Chunk(left, widest.start, len(widest)),)
        for size in sizes:
            for larger in sizes:
                if not size < larger <= len(widest):
                    continue
                run = self.extend(held, size)
                after = None if run is None else self.extend(run, larger)
                if run is None or after is None:
                    continue
                wait_s = max(now[g] for g in run)
                n = self.budgeted(size, done, max(now[g] for g in after) - wait_s)
                if not PIECES * size <= n < left:
                    continue
                end_s = wait_s + self.times.seconds(size, done, n)
                later = [0.0 if g in run else max(0.0, queue - end_s) for g, queue in enumerate(now)]
                rest = [x for x in sizes if larger <= x <= len(widest)]
                for rest_s, chunks in self.plans(left - n, done + n, run, rest, later):
                    yield end_s + rest_s, (Chunk(n, run.start, size), *chunks)


def a_case(random: np.random.Generator) -> tuple[ChunkTimes, int, int, list[float], float]:
    """Latency model, groups, prompt, queues and improvement rate of a small case."""
    count = int(random.choice([1, 2, 4, 6, 8, 16]))
    sizes = [1 << i for i in range(5) if 1 << i <= count]
    sizes = sorted(random.choice(sizes, int(random.integers(1, len(sizes) + 1)), replace=False).tolist())
    rows = []
    for size in sizes:  # some of them get no faster with more groups, and their history is read at any price
        a, b, d, e = random.uniform((0, 2e-5, 0, 0), (0.3, 8e-5, 2e-9, 2e-7)).tolist()
        rows.append((a, b / size ** random.uniform(0, 1), d * random.uniform(1, 2.5) / size, d / size, e))
    times = ChunkTimes(tuple(sizes), tuple(rows), groups_per_node=int(random.choice([2, 4, 8])))
    queue_s = (random.uniform(0, 4, count) * (random.random(count) < 0.7)).tolist()
    return times, count, int(random.integers(1, 120_000)), queue_s, float(random.choice([0.0, 0.1, 0.3, 0.6]))


def test_the_search_finds_the_best_of_all_plans() -> None:
    random, lengths = np.random.default_rng(0), []
    for _ in range(1000):
        times, count, prompt, queue_s, rate = a_case(random)
        planner, literal = Planner(times, count), Literal(times, queue_s, rate)
        sizes = [size for size in times.sizes if literal.runs(size)]
        plans = list(literal.plans(prompt, 0, range(0), sizes, list(queue_s)))
        plan = planner.plan(prompt, queue_s, rate)
        assert plan.ttft_s == pytest.approx(min(t for t, _ in plans), rel=1e-6), (times, queue_s, prompt, rate)
        lengths.append(len(plan.chunks))
        # What any plan keeps to; and it takes what it says when it is played.
        assert sum(chunk.num_tokens for chunk in plan.chunks) == prompt
        for one, after in pairwise(plan.chunks):
            assert after.first <= one.first and one.first + one.size <= after.first + after.size
            assert one.size < after.size and one.num_tokens >= PIECES * one.size
        planner.occupy(queue_s, plan.chunks)
        assert queue_s[plan.chunks[-1].first] == pytest.approx(plan.ttft_s, rel=1e-9)
    assert min(lengths) == 1 and max(lengths) >= 3 and sum(n > 1 for n in lengths) > 100


def test_max_chunks_and_least_size() -> None:
    random = np.random.default_rng(2)
    for _ in range(100):
        times, count, prompt, queue_s, rate = a_case(random)
        free = Planner(times, count).plan(prompt, queue_s, rate)
        for most in (1, 2):
            bounded = Planner(times, count, max_chunks=most).plan(prompt, queue_s, rate)
            assert len(bounded.chunks) <= most and bounded.ttft_s >= free.ttft_s * (1 - 1e-9)
    wide = Planner(ChunkTimes((1, 2, 4), ((0.0, 1e-5, 0.0, 0.0, 0.0),) * 3), 4)
    assert wide.plan(100, [0.0] * 4, 0.0).chunks[0].size == 1
    assert wide.plan(100, [0.0] * 4, 0.0, least_size=3).chunks[0].size == 4
    with pytest.raises(ValueError, match="no run has 5 groups"):
        wide.plan(100, [0.0] * 4, 0.0, least_size=5)


@pytest.mark.parametrize("sizes", [(), (3,), (2, 1), (1, 1), (0,), (1, 2, 6), (1, 2, 4, 8)])
def test_sizes_are_ascending_powers_of_two_up_to_the_number_of_groups(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"sp_sizes=.*accepted: ascending powers of two up to kvp=4"):
        Planner(ChunkTimes(sizes, ((0.0,) * 5,) * len(sizes)), 4)
