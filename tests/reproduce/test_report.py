"""Claims, figures and reports: the list of claims, the rule for a verdict, every figure on systems that take no time to
play, and ``python -m examples.reproduce`` end to end."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.reproduce import load, report
from examples.reproduce.__main__ import app
from examples.reproduce.claims import Claim, load_claims
from examples.reproduce.figures import batching, capacity, chunks, kvp, layouts, stages, tetris
from examples.reproduce.load import LONG_TOKENS, Load, Served, System
from examples.reproduce.report import FIGURES, SMALL, Row, find_figures, run_figure, save, write_all
from examples.reproduce.result import VERDICTS, FigureResult, FigureSpec, Options, ratio, verdict
from examples.reproduce.systems import LOONGSERVE, MEDHA
from examples.reproduce.timing import M
from medha.cli.command import run_app
from medha.errors import ConfigError
from medha.workload.synth import synthesize
from medha.workload.trace import Trace
from tests.reproduce import made_up
from tools import best_rates

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None

# -- claims ----------------------------------------------------------------------------------------------------


def claim(kind: str = "value", value: Any = 2.0, unit: str = "s") -> Claim:
    return Claim("one", "v5 section 1", "It is fast", kind, value, unit, figure="requirements")


def test_what_was_not_simulated_is_not_counted() -> None:
    claims = load_claims()
    assert {one.figure for one in claims if one.basis == "input"} == {"lengths"}
    assert len([one for one in claims if one.basis]) == 33
    _, rows = run_figure(FIGURES["intensity"], claims, Options())
    assert report._counts(rows) == "0 reproduced, 0 partly, 0 not; not counted: 3 arithmetic"
    more = [Row(claim(unit="times"), ours, "") for ours in (2.0, 9.0, 0.1)]
    assert report._counts(more) == "1 reproduced, 0 partly, 1 not; not counted: 1 exceeds"


def test_fields_of_claims_of_which_each_has_a_known_figure_or_a_reason() -> None:
    claims = load_claims()
    assert len({one.id for one in claims}) == len(claims) > 80
    assert set(FIGURES) == {one.figure for one in claims if one.figure}
    for one in claims:
        assert one.figure in FIGURES or (not one.figure and len(one.reason) > 20), one.id
        assert bool(one.how) == bool(one.figure), one.id
        assert any(version in one.where for version in ("v4", "v5", "Tetris", "post")), one.id
        assert one.kind in ("value", "range", "at-least", "at-most", "statement"), one.id
        assert one.basis in ("", "arithmetic", "input", "by construction"), one.id
        assert all(text.strip() for text in (one.id, one.where, one.says)), one.id
        assert bool(one.unit) == (one.kind != "statement"), one.id
        assert one.value == 1 if one.kind == "statement" else np.isfinite(one.value).all(), one.id
        assert one.kind != "range" or one.value[0] < one.value[1], one.id


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (claim(), {2.3: "reproduced", 2.31: "partly", 4.0: "partly", 4.01: "not", -2.0: "not"}),
        (claim(unit="times"), {2.15: "reproduced", 1.01: "not", 3.0: "partly", 3.1: "exceeds", 0.1: "not"}),
        (claim("range", (1.2, 1.4), unit="times"), {(1.2, 1.9): "exceeds", (1.0, 1.9): "not"}),
        (claim(value=1.05, unit="times"), {0.98: "not"}),
        (claim(value=0, unit="times"), {0.1: "reproduced"}),
        (claim(value=0), {0.0: "reproduced"}),
        (claim("at-least"), {9.0: "reproduced", 1.0: "partly", -1.0: "not"}),
        (claim("at-most"), {4.0: "partly", 4.1: "not"}),
        (claim("statement", 1), {0.9: "partly", 0.4: "not"}),
        (claim("range", (50.0, 60.0)), {(48.0, 66.0): "reproduced", (40.0, 60.0): "partly", (50.0, 130.0): "not"}),
    ],
)
def test_the_verdict_rule(one: Claim, expected: dict[Any, str]) -> None:
    """By what we have of the claim."""
    assert {ours: verdict(one, ours) for ours in expected} == expected


def test_ratios() -> None:
    assert ratio(claim(), 3.0) == 1.5
    assert ratio(claim(unit="times"), 3.0) == 2.0
    assert ratio(claim("range", (50.0, 60.0)), (45.0, 65.0)) == 1.0
    assert ratio(claim("statement", 1), 1.0) is None
    assert ratio(claim(value=0), 1.0) is None
    for one, ours in ((claim(), (1.0, 2.0)), (claim("range", (1.0, 2.0)), 1.0)):
        with pytest.raises(ValueError, match="claim one is a "):
            verdict(one, ours)


def test_figures_by_name() -> None:
    assert [figure.name for figure in find_figures(["all"])] == list(FIGURES)
    assert [figure.name for figure in find_figures([])] == list(SMALL)
    assert [figure.name for figure in find_figures(["mbu", "intensity", "mbu"])] == ["intensity", "mbu"]
    with pytest.raises(
        ConfigError, match=r"figure 'spp-scalin' is not known; accepted: all, requirements, .*spp-scaling\?"
    ):
        find_figures(["all", "spp-scalin"])


# -- figures ---------------------------------------------------------------------------------------------------

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


def half_with_a_pool(system: System, asked: Load) -> Served:
    """But on two systems every second long request has no end."""
    served = fake(system, asked)
    finish_s = served.finish_s.copy()
    if system not in (MEDHA, LOONGSERVE):
        finish_s[np.flatnonzero(served.is_long & served.is_finished)[1::2]] = np.nan
    return replace(served, finish_s=finish_s)


def patched(monkeypatch: pytest.MonkeyPatch, serve: Serve) -> None:
    """Have the figures under load, which would play traces for a minute, play on this, those that play all the same
    play few requests, those of a million tokens take an eighth of them, and pictures be small."""

    def few(*given: Any, num_requests: int, **named: Any) -> Trace:
        return synthesize(*given, num_requests=num_requests // 8, **named)

    for module, name, value in (
        *((load, "serve", serve), (layouts, "serve", serve), (batching, "synthesize", few)),
        *((tetris, "TRACES", tetris.TRACES[:1]), (tetris, "_SERVED", 15), (best_rates, "RATES", (0.05, 0.5))),
        *((module, "M", M // 8) for module in (chunks, kvp, stages)),
        (report, "_DPI", 20),
    ):
        monkeypatch.setattr(module, name, value)


ANSWERS: dict[str, dict[str, object]] = {  # on the made-up plays of all
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
    ("name", "serve", "answers"),
    [
        *((name, fake, ANSWERS.get(name, {})) for name in FIGURES),
        *(("capacity", nothing, {}), ("pools", nothing, {}), ("pools", half_with_a_pool, {"pool-10": 50.0})),
    ],
)
def test_each_figure_answers_its_claims_and_is_drawn(
    name: str, serve: Serve, answers: dict[str, object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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
    for claim, ours in answers.items():
        assert result.answers[claim].ours == pytest.approx(ours, rel=1e-6), claim


# -- reports ---------------------------------------------------------------------------------------------------

NAMES = ("intensity", "kvp-decode")


def test_two_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for folder in ("a", "b"):
        assert run_app(app, "reproduce", [*NAMES, "--out", str(tmp_path / folder), "--quick"]) == 0
        texts.append((tmp_path / folder / "REPORT.md").read_text())
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == str(tmp_path / "b" / "REPORT.md")
    assert "intensity: 0 reproduced, 0 partly, 0 not; not counted: 3 arithmetic" in err
    assert texts[0] == texts[1]
    claims = [claim for claim in load_claims() if claim.figure in NAMES]
    table = [line for line in texts[0].splitlines() if line.startswith("| ")]
    assert len(table) == 2 + len(claims) and all(line.count("|") == 9 for line in table)
    assert "Some figures, quick, seed 0" in texts[0] and "Still to come" not in texts[0]
    for name in NAMES:
        tree = json.loads((tmp_path / "a" / f"{name}.json").read_text())
        assert tree["figure"] == name and tree["panels"]
        assert {row["id"] for row in tree["claims"]} == {claim.id for claim in claims if claim.figure == name}
        assert (tmp_path / "a" / f"{name}.png").exists() == HAS_MATPLOTLIB
    assert ("matplotlib is not installed" in texts[0]) != HAS_MATPLOTLIB


def test_seed_changes_what_is_drawn_and_nothing_else() -> None:
    claims, figure = load_claims(), FIGURES["lengths"]
    one, same, other = (run_figure(figure, claims, Options(quick=True, seed=seed))[0].panels for seed in (1, 1, 2))
    assert one == same != other


def test_the_whole_report_lists_what_is_not_answered() -> None:
    claims = load_claims()
    text = report.report(list(FIGURES.values()), claims, [], Options(), drawn=True)
    assert "## Not answered here: " in text
    for claim in claims:
        assert (claim.says in text) == (claim.figure not in FIGURES), claim.id


@pytest.mark.parametrize(
    ("arguments", "out", "message"),
    [
        (["nothing"], "out", "figure 'nothing' is not known; accepted: all, requirements,"),
        (["mfuu"], "out", "did you mean mfu?"),
        (["--seed", "-1"], "out", "--seed"),
        (["intensity"], "file", "cannot be written to"),
    ],
)
def test_bad_usage(
    arguments: list[str], out: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert run_app(app, "reproduce", [*arguments, "--out", str(tmp_path / out)]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_figure_must_answer_its_claims(tmp_path: Path) -> None:
    silent = FigureSpec("intensity", "silent", lambda options: FigureResult([]))
    with pytest.raises(RuntimeError, match=r"intensity and claims.toml differ in gqa-ratio, linear-memory-bound"):
        write_all([silent], load_claims(), Options(), tmp_path)
