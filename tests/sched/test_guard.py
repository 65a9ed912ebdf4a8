"""The guard: who is guarded, what is owed, and the bounds that it states, at load 1.2 on a server of unit rate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.sched.budget import guard_limit_s, guarded_rows, is_guarded
from medha.sched.policy import Columns
from tests.sched.unit_rate import QUANTUM_S, US, GuardRule, Job, Server

LONG, SHORTS = 0, slice(1, None)
SHARE = 0.1

# 0.5 s of work arrives every 0.5 / 1.2 s for 120 s, beside 8 s of work due after 12 s.
LOAD_1_2 = [Job(0.0, 8.0, 12.0), *(Job(0.1 + i * 0.5 / 1.2, 0.5, 2.0) for i in range(288))]


def columns_of(arrival_s: list[float], deadline_s: list[float]) -> Columns:
    ones, zeros = np.ones(len(arrival_s)), np.zeros(len(arrival_s), np.int64)
    return Columns(np.array(arrival_s), np.array(deadline_s), ones, ones, zeros, zeros, zeros)


# ---------------------------------------------------------------------------------------------------------------------
# The functions


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


# ---------------------------------------------------------------------------------------------------------------------
# Load 1.2


@pytest.mark.parametrize("policy", ["lars", "srpt"])
def test_without_the_guard_the_long_one_starves_until_the_shorts_are_done(policy: str) -> None:
    server = Server(LOAD_1_2, policy)
    assert server.finish_s[LONG] == server.finish_s.max() == pytest.approx(152.0, abs=QUANTUM_S)


@pytest.mark.parametrize("policy", ["lars", "srpt"])
@pytest.mark.parametrize("patience_s", [np.inf, 1.0])
def test_with_it_the_long_one_ends_within_its_work_over_the_share(policy: str, patience_s: float) -> None:
    server = Server(LOAD_1_2, policy, guard=GuardRule(SHARE, patience_s))
    left_s = server.guarded_work_s[LONG]
    assert server.guarded_s[LONG] <= 12.0 + QUANTUM_S
    assert server.finish_s[LONG] <= server.guarded_s[LONG] + left_s / SHARE + QUANTUM_S
    assert server.finish_s[LONG] < 100.0


def assert_each_guarded_is_in_time(server: Server, grain_s: float = 0.0) -> None:
    """The first bound, for every request that was ever guarded."""
    slack_s = QUANTUM_S + (QUANTUM_S / SHARE if grain_s else 0.0) + 1e-6
    guarded = ~np.isnan(server.guarded_s)
    bound_s = server.guarded_s + server.guarded_work_s / SHARE + slack_s
    assert guarded.any()
    assert (server.finish_s <= bound_s)[guarded].all()


@pytest.mark.parametrize("policy", ["lars", "sjf"])
@pytest.mark.parametrize("grain_s", [0.0, 0.005, QUANTUM_S])
def test_every_guarded_request_keeps_its_bound_and_the_others_theirs(policy: str, grain_s: float) -> None:
    server = Server(LOAD_1_2, policy, guard=GuardRule(SHARE, grain_s=grain_s))
    assert_each_guarded_is_in_time(server, grain_s)
    taken_s, done_s = np.cumsum(server.by_guard_s), np.cumsum(np.add(server.by_policy_s, server.by_guard_s))
    above_share_s = taken_s - SHARE * done_s
    most_over_a_stretch_s = (above_share_s - np.minimum.accumulate(above_share_s)).max()
    assert most_over_a_stretch_s <= (QUANTUM_S if grain_s else 0.0) + 1e-6


def test_the_others_are_no_slower_than_on_a_machine_slower_by_the_share() -> None:
    # sjf: the place of a request in the order is fixed, and the long one is last.
    guarded = Server(LOAD_1_2, "sjf", guard=GuardRule(SHARE))
    slower = Server(LOAD_1_2, "sjf", rate=1 - SHARE)
    alone = Server(LOAD_1_2, "sjf")
    assert (guarded.finish_s[SHORTS] <= slower.finish_s[SHORTS] + QUANTUM_S).all()
    # At load 1.2 the wait grows with the backlog, 1 - 1/1.2 of the time gone by; with 0.9 of the machine, 1 - 0.9/1.2.
    assert alone.ttft_s[SHORTS].max() == pytest.approx(24.42, abs=0.05)
    assert guarded.ttft_s[SHORTS].max() < slower.ttft_s[SHORTS].max() == pytest.approx(40.4, abs=0.2)


JOBS = st.lists(
    st.tuples(st.floats(0, 2), st.sampled_from([0.02, 0.1, 0.5]), st.sampled_from([0.1, 0.5, 3.0])),
    min_size=2,
    max_size=8,
)


@settings(max_examples=25, deadline=None)
@given(JOBS, st.sampled_from(["lars", "edf", "srpt"]), st.sampled_from([0.0, 0.007, QUANTUM_S]))
def test_the_bound_holds_for_any_jobs(jobs: list[tuple[float, float, float]], policy: str, grain_s: float) -> None:
    late = Job(0.0, 1.0, 0.5)  # so that somebody is guarded
    server = Server([late, *(Job(*job) for job in sorted(jobs))], policy, guard=GuardRule(SHARE, grain_s=grain_s))
    assert_each_guarded_is_in_time(server, grain_s)
    assert sum(server.by_policy_s) + sum(server.by_guard_s) == pytest.approx(server.work_us.sum() / US)
