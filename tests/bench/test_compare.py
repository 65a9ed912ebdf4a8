"""``medha bench compare`` at a toy size: both sides run, agree and are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from medha.bench import compare_mixed
from medha.bench.cli import app
from medha.bench.compare import CompareOptions
from medha.bench.comparing import Comparison
from medha.bench.timing import Timing
from medha.bench.workloads import Workload
from medha.cli.command import run_app
from tests.bench.shapes import TINY

SMALL = ["--num-threads", "1", "--hf-overrides", json.dumps(TINY), "--num-iters", "2"]
ALONE = ["--prompt-lens", "none", "--batch-size", "0"]


def report_of(path: Path, *arguments: str) -> dict[str, Any]:
    assert run_app(app, "bench", ["compare", *SMALL, *arguments, "--output-json", str(path)]) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def test_prefill_and_decode_in_two_dtypes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt-lens", "40", "--batch-size", "2", "--decode-len", "4", "--num-mixed", "0"]
    report = report_of(tmp_path / "compare.json", *options, "--dtype", "float32,bfloat16")
    results = report["results"]
    assert [(r["dtype"], r["name"]) for r in results] == [
        (dtype, name) for dtype in ("float32", "bfloat16") for name in ("prefill 40", "decode of 2")
    ]
    assert all(r["ratio"] > 0 and r["medha"]["runs"] == 2 for r in results)
    assert all(r["same_tokens"] and r["num_equal"] == r["num_requests"] for r in results if r["dtype"] == "float32")
    assert report["model"]["hidden_size"] == TINY["hidden_size"]
    assert report["options"]["mixed"] is None
    assert "2 layers, 32 wide, GQA 2" in capsys.readouterr().out


def test_mixed_requests_in_padded_batches_and_continuously(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--num-mixed", "11", "--mixed-lengths", "uniform:4-40,2-9"]
    report = report_of(tmp_path / "compare.json", *ALONE, *given)
    padded, continuous = report["results"]
    assert (padded["name"], continuous["name"]) == ("11 mixed, padded by 8", "11 mixed, continuous")
    assert padded["medha"] == continuous["medha"]  # one run of medha stands against both
    assert padded["transformers"] != continuous["transformers"]
    for result in (padded, continuous):
        assert result["is_padded"] and result["medha"]["runs"] == 2
        assert result["num_requests"] == 11 and result["num_equal"] >= 9  # a tie may turn
    mixed = report["options"]["mixed"]
    assert (mixed["num_prompts"], mixed["padded_batch"]) == (11, 8)
    assert 4 <= mixed["input_len"]["min"] < mixed["input_len"]["max"] <= 40
    assert "11 mixed" in capsys.readouterr().out


def test_the_requests_are_those_of_the_seed() -> None:
    trace = Workload(lengths="uniform:4-40,2-9", num_prompts=5, seed=1).trace()
    requests = compare_mixed.mixed_requests(trace, 64, seed=1)
    assert [len(one.prompt) for one in requests] == trace.prompt_tokens.tolist()
    assert [one.num_outputs for one in requests] == trace.output_tokens.tolist()
    assert requests == compare_mixed.mixed_requests(trace, 64, seed=1)
    assert requests != compare_mixed.mixed_requests(trace, 64, seed=2)


def test_share_of_equal_tokens_and_who_may_differ() -> None:
    timing = Timing.of([1.0])
    tokens = ([[1, 2], [3], [4], [5]], [[1, 2], [3], [4], [6]])
    exact = Comparison.of("x", "float32", timing, Timing.of([3.0]), tokens=tokens)
    assert (exact.num_equal, exact.num_requests, exact.same_tokens, exact.ratio) == (3, 4, False, 3.0)
    assert exact.is_exact and exact.tokens_text == "DIFFER: 3 of 4"
    padded = Comparison.of("x", "float32", timing, timing, tokens=tokens, is_padded=True)
    assert not padded.is_exact and padded.tokens_text == "3 of 4"
    assert not Comparison.of("x", "bfloat16", timing, timing, tokens=tokens).is_exact


def test_runs_are_counted_before() -> None:
    mixed = Workload(lengths="fixed:4,2", num_prompts=9)
    options = CompareOptions(prompt_lens=(8, 16), decode_batch=0, mixed=mixed, dtypes=("float32", "bfloat16"), runs=2)
    assert options.num_runs == 2 * (2 * 2 + 3) * (1 + 2)


@pytest.mark.parametrize(("variable", "threads"), [(None, 2), ("1", 1), ("3", 3)])
def test_threads_are_those_of_the_environment(
    variable: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    seen = []
    monkeypatch.setattr(
        "medha.bench.compare.run_and_print", lambda options, path: seen.append(options.num_threads) or 0
    )
    assert run_app(app, "bench", ["compare"]) == 0
    assert run_app(app, "bench", ["compare", "--num-threads", "4"]) == 0
    assert seen == [threads, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output-json", "absent/compare.json"], "cannot be written"),
        (["--dtype", "float64"], "dtype='float64'; accepted"),
        ([*ALONE, "--num-mixed", "0"], "all left out; accepted"),
        (
            [*ALONE[:2], "--batch-size", "2", "--decode-len", "2", "--num-mixed", "0", "--t-target-s", "0"],
            "t_target_s=0.0",
        ),
        (["--prompt-lens", "0"], "prompt_lens='0'; accepted"),
        (["--mixed-lengths", "nothing"], "lengths='nothing'; accepted"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "bench", ["compare", *SMALL, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
