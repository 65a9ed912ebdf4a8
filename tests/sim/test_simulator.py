"""The simulator: rules that hold for any load, closed forms, and that nothing but the arguments counts."""

import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st

from medha.config import ParallelConfig, SchedulerConfig
from medha.cost.coefficients import Curve
from medha.cost.hardware import load_spec
from medha.cost.predictor import Predictor, Work
from medha.sched.scheduler import Scheduler
from medha.sim.outcome import Outcome
from medha.sim.pipeline import Pipeline, Segment
from medha.sim.replica import Replica, find_model
from medha.sim.simulator import Simulation
from medha.workload.synth import synthesize
from medha.workload.trace import Trace, trace_stats
from tests.sched.costs import FREE

SPEC, MODEL = load_spec("a100-80g"), find_model("llama-3-8b")


def one_replica(system: str = "sarathi", *, spp: int = 1, kvp: int = 1, **options: object) -> Replica:
    """Of a policy of the medha scheduler, or another scheduler."""
    name = "policy" if system in ("lars", "fcfs") else "scheduler"
    config = SchedulerConfig(**{name: system, **options})  # type: ignore[arg-type]
    return Replica(SPEC, MODEL, ParallelConfig(spp=spp, kvp=kvp), config, max_model_len=1 << 15)


def run(replica: Replica, trace: Trace) -> Outcome:
    return Simulation(*replica.build(), trace).run()


