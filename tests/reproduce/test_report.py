"""``python -m examples.reproduce`` end to end: files, table, the same text twice, bad names."""

import json
from pathlib import Path

import pytest

from examples.reproduce.__main__ import app
from examples.reproduce.claims import load_claims
from examples.reproduce.report import FIGURES, report, run_figure, write_all
from examples.reproduce.result import FigureResult, FigureSpec, Options
from medha.cli.command import run_app
from tests.reproduce import HAS_MATPLOTLIB

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
    text = report(list(FIGURES.values()), claims, [], Options(), drawn=True)
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
