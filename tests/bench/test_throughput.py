"""``medha bench throughput`` at a toy size."""

from pathlib import Path

import pytest

from medha.bench.load import Workload
from medha.bench.offline import throughput_fields
from tests.bench.conftest import Bench

QUICK = ["--num-iters", "2", "--num-iters-warmup", "0"]


def test_table_and_report(bench: Bench) -> None:
    lengths = ["--num-prompts", "5", "--input-len", "12", "--output-len", "40"]
    report, done = bench("throughput", *QUICK, *lengths, "--scheduler", "sarathi", "--chunk-size", "8")
    assert (report["num_requests"], report["total_num_tokens"]) == (5, 260)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (60, 200)
    assert len(report["elapsed_times"]) == report["timing"]["runs"] == 2
    elapsed_s = report["elapsed_time"]
    assert report["requests_per_second"] == pytest.approx(5 / elapsed_s)
    assert report["tokens_per_second"] == pytest.approx(260 / elapsed_s)
    assert report["output_tokens_per_second"] == pytest.approx(200 / elapsed_s)
    assert report["engine"]["scheduler"]["scheduler"] == "sarathi"
    host = report["host"]
    assert host["largest_batch"] == 5  # they decode together, however late one is prepared
    assert host["timing"]["runs"] >= 2 * 40 and host["at_largest"]["runs"] >= 2
    assert all(0 < figures["min_s"] <= figures["max_s"] for figures in (host["timing"], host["at_largest"]))
    assert "host: timing" in done.out and "a step less the runner's compute" in " ".join(done.out.split())


@pytest.mark.parametrize("source", ["trace", "distribution"])
def test_lengths_of_a_trace_or_a_distribution(bench: Bench, tmp_path: Path, source: str) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,20,2\n1000.0,30,3\n2000.0,40,4\n")
    given = ["--dataset-path", trace] if source == "trace" else ["--lengths", "uniform:20-40,2-4"]
    report, _ = bench("throughput", *QUICK, *given, "--num-prompts", "2")
    assert report["num_requests"] == report["options"]["workload"]["num_prompts"] == 2
    assert 40 <= report["total_input_tokens"] <= 80
    if source == "trace":  # its arrivals do not count
        assert (report["total_num_tokens"], report["elapsed_time"] < 1000) == (55, True)


def test_the_run_with_the_median_time() -> None:
    trace = Workload(num_prompts=4, input_len=10, output_len=5).trace
    fields = throughput_fields(trace, (1.0, 4.0, 2.0))
    assert (fields["elapsed_time"], fields["requests_per_second"], fields["tokens_per_second"]) == (2.0, 2.0, 30.0)
