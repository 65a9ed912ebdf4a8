"""The guard: who is guarded, and what is owed; its bound is shown in test_cases.py."""

from __future__ import annotations

import numpy as np
import pytest

from medha.sched.budget import guard_limit_s, guarded_rows, is_guarded
from medha.sched.policy import Columns

SHARE = 0.1


def columns_of(arrival_s: list[float], deadline_s: list[float]) -> Columns:
    ones, zeros = np.ones(len(arrival_s)), np.zeros(len(arrival_s), np.int64)
    return Columns(np.array(arrival_s), np.array(deadline_s), ones, ones, zeros, zeros, zeros)


@pytest.mark.parametrize(
    ("now_s", "guarded"),
    [
        (2.0, [False, False, False, True]),  # due at 2 s is not late at 2 s
        (2.5, [True, False, False, True]),  # the first is late
        (5.0, [True, True, False, True]),  # the second has had no chunk for 4 s
    ],
)
def test_the_late_the_passed_over_and_those_guarded_before_are_guarded(now_s: float, guarded: list[bool]) -> None:
    columns = columns_of([0.0, 1.0, 1.0, 1.0], [2.0, 100.0, 100.0, 100.0])
    last_chunk_s = np.array([0.0, 1.0, 1.5, 1.5])
    before = np.array([False, False, False, True])
    found = is_guarded(columns, now_s, last_chunk_s=last_chunk_s, was_guarded=before, patience_s=4.0)
    assert found.tolist() == guarded


def test_the_guarded_are_served_by_arrival_then_slot() -> None:
    columns = columns_of([3.0, 1.0, 2.0, 1.0, 0.0], [1.0] * 5)
    guarded, slots = np.array([True, True, True, True, False]), np.array([1, 9, 3, 4, 5])
    assert guarded_rows(columns, guarded, slots=slots, first=9).tolist() == [3, 1, 2, 0]
    assert guarded_rows(columns, guarded, slots=slots, first=2).tolist() == [3, 1]
    assert guarded_rows(columns, np.zeros(5, np.bool_), slots=slots, first=9).tolist() == []


def test_what_did_not_fit_is_owed_up_to_one_budget() -> None:
    limits, owed_s = [], 0.0
    for _ in range(12):
        limits.append(guard_limit_s(0.02, late_share=SHARE, owed_s=owed_s))
        owed_s = limits[-1]
    assert limits == pytest.approx([0.002 * k for k in range(1, 11)] + [0.02, 0.02])
