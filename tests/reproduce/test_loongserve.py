"""LoongServe's model: its costs, its decisions, what a play must keep, and the ordering of its own paper."""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import ClassVar, NamedTuple

import numpy as np
import pytest

from examples.reproduce.baselines import loongserve
from examples.reproduce.baselines.context_parallel import ContextParallel, prefill_s
from examples.reproduce.baselines.loongserve import LoongServe
from examples.reproduce.baselines.loongserve_cost import EspCosts
from examples.reproduce.baselines.loongserve_manager import Manager
from examples.reproduce.baselines.loongserve_plan import MAX_PREFILL_S, Pending, Situation, fill, plan_batches, select
from examples.reproduce.baselines.loongserve_pool import Group, Prefill
from examples.reproduce.load import Served
from examples.reproduce.timing import A100, MODELS
from medha.config import ParallelConfig, SchedulerConfig
from medha.errors import ConfigError
from medha.sim.replica import Replica
from medha.sim.simulator import Simulation
from medha.workload.trace import Trace

MODEL = MODELS["Llama-3 8B"]


@cache
def costs(utilization: float = 0.9, num_instances: int = 8) -> EspCosts:
    return EspCosts(A100, MODEL, num_instances=num_instances, tp=2, utilization=utilization)


def load(num_requests: int, *, qps: float, long_share: float = 0.0, seed: int = 0, longest: int = 1 << 20) -> Trace:
    rng = np.random.default_rng(seed)
    prompts = np.clip(rng.lognormal(7.2, 1.0, num_requests), 16, 8000)
    long = np.exp(rng.uniform(np.log(longest / 8), np.log(longest), num_requests))
    prompts = np.where(rng.random(num_requests) < long_share, long, prompts).astype(np.int64)
    outputs = np.clip(rng.lognormal(5.0, 1.0, num_requests), 1, 2000).astype(np.int64)
    return Trace(np.cumsum(rng.exponential(1 / qps, num_requests)), prompts, outputs)


def trace_of(*requests: tuple[float, int, int]) -> Trace:
    arrivals, prompts, outputs = zip(*requests, strict=True)
    return Trace(np.array(arrivals), np.array(prompts), np.array(outputs))


class Occupied(NamedTuple):
    """A time for which an instance served a group; its cached tokens at the end, and tokens that activations take."""

    instance: int
    kind: str
    start_s: float
    end_s: float
    rows: tuple[int, ...]
    cached_tokens: int
    activation_tokens: float


class Watched(Manager):
    """A manager that notes what each instance did, as it ends."""

    log: ClassVar[list[Occupied]] = []

    def _end_prefill(self, prefill: Prefill) -> None:
        rows = tuple(request.pending.row for request in prefill.requests)
        beside = prefill.activations * self._costs.activation_tokens
        for instance in prefill.instances:
            cached = self._pool.used[instance]
            self.log.append(Occupied(instance, "prefill", prefill.start_s, prefill.end_s, rows, cached, beside))
        super()._end_prefill(prefill)

    def _account(self, group: Group, num_steps: int) -> None:
        run = group.run
        assert run is not None
        unused = {instance: rows * (run.num_steps - num_steps) for instance, rows in run.masters}
        rows = tuple(request.pending.row for request in group.requests)
        for instance in group.instances if num_steps else ():
            cached = self._pool.used[instance] - unused.get(instance, 0)
            self.log.append(Occupied(instance, "decode", run.start_s, run.end_s(num_steps), rows, cached, 0.0))
        super()._account(group, num_steps)


def played(system: LoongServe, trace: Trace) -> tuple[Served, list[Occupied]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loongserve, "Manager", Watched)
        patch.setattr(Watched, "log", log := [])
        return system.play(trace), log


# Costs


def test_fit_within_a_node() -> None:
    for degree, tokens in itertools.product(range(1, 5), (1000, 10_000, 100_000, 1_000_000)):
        estimate_s = costs().estimate_s(degree, tokens, tokens**2)
        assert estimate_s == pytest.approx(costs().prefill_s([tokens], degree), rel=0.03)
    assert (costs().fit[1:] >= 0).all()


# Decisions


def cost_of(lengths: Sequence[int], degree: int) -> float:
    """Seconds per prompt token of a batch, summed over its requests."""
    return costs().estimate_s(degree, sum(lengths), sum(n * n for n in lengths)) * sum(1 / n for n in lengths)


