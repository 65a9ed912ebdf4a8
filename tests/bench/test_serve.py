"""``medha bench serve`` at a toy size, and its preset convoy; a load on a live engine."""

import math
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medha.bench.harness import Local, Subject, on_ranks
from medha.bench.load import ArrivingWorkload, NotedStep, Workload, arrivals_of, fixed_output, serve_load
from medha.bench.serve import ServeOptions, convoy_figures, mix_of, prediction_error, stream_of, systems_of
from medha.config import SchedulerConfig
from medha.engine.arrivals import Arrival
from medha.engine.request import Request
from medha.params import SLO
from medha.sched.decision import Prediction
from medha.workload.io import write_trace
from medha.workload.metrics import METRICS, Outcome, Served
from medha.workload.trace import Trace
from tests.bench.conftest import Bench
from tests.bench.shapes import TINY

OF_VLLM = """
    backend model_id tokenizer_id num_prompts request_rate burstiness max_concurrency duration completed failed
    total_input_tokens total_output_tokens request_throughput request_goodput output_throughput total_token_throughput
    max_output_tokens_per_s max_concurrent_requests input_lens output_lens start_times ttfts itls latencies errors
"""
KEYS = {*OF_VLLM.split(), "queue_times", "slo_attainment", "ttft_by_length", "prediction_error"}
KEYS |= {f"{figure}_{metric}_ms" for figure in ("mean", "median", "std", "p99") for metric in METRICS}


