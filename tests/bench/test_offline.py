"""``medha bench latency`` and ``throughput`` at a toy size, and benchmarks on several ranks."""

import json
import statistics
from math import prod
from pathlib import Path

import pytest

from medha.bench.cli import Report
from medha.bench.harness import Local, Subject, on_ranks
from medha.bench.load import Workload, fixed_output, serve_load
from medha.bench.offline import throughput_fields
from medha.engine.arrivals import Arrival
from medha.models.weights import expected_tensors
from tests.bench.conftest import Bench
from tests.bench.shapes import ON_TINY, TINY
from tests.commands import Command
from tests.engines import drained
from tests.parallel.workers import WorkerPool, run_medha


def test_latency(bench: Bench) -> None:
    report, printed = bench("latency", "--input-len", "8,24", "--output-len", "3", "--num-iters", "2")
    assert report["benchmark"] == "latency" and report["model"]["hidden_size"] == TINY["hidden_size"]
    assert {"cpu", "cpus", "packages", "date", "threads"} <= set(report["environment"])
    assert (report["options"]["warmup"], report["options"]["runs"], report["dtype"]) == (1, 2, "float32")
    assert report["definitions"]["TTFT"] == "arrival to first token, queueing included"
    assert "avg_latency" not in report  # there are two lengths
    assert [line["input_len"] for line in report["results"]] == [8, 24]
    for line in report["results"]:
        assert line["output_len"] == 3
        assert len(line["latencies"]) == len(line["ttfts"]) == len(line["tpots"]) == line["num_iters"] == 2
        assert line["avg_latency"] == pytest.approx(statistics.fmean(line["latencies"]))
        assert list(line["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
        for e2el, ttft, tpot in zip(line["latencies"], line["ttfts"], line["tpots"], strict=True):
            assert e2el == pytest.approx(ttft + 2 * tpot)
        assert line["ttft"]["min_s"] <= line["ttft"]["median_s"] <= line["ttft"]["max_s"]
    assert "ttft" in printed.out


def test_one_length_has_vllm_fields_at_the_top_and_goes_to_stdout(command: Command) -> None:
    sizes = ["--input-len", "8", "--output-len", "1", "--num-iters", "1"]
    report = json.loads(command("bench", "latency", *ON_TINY, *sizes, "--output-json", "-").out)
    assert {"avg_latency", "latencies", "percentiles"} <= set(report)
    assert report["tpots"] == [] and report["tpot"] is None


@pytest.mark.usefixtures("_small_rates")
def test_whole_and_in_chunks(bench: Bench) -> None:
    given = ["--input-len", "300,20", "--max-batch-tokens", "128", "--num-iters", "2"]
    report, done = bench("latency", *given, "--whole", "--output-len", "1")
    lines = {(line["input_len"], line["way"]): line for line in report["results"]}
    assert list(lines) == [(300, "in chunks"), (300, "whole"), (20, "in chunks"), (20, "whole")]
    assert lines[300, "in chunks"]["num_chunks"] >= 3 and lines[300, "whole"]["num_chunks"] == 1
    model = Subject(hf_overrides=TINY).model_config(longest=320)
    parameters = sum(prod(shape) for name, shape in expected_tensors(model).items() if ".layers." in name)
    for (length, _), line in lines.items():
        assert line["flops"] == 2 * parameters * length + 2 * length**2 * 2 * 16 * 2
        seconds = line["ttft"]["median_s"]
        assert line["mfu"] == pytest.approx(line["flops"] / seconds / report["matrix_product"]["flops_per_s"])
        assert line["ratio"] == pytest.approx(seconds / lines[length, "whole"]["ttft"]["median_s"])
    assert "mfu" in done.out


def test_two_engines_over_the_same_weights_say_the_same() -> None:
    """In turn, in whatever order, with different chunks: the blocks that one has left do not reach the other."""
    prompts = [list(range(1, 61)), list(range(60, 0, -1))]
    said: dict[int, set[int]] = {0: set(), 1: set()}
    tokens: dict[int, set[tuple[int, ...]]] = {0: set(), 1: set()}

    def work(local: Local) -> Report:
        engines = (local.engine, local.engine_with(chunk_size=16))
        for turn in range(6):
            engine, which = engines[turn % 2], turn // 2 % 2
            engine.add_request("prompt", prompts[which], fixed_output(8).reported("cumulative"))
            last = drained(engine)[-1]
            tokens[which].add(tuple(last.outputs[0].token_ids))
            said[which].add(last.metrics.num_chunks)
        return {"last": serve_load(local.engine, [Arrival("last", prompts[0], fixed_output(2))]).outcomes}

    subject = Subject(hf_overrides=TINY, engine={"num_threads": 1, "block_size": 16})
    report = on_ranks(subject, work, longest=80, chunk_size=64)
    assert [len(found) for found in tokens.values()] == [1, 1]
    assert said == {0: {1, 4}, 1: {1, 4}}
    assert report is not None and [one.output_len for one in report["last"]] == [2]


@pytest.mark.parametrize(
    ("verb", "layout"),
    [
        (["latency", "--input-len", "20", "--num-iters", "1", "--whole"], "spp"),
        (["serve", "--preset", "convoy", "--num-prompts", "3", "--long-len", "700"], "kvp"),
    ],
)
def test_on_several_ranks(workers: WorkerPool, verb: list[str], layout: str, tmp_path: Path) -> None:
    """Rank 0 alone speaks, and writes the report of all."""
    path = tmp_path / "report.json"
    arguments = ["bench", *verb, *ON_TINY, f"--{layout}", "2", "--output-json", str(path)]
    (code, out), (other_code, other_out) = workers.run(run_medha, 2, arguments)
    assert (code, other_code, other_out, out.count("2 ranks")) == (0, 0, "", 1)
    report = json.loads(path.read_text())
    assert report["num_ranks"] == report["engine"]["parallel"][layout] == 2
    if layout == "kvp":
        assert all(one["long"]["completed"] == 4 and one["failed"] == 0 for one in report["systems"])
        assert report["systems"][-1]["system"] == "default"


# -- throughput -----------------------------------------------------------------------------------------------------

QUICK = ["--num-iters", "2", "--num-iters-warmup", "0"]


def test_throughput(bench: Bench) -> None:
    lengths = ["--num-prompts", "5", "--input-len", "12", "--output-len", "40"]
    report, done = bench("throughput", *QUICK, *lengths, "--scheduler", "sarathi", "--chunk-size", "8")
    assert (report["num_requests"], report["total_num_tokens"]) == (5, 260)
    assert len(report["elapsed_times"]) == report["timing"]["runs"] == 2
    assert report["engine"]["scheduler"]["scheduler"] == "sarathi"
    host = report["host"]
    assert host["largest_batch"] == 5  # they decode together, however late one is prepared
    assert host["timing"]["runs"] >= 2 * 40 and host["at_largest"]["runs"] >= 2
    assert all(0 < figures["min_s"] <= figures["max_s"] for figures in (host["timing"], host["at_largest"]))
    assert "host: timing" in done.out and "a step less the runner's compute" in " ".join(done.out.split())


def test_the_lengths_of_a_trace_and_not_its_arrivals(bench: Bench, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,20,2\n1000.0,30,3\n2000.0,40,4\n")
    report, _ = bench("throughput", *QUICK, "--dataset-path", trace, "--num-prompts", "2")
    assert report["num_requests"] == report["options"]["workload"]["num_prompts"] == 2
    assert (report["total_num_tokens"], report["elapsed_time"] < 1000) == (55, True)


def test_the_run_with_the_median_time() -> None:
    trace = Workload(num_prompts=4, input_len=10, output_len=5).trace
    fields = throughput_fields(trace, (1.0, 4.0, 2.0))
    assert (fields["total_input_tokens"], fields["total_output_tokens"], fields["elapsed_time"]) == (40, 20, 2.0)
    assert [fields[f"{what}_per_second"] for what in ("requests", "tokens", "output_tokens")] == [2.0, 30.0, 10.0]
