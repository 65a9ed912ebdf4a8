"""The paper's example and an overload, policy by policy, on a server of unit rate (arXiv:2409.17264 v5, section 4.1).

The true figures. EDF is optimal on one preemptive server, so the paper's example cannot tell it from better policies;
only the overload does. No guard here. The server knows no predictor, pipeline or memory; its clock counts microseconds
in integers, so that a deadline met on the dot is met.
"""

from typing import NamedTuple

import numpy as np
import pytest

from medha.sched.policy import Columns, Floats, load_policy
from tests.sched.test_policy import order

QUANTUM_S = 0.02
US = 1_000_000


class Job(NamedTuple):
    """A prefill: when it arrives, its work, and the length of its deadline, in seconds."""

    arrival_s: float
    work_s: float
    deadline_s: float


def serve(jobs: list[Job], policy: str) -> tuple[Floats, Floats]:
    """When each prefill ends, and how long after its deadline (0 or less is in time), serving a quantum at a time."""
    ranking, now_us = load_policy(policy), 0
    arrival_us, work_us, deadline_us = (np.array([round(x * US) for x in column]) for column in zip(*jobs, strict=True))
    left_us, finish_s = work_us.copy(), np.full(len(jobs), np.nan)
    while left_us.any():
        slots = np.flatnonzero((arrival_us <= now_us) & (left_us > 0))
        if not slots.size:
            now_us = int(arrival_us[left_us > 0].min())
            continue
        seconds = (column[slots] / US for column in (arrival_us, deadline_us, work_us, left_us))
        columns = Columns(*seconds, *[np.zeros(slots.size, np.int64)] * 3)
        spare_us = round(QUANTUM_S * US)
        for slot in slots[order(ranking, columns, slots=slots, now_s=now_us / US)]:
            chunk_us = int(min(left_us[slot], spare_us))
            left_us[slot] -= chunk_us
            spare_us -= chunk_us
        now_us += round(QUANTUM_S * US) - spare_us
        finish_s[slots[left_us[slots] == 0]] = now_us / US
    return finish_s, np.round(finish_s - (arrival_us + deadline_us) / US, 6)


LONG, SHORTS = 0, slice(1, None)

# 10 s of work due after 16 s, and two of 0.5 s due after 1 s that arrive when half of it is done.
EXAMPLE = [Job(0.0, 10.0, 16.0), Job(5.0, 0.5, 1.0), Job(5.0, 0.5, 1.0)]

# 100 s of work due after 150 s, and 0.5 s due after 2 s every 1.25 s: until 150 s there are 160 s of work.
OVERLOAD = [Job(0.0, 100.0, 150.0), *(Job(0.1 + 1.25 * i, 0.5, 2.0) for i in range(136))]


def test_example_whole_prefill_fcfs_misses_both_shorts() -> None:
    finish_s, late_s = serve(EXAMPLE, "fcfs")
    assert finish_s.tolist() == [10.0, 10.5, 11.0]
    assert (late_s > 0).tolist() == [False, True, True]


@pytest.mark.parametrize("policy", ["edf", "lrs", "srpt"])
def test_example_edf_lrs_and_srpt_meet_all(policy: str) -> None:
    finish_s, late_s = serve(EXAMPLE, policy)
    assert late_s.max() <= 0 and finish_s.max() == 11.0


def test_example_lars_meets_the_long_and_ends_the_shorts_a_fraction_of_a_second_late() -> None:
    # The shorts' relative slack starts at 1 and falls by 2 a second; at 5.2 s it is the long one's, 0.6.
    finish_s, late_s = serve(EXAMPLE, "lars")
    assert finish_s[LONG] == 11.0
    np.testing.assert_allclose(late_s[SHORTS], [0.18, 0.20], atol=QUANTUM_S)


@pytest.mark.parametrize(
    ("policy", "worst_s", "long_s"),
    [
        ("edf", 11.15, 159.5),  # both turn the long one into a convoy
        ("lrs", 11.48, 159.5),
        ("lars", 2.09, 166.0),  # no short waits much longer than its deadline; the long one ends 6.5 s later for it
    ],
)
def test_overload(policy: str, worst_s: float, long_s: float) -> None:
    finish_s, late_s = serve(OVERLOAD, policy)
    assert late_s[SHORTS].max() + 2.0 == pytest.approx(worst_s, abs=2 * QUANTUM_S)
    assert finish_s[LONG] == pytest.approx(long_s, abs=2 * QUANTUM_S)