def test_table_and_report(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes stderr for a terminal
    load = ["--num-prompts", "6", "--input-len", "20", "--output-len", "4", "--request-rate", "40"]
    aims = ["--goodput", "ttft:60000", "tpot:60000", "--metric-percentiles", "50,99,99.9"]
    report, printed = bench("serve", *load, *aims)
    assert set(report) >= KEYS
    assert (report["backend"], report["num_prompts"], report["request_rate"]) == ("medha", 6, 40.0)
    assert (report["completed"], report["failed"]) == (6, 0)
    assert report["total_input_tokens"] == sum(report["input_lens"]) == 120
    assert report["total_output_tokens"] == sum(report["output_lens"]) == 24
    assert report["total_token_throughput"] == pytest.approx(144 / report["duration"])
    assert report["slo_attainment"] == 1.0
    assert report["p50_ttft_ms"] == pytest.approx(report["median_ttft_ms"])
    assert report["p99_e2el_ms"] <= report["p99.9_e2el_ms"]
    columns = (report[name] for name in ("start_times", "ttfts", "itls", "latencies", "queue_times"))
    for start, ttft, itls, latency, queue in zip(*columns, strict=True):
        assert start >= 0 and 0 <= queue <= ttft and len(itls) == 3
        assert latency == pytest.approx(ttft + sum(itls))
    (line,) = report["ttft_by_length"]
    assert (line["bucket"], line["num_requests"], line["completed"]) == ("1-256", 6, 6)
    assert report["prediction_error"]["count"] > 0
    assert "TTFT" in printed.out and "slo attainment" in printed.out
    assert "measuring" in printed.err and "measuring" not in printed.out


def test_a_trace_with_its_own_objectives_and_a_limit(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    own = np.array([1e-9, np.nan, np.nan])
    write_trace(path, Trace(np.array([5.0, 5.0, 5.1]), np.array([300, 10, 10]), np.array([2, 3, 1]), ttft_slo_s=own))
    load = ["--trace", path, "--max-concurrency", "1", "--percentile-metrics", "ttft"]
    report, _ = bench("serve", *load, "--goodput", "e2el:60000", "--scheduler", "orca")
    assert report["input_lens"] == [300, 10, 10] and report["output_lens"] == [2, 3, 1]
    assert report["start_times"][0] == 0.0  # the first request is there at once
    assert report["max_concurrent_requests"] == report["max_concurrency"] == 1
    assert report["slo_attainment"] == pytest.approx(2 / 3)  # the first cannot meet its own
    assert "mean_ttft_ms" in report and "mean_tpot_ms" not in report
    assert {line["bucket"]: line["num_requests"] for line in report["ttft_by_length"]} == {"1-256": 2, "256-1K": 1}


def test_requests_that_fail_are_counted(bench: Bench) -> None:
    given = ["--num-prompts", "3", "--input-len", "40", "--goodput", "ttft:0.000001", "--admission", "refuse"]
    report, printed = bench("serve", *given, "--num-warmups", "0", code=3)
    assert (report["completed"], report["failed"], report["request_rate"]) == (0, 3, "inf")
    assert report["mean_ttft_ms"] is None and report["slo_attainment"] == 0.0
    assert all("DeadlineError" in error for error in report["errors"])
    assert " of 3 that failed: DeadlineError" in printed.out


def test_workloads(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n2.0,20,2\n4.0,30,3\n6.0,40,4\n")
    assert Workload(dataset_path=path).trace.arrival_s.tolist() == [0.0, 2.0, 4.0]
    assert Workload(dataset_path=path, request_rate=2.0).trace.arrival_s.tolist() == [0.0, 0.5, 1.0]
    assert Workload(dataset_path=path, request_rate=math.inf, num_prompts=2).trace.arrival_s.tolist() == [0.0, 0.0]
    drawn = Workload(input_len=7, output_len=2, num_prompts=500, request_rate=10.0, burstiness=2.0).trace
    assert drawn.qps == pytest.approx(10.0, rel=0.2)
    assert set(drawn.prompt_tokens.tolist()) == {7}


def test_convoy(bench: Bench) -> None:
    """Every scheduler gets the same requests, and each of them is accounted for; what is asked for is kept."""
    asked = ["--policy", "fcfs", "--max-num-seqs", "3", "--long-threshold", "500"]
    report, done = bench("serve", "--preset", "convoy", "--num-prompts", "6", "--long-len", "600", *asked)
    scheduler = report["engine"]["scheduler"]
    assert (scheduler["max_num_seqs"], scheduler["long_threshold"], scheduler["t_target_s"]) == (3, 500, 0.25)
    names = ["whole prefill", "Sarathi-512", "EDF", "SRPT", "LARS", "fcfs"]
    assert [one["system"] for one in report["systems"]] == names
    assert report["span_s"] == pytest.approx(report["capacity_s"] / 0.75)
    requests = [[(r["request_id"], r["input_len"]) for r in one["requests"]] for one in report["systems"]]
    assert requests[0][:4] == [(f"long-{i}", 600) for i in range(4)] and len(requests[0]) == 10
    assert all(one == requests[0] for one in requests)
    for one in report["systems"]:
        assert (one["short"]["completed"], one["long"]["completed"], one["failed"]) == (6, 4, 0)
        assert one["short"]["median_ttft_ms"] <= one["short"]["p90_ttft_ms"] <= one["short"]["p99_ttft_ms"]
        assert one["long"]["slo_attainment"] is None
        assert (one["prediction_error"]["count"] > 0) == (one["options"].get("scheduler", "medha") == "medha")
        assert all(r["arrival_s"] <= report["span_s"] for r in one["requests"])
    assert all(name in done.out for name in names) and "TTFT" in done.out


def test_the_stream_of_the_convoy() -> None:
    mix = mix_of(ServeOptions(preset="convoy", workload=ArrivingWorkload(num_prompts=30), long_len=1000), 64)
    assert [len(one.prompt) for one in mix[:4]] == [1000] * 4 and len(mix) == 34
    assert all(50 <= len(one.prompt) <= 500 and one.slo == SLO(ttft_s=1.0) for one in mix[4:])
    stream = stream_of(mix, 8.0, 0)
    assert [one.arrival_s for one in stream[:4]] == [0.0] * 4
    times = [one.arrival_s for one in stream[4:]]
    assert times == sorted(times) and times[0] > 0 and 4 < times[-1] < 8
    assert stream_of(mix, 8.0, 0) == stream
    systems = systems_of(1000)
    configs = {name: SchedulerConfig(**fields) for name, fields in systems.items()}
    asked = {name: replace(SchedulerConfig(scheduler="vllm"), **fields).scheduler for name, fields in systems.items()}
    assert list(asked.values()) == ["orca", "sarathi", "medha", "medha", "medha", "vllm"]
    guards = {name: (one.guarded_share, one.spare_share) for name, one in configs.items()}
    assert all((share == (0.0, 0.0)) == (name != "default") for name, share in guards.items())
    assert configs["LARS"].yielded_share == 0.4 and configs["SRPT"].yielded_share == 0.0


def test_figures_of_the_convoy() -> None:
    goal = SLO(ttft_s=1.0)
    shorts = [Outcome(f"short-{at}", 9, 1, 0.0, 0.0, at, (), at, slo=goal) for at in (0.5, 2.0)]
    lost = Outcome("short-2", 9, 0, 0.0, None, None, (), 1.0, error="DeadlineError", slo=goal)
    found = convoy_figures(Served((Outcome("long-0", 99, 2, 0.0, 0.0, 4.0, (0.5,), 4.5), *shorts, lost), 5.0))
    assert (found["failed"], found["short"]["failed"], found["short"]["completed"]) == (1, 1, 2)
    assert found["short"]["median_ttft_ms"] == 1250.0 and found["short"]["slo_attainment"] == pytest.approx(1 / 3)
    assert (found["long"]["mean_ttft_ms"], found["long"]["p99_tpot_ms"]) == (4000.0, 500.0)
    assert found["long"]["slo_attainment"] is None


def test_errors_of_predicted_step_times() -> None:
    prediction = Prediction("decode", 1.0, 1.0, 1.0)
    steps = [NotedStep(1, prediction, busy_s, 0.0) for busy_s in (1.0, 1.0, 0.8)] + [NotedStep(1, None, 9.0, 0.0)]
    found = prediction_error(steps)
    assert (found["count"], found["within_share"]) == (3, 2 / 3)
    assert found["mean_abs_error"] == found["mean_signed_error"] == pytest.approx(0.25 / 3)
    assert set(prediction_error([]).values()) == {0, None}


# -- a load on a live engine: what becomes of its requests ---------------------------------------------------------


@pytest.fixture(scope="module")
def local() -> Local:
    report = on_ranks(Subject(hf_overrides=TINY, engine={"num_threads": 1}), lambda one: {"local": one}, longest=64)
    assert report is not None
    return report["local"]


def arrival(name: str, arrival_s: float = 0.0, *, tokens: int = 3, prompt: int = 8) -> Arrival:
    return Arrival(name, [1] * prompt, fixed_output(tokens), arrival_s=arrival_s)


def test_who_is_held_back_arrives_when_there_is_room(local: Local) -> None:
    served = serve_load(local.engine, [arrival("a"), arrival("b", tokens=1), arrival("c", 0.01)], max_concurrency=1)
    a, b, c = served.outcomes
    assert a.end_s <= b.start_s and b.end_s <= c.start_s and c.end_s == served.duration_s
    assert (b.itl_s, b.tpot_s) == ((), None) and all(gap > 0 for gap in (*a.itl_s, *c.itl_s))
    assert not local.engine.has_unfinished


def test_a_refused_request_has_an_error_and_the_others_go_on(local: Local) -> None:
    long, a = serve_load(local.engine, [arrival("long", prompt=100), arrival("a")], max_concurrency=1).outcomes
    assert not long.is_completed and long.error.startswith("ContextLengthError: ") and long.ttft_s is None
    assert (long.input_len, long.output_len) == (100, 0)
    assert a.is_completed


def test_requests_keep_their_tenants(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    tenants, add = list[str](), local.engine.add_prepared

    def noted(request: Request, **named: Any) -> None:
        tenants.append(request.tenant)
        add(request, **named)

    monkeypatch.setattr(local.engine, "add_prepared", noted)
    serve_load(local.engine, [replace(arrival("a"), tenant="chat"), arrival("b")])
    assert tenants == ["chat", ""]


def test_each_load_finds_an_empty_prefix_cache() -> None:
    def work(local: Local) -> dict[str, Any]:
        loads = [serve_load(local.engine, [arrival("a", prompt=48)]) for _ in range(2)]
        return {"num_chunks": [one.outcomes[0].num_chunks for one in loads]}

    engine = {"num_threads": 1, "prefix_caching": True, "block_size": 16, "chunk_size": 16}
    assert on_ranks(Subject(hf_overrides=TINY, engine=engine), work, longest=64) == {"num_chunks": [3, 3]}


def test_prompts_share_the_blocks_that_a_trace_names() -> None:
    hashes = np.array([array("q", ids) for ids in ([7, 8], [7, 9, 1], [7, 8])], object)
    trace = Trace(np.zeros(3), np.array([1024, 1100, 1030]), np.ones(3, int), prefix_hashes=hashes)
    prompts = [list(one.prompt) for one in arrivals_of(trace, 256, seed=0)]
    assert [len(one) for one in prompts] == [1024, 1100, 1030]
    assert prompts[0][:512] == prompts[1][:512] and prompts[0] == prompts[2][:1024]
    assert prompts[0][512:] != prompts[1][512:1024] and prompts[0][:512] != prompts[0][512:]
