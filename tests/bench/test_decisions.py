"""``medha bench micro scheduler`` at a small size: it measures the state that it says, and the report is complete."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from medha.bench.cli import app
from medha.bench.decisions import DecisionOptions, _Load, bench_decisions
from medha.cli.command import run_app
from medha.errors import ConfigError

SMALL = DecisionOptions(waiting=(60,), num_decoding=12, num_prefilling=4, runs=40, warmup=5)


def test_table_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "decisions.json"
    options = ["--num-waiting", "20,40", "--policy", "lars", "--policy", "priority", "--num-running", "8"]
    options += ["--num-prefills", "4", "--num-iters", "10", "--num-iters-warmup", "2", "--output-json", str(path)]
    assert run_app(app, "bench", ["micro", "scheduler", *options]) == 0
    report = json.loads(path.read_text())
    assert report["benchmark"] == "micro scheduler"
    assert report["options"]["waiting"] == [20, 40]
    assert {"date", "cpu", "python", "packages"} <= report["environment"].keys()
    assert [(r["policy"], r["waiting"], r["decisions"]) for r in report["results"]] == [
        (policy, waiting, 10) for policy in ("lars", "priority") for waiting in (20, 40)
    ]
    for result in report["results"]:
        assert result["limit_ms"] == 1.0
        for call in ("schedule", "complete", "both"):
            figures = [result[call][name] for name in ("median_ms", "p90_ms", "p99_ms", "max_ms")]
            assert figures[0] > 0 and figures == sorted(figures)
    text = capsys.readouterr().out
    assert "schedule" in text and "complete" in text


@pytest.mark.parametrize("policy", ["lars", "fcfs", "priority:edf"])
def test_the_load_stays_what_it_says(policy: str) -> None:
    """So many decode in every counted batch, so many wait after it, and prefills are under way."""
    load = _Load(policy, SMALL)
    load.begin(60)
    for _ in range(5):
        load.step()
    load.clear()
    for _ in range(40):
        load.step()
        assert load.scheduler.num_waiting >= 60
        assert SMALL.num_decoding <= load.scheduler.num_running <= SMALL.num_decoding + SMALL.num_prefilling
    assert len(load.seconds) == 40
    assert all(abs(decodes - SMALL.num_decoding) <= 2 for decodes, _ in load.num_rows)
    assert all(chunks > 0 for _, chunks in load.num_rows)


def test_a_pool_that_decodes_fill_is_measured_too() -> None:
    """Fewer than asked for decode, the others are refused memory."""
    load = _Load("lars", replace(SMALL, num_decoding=100, num_blocks=400))
    load.begin(60)
    assert load.scheduler.schedule(load._now_s).refused
    report = bench_decisions(replace(SMALL, num_decoding=100, num_blocks=400, runs=10))
    (result,) = report["results"]
    assert result["waiting"] >= 60 and 10 < result["decoding"] < 90
    with pytest.raises(ConfigError, match=r"num_kv_blocks=10; accepted: at least 395, one long request"):
        replace(SMALL, num_blocks=10)


def test_an_unknown_policy_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "bench", ["micro", "scheduler", "--policy", "larz"]) == 2
    assert "policy='larz'; accepted: " in capsys.readouterr().err
    assert run_app(app, "bench", ["micro", "scheduler", "--num-waiting", "0"]) == 2
    assert "num_waiting='0'; accepted: positive integers" in capsys.readouterr().err
