"""The list of claims: its schema, and that each has a figure or a reason."""

from typing import Any

import numpy as np
import pytest

from examples.reproduce.claims import Claim, load_claims
from examples.reproduce.report import FIGURES, SMALL, Row, _counts, find_figures, run_figure
from examples.reproduce.result import Options, ratio, verdict
from medha.errors import ConfigError


def claim(kind: str = "value", value: Any = 2.0, unit: str = "s") -> Claim:
    return Claim("one", "v5 section 1", "It is fast", kind, value, unit, figure="requirements")


def test_what_was_not_simulated_is_not_counted() -> None:
    claims = load_claims()
    assert {one.figure for one in claims if one.basis == "input"} == {"lengths"}
    assert len([one for one in claims if one.basis]) == 33
    _, rows = run_figure(FIGURES["intensity"], claims, Options())
    assert _counts(rows) == "0 reproduced, 0 partly, 0 not; not counted: 3 arithmetic"
    more = [Row(claim(unit="times"), ours, "") for ours in (2.0, 9.0, 0.1)]
    assert _counts(more) == "1 reproduced, 0 partly, 1 not; not counted: 1 exceeds"


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
