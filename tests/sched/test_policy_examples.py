"""The paper's example and an overload, policy by policy, on a server of unit rate (arXiv:2409.17264 v5, section 4.1).

The true figures. EDF is optimal on one preemptive server, so the paper's example cannot tell it from better policies;
only the overload does. No guard here: see test_guard.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.sched.unit_rate import QUANTUM_S, Job, Server

LONG, SHORTS = 0, slice(1, None)

# 10 s of work due after 16 s, and two of 0.5 s due after 1 s that arrive when half of it is done.
EXAMPLE = [Job(0.0, 10.0, 16.0), Job(5.0, 0.5, 1.0), Job(5.0, 0.5, 1.0)]

# 100 s of work due after 150 s, and 0.5 s due after 2 s every 1.25 s: until 150 s there are 160 s of work.
OVERLOAD = [Job(0.0, 100.0, 150.0), *(Job(0.1 + 1.25 * i, 0.5, 2.0) for i in range(136))]


def test_example_whole_prefill_fcfs_misses_both_shorts() -> None:
    server = Server(EXAMPLE, "fcfs")
    assert server.finish_s.tolist() == [10.0, 10.5, 11.0]
    assert (server.lateness_s > 0).tolist() == [False, True, True]


@pytest.mark.parametrize("policy", ["edf", "lrs", "srpt"])
def test_example_edf_lrs_and_srpt_meet_all(policy: str) -> None:
    server = Server(EXAMPLE, policy)
    assert (server.lateness_s <= 0).all()
    assert server.finish_s.max() == 11.0


def test_example_lars_meets_the_long_and_ends_the_shorts_a_fraction_of_a_second_late() -> None:
    # The shorts' relative slack starts at 1 and falls by 2 a second; at 5.2 s it is the long one's, 0.6.
    server = Server(EXAMPLE, "lars")
    assert server.finish_s[LONG] == 11.0
    np.testing.assert_allclose(server.lateness_s[SHORTS], [0.18, 0.20], atol=QUANTUM_S)


@pytest.mark.parametrize(("policy", "worst_s"), [("edf", 11.15), ("lrs", 11.48)])
def test_overload_edf_and_lrs_turn_the_long_one_into_a_convoy(policy: str, worst_s: float) -> None:
    server = Server(OVERLOAD, policy)
    assert server.ttft_s[SHORTS].max() == pytest.approx(worst_s, abs=2 * QUANTUM_S)
    assert server.ttft_s[LONG] == pytest.approx(159.5, abs=2 * QUANTUM_S)


def test_overload_under_lars_no_short_waits_much_longer_than_its_deadline() -> None:
    server = Server(OVERLOAD, "lars")
    assert server.ttft_s[SHORTS].max() == pytest.approx(2.09, abs=2 * QUANTUM_S)
    assert server.lateness_s[SHORTS].max() < 0.2
    # The price: the long one ends 6.5 s later than under EDF, 16 s late instead of 9.5 s.
    assert server.ttft_s[LONG] == pytest.approx(166.0, abs=2 * QUANTUM_S)
