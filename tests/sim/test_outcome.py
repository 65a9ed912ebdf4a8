"""What a report makes of an outcome: by hand where it can be, and the tables."""

import json
import math
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from medha.config import ParallelConfig, SchedulerConfig
from medha.cost.hardware import load_spec
from medha.sim.outcome import Gaps, Outcome, Requests, System, alone_seconds, report
from medha.sim.replica import Replica, find_model
from medha.sim.simulator import Simulation
from medha.sim.study import remarks, shown
from medha.workload.synth import synthesize
from medha.workload.trace import Trace

NAN = math.nan
REPLICA = Replica(load_spec("h100-80g"), find_model("llama-3-8b"), ParallelConfig(tp=8), max_model_len=1 << 17)
SYSTEM = System("lars", REPLICA, synthesize("fixed:1,1", qps=1.0, num_requests=1), 2.0)


def outcome() -> Outcome:
    """Five requests: two in time, one too slow in its tokens, one without an end, one that never fits."""
    trace = Trace(
        np.array([10.0, 11.0, 12.0, 13.0, 14.0]),
        np.array([100, 2_000, 100, 100, 9_000]),
        np.array([3, 1, 5, 4, 10]),
        tpot_slo_s=np.array([0.5, NAN, 0.5, NAN, NAN]),
    )
    requests = Requests(5)
    vars(requests).update(
        first_scheduled_s=np.array([10.0, 11.5, 12.0, 19.0, NAN]),
        first_token_s=np.array([10.5, 12.0, 12.5, 20.0, NAN]),
        finish_s=np.array([11.5, 12.0, 18.5, NAN, NAN]),
        deadline_s=np.array([1.0, math.inf, 1.0, 1.0, NAN]),
        num_tokens=np.array([3, 1, 5, 2, 0]),
        num_preemptions=np.array([0, 0, 2, 0, 0]),
        is_refused=np.array([False, False, False, False, True]),
    )
    gaps = Gaps()
    gaps.add(0.5, 2)
    gaps.add(1.5, 4)
    return Outcome(
        trace=trace,
        requests=requests,
        duration_s=10.0,
        usage_at_s=array("d", [10.0, 15.0]),
        usage=array("d", [0.25, 0.75]),
        gaps=gaps,
        stage_busy_s=[[5.0, 4.0]],
        stage_bubble_s=[[1.0, 2.0]],
        num_batches=20,
        work_lost_s=0.25,
        is_stopped=True,
    )


def made() -> dict[str, Any]:
    return report(SYSTEM, outcome(), np.full(5, 0.25))


def test_the_fields_of_a_serving_benchmark() -> None:
    serving = made()
    assert (serving["completed"], serving["failed"], serving["duration"], serving["request_rate"]) == (3, 1, 10.0, 2.0)
    assert (serving["total_input_tokens"], serving["total_output_tokens"]) == (2_200, 9)
    assert (serving["request_throughput"], serving["request_goodput"]) == pytest.approx((0.3, 0.2))
    assert (serving["output_throughput"], serving["total_token_throughput"]) == pytest.approx((0.9, 220.9))
    assert serving["max_concurrent_requests"] == 2
    assert (serving["start_times"][0], serving["input_lens"][0]) == (0.0, 100)
    assert serving["ttfts"] == [0.5, 1.0, 0.5, 7.0, None]
    ttft_ms = [500.0, 1000.0, 500.0]
    figures = [serving[f"{figure}_ttft_ms"] for figure in ("mean", "median", "std", "p99")]
    assert figures == pytest.approx([np.mean(ttft_ms), 500.0, np.std(ttft_ms), np.percentile(ttft_ms, 99)])
    means = [serving[f"mean_{time}_ms"] for time in ("tpot", "e2el", "itl")]  # one token has no TPOT
    assert means == pytest.approx([(500 + 1500) / 2, (1500 + 1000 + 6500) / 3, (2 * 500 + 4 * 1500) / 6])
    assert serving["p99_itl_ms"] == pytest.approx(1500, rel=0.012)
    assert serving["std_itl_ms"] == pytest.approx(np.std([500] * 2 + [1500] * 4), rel=0.02)


