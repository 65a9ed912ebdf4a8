"""The figures under load on systems that take no time to play: claims answered, JSON, drawing."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from examples.reproduce import load
from examples.reproduce.claims import load_claims
from examples.reproduce.figures import capacity, layouts
from examples.reproduce.load import LONG_TOKENS, Load, Served, System
from examples.reproduce.report import FIGURES, run_figure, save
from examples.reproduce.result import Options
from examples.reproduce.systems import LOONGSERVE, MEDHA
from medha.sim.outcome import Gaps
from tests.reproduce import HAS_MATPLOTLIB, PLAYED

OPTIONS = Options(quick=True)


def fake(system: System, asked: Load) -> Served:
    """Short requests wait 0.35 s on Medha and 10.5 s elsewhere, long ones 100 s; a token takes 10 and 50 ms."""
    trace = asked.trace()
    is_ours = system.label.startswith("Medha")
    ttft_s = np.where(trace.prompt_tokens > LONG_TOKENS, 100.0, 0.35 if is_ours else 10.5)
    ttft_s[trace.arrival_s + ttft_s > asked.window_s] = np.nan
    first_s = trace.arrival_s + ttft_s
    finish_s = first_s + (0.01 if is_ours else 0.05) * (trace.output_tokens - 1)
    gaps = Gaps()
    gaps.add(0.01)
    return Served(trace, first_s, np.where(finish_s <= asked.window_s, finish_s, np.nan), asked.window_s, gaps)


def nothing(system: System, asked: Load) -> Served:
    """Nobody gets a token."""
    trace = asked.trace()
    never = np.full(len(trace), np.nan)
    return Served(trace, never, never, asked.window_s, Gaps())


def patched(monkeypatch: pytest.MonkeyPatch, serve: Callable[[System, Load], Served]) -> None:
    """Have all figures play on this."""
    monkeypatch.setattr(load, "serve", serve)
    monkeypatch.setattr(layouts, "serve", serve)


@pytest.mark.parametrize("name", sorted(PLAYED))
def test_claims_are_answered_and_numbers_drawn(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patched(monkeypatch, fake)
    result, rows = run_figure(FIGURES[name], load_claims(), OPTIONS)
    assert all(row.sentence.endswith(".") and "nan" not in row.sentence for row in rows)
    json.dumps([asdict(panel) for panel in result.panels], allow_nan=False)
    assert save(result.panels, tmp_path / "figure.png") == HAS_MATPLOTLIB


@pytest.mark.parametrize("name", ["capacity", "pools"])
def test_claims_are_answered_where_nobody_gets_a_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, nothing)
    result, rows = run_figure(FIGURES[name], load_claims(), OPTIONS)
    json.dumps([[asdict(panel) for panel in result.panels], [row.ours for row in rows]], allow_nan=False)
    assert all(row.verdict for row in rows)


ANSWERS: dict[str, dict[str, object]] = {
    "capacity": {
        "ttft-median-30": 30.0,
        "ttft-tail-174": 30.0,  # 5 % long: P90 is of short requests
        "median-30-percent": 100 * (1 - 1 / 30),
        "p90-10s": 0.35,
        "long-1-percent": 1.0,
        "short-alike": 1 / 5,  # nobody is alike, LoongServe is behind
        "capacity-5": 1.75 / capacity.LOW_QPS[1],
    },
    "decode-under-load": {"tpot-5": 5.0, "ttft-order": 30.0, "sarathi-1s": 0.05},
    "2d-3d": {"3d-tpot-2": 1.0, "3d-ttft-alike": 1.0},
    "schedulers": {"multi-prefill-throughput": 1.0, "multi-prefill-median": (1.0, 1.0), "policies-low-load": 1.0},
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_on_made_up_plays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patched(monkeypatch, fake)
    answers = FIGURES[name].run(OPTIONS).answers
    assert {claim: answers[claim].ours for claim in ANSWERS[name]} == {
        claim: pytest.approx(ours, rel=1e-6) for claim, ours in ANSWERS[name].items()
    }


def test_answers_of_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_with_a_pool(system: System, asked: Load) -> Served:
        served = fake(system, asked)
        if system in (MEDHA, LOONGSERVE):
            return served
        finish_s = served.finish_s.copy()
        finish_s[np.flatnonzero(served.is_long & served.is_finished)[1::2]] = np.nan
        return replace(served, finish_s=finish_s)

    patched(monkeypatch, half_with_a_pool)
    answers = FIGURES["pools"].run(OPTIONS).answers
    assert 0 < answers["pool-10"].ours <= 50
