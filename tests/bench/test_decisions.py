"""``medha bench micro scheduler`` at a small size: it measures the state that it says, and the report is complete."""

from __future__ import annotations

import gc
import json
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest

from medha.bench.cli import app
from medha.bench.decisions import DecisionOptions, Decisions, Spread, _collector, _Load, bench_decisions, growth
from medha.cli.command import run_app
from medha.errors import ConfigError

SMALL = DecisionOptions(waiting=(60,), num_decoding=12, num_prefilling=4, num_decisions=40, warmup=5)


def test_table_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "decisions.json"
    options = ["--num-waiting", "20,40", "--policy", "lars", "--policy", "priority", "--num-running", "8"]
    options += ["--num-prefills", "4", "--num-iters", "10", "--num-iters-warmup", "2", "--output-json", str(path)]
    assert run_app(app, "bench", ["micro", "scheduler", *options]) == 0
    report = json.loads(path.read_text())
    assert report["benchmark"] == "micro scheduler"
    assert report["gc"]["is_enabled"] is True
    assert report["options"]["waiting"] == [20, 40]
    assert {"date", "cpu", "python", "packages"} <= report["environment"].keys()
    assert [(r["policy"], r["waiting"], r["decisions"]) for r in report["results"]] == [
        (policy, waiting, 10) for policy in ("lars", "priority") for waiting in (20, 40)
    ]
    for result in report["results"]:
        assert result["limit_ms"] == 1.0
        for call in ("schedule", "complete", "both"):
            spread = result[call]
            assert 0 < spread["median_ms"] <= spread["p90_ms"] <= spread["p99_ms"] <= spread["max_ms"]
            assert spread["cpu_p99_ms"] > 0
    text = capsys.readouterr().out
    assert "schedule" in text and "complete" in text
    assert [(one["policy"], one["from_waiting"], one["waiting_ratio"]) for one in report["growth"]] == [
        ("lars", 20, 2.0),
        ("priority", 20, 2.0),
    ]


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
    assert [len(times.wall_s) for times in (load.schedule, load.complete)] == [40, 40]
    assert all(abs(decodes - SMALL.num_decoding) <= 2 for decodes, _ in load.num_rows)
    assert all(chunks > 0 for _, chunks in load.num_rows)
    assert max(begun for begun, _ in load.num_begun) > 0


def test_the_same_seed_makes_the_same_decisions() -> None:
    def decide(seed: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        load = _Load("lars", replace(SMALL, seed=seed))
        load.begin(60)
        for _ in range(20):
            load.step()
        return list(zip(load.num_rows, load.num_begun, strict=True))

    assert decide(1) == decide(1) != decide(2)


def test_a_pool_that_decodes_fill_is_measured_too() -> None:
    """Fewer than asked for decode, the others are refused memory."""
    load = _Load("lars", replace(SMALL, num_decoding=100, num_blocks=400))
    load.begin(60)
    assert load.scheduler.schedule(load._now_s).refused
    report = bench_decisions(replace(SMALL, num_decoding=100, num_blocks=400, num_decisions=10))
    (result,) = report["results"]
    assert result["waiting"] >= 60 and 10 < result["decoding"] < 90
    with pytest.raises(ConfigError, match=r"num_kv_blocks=10; accepted: at least 395, one long request"):
        replace(SMALL, num_blocks=10)


def test_an_unknown_policy_is_refused_before_anything_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "bench", ["micro", "scheduler", "--policy", "larz"]) == 2
    assert "policy='larz'; accepted: " in capsys.readouterr().err
    assert run_app(app, "bench", ["micro", "scheduler", "--num-waiting", "0"]) == 2
    assert "num_waiting='0'; accepted: positive integers" in capsys.readouterr().err


def test_spread_and_growth() -> None:
    seconds = np.arange(1, 101) / 1e3
    spread = Spread.of(seconds.tolist(), (seconds / 2).tolist())
    assert astuple(spread) == pytest.approx((50.5, 90.1, 99.01, 100.0, 49.505))
    first = Decisions("lars", 10, 1, 1, 1, 0, 100, spread, spread, spread, 1.0, 0, 0.0)
    second = replace(first, waiting=100, both=Spread(*(2 * value for value in astuple(spread))))
    (grown,) = growth([first, second, replace(first, policy="fcfs")])
    assert (grown["policy"], grown["from_waiting"], grown["waiting"]) == ("lars", 10, 100)
    assert (grown["waiting_ratio"], grown["median_ratio"], grown["p99_ratio"]) == (10.0, 2.0, 2.0)


def test_runs_of_the_garbage_collector_are_seen() -> None:
    before = list(gc.callbacks)
    with _collector() as pauses:
        gc.collect()
    assert len(pauses) == 1 and pauses[0] > 0
    assert gc.callbacks == before