# -- rules of any load -----------------------------------------------------------------------------------------


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Up to eight requests, some at the same time, some long."""
    count = draw(st.integers(1, 8))

    def column(values: st.SearchStrategy[float]) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=count, max_size=count)))

    return Trace(
        np.sort(column(st.sampled_from((0.0, 0.05)) | st.floats(0, 3))),
        column(st.integers(1, 900) | st.integers(1, 9000)),
        column(st.integers(1, 12)),
        ttft_slo_s=column(st.just(math.nan) | st.floats(0.01, 5.0)),
        priority=column(st.integers(0, 3)).astype(np.int8),
    )


@st.composite
def replicas(draw: st.DrawFn) -> Replica:
    """One to three stages, one or two groups, memory for all or hardly for one, given away once or twice."""
    system = draw(st.sampled_from(("lars", "fcfs", "sarathi", "vllm", "orca", "static")))
    kvp = draw(st.sampled_from((1, 1, 2)))
    replica = one_replica(
        system,
        spp=draw(st.integers(1, 3)),
        kvp=kvp,
        max_num_seqs=draw(st.sampled_from((1, 3, 256))),
        max_batch_tokens=draw(st.sampled_from((256, 2048))),
        overcommit=draw(st.booleans()) if kvp == 1 else False,
        num_swap_blocks=draw(st.sampled_from((0, 20))),
        swap_block_s=draw(st.sampled_from((1e-5, 10.0))),
    )
    return replace(replica, num_blocks=draw(st.sampled_from((16, 40, 400))), max_model_len=10_000)


@settings(max_examples=60, deadline=None)
@given(replicas(), traces())
def test_rules_of_any_load(replica: Replica, trace: Trace) -> None:
    segments: list[Segment] = []
    scheduler, pipeline = replica.build(on_segment=segments.append)
    outcome = Simulation(scheduler, pipeline, trace).run()
    sent, ends_s = dict[int, int](), defaultdict[int, float](float)  # of batches: tokens, and when all is done
    for one in segments:
        sent[one.batch_id] = one.num_tokens
        ends_s[one.batch_id] = max(ends_s[one.batch_id], one.end_s)
    requests = outcome.requests
    check_nothing_is_lost(outcome, scheduler)
    check_causality(outcome, pipeline, list(ends_s.values()))
    check_stages(segments, replica.parallel.spp)
    served = ~requests.is_refused
    work = int((trace.prompt_tokens + trace.output_tokens - 1)[served].sum())
    computed = sum(sent.values())
    assert computed == work if requests.num_preemptions.sum() == outcome.num_swaps else computed > work
    assert (outcome.work_lost_s > 0) == bool(requests.num_preemptions.sum())
    assert outcome.num_batches == len(sent)


def check_nothing_is_lost(outcome: Outcome, scheduler: Scheduler) -> None:
    """Each request is refused, because it never fits, or has all its tokens; nothing is left behind."""
    trace, requests = outcome.trace, outcome.requests
    reserved = trace.prompt_tokens + trace.output_tokens - 1
    assert (requests.is_refused == (reserved > scheduler.memory.max_request_tokens)).all()
    assert (requests.num_tokens == np.where(requests.is_refused, 0, trace.output_tokens)).all()
    assert (np.isnan(requests.finish_s) == requests.is_refused).all()
    assert not outcome.is_stopped
    assert (scheduler.num_waiting, scheduler.num_running, scheduler.in_flight) == (0, 0, ())
    assert scheduler.memory.num_used == 0


def check_causality(outcome: Outcome, pipeline: Pipeline, ends_s: list[float]) -> None:
    """First chunk after arrival, first token after as much work as the prompt is, end after that."""
    trace, requests = outcome.trace, outcome.requests
    served = ~requests.is_refused
    first_s, token_s = requests.first_scheduled_s[served], requests.first_token_s[served]
    most = pipeline.stages[0].max_tokens
    least_s = sum(stage.predict([Work(1, 0, False)]) for stage in pipeline.stages)
    chunks = -(-trace.prompt_tokens[served] // most)
    slack = 1e-9
    assert (first_s >= trace.arrival_s[served]).all()
    assert (token_s - first_s >= least_s + (chunks - 1) * least_s / len(pipeline.stages) - slack).all()
    assert (requests.finish_s[served] >= token_s).all()
    single = trace.output_tokens[served] == 1
    assert ((requests.finish_s[served] == token_s) == single).all()
    gaps = trace.output_tokens[served] - 1
    assert (requests.finish_s[served] - token_s >= gaps * least_s * 0.999 - slack).all()
    assert set(token_s) <= set(np.maximum.accumulate(ends_s))


def check_stages(segments: list[Segment], spp: int) -> None:
    """A stage runs one batch at a time, in one order, and after the stage before."""
    lanes, passages = defaultdict(list), defaultdict(list)
    for segment in segments:
        assert segment.end_s > segment.start_s
        lanes[segment.group, segment.stage].append(segment)
        passages[segment.group, segment.batch_id].append(segment)
    for lane in lanes.values():
        for before, after in pairwise(lane):
            assert after.batch_id > before.batch_id
            assert after.start_s >= before.end_s
    for passage in passages.values():
        assert [segment.stage for segment in passage] == list(range(spp))
        for before, after in pairwise(passage):
            assert after.start_s >= before.end_s


@settings(max_examples=40, deadline=None)
@given(replicas(), traces(), st.floats(0.01, 3.0))
@example(one_replica(), Trace(np.array([5.0]), np.array([100]), np.array([5])), 1.0)  # before anybody arrives
def test_a_stop_counts_what_ran_by_then(replica: Replica, trace: Trace, stop_s: float) -> None:
    segments: list[Segment] = []
    simulation = Simulation(*replica.build(on_segment=segments.append), trace, stop_s=stop_s)
    outcome, now_s = simulation.run(), simulation.now_s
    ran_s = np.zeros((replica.parallel.kvp, replica.parallel.spp))
    for one in segments:
        ran_s[one.group, one.stage] += min(one.end_s, now_s) - min(one.start_s, now_s)
    np.testing.assert_allclose(outcome.stage_busy_s, ran_s, atol=1e-9)
    active_s = np.add(outcome.stage_busy_s, outcome.stage_bubble_s)
    np.testing.assert_allclose(active_s, active_s[:, :1].repeat(replica.parallel.spp, 1), atol=1e-9)
    assert active_s.max() <= outcome.duration_s + 1e-9
    assert trace.arrival_s[0] <= stop_s or (outcome.is_stopped and outcome.duration_s == 0.0)


def crowded(system: str, **options: object) -> Outcome:
    """Six requests at once in little memory, which is given away more than once."""
    trace = synthesize("fixed:700,100", arrivals="at-once", num_requests=6)
    outcome = run(replace(one_replica(system, overcommit=True, **options), num_blocks=9), trace)
    assert (outcome.requests.num_tokens == 100).all()
    return outcome


def test_who_is_swapped_is_not_computed_again_and_the_moves_take_their_time() -> None:
    recomputed = crowded("lars")
    swapped, dear = (crowded("lars", num_swap_blocks=40, swap_block_s=seconds) for seconds in (1e-4, 5e-3))
    assert recomputed.work_lost_s > 0 and recomputed.num_swaps == 0
    assert 0 < swapped.num_swaps == swapped.requests.num_preemptions.sum()
    assert swapped.work_lost_s < recomputed.work_lost_s
    assert swapped.duration_s < min(recomputed.duration_s, dear.duration_s)


def test_who_gives_way_finds_what_is_left_of_its_own_blocks() -> None:
    kept, lost = (crowded("vllm", prefix_caching=keeps) for keeps in (True, False))
    assert kept.requests.num_preemptions.sum() > 0 < lost.requests.num_preemptions.sum()
    assert kept.num_cached_tokens == 0  # nobody shares with another
    assert kept.duration_s < lost.duration_s


def test_blocks_of_requests_that_end_with_their_prompt_are_in_use_while_it_is_read() -> None:
    outcome = run(one_replica("orca"), synthesize("fixed:4000,1", arrivals="at-once", num_requests=1))
    assert max(outcome.usage) > 0 == outcome.usage[-1]


def test_sessions_find_what_they_said_before_and_read_it_back_from_the_host_where_that_is_cheaper() -> None:
    trace = synthesize("sessions:2048,512,64,4", qps=0.5, num_requests=40)
    kept, lost = (run(one_replica("lars", prefix_caching=keeps), trace) for keeps in (True, False))
    reused = trace_stats(trace)["prefix_reuse"] * trace.prompt_tokens.sum()
    assert 0.9 * reused < kept.num_cached_tokens <= reused and lost.num_cached_tokens == 0
    assert np.nanmean(kept.requests.first_token_s) < np.nanmean(lost.requests.first_token_s)
    cached, waits_s = [], []
    for num_swap_blocks, swap_block_s in ((0, 0.0), (4000, 1e-5), (4000, 9.0)):
        options = {"num_swap_blocks": num_swap_blocks, "swap_block_s": swap_block_s}
        outcome = run(replace(one_replica("lars", prefix_caching=True, **options), num_blocks=80), trace)
        cached.append(outcome.num_cached_tokens)
        waits_s.append(np.nanmean(outcome.requests.first_token_s - trace.arrival_s))
    assert cached[0] == cached[2] < cached[1] and waits_s[1] < waits_s[0] == waits_s[2]


# -- closed forms ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chunk_size", "spp"), [(256, 1), (512, 2)])
def test_one_request_alone_takes_the_sum_of_its_predictions(chunk_size: int, spp: int) -> None:
    replica = one_replica("sarathi", spp=spp, chunk_size=chunk_size, stream=False)
    replica = replace(replica, spec=replace(SPEC, control_s=0.0))
    outcome = run(replica, Trace(np.array([1.5]), np.array([5000]), np.array([40])))
    starts = range(0, 5000, chunk_size)
    chunks = [Work(min(chunk_size, 5000 - kv), kv, False, None, kv + chunk_size >= 5000) for kv in starts]
    decodes = [Work(1, 5000 + i, True, None, True) for i in range(39)]
    prefill_s, decodes_s = (
        np.array([sum(stage.predict([work]) for work in works) for stage in replica.stages()])
        for works in (chunks, decodes)
    )
    assert outcome.requests.first_token_s[0] == pytest.approx(1.5 + prefill_s.sum(), rel=1e-9)
    assert outcome.requests.finish_s[0] == pytest.approx(1.5 + prefill_s.sum() + decodes_s.sum(), rel=1e-9)
    assert outcome.stage_busy_s == [pytest.approx(prefill_s + decodes_s)]


def test_one_server_of_equal_services_lets_each_wait_as_a_queue_does() -> None:
    replica = one_replica("sarathi", max_num_seqs=1)
    (stage,) = replica.stages()
    service_s = stage.predict([Work(512, 0, False, None, True)])
    trace = synthesize("fixed:512,1", qps=0.8 / service_s, num_requests=1000)
    wait_s = run(replica, trace).requests.first_scheduled_s - trace.arrival_s
    # W' = max(0, W + S - gap), unrolled
    steps_s = np.cumsum(service_s - np.diff(trace.arrival_s, prepend=trace.arrival_s[0] - service_s))
    assert wait_s == pytest.approx(steps_s - np.minimum.accumulate(steps_s), abs=1e-6)
    assert 200 < np.count_nonzero(wait_s > service_s) < 800


STEP_S = 0.01  # of any batch in a stage


def piped(
    spp: int,
    trace: Trace,
    system: str = "sarathi",
    *,
    control_s: float = 0.0,
    stop_s: float | None = None,
    **options: Any,
) -> Outcome:
    """A run on equal stages, in batches of up to 128 tokens."""
    stage = Predictor(replace(FREE, linear=Curve((1.0, 4096.0), (STEP_S, STEP_S))), max_tokens=4096)
    config = SchedulerConfig(system, chunk_size=128, max_batch_tokens=128, depth=spp + 1, late_share=0.0, **options)
    scheduler = Scheduler(config, num_blocks=200, block_size=256, predictor=stage)
    pipeline = Pipeline([stage.uncorrected()] * spp, control_s=control_s)
    return Simulation(scheduler, pipeline, trace, stop_s=stop_s).run()


@pytest.mark.parametrize("system", ["medha", "sarathi", "vllm"])
@pytest.mark.parametrize(("spp", "num_chunks"), [(1, 5), (2, 1), (3, 7), (4, 32)])
def test_a_perfect_pipeline_takes_a_step_a_chunk_and_a_further_stage(spp: int, num_chunks: int, system: str) -> None:
    """One prompt alone fills it with the stream only; without, as many as there are stages do, which take turns."""
    for stream, num_prompts in ((True, 1), (False, spp), (False, 1)):
        lengths = np.full(num_prompts, 128 * num_chunks)
        trace = Trace(np.zeros(num_prompts), lengths, np.ones(num_prompts, np.int64))
        outcome = piped(spp, trace, system, stream=stream)
        busy = num_prompts * num_chunks
        steps = busy + spp - 1 if stream or num_prompts > 1 else busy * spp
        assert outcome.requests.first_token_s.max() == pytest.approx(steps * STEP_S, rel=1e-9)
        np.testing.assert_allclose(outcome.stage_busy_s, [[busy * STEP_S] * spp])
        np.testing.assert_allclose(outcome.stage_bubble_s, [[(steps - busy) * STEP_S] * spp], atol=1e-12)


def test_a_pipeline_that_is_stopped_has_not_drained() -> None:
    outcome = piped(3, Trace(np.zeros(1), np.array([128 * 64]), np.ones(1, np.int64)), stop_s=9.5 * STEP_S)
    np.testing.assert_allclose(outcome.stage_busy_s, [[10 * STEP_S, 9 * STEP_S, 8 * STEP_S]])
    np.testing.assert_allclose(outcome.stage_bubble_s, [[0.0, STEP_S, 2 * STEP_S]], atol=1e-12)


def test_a_decode_alone_leaves_the_other_stages_empty() -> None:
    outcome = piped(3, Trace(np.array([0.0, 9.0]), np.array([100, 100]), np.array([11, 1])))
    assert outcome.requests.finish_s.tolist() == pytest.approx([0.33, 9.03])
    np.testing.assert_allclose(outcome.stage_busy_s, [[0.12] * 3])
    np.testing.assert_allclose(outcome.stage_bubble_s, [[0.24] * 3])  # the idle time between the two is none


@pytest.mark.parametrize("control_s", [0.0, 0.001, 0.005])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_batch_enters_later_by_the_control_latency(control_s: float, is_async: bool) -> None:
    """A decode alone pays for it at each token where its token has to be known, and is sent ahead where not."""
    trace = Trace(np.zeros(1), np.array([100]), np.array([11]))
    outcome = piped(3, trace, control_s=control_s, async_scheduling=is_async)
    assert outcome.requests.finish_s[0] == pytest.approx(0.33 + control_s * (1 if is_async else 11))
    assert outcome.requests.first_token_s[0] == pytest.approx(0.03 + control_s)


def test_stages_are_simulated_as_they_run() -> None:
    """Several stages with async scheduling and control latency: a decode comes round as often as there are stages."""
    for spp in (1, 2, 4):
        scheduler, pipeline = one_replica(spp=spp).build()
        assert scheduler.config.async_scheduling == (spp > 1) and scheduler.config.period == spp
        assert pipeline._control_s == (SPEC.control_s if spp > 1 else 0.0)


def test_the_last_arrival_counts_however_its_time_is_rounded() -> None:
    trace = Trace(np.array([1.1, 7.3]), np.array([100, 600_000]), np.array([5, 5]))
    assert run(one_replica(), trace).times.is_refused.tolist() == [False, True]