def least(lengths: Sequence[int], used: Sequence[int]) -> float:
    """The least of all ways to cut requests and instances into neighbours."""
    ways = [0.0] if not lengths else [math.inf]
    for count, degree in itertools.product(range(1, len(lengths) + 1), range(1, len(used) + 1)):
        if sum(lengths[:count]) <= costs().most_tokens(used[:degree]):
            ways.append(cost_of(lengths[:count], degree) + least(lengths[count:], used[degree:]))
    return min(ways)


@pytest.mark.parametrize("seed", range(12))
def test_batches_are_the_best_of_all_ways(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_requests, num_instances = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    lengths = sorted(np.exp(rng.uniform(5, 12.5, num_requests)).astype(int).tolist(), reverse=True)
    used = sorted(rng.integers(0, 1_040_000, num_instances).tolist())
    plan = plan_batches(costs(), lengths, used)
    if plan is None:
        assert least(lengths, used) == math.inf
        return
    batches = [lengths[one.requests] for one in plan]
    degrees = [len(used[one.instances]) for one in plan]
    assert sum(map(cost_of, batches, degrees)) == pytest.approx(least(lengths, used), rel=1e-9)
    assert [tokens for batch in batches for tokens in batch] == lengths


def situation(**changes: float) -> Situation:
    most = costs().most_tokens([0] * 8)
    base = {"num_instances": 8, "most_idle": 8, "idle_prompt_tokens": most, "prompt_tokens": most}
    base |= {"claim_tokens": 10_000_000, "decode_left_s": 1.0, "decode_rate": 0.0}
    return Situation(**base | changes)  # type: ignore[arg-type]


def queue_of(*prompts: int) -> list[Pending]:
    return [Pending(row, prompt, prompt + 100) for row, prompt in enumerate(prompts)]


def test_select_stops_at_the_longest_prefill() -> None:
    queue = queue_of(*[100_000] * 20)
    places = select(costs(), queue, situation(), may_pass=True)
    assert places == list(range(len(places)))
    count = len(places)
    assert costs().estimate_s(8, count * 1e5, count * 1e10) <= MAX_PREFILL_S
    assert costs().estimate_s(8, (count + 1) * 1e5, (count + 1) * 1e10) > MAX_PREFILL_S


@pytest.mark.parametrize(
    ("prompts", "changes", "may_pass", "expected"),
    [
        ([1000] * 5, {}, True, [0, 1, 2, 3, 4]),
        ([1_000_000, 100], {}, True, [0]),  # longer than the longest prefill, alone
        ([500_000, 1000, 1000], {"claim_tokens": 10_000}, True, [1, 2]),  # no room for the claim of the first
        ([500_000, 1000, 1000], {"claim_tokens": 10_000}, False, []),
        # too much for the instances that decodes can leave: decodes at their beginning have most to lose
        ([600_000], {"most_idle": 1, "idle_prompt_tokens": 500_000, "decode_rate": 1e-9}, True, [0]),
        ([600_000], {"most_idle": 1, "idle_prompt_tokens": 500_000, "decode_rate": 1.0}, True, []),
    ],
)
def test_select(prompts: list[int], changes: dict[str, float], may_pass: bool, expected: list[int]) -> None:
    assert select(costs(), queue_of(*prompts), situation(**changes), may_pass=may_pass) == expected


def test_fill_takes_what_ends_in_time() -> None:
    queue = queue_of(500_000, 2000, 2000)
    one_s = costs().estimate_s(1, 2000, 2000**2)
    two_s = costs().estimate_s(1, 4000, 2 * 2000**2)
    assert fill(costs(), queue, [0], left_s=one_s, claim_tokens=10**7) == [1]
    assert fill(costs(), queue, [0], left_s=two_s, claim_tokens=10**7) == [1, 2]
    assert fill(costs(), queue, [0], left_s=two_s, claim_tokens=2100) == [1]
    assert fill(costs(), queue, [0], left_s=0.9 * one_s, claim_tokens=10**7) == []


# A request alone


@pytest.mark.parametrize("prompt", [200, 8000, 100_000, 1_000_000])
def test_one_alone(prompt: int) -> None:
    """The prefill of the degree that the manager thinks best, then steps on as few instances as hold it."""
    output = 50
    served, log = played(LoongServe(), trace_of((2.0, prompt, output)))
    degree = min(range(1, 9), key=lambda d: costs().estimate_s(d, prompt, prompt**2))
    ring = prefill_s(ContextParallel(A100, MODEL, cp=degree, tp=2), prompt)
    assert served.ttft_s[0] == pytest.approx(ring, rel=1e-9)
    decoding = {entry.instance for entry in log if entry.kind == "decode"}
    assert len({entry.instance for entry in log if entry.kind == "prefill"}) == degree
    assert len(decoding) == -(-prompt // costs().room_tokens(0, prompt / degree))
    fullest = min(prompt, costs().room_tokens(0, prompt / degree))
    steps = [
        costs().step_s(1, fullest + token, prompt + token, num_instances=len(decoding), rows=1)
        for token in range(output - 1)
    ]
    assert served.finish_s[0] - served.first_token_s[0] == pytest.approx(sum(steps), rel=2e-3)
    assert served.gaps.count == output - 1
    assert served.end_s == served.finish_s[0]


# What every play keeps


@pytest.mark.parametrize("seed", range(24))
def test_any_small_system(seed: int) -> None:
    """Systems and loads drawn at random, with hardly any memory: who fits is served whole, nothing twice."""
    rng = np.random.default_rng(seed)
    num_instances, is_split = int(rng.integers(1, 9)), rng.random() < 0.3
    drawn = LoongServe(
        num_instances=num_instances,
        reserved=int(rng.integers(0, num_instances)) if is_split else 0,
        reserved_below=2000,
        utilization=float(rng.uniform(0.105, 0.3)),
    )
    longest, qps = int(np.exp(rng.uniform(9, 13))), float(np.exp(rng.uniform(-2, 6)))
    trace = load(int(rng.integers(1, 150)), qps=qps, long_share=float(rng.choice([0, 0.1, 0.5])), longest=longest)
    served, log = played(drawn, trace)
    own, done = costs(drawn.utilization, num_instances), served.is_finished
    sizes = np.where(trace.prompt_tokens < 2000, drawn.reserved, num_instances - drawn.reserved)
    sizes = sizes if drawn.reserved else np.full(len(trace), num_instances)
    lengths = zip(trace.prompt_tokens.tolist(), trace.output_tokens.tolist(), sizes.tolist(), strict=True)
    assert done.tolist() == [own.fits(prompt, prompt + output - 1, size) for prompt, output, size in lengths]
    decodes = done & (trace.output_tokens > 1)
    assert (served.first_token_s[done] > trace.arrival_s[done]).all()
    assert (served.finish_s[decodes] > served.first_token_s[decodes]).all()
    assert served.gaps.count == (trace.output_tokens - 1)[done].sum()
    waited_s = (served.finish_s - served.first_token_s)[done].sum()
    assert served.gaps.total_s == pytest.approx(waited_s, rel=1e-9)
    assert served.end_s >= served.finish_s[done].max(initial=0.0)
    by_instance, prefills = defaultdict(list), defaultdict(set)
    for entry in log:
        by_instance[entry.instance].append(entry)
        if entry.kind == "prefill":
            prefills[entry.rows, entry.start_s, entry.end_s].add(entry.instance)
        assert 0 <= entry.cached_tokens <= own.pool_tokens - entry.activation_tokens
    for entries in by_instance.values():  # one group at a time
        entries.sort(key=lambda entry: entry.start_s)
        for before, after in itertools.pairwise(entries):
            assert after.start_s >= before.end_s - 1e-9
    assert sorted(row for rows, *_ in prefills for row in rows) == np.flatnonzero(done).tolist()
    for (rows, start_s, end_s), on in prefills.items():  # never interrupted
        seconds = own.prefill_s(trace.prompt_tokens[list(rows)].tolist(), len(on))
        assert end_s - start_s == pytest.approx(seconds, rel=1e-9)


def test_a_stopped_play_is_the_beginning() -> None:
    whole = LoongServe().play(load(250, qps=0.5, long_share=0.1))
    stop_s = float(np.median(whole.finish_s))
    part = LoongServe().play(whole.trace, stop_s=stop_s)
    assert part.end_s == stop_s
    for times, known in ((part.first_token_s, whole.first_token_s), (part.finish_s, whole.finish_s)):
        assert np.array_equal(times, np.where(known <= stop_s, known, np.nan), equal_nan=True)
    assert 0 < part.gaps.count < whole.gaps.count


# What it is known for


def test_short_requests_wait_for_a_long_prefill() -> None:
    """The convoy of v5 section 2: who comes while a long prefill holds all instances waits for its end."""
    served = LoongServe().play(trace_of((0.0, 1_000_000, 10), (1.0, 1000, 10)))
    assert served.first_token_s[1] > served.first_token_s[0] > 60.0


def test_an_idle_instance_prefills_what_ends_before_the_long_prefill() -> None:
    """The first keeps its instance out of the long prefill, and leaves it; 200K tokens would take it too long."""
    trace = trace_of((0.0, 100, 200), (0.5, 500_000, 2), (4.0, 200_000, 2), (5.0, 1000, 2))
    served, log = played(LoongServe(), trace)
    first, long, middle, short = served.first_token_s
    assert first < served.finish_s[0] < 4.0 < 5.0 < short < long < middle
    assert len({entry.instance for entry in log if entry.kind == "prefill" and entry.rows == (1,)}) == 7


def test_groups_decode_ten_steps_between_prefills() -> None:
    served, log = played(LoongServe(), trace_of((0.0, 1000, 100), (1e-3, 1000, 2)))
    start_s = min(entry.start_s for entry in log if entry.kind == "prefill" and 1 in entry.rows)
    step_s = costs().step_s(1, 1010, 1010, num_instances=1, rows=1)
    assert start_s == pytest.approx(served.first_token_s[0] + 10 * step_s, abs=0.5 * step_s)


def test_the_reserved_pool_isolates() -> None:
    trace = load(200, qps=0.5, long_share=0.1)
    is_short = trace.prompt_tokens < 8192
    served, log = played(LoongServe(reserved=2), trace)
    assert {row for entry in log if entry.instance < 2 for row in entry.rows} == set(np.flatnonzero(is_short).tolist())
    columns = (trace.arrival_s, trace.prompt_tokens, trace.output_tokens)
    alone = LoongServe(num_instances=2).play(Trace(*(column[is_short] for column in columns)))
    assert np.array_equal(served.finish_s[is_short], alone.finish_s)
    shared = LoongServe().play(trace)
    assert np.quantile(served.ttft_s[is_short], 0.9) < np.quantile(shared.ttft_s[is_short], 0.9)
    assert served.ttft_s[~is_short].mean() > shared.ttft_s[~is_short].mean()


def test_it_serves_its_own_papers_load_better_than_chunked_prefill() -> None:
    """Its own evaluation: Llama-2 7B on 8 A800 (here A100), TP 2 times 4 against TP 8, and the mean latency per token.

    Prompts are log-uniform in the ranges of ShareGPT, L-Eval and LV-Eval, outputs up to 1,000, 300 and 100.
    """
    llama_2 = replace(MODEL, num_kv_heads=32, intermediate_size=11008, vocab_size=32000)
    prompts, outputs = ((16, 2300), (2700, 210_500), (15_100, 497_300)), ((4, 1000), (4, 300), (4, 100))
    rng = np.random.default_rng(0)
    dataset = rng.integers(0, 3, 100)
    lengths = [np.exp(rng.uniform(*np.log(np.array(r)[dataset].T))).astype(np.int64) for r in (prompts, outputs)]
    trace = Trace(np.cumsum(rng.exponential(5.0, 100)), *lengths)
    chunked = SchedulerConfig(scheduler="sarathi", chunk_size=2048, max_batch_tokens=2048)
    replica = Replica(A100, llama_2, ParallelConfig(tp=8), chunked, max_model_len=500_000)
    theirs = Served.of(Simulation(*replica.build(), trace).run())
    ours = LoongServe(model=llama_2, num_instances=4).play(trace)
    ours_s, theirs_s = (
        ((one.finish_s - trace.arrival_s) / (trace.prompt_tokens + trace.output_tokens)).mean()
        for one in (ours, theirs)
    )
    assert ours_s < 0.5 * theirs_s


def test_a_model_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        LoongServe(utilization=0.05).play(trace_of((0.0, 1, 1)))
