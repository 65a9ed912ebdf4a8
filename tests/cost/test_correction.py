"""Learning while running: convergence, no oscillation, bad observations, error figures."""

import math
from collections import deque

import numpy as np
import pytest
from hypothesis import given, strategies as st

from medha.cost.predictor import Correction, Kind


def run(correction: Correction, truth: float, steps: int, *, depth: int = 1) -> list[float]:
    """Factors while batches of 10 ms by the table take ``truth`` times as long, ``depth`` of them in flight."""
    flying: deque[tuple[float, float]] = deque()
    factors = []
    for _ in range(steps):
        factor = correction.factor("prefill")
        flying.append((0.01 * factor, factor))
        if len(flying) == depth:
            predicted_s, within = flying.popleft()
            assert correction.observe("prefill", predicted_s, 0.01 * truth, factor=within)
        factors.append(correction.factor("prefill"))
    return factors


@given(st.floats(-1, 1), st.integers(1, 16))
def test_a_wrong_start_is_corrected_within_200_steps(exponent: float, depth: int) -> None:
    truth = 10.0**exponent
    assert run(Correction(), truth, 200, depth=depth)[-1] == pytest.approx(truth, rel=1e-3)


@given(st.sampled_from([1.3, 1 / 1.3]), st.integers(1, 16), st.integers(100, 300))
def test_a_change_of_speed_is_followed_from_one_side(change: float, depth: int, before: int) -> None:
    correction = Correction()
    run(correction, 2.0, before, depth=depth)
    factors = run(correction, 2.0 * change, 200, depth=depth)
    steps = np.diff(factors) * (1 if change > 1 else -1)
    assert (steps >= -1e-12).all()  # never back, so never beyond
    assert factors[60 + depth] == pytest.approx(2.0 * change, rel=0.03)
    assert factors[-1] == pytest.approx(2.0 * change, rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e9, 1e-9])
def test_bad_observations_are_ignored(bad: float) -> None:
    correction = Correction()
    run(correction, 2.0, 200)
    before = dict(correction.learned)
    assert not correction.observe("prefill", 0.01, bad)
    assert not correction.observe("prefill", bad, 0.01)
    assert correction.learned == before and before["prefill"][1] == 200


@given(st.lists(st.tuples(st.sampled_from(["decode", "mixed", "prefill"]), st.floats(), st.floats())))
def test_the_factor_is_always_a_positive_number(observations: list[tuple[Kind, float, float]]) -> None:
    correction = Correction()
    for kind, predicted_s, busy_s in observations:
        correction.observe(kind, predicted_s, busy_s)
    for kind in ("decode", "mixed", "prefill"):
        assert 0 < correction.factor(kind) < math.inf  # type: ignore[arg-type]


def test_kinds_are_apart_and_an_unseen_one_borrows() -> None:
    correction = Correction()
    assert correction.factor("mixed") == 1.0
    for _ in range(3):
        correction.observe("decode", 1.0, 2.0, factor=1.0)
    assert correction.factor("mixed") == correction.factor("prefill") == correction.factor("decode")
    correction.observe("mixed", 1.0, 1.0, factor=1.0)
    assert correction.factor("mixed") == pytest.approx(1.0)
    assert correction.factor("decode") == pytest.approx(2.0)
