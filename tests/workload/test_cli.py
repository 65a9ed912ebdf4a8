"""``medha trace``."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from medha.workload import cli
from medha.workload.formats import FORMATS
from medha.workload.io import read_trace
from medha.workload.synth import ARRIVALS, named_lengths
from tests.commands import ENVIRONMENT, Command, write_lines

VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    more = {"output_length": 3}
    rows = [{"timestamp": i * 500, "input_length": 10 * i + 1, "hash_ids": [0, i], **more} for i in range(5)]
    return write_lines(tmp_path / "mooncake.jsonl", *rows)


@pytest.fixture
def trace(command: Command) -> Command:
    return partial(command, "trace")


def arrivals(path: Path) -> list[float]:
    return read_trace(path).trace.arrival_s.tolist()


def test_convert(trace: Command, mooncake: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl.gz"
    done = trace("convert", mooncake, out)
    assert (done.code, done.out) == (0, f"{out}: 5 requests over 2.000 s, 2 requests/s\n")
    assert (read_trace(out).format, read_trace(out).trace.prompt_tokens.tolist()) == ("medha", [1, 11, 21, 31, 41])
    assert trace("convert", mooncake, out, "--qps", "4").code == 0
    assert arrivals(out) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert trace("convert", mooncake, out, "--duration", "1.2", "--num-prompts", "2").code == 0
    assert arrivals(out) == [0.0, 0.5]
    for option, value in (("--arrivals", "at-once"), ("--burstiness", 2)):
        done = trace("convert", mooncake, out, option, value)
        assert done.code == 2 and f"{value}" in done.err and "have arrival times; accepted: the defaults" in done.err
    (tmp_path / "late.csv").write_text(VIDUR + "7,1,1\n9.5,1,1\n")
    assert trace("convert", tmp_path / "late.csv", out, "--from-zero").code == 0
    assert arrivals(out) == [0.0, 2.5]


def test_lengths_alone_need_a_rate_and_have_no_figures_of_arrivals(trace: Command, tmp_path: Path) -> None:
    lengths, out = tmp_path / "lengths.csv", tmp_path / "out.jsonl"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n" + "5,6\n7,8\n" * 500)
    done = trace("convert", lengths, out)
    assert done.code == 2
    assert done.err.endswith("without a rate; accepted: --request-rate, or --arrivals at-once\n")
    assert trace("convert", lengths, out, "--request-rate", "10", "--seed", "1").code == 0
    assert read_trace(out).trace.qps == pytest.approx(10, rel=0.1)
    first = out.read_bytes()
    assert trace("convert", lengths, out, "--qps", "10", "--seed", "1").code == 0
    assert out.read_bytes() == first
    assert trace("convert", lengths, out, "--arrivals", "at-once").code == 0
    assert read_trace(out).trace.duration_s == 0
    assert "has arrivals: no" in trace("stats", lengths).out
    figures = json.loads(trace("stats", lengths, "--output-json", "-").out)
    assert (figures["has_arrivals"], figures["qps"], figures["gap_cv"]) == (False, None, None)
    assert trace("validate", lengths).out == f"{lengths}: 1000 requests of format vidur without arrival times\n"


def test_what_is_printed_goes_nowhere_where_stdout_is_closed(tmp_path: Path) -> None:
    """Least of all into a file that has its number."""
    command = f"{sys.executable} -m medha trace synth {tmp_path}/x --num-prompts 3 --arrivals at-once >&-"
    assert subprocess.run(command, shell=True, env=ENVIRONMENT).returncode == 0
    assert [json.loads(line)["id"] for line in (tmp_path / "x").open()] == ["0", "1", "2"]


def test_stats(trace: Command, mooncake: Path) -> None:
    assert trace("stats", mooncake, "--output-json", mooncake.parent / "no" / "x.json").code == 2
    assert "which is read; accepted: another file" in trace("stats", mooncake, "--output-json", mooncake).err
    assert "which is read; accepted: another file" in trace("convert", mooncake, mooncake).err
    figures = json.loads(trace("stats", mooncake, "--output-json", "-").out)
    assert (figures["format"], figures["num_requests"], figures["qps"], figures["gap_cv"]) == ("mooncake", 5, 2.0, 0.0)
    assert list(figures["prompt_tokens"].values()) == [105, 21.0, 1, 21.0, 37.0, 40.6, 41]
    table = " ".join(trace("stats", mooncake).out.split())
    lengths = "prompt tokens: total 105, mean 21, min 1, p50 21, p90 37, p99 40.6, max 41"
    for text in (lengths, "gap cv: 0", "qps: 2", "from 128K share 0.0%"):
        assert text in table


def test_stats_of_text_with_another_estimate(trace: Command, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"conversations": [{"value": "a" * 12}, {"value": "b" * 24}]}, {"conversations": []}]))
    done = trace("stats", path, "--output-json", "-")
    assert done.err == f"medha: {path}: tokens are an estimate, characters / 4\n"
    figures = json.loads(done.out)
    assert (figures["prompt_tokens"]["max"], figures["output_tokens"]["max"], figures["num_dropped"]) == (3, 6, 1)


def test_synth(trace: Command, tmp_path: Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path in (a, b):
        sizes = ("--lengths", "medha-mix", "--qps", "2", "--duration", "100", "--seed", "5")
        assert trace("synth", path, *sizes).code == 0
    assert a.read_bytes() == b.read_bytes()
    assert read_trace(a).trace.arrival_s[-1] < 100
    assert trace("synth", b, "--lengths", "fixed:7,9", "--arrivals", f"trace:{a}", "--qps", "4").code == 0
    assert read_trace(b).trace.qps == pytest.approx(4.0)
    assert trace("synth", b, "--lengths", "sessions:2K,9,9,4", "--qps", "4", "--num-requests", "99").code == 0
    assert json.loads(trace("stats", b, "--output-json", "-").out)["prefix_reuse"] > 0.6
    done = trace("synth", b, "--qps", "2")
    assert done.code == 2
    assert done.err == "error: ConfigError: num_requests=None and duration_s=None; accepted: one of the two\n"
    assert trace("synth", b, "--arrivals", "trace:nowhere").code == 2
    done = trace("synth", "-", *sizes)
    assert (done.code, done.out, done.err.startswith("-: ")) == (0, a.read_text(), True)


def test_validate(trace: Command, mooncake: Path, tmp_path: Path) -> None:
    done = trace("validate", mooncake)
    assert (done.code, done.out) == (0, f"{mooncake}: 5 requests of format mooncake over 2.000 s\n")
    wrong = tmp_path / "wrong.csv"
    wrong.write_text(VIDUR + "0,1,2\nnan,1,2\n1,0,2\n1,2\n" + "2,0,0\n" * 30)
    done = trace("validate", wrong)
    assert (done.code, done.err) == (2, f"error: {wrong}: 33 faults\n")
    lines = done.out.splitlines()
    assert [line.split(": ")[0] for line in lines] == [f"{wrong}, line {i}" for i in range(3, 23)]
    assert trace("validate", wrong, "--from", "azure").code == 2
    few = tmp_path / "few.csv"
    for lines, count in (("0,0,2\n", "1 fault"), ("0,0,2\n" * 2, "2 faults"), ("", "1 fault")):
        few.write_text(VIDUR + lines)
        assert trace("validate", few).err == f"error: {few}: {count}\n"
    assert trace("validate", tmp_path / "nowhere").err.count("\n") == 1
    done = trace("convert", wrong, tmp_path / "out.jsonl", "--skip-invalid")
    assert (done.code, arrivals(tmp_path / "out.jsonl")) == (0, [0.0])
    assert json.loads(trace("stats", wrong, "--output-json", "-", "--skip-invalid").out)["num_skipped"] == 33
    done = trace("convert", wrong, tmp_path / "out.csv")
    assert (done.code, done.err.startswith(f"error: TraceFormatError: {wrong}, line 3: arrived_at='nan'")) == (2, True)


def test_help_names_what_is_accepted(trace: Command) -> None:
    for verb in ("convert", "stats", "synth", "validate"):
        assert trace(verb, "--help").code == 0
    assert all(name in cli.FORMATS for name in FORMATS)
    assert ", ".join(ARRIVALS) == cli.PROCESSES
    help_text = " ".join(trace("synth", "--help").out.replace("│", " ").split())
    assert all(name in help_text for name in named_lengths())
