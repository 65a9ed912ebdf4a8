"""The list of claims: its schema, and that each has a figure or a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.reproduce.claims import Claim, load_claims
from examples.reproduce.registry import FIGURES, SMALL, find_figures
from examples.reproduce.report import _counts, run_figure
from examples.reproduce.result import VERDICTS, Options, ratio, verdict
from medha.errors import ConfigError
from tests.reproduce import PLAYED

CLAIM = """
[[claim]]
id = "one"
versions = ["v5"]
where = "v5 section 1"
says = "It is fast"
kind = "value"
value = 2.0
unit = "times"
figure = "requirements"
"""


def claim(kind: str = "value", value: Any = 2.0, **more: Any) -> Claim:
    return Claim("one", ("v5",), "v5 section 1", "It is fast", kind, value, "times", figure="requirements", **more)


def test_each_claim_has_a_known_figure_or_a_reason() -> None:
    claims = load_claims()
    assert len(claims) > 80
    for one in claims:
        assert one.figure in FIGURES or (not one.figure and len(one.reason) > 20), one.id
    assert set(FIGURES) - {one.figure for one in claims} == {"baselines"}


@pytest.mark.parametrize("name", sorted(set(FIGURES) - PLAYED))
def test_each_figure_gives_a_verdict_on_its_claims(name: str) -> None:
    claims, figure = load_claims(), FIGURES[name]
    _, rows = run_figure(figure, claims, Options(quick=True))
    assert [row.claim.id for row in rows] == [one.id for one in claims if one.figure == figure.name]
    for row in rows:
        assert row.verdict in VERDICTS
        assert row.sentence.strip().endswith("."), row.claim.id


def test_what_was_not_simulated_is_not_counted() -> None:
    claims = load_claims()
    assert {one.figure for one in claims if one.basis == "input"} == {"lengths"}
    assert len([one for one in claims if one.basis]) == 32
    _, rows = run_figure(FIGURES["intensity"], claims, Options())
    assert _counts(rows) == "0 reproduced, 0 partly, 0 not; not counted: 3 arithmetic"


def test_where_names_the_versions() -> None:
    for one in load_claims():
        assert {version for version in ("v4", "v5") if version in one.where} == set(one.versions), one.id


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('id = "one"', "", "claim number 1 lacks id"),
        ('unit = "times"', "", "claim one lacks unit"),
        ('unit = "times"', 'units = "times"', "claim one has unknown fields units; known: id, versions"),
        ('unit = "times"', 'unit = " "', "claim one: unit=' '; accepted: a text that is not empty"),
        ('versions = ["v5"]', 'versions = ["v6"]', "accepted: one or more of v4, v5"),
        (
            'unit = "times"',
            'unit = "times"\nbasis = "guess"',
            "basis='guess'; accepted: arithmetic, input",
        ),
        ('kind = "value"', 'kind = "number"', "kind='number'; accepted: value, range"),
        ("value = 2.0", 'value = "2"', "value='2'; accepted: a finite number"),
        ("value = 2.0", "value = nan", "value=nan; accepted: a finite number"),
        ("value = 2.0", "value = [1, 2]", "accepted: a finite number"),
        ('kind = "value"', 'kind = "range"', "value=2.0; accepted: two rising numbers for a range"),
        ('kind = "value"', 'kind = "statement"', "value=2.0; accepted: 1 for a statement"),
        ('figure = "requirements"', "", "figure='' and reason=''; accepted: one of the two"),
        ('figure = "requirements"', 'figure = "a"\nreason = "b"', "accepted: one of the two"),
        ('figure = "requirements"', 'figure = "a"\nneutral = "1"', "neutral='1'; accepted: a finite number"),
        ("[[claim]]", "[[claims]]", r"accepted: a list of \[\[claim\]\] and nothing else"),
        ("[[claim]]", "[[claim", "cannot be read"),
    ],
)
def test_bad_claims_are_refused(tmp_path: Path, before: str, after: str, message: str) -> None:
    path = tmp_path / "claims.toml"
    assert before in CLAIM
    path.write_text(CLAIM.replace(before, after))
    with pytest.raises(ConfigError, match=message):
        load_claims(path)


def test_an_id_is_given_once(tmp_path: Path) -> None:
    path = tmp_path / "claims.toml"
    path.write_text(CLAIM + CLAIM)
    with pytest.raises(ConfigError, match="claim one is given twice"):
        load_claims(path)


def test_no_claims_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing.toml cannot be read"):
        load_claims(tmp_path / "nothing.toml")


@pytest.mark.parametrize(
    ("one", "ours", "expected"),
    [
        (claim(), 2.0, "reproduced"),
        (claim(), 2.3, "reproduced"),
        (claim(), 1.7, "reproduced"),
        (claim(), 2.31, "partly"),
        (claim(), 1.69, "partly"),
        (claim(), 1.0, "partly"),
        (claim(), 4.0, "partly"),
        (claim(), 4.01, "not"),
        (claim(), 0.99, "not"),
        (claim(), -2.0, "not"),
        (claim(neutral=1.0), 2.15, "reproduced"),
        (claim(neutral=1.0), 1.5, "partly"),
        (claim(neutral=1.0), 1.01, "not"),
        (claim(value=1.05, neutral=1.0), 0.98, "not"),
        (claim(value=0, neutral=1.0), 0.1, "reproduced"),
        (claim(value=0), 0.0, "reproduced"),
        (claim(value=0), 0.1, "not"),
        (claim("at-least"), 2.0, "reproduced"),
        (claim("at-least"), 9.0, "reproduced"),
        (claim("at-least"), 1.0, "partly"),
        (claim("at-least"), 0.99, "not"),
        (claim("at-least"), -1.0, "not"),
        (claim("at-most"), 2.0, "reproduced"),
        (claim("at-most"), 4.0, "partly"),
        (claim("at-most"), 4.1, "not"),
        (claim("statement", 1), 1.0, "reproduced"),
        (claim("statement", 1), 0.9, "partly"),
        (claim("statement", 1), 0.4, "not"),
        (claim("range", (50.0, 60.0)), (48.0, 66.0), "reproduced"),
        (claim("range", (50.0, 60.0)), (40.0, 60.0), "partly"),
        (claim("range", (50.0, 60.0)), (50.0, 130.0), "not"),
    ],
)
def test_the_verdict_rule(one: Claim, ours: float | tuple[float, float], expected: str) -> None:
    assert verdict(one, ours) == expected


def test_ratios() -> None:
    assert ratio(claim(), 3.0) == 1.5
    assert ratio(claim(neutral=1.0), 3.0) == 2.0
    assert ratio(claim("range", (50.0, 60.0)), (45.0, 65.0)) == 1.0
    assert ratio(claim("statement", 1), 1.0) is None
    assert ratio(claim(value=0), 1.0) is None
    with pytest.raises(ValueError, match="two numbers were given"):
        verdict(claim(), (1.0, 2.0))
    with pytest.raises(ValueError, match="one number was given"):
        verdict(claim("range", (1.0, 2.0)), 1.0)


def test_figures_by_name() -> None:
    assert [figure.name for figure in find_figures(["all"])] == list(FIGURES)
    assert [figure.name for figure in find_figures([])] == list(SMALL)
    assert [figure.name for figure in find_figures(["mbu", "intensity", "mbu"])] == ["intensity", "mbu"]
    with pytest.raises(
        ConfigError, match=r"figure 'spp-scalin' is not known; accepted: all, requirements, .*spp-scaling\?"
    ):
        find_figures(["all", "spp-scalin"])
