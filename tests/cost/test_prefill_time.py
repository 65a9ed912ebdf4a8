"""Prefill seconds of whole prompts against stepping through them."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from medha.config import SchedulerConfig
from medha.cost.predictor import Predictor
from medha.cost.prefill_time import ChunkRule, PrefillTimes, budgeted_chunk
from tests.sched.costs import PLAIN, coefficients

PREDICTOR = Predictor(PLAIN, max_tokens=4096)
ADAPTIVE = SchedulerConfig(quantum_s=0.05, max_batch_tokens=4096, min_chunk=16)


def stepwise(predictor: Predictor, chunk: ChunkRule, longest: int) -> tuple[list[int], list[float]]:
    """Where chunks start, and the seconds spent by then."""
    starts, done = [0], [0.0]
    while starts[-1] < longest:
        size = max(chunk(starts[-1]), 1)
        done.append(done[-1] + predictor.tick().with_chunk(size, starts[-1]))
        starts.append(starts[-1] + size)
    return starts, done


def exact(predictor: Predictor, starts: list[int], done: list[float], length: int) -> float:
    """Seconds of a prompt of this length."""
    i = int(np.searchsorted(starts, length)) - 1
    return done[i] + predictor.tick().with_chunk(length - starts[i], starts[i])


def totals_of(times: PrefillTimes, lengths: Iterable[int]) -> np.ndarray:
    return np.array([times.total_s(int(length)) for length in lengths])


RULES = {
    "fixed": lambda kv: 512,
    "adaptive": budgeted_chunk(ADAPTIVE, PREDICTOR),
    "small budget": budgeted_chunk(replace(ADAPTIVE, quantum_s=0.006, chunk_granularity=1, min_chunk=64), PREDICTOR),
    "whole prompt": lambda kv: 4096,
}


@pytest.mark.parametrize("name", RULES)
def test_totals_and_what_is_left_are_within_one_percent_of_stepping(name: str) -> None:
    times = PrefillTimes(PREDICTOR, RULES[name])
    starts, done = stepwise(PREDICTOR, RULES[name], 1_000_000)
    lengths = np.unique(np.geomspace(1, 999_000, 400).astype(int))
    expected = np.array([exact(PREDICTOR, starts, done, int(length)) for length in lengths])
    np.testing.assert_allclose(totals_of(times, lengths), expected, rtol=0.01)
    at = [start for start in starts[::50] if start < 800_000]
    left = exact(PREDICTOR, starts, done, 900_000) - np.array(done)[: 50 * len(at) : 50]
    np.testing.assert_allclose([times.remaining_s(start, 900_000) for start in at], left, rtol=0.01)


@settings(max_examples=25, deadline=None)
@given(coefficients(), st.floats(0, 0.1, exclude_min=True))
def test_monotone_and_never_zero_while_tokens_are_left(stage: object, budget_s: float) -> None:
    predictor = Predictor(stage, max_tokens=256)  # type: ignore[arg-type]
    config = SchedulerConfig(quantum_s=budget_s, max_batch_tokens=256, chunk_granularity=1, min_chunk=1)
    times = PrefillTimes(predictor, budgeted_chunk(config, predictor), max_tokens=10_000_000)
    lengths = np.unique(np.geomspace(1, 10_000_000, 500).astype(int))
    totals = totals_of(times, lengths)
    assert (np.diff(totals) >= 0).all() and totals[0] > 0
    assert times.total_s(0) == 0.0 < times.least_s
    for length in map(int, lengths):
        left = [times.remaining_s(done, length) for done in (length - 1, length // 2, 0)]
        assert all(times.least_s <= left_s < np.inf for left_s in left)
        assert times.remaining_s(length, length) == 0.0


def test_a_rule_that_yields_nothing_still_finishes() -> None:
    times = PrefillTimes(PREDICTOR, lambda kv: 0, max_tokens=10_000)
    starts, done = stepwise(PREDICTOR, lambda kv: 0, 2000)
    assert times.total_s(1500) == pytest.approx(exact(PREDICTOR, starts, done, 1500), rel=0.01)


def test_short_and_long_limits() -> None:
    times = PrefillTimes(PREDICTOR, RULES["fixed"], max_tokens=300)
    assert times.total_s(300) == pytest.approx(PREDICTOR.tick().with_chunk(300, 0))
    assert times.total_s(10**9) == times.total_s(300)  # longer prompts count as the longest
    assert times.remaining_s(10**9 - 1, 10**9) == times.least_s


def test_the_present_factor_does_not_enter() -> None:
    predictor = Predictor(PLAIN, max_tokens=4096)
    predictor.observe("prefill", 1.0, 5.0)
    rule = budgeted_chunk(ADAPTIVE, predictor)
    lengths = (100, 10_000, 1_000_000)
    times, fresh = PrefillTimes(predictor, rule), PrefillTimes(PREDICTOR, RULES["adaptive"])
    np.testing.assert_array_equal(totals_of(times, lengths), totals_of(fresh, lengths))
