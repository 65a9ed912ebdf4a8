"""``medha bench latency`` at a toy size."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from medha.bench.cli import app
from medha.bench.latency import LengthLatency
from medha.cli.command import run_app
from medha.workload.metrics import Outcome
from tests.bench.shapes import ON_TINY, TINY


def run(*arguments: str) -> int:
    return run_app(app, "bench", ["latency", *ON_TINY, *arguments])


def test_table_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes stderr for a terminal
    path = tmp_path / "latency.json"
    assert run("--input-len", "8,24", "--output-len", "3", "--num-iters", "2", "--output-json", str(path)) == 0
    report = json.loads(path.read_text())
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
    printed = capsys.readouterr()
    assert "TTFT ms" in printed.out and "serving" not in printed.out
    assert "serving" in printed.err and "6/6" in printed.err


def test_one_length_has_vllm_fields_at_the_top(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    assert run("--prompt-lens", "8", "--output-len", "1", "--num-iters", "1", "--output-json", str(path)) == 0
    report = json.loads(path.read_text())
    assert {"avg_latency", "latencies", "percentiles"} <= set(report)
    assert report["tpots"] == [] and report["avg_tpot"] is None and report["tpot"] is None


def test_fields_of_a_length() -> None:
    runs = [Outcome("a", 8, 3, 0.0, 0.1, 1.0, (0.5, 0.5), 2.0), Outcome("a", 8, 3, 0.0, 0.1, 2.0, (1.0, 1.0), 4.0)]
    fields = LengthLatency.of(runs).report()
    assert (fields["avg_latency"], fields["std_latency"], fields["percentiles"]["50"]) == (3.0, 1.0, 3.0)
    assert (fields["avg_ttft"], fields["avg_tpot"]) == (1.5, 0.75)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input-len", "0"], "input_len='0'; accepted: positive integers"),
        (["--input-len", "8,8"], "input_len"),
        (["--output-json", "absent/latency.json"], "absent/latency.json cannot be written"),
        (["--load-format", "safetensors"], "load_format='safetensors' without a model"),
        (["--dtype", "int8"], "dtype='int8'; accepted"),
        (["--policy", "lifo"], "policy"),
        (["--model", "absent-folder/model"], "absent-folder/model"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())
