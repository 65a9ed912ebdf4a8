"""All figures, those under load on systems that take no time to play: claims answered, JSON, drawing."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.reproduce import load, report
from examples.reproduce.claims import load_claims
from examples.reproduce.figures import batching, capacity, layouts, tetris
from examples.reproduce.load import LONG_TOKENS, Load, Served, System
from examples.reproduce.report import FIGURES, run_figure, save
from examples.reproduce.result import VERDICTS, Options
from examples.reproduce.systems import LOONGSERVE, MEDHA
from medha.workload.synth import synthesize
from medha.workload.trace import Trace
from tests.reproduce import HAS_MATPLOTLIB, made_up
from tools import best_rates

OPTIONS = Options(quick=True)
Serve = Callable[[System, Load], Served]


def fake(system: System, asked: Load) -> Served:
    """Short requests wait 0.35 s on Medha and 10.5 s elsewhere, long ones 100 s; a token takes 10 and 50 ms."""
    trace, is_ours = asked.trace(), system.label.startswith("Medha")
    ttft_s = np.where(trace.prompt_tokens > LONG_TOKENS, 100.0, 0.35 if is_ours else 10.5)
    decode_s = (0.01 if is_ours else 0.05) * (trace.output_tokens - 1)
    served = made_up(trace, ttft_s, end_s=asked.window_s, decode_s=decode_s)
    served.gaps.add(0.01)
    return served


def nothing(system: System, asked: Load) -> Served:
    """Nobody gets a token."""
    return made_up(asked.trace(), np.nan, end_s=asked.window_s)


def patched(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    """Have the figures under load, which would play traces for a minute, play on this, those that play all the same
    play few requests, and pictures be small."""

    def few(*given: Any, num_requests: int, **named: Any) -> Trace:
        return synthesize(*given, num_requests=num_requests // 8, **named)

    for module, name, value in (
        *((load, "serve", serve), (layouts, "serve", serve), (batching, "synthesize", few)),
        *((tetris, "TRACES", tetris.TRACES[:1]), (tetris, "_SERVED", 15), (best_rates, "RATES", (0.05, 0.5))),
        (report, "_DPI", 20),
    ):
        monkeypatch.setattr(module, name, value)


ANSWERS: dict[str, dict[str, object]] = {  # on the made-up plays
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


@pytest.mark.parametrize(
    ("name", "serve"), [*((name, fake) for name in FIGURES), ("capacity", nothing), ("pools", nothing)]
)
def test_each_figure_answers_its_claims_and_is_drawn(
    name: str, serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    patched(monkeypatch, serve)
    claims = load_claims()
    result, rows = run_figure(FIGURES[name], claims, OPTIONS)
    assert [row.claim.id for row in rows] == [one.id for one in claims if one.figure == name]
    for row in rows:
        assert row.verdict in VERDICTS
        assert row.sentence.endswith(".") and (serve is nothing or "nan" not in row.sentence), row.claim.id
    panels = [asdict(panel) for panel in result.panels]
    assert panels and json.loads(json.dumps([panels, [row.ours for row in rows]], allow_nan=False))
    assert save(result.panels, tmp_path / "figure.png") == HAS_MATPLOTLIB
    for claim, ours in ANSWERS.get(name, {}).items() if serve is fake else ():
        assert result.answers[claim].ours == pytest.approx(ours, rel=1e-6), claim


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
