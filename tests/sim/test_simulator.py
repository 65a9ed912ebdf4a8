"""The simulator: rules that hold for any load, closed forms, and that nothing but the arguments counts."""

import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from medha.batch import Batch
from medha.config import ParallelConfig, SchedulerConfig
from medha.cost.coefficients import Curve
from medha.cost.hardware import load_spec
from medha.cost.predictor import Predictor, Work
from medha.sched.memory import KVMemory
from medha.sched.scheduler import Scheduler
from medha.sim.outcome import Outcome
from medha.sim.pipeline import Passage, Pipeline, Segment
from medha.sim.replica import Replica, find_model
from medha.sim.simulator import Simulation
from medha.workload.synth import arrival_times, generators, synthesize
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


class Watched(Pipeline):
    """Notes every batch that is sent, and when."""

    sent: list[tuple[Batch, float, Passage]]

    def send(self, batch: Batch, memory: KVMemory, now_s: float) -> Passage:
        passage = super().send(batch, memory, now_s)
        self.sent.append((batch, now_s, passage))
        return passage


@st.composite
def traces(draw: st.DrawFn, *, max_output: int = 12) -> Trace:
    """Up to eight requests, some at the same time, some long."""
    count = draw(st.integers(1, 8))

    def column(values: st.SearchStrategy[float]) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=count, max_size=count)))

    return Trace(
        np.sort(column(st.sampled_from((0.0, 0.05)) | st.floats(0, 3))),
        column(st.integers(1, 900) | st.integers(1, 9000)),
        column(st.integers(1, max_output)),
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
    watched = Watched(pipeline.stages, pipeline.num_groups, on_segment=segments.append)
    watched.sent = []
    outcome = Simulation(scheduler, watched, trace).run()
    requests = outcome.requests
    check_nothing_is_lost(outcome, scheduler)
    check_causality(outcome, watched)
    check_stages(segments, replica.parallel.spp)
    served = ~requests.is_refused
    work = int((trace.prompt_tokens + trace.output_tokens - 1)[served].sum())
    computed = sum(batch.num_tokens for batch, *_ in watched.sent)
    assert computed == work if requests.num_preemptions.sum() == outcome.num_swaps else computed > work
    assert (outcome.work_lost_s > 0) == bool(requests.num_preemptions.sum())
    assert outcome.num_batches == len(watched.sent)


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


def check_causality(outcome: Outcome, pipeline: Watched) -> None:
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
    ends = [passage.end_s for *_, passage in pipeline.sent]
    assert set(token_s) <= set(np.maximum.accumulate(ends))


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


@settings(max_examples=20, deadline=None)
@given(replicas(), traces(max_output=300))
def test_repeating_changes_nothing(replica: Replica, trace: Trace) -> None:
    once, again = (run(replica, trace) for _ in range(2))
    for name, column in vars(once.requests).items():
        assert column.tobytes() == getattr(again.requests, name).tobytes(), name
    assert (once.num_batches, once.duration_s, once.gaps) == (again.num_batches, again.duration_s, again.gaps)
    assert (once.stage_busy_s, once.stage_bubble_s) == (again.stage_busy_s, again.stage_bubble_s)


def crowded(system: str, **options: object) -> Outcome:
    """Six requests at once in little memory, which is given away more than once."""
    trace = synthesize("fixed:700,300", arrivals="at-once", num_requests=6)
    outcome = run(replace(one_replica(system, overcommit=True, **options), num_blocks=9), trace)
    assert (outcome.requests.num_tokens == 300).all()
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


@pytest.mark.parametrize("chunk_size", [256, 512])
def test_one_request_alone_takes_the_sum_of_its_predictions(chunk_size: int) -> None:
    replica = one_replica("sarathi", chunk_size=chunk_size)
    trace = Trace(np.array([1.5]), np.array([5000]), np.array([40]))
    outcome = run(replica, trace)
    (stage,) = replica.stages()
    starts = range(0, 5000, chunk_size)
    chunks = [Work(min(chunk_size, 5000 - kv), kv, False, None, kv + chunk_size >= 5000) for kv in starts]
    prefill_s = sum(stage.predict([chunk]) for chunk in chunks)
    decodes_s = sum(stage.predict([Work(1, 5000 + i, True, None, True)]) for i in range(39))
    assert outcome.requests.first_token_s[0] == pytest.approx(1.5 + prefill_s, rel=1e-9)
    assert outcome.requests.finish_s[0] == pytest.approx(1.5 + prefill_s + decodes_s, rel=1e-9)
    assert outcome.stage_busy_s == [[pytest.approx(prefill_s + decodes_s)]]


def lindley_mean_wait_s(gaps_s: np.ndarray, service_s: float) -> float:
    """Mean wait of a queue with one server and equal services: W' = max(0, W + S - gap), unrolled."""
    steps = np.concatenate([[0.0], np.cumsum(service_s - gaps_s[1:])])
    return float((steps - np.minimum.accumulate(steps)).mean())


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_server_of_equal_services_waits_as_the_formula_says(load: float) -> None:
    replica = one_replica("sarathi", max_num_seqs=1)
    (stage,) = replica.stages()
    service_s = stage.predict([Work(512, 0, False, None, True)])
    expected_s = load * service_s / (2 * (1 - load))  # Pollaczek and Khinchine, M/D/1
    trace = synthesize("fixed:512,1", qps=load / service_s, num_requests=8000)
    outcome = run(replica, trace)
    wait_s = outcome.requests.first_scheduled_s - trace.arrival_s
    gaps_s = np.diff(trace.arrival_s, prepend=0.0)
    assert wait_s.mean() == pytest.approx(lindley_mean_wait_s(gaps_s, service_s), rel=1e-6)
    # The same queue over as many arrivals as it takes to tell the formula to 1 %.
    many_s = arrival_times("poisson", generators(1)[0], qps=load / service_s, num_requests=3_000_000)
    assert lindley_mean_wait_s(np.diff(many_s, prepend=0.0), service_s) == pytest.approx(expected_s, rel=0.01)
    assert wait_s.mean() == pytest.approx(expected_s, rel=0.15)


STEP_S = 0.01  # of any batch in a stage


def piped(
    spp: int, trace: Trace, *, control_s: float = 0.0, is_async: bool = False, stop_s: float | None = None
) -> Outcome:
    """A run on equal stages, in chunks of 128 tokens."""
    stage = Predictor(replace(FREE, linear=Curve((1.0, 4096.0), (STEP_S, STEP_S))), max_tokens=4096)
    config = SchedulerConfig("sarathi", chunk_size=128, depth=spp + 1, async_scheduling=is_async)
    scheduler = Scheduler(config, num_blocks=100, block_size=256, predictor=stage)
    pipeline = Pipeline([stage.uncorrected()] * spp, control_s=control_s)
    return Simulation(scheduler, pipeline, trace, stop_s=stop_s).run()


@pytest.mark.parametrize(("spp", "num_chunks"), [(1, 5), (2, 1), (3, 7), (4, 64)])
def test_a_perfect_pipeline_takes_one_step_a_chunk_and_one_a_further_stage(spp: int, num_chunks: int) -> None:
    outcome = piped(spp, Trace(np.zeros(1), np.array([128 * num_chunks - 5]), np.ones(1, np.int64)))
    steps = num_chunks + spp - 1
    assert outcome.requests.first_token_s[0] == pytest.approx(steps * STEP_S, rel=1e-9)
    np.testing.assert_allclose(outcome.stage_busy_s, [[num_chunks * STEP_S] * spp])
    np.testing.assert_allclose(outcome.stage_bubble_s, [[(spp - 1) * STEP_S] * spp], atol=1e-12)


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
    outcome = piped(3, trace, control_s=control_s, is_async=is_async)
    assert outcome.requests.finish_s[0] == pytest.approx(0.33 + control_s * (1 if is_async else 11))
    assert outcome.requests.first_token_s[0] == pytest.approx(0.03 + control_s)


def test_stages_are_simulated_as_they_run() -> None:
    """Several stages with async scheduling and control latency: a decode comes round as often as there are stages."""
    for spp in (1, 2, 4):
        scheduler, pipeline = one_replica(spp=spp).build()
        assert scheduler.config.async_scheduling == (spp > 1) and scheduler.config.period == spp
        assert pipeline._control_s == (SPEC.control_s if spp > 1 else 0.0)


def test_a_tenant_that_floods_holds_the_other_up_no_more_than_half_a_machine_would() -> None:
    """Prompts of 32K from one, short ones from the other, first come first served: the worst that it could be."""
    short = synthesize("sharegpt4-8k", qps=1.0, duration_s=120, seed=1)
    num_long, count = 330, len(short)
    times = np.append(short.arrival_s, np.sort(np.random.default_rng(0).uniform(0, 120, num_long)))
    order = np.argsort(times, kind="stable")
    prompts = np.append(short.prompt_tokens, np.full(num_long, 32768))
    outputs = np.append(short.output_tokens, np.full(num_long, 16))
    names = np.array(["a"] * count + ["b"] * num_long, np.dtypes.StringDType())
    both = Trace(times[order], prompts[order], outputs[order], tenant=names[order])

    def worst_s(trace: Trace, *, tp: int) -> float:
        config = SchedulerConfig(policy="fcfs")
        replica = Replica(load_spec("h100-80g"), MODEL, ParallelConfig(tp=tp), config, max_model_len=1 << 16)
        ttft_s = run(replica, trace).times.ttft_s
        return float(np.percentile(ttft_s[trace.prompt_tokens < 16384], 94))  # some wait for the lead at the beginning

    alone_s = worst_s(short, tp=4)
    assert worst_s(both, tp=8) < 1.5 * alone_s
    assert worst_s(replace(both, tenant=None), tp=8) > 10 * alone_s


def test_the_last_arrival_counts_however_its_time_is_rounded() -> None:
    trace = Trace(np.array([1.1, 7.3]), np.array([100, 600_000]), np.array([5, 5]))
    assert run(one_replica(), trace).times.is_refused.tolist() == [False, True]


def test_a_stop_before_the_first_arrival() -> None:
    trace = Trace(np.array([5.0]), np.array([100]), np.array([5]))
    outcome = Simulation(*one_replica().build(), trace, stop_s=1.0).run()
    assert outcome.is_stopped and outcome.duration_s == 0.0


# -- stream pipeline parallelism against pipelined micro-batches (``stream=False``) ----------------------------

CHUNK, NUM_CHUNKS = 512, 6
CHUNKED = ("medha", "sarathi", "vllm")


def two_stages(scheduler: str, *, stream: bool) -> Replica:
    """Llama-3 8B on two A100s; batches are bounded by tokens alone."""
    options = {"chunk_size": CHUNK, "max_batch_tokens": CHUNK, "t_target_s": 60.0, "late_share": 0.0, "stream": stream}
    return replace(one_replica(scheduler, spp=2, **options), spec=replace(SPEC, control_s=0.0))


def play(replica: Replica, num_prompts: int) -> tuple[Outcome, list[Segment]]:
    """Prompts of some chunks that all arrive at 0 and ask for one token."""
    segments: list[Segment] = []
    scheduler, pipeline = replica.build(on_segment=segments.append)
    assert scheduler.depth == 3
    lengths = np.full(num_prompts, NUM_CHUNKS * CHUNK)
    trace = Trace(np.zeros(num_prompts), lengths, np.ones(num_prompts, np.int64))
    return Simulation(scheduler, pipeline, trace).run(), segments


def stage_seconds(replica: Replica) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Of each chunk of a prompt on each stage, as predicted: [stages, chunks]."""
    chunks = [Work(CHUNK, i * CHUNK, False, None, i == NUM_CHUNKS - 1) for i in range(NUM_CHUNKS)]
    return np.array([[stage.predict([chunk]) for chunk in chunks] for stage in replica.stages()])


@pytest.mark.parametrize("scheduler", CHUNKED)
def test_a_prompt_alone_gains_from_the_stream_and_not_from_micro_batches(scheduler: str) -> None:
    replica = two_stages(scheduler, stream=False)
    seconds = stage_seconds(replica)
    ready_s = done_s = 0.0
    for first_s, second_s in seconds.T:
        ready_s += first_s
        done_s = max(ready_s, done_s) + second_s
    waiting, _ = play(replica, 1)
    streaming, _ = play(two_stages(scheduler, stream=True), 1)
    assert waiting.requests.first_token_s[0] == pytest.approx(seconds.sum(), rel=1e-12)
    assert streaming.requests.first_token_s[0] == pytest.approx(done_s, rel=1e-12)
    assert seconds.sum() > 1.5 * done_s


@pytest.mark.parametrize("scheduler", CHUNKED)
def test_two_prompts_take_turns_and_fill_both_stages(scheduler: str) -> None:
    replica = two_stages(scheduler, stream=False)
    outcome, segments = play(replica, 2)
    for stage, stage_s in enumerate(stage_seconds(replica).sum(axis=1)):
        mine = [segment for segment in segments if segment.stage == stage]
        assert len(mine) == 2 * NUM_CHUNKS
        assert outcome.stage_busy_s[0][stage] == pytest.approx(2 * stage_s, rel=1e-9)
        gaps_s = [after.start_s - before.end_s for before, after in pairwise(mine)]
        assert sum(gaps_s) < 0.1 * outcome.duration_s  # the stages differ by the head alone
    streaming, _ = play(two_stages(scheduler, stream=True), 2)
    assert outcome.duration_s == pytest.approx(streaming.duration_s, rel=0.05)
