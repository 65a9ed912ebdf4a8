"""The paper's example and an overload, policy by policy, on a server of unit rate (arXiv:2409.17264 v5, section 4.1).

The true figures. EDF is optimal on one preemptive server, so the paper's example cannot tell it from better policies;
only the overload does. No guard here: see test_guard.py. The server knows no predictor, pipeline or memory; its clock
counts microseconds in integers, so that a deadline met on the dot is met.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from medha.sched.policy import Columns, Ints, load_policy, order

QUANTUM_S = 0.02
US = 1_000_000


@dataclass(frozen=True, slots=True)
class Job:
    """A prefill: when it arrives, its work, and the length of its deadline, in seconds."""

    arrival_s: float
    work_s: float
    deadline_s: float


class Server:
    """Serves jobs to their end; the slot of each is its place in the list.

    Args:
        jobs: what arrives, in order of arrival.
        policy: its name.

    Attributes:
        finish_s: end of the batch that ended each prefill.
    """

    def __init__(self, jobs: Iterable[Job], policy: str) -> None:
        self.jobs = list(jobs)
        self.ranking = load_policy(policy)
        self.arrival_us = _microseconds(job.arrival_s for job in self.jobs)
        self.deadline_us = _microseconds(job.deadline_s for job in self.jobs)
        self.work_us = _microseconds(job.work_s for job in self.jobs)
        self.left_us = self.work_us.copy()
        self.finish_s = np.full(len(self.jobs), np.nan)
        self._serve()

    @property
    def ttft_s(self) -> NDArray[np.float64]:
        """Arrival to end of prefill."""
        return self.finish_s - self.arrival_us / US

    @property
    def lateness_s(self) -> NDArray[np.float64]:
        """End of prefill after the deadline; not above 0 for one that is in time."""
        return np.round(self.ttft_s - self.deadline_us / US, 6)

    def _serve(self) -> None:
        now_us = 0
        while self.left_us.any():
            slots = np.flatnonzero((self.arrival_us <= now_us) & (self.left_us > 0))
            if slots.size == 0:
                now_us = int(self.arrival_us[self.left_us > 0].min())
                continue
            done_us = self._batch(slots, now_us)
            now_us += done_us
            self.finish_s[slots[self.left_us[slots] == 0]] = now_us / US

    def _batch(self, slots: Ints, now_us: int) -> int:
        """Serve one quantum; returns the work done."""
        budget_us = round(QUANTUM_S * US)
        columns = self._columns(slots)
        used_us = 0
        for row in order(self.ranking, columns, slots=slots, now_s=now_us / US):
            if used_us == budget_us:
                break
            chunk_us = int(min(self.left_us[slots[row]], budget_us - used_us))
            self.left_us[slots[row]] -= chunk_us
            used_us += chunk_us
        return used_us

    def _columns(self, slots: Ints) -> Columns:
        zeros = np.zeros(slots.size, np.int64)
        return Columns(
            arrival_s=self.arrival_us[slots] / US,
            deadline_s=self.deadline_us[slots] / US,
            work_total_s=self.work_us[slots] / US,
            work_left_s=self.left_us[slots] / US,
            num_prompt_tokens=zeros,
            num_computed_tokens=zeros,
            priority=zeros,
        )


def _microseconds(values_s: Iterable[float]) -> Ints:
    return np.array([round(value * US) for value in values_s], np.int64)


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


@pytest.mark.parametrize(
    ("policy", "worst_s", "long_s"),
    [
        ("edf", 11.15, 159.5),  # both turn the long one into a convoy
        ("lrs", 11.48, 159.5),
        ("lars", 2.09, 166.0),  # no short waits much longer than its deadline; the long one ends 6.5 s later for it
    ],
)
def test_overload(policy: str, worst_s: float, long_s: float) -> None:
    server = Server(OVERLOAD, policy)
    assert server.ttft_s[SHORTS].max() == pytest.approx(worst_s, abs=2 * QUANTUM_S)
    assert server.ttft_s[LONG] == pytest.approx(long_s, abs=2 * QUANTUM_S)