def test_unfinished_and_refused_requests_are_missed_in_all_and_in_their_buckets() -> None:
    one = made()
    assert (one["num_prompts"], one["unfinished"], one["complete"]) == (5, 1, False)
    assert one["slo_attainment"] == pytest.approx(2 / 5)
    assert outcome().times.is_in_time.tolist() == [True, True, False, False, False]
    assert (one["num_preemptions"], one["work_lost_s"]) == (2, 0.25)
    short, middle, long = one["ttft_by_length"]
    assert [bucket["bucket"] for bucket in (short, middle, long)] == ["1-256", "1K-4K", "4K-16K"]
    assert (short["num_requests"], short["completed"], short["slo_attainment"]) == (3, 2, pytest.approx(1 / 3))
    assert (short["p50_ttft_ms"], short["p90_ttft_ms"]) == (500.0, pytest.approx(5700.0))
    assert (middle["p99_ttft_ms"], long["p50_ttft_ms"]) == (1000.0, None)  # refused: nothing to wait for
    assert (one["p50_slowdown"], one["p99_slowdown"]) == (3.0, pytest.approx(4 + 0.97 * 24))


def test_counts_over_time() -> None:
    one = made()
    assert one["waiting"]["max"] == 1
    assert one["waiting"]["mean"] == pytest.approx((0.5 + 6.0) / 10)
    assert one["active"]["max"] == 1  # the next begins as one ends
    assert one["active"]["mean"] == pytest.approx((1.5 + 0.5 + 6.5 + 1.0) / 10)
    assert one["kv_cache_usage"] == {"mean": pytest.approx((0.25 * 5 + 0.75 * 5) / 10), "max": 0.75}
    assert [(stage["occupancy"], stage["bubble"]) for stage in one["stages"]] == [(0.5, 0.1), (0.4, 0.2)]


def test_nothing_arrived() -> None:
    empty = synthesize("fixed:5,5", qps=1.0, num_requests=1)[:0]
    one = report(SYSTEM, Simulation(*REPLICA.build(), empty).run(), alone_seconds(REPLICA, empty.prompt_tokens))
    json.dumps(one, allow_nan=False)
    assert (one["num_prompts"], one["slo_attainment"], one["p50_slowdown"]) == (0, None, None)
    assert not one["saturation"]["is_over"]
    assert remarks([one]) == []


# -- of runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tp", "spp"), [(8, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("num_prompt", [1, 60_000])
def test_alone_is_what_a_request_alone_takes(tp: int, spp: int, num_prompt: int) -> None:
    """By batches of a quantum: where that is given it is kept to, else the one that is alone takes longer batches."""
    trace = Trace(np.zeros(1), np.array([num_prompt]), np.ones(1, np.int64))
    for quantum_s, least in ((0.02, 0.99), (None, 0.85)):
        parallel, scheduler = ParallelConfig(tp=tp, spp=spp), SchedulerConfig(quantum_s=quantum_s)
        replica = replace(REPLICA, parallel=parallel, scheduler=scheduler)
        found = Simulation(*replica.build(), trace).run()
        (alone_s,) = alone_seconds(replica, trace.prompt_tokens)
        assert least * alone_s <= found.requests.first_token_s[0] <= 1.01 * alone_s


@pytest.mark.parametrize(("load", "is_over"), [(0.5, False), (2.0, True)])
def test_over_saturation(load: float, is_over: bool) -> None:
    replica = replace(REPLICA, scheduler=SchedulerConfig("sarathi", max_num_seqs=1))
    (alone_s,) = alone_seconds(replica, np.array([512]))
    trace = synthesize("fixed:512,1", qps=load / alone_s, num_requests=400)
    saturation = report(SYSTEM, Simulation(*replica.build(), trace).run(), np.full(400, alone_s))["saturation"]
    assert saturation["is_over"] == is_over
    assert saturation["growth"] is not None and saturation["drain_s"] is not None
    if is_over:  # half of what arrives is served, and the other half as long after the last arrival
        assert saturation["growth"] == pytest.approx(saturation["num_late"] / 2, rel=0.2)
        assert saturation["drain_s"] == pytest.approx(saturation["arrivals_s"], rel=0.2)


def test_what_is_printed() -> None:
    tables, lines = shown([made()]), remarks([made()])
    assert tables["latency"][0]["in time share"] == pytest.approx(0.4)
    assert tables["load"][0]["waiting"]["max"] == 1 and len(tables["by prompt tokens"]) == 3
    assert lines[0].startswith("lars, 2 requests/s: stopped at 10 s with 1 unfinished; 1 refused")
    assert "2 preempted, 0.25 s computed again" in lines[0]
