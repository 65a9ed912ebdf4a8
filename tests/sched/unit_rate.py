"""A server of unit rate: one second of work takes one second, in batches of one quantum, ordered anew for each.

What a policy and the guard do by themselves, with no predictor, pipeline or memory in the way. The clock counts
microseconds in integers, so that a deadline met on the dot is met.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from medha.sched.budget import guard_limit_s, guarded_rows, is_guarded
from medha.sched.policy import Columns, Ints, load_policy, order

QUANTUM_S = 0.02
US = 1_000_000


@dataclass(frozen=True, slots=True)
class Job:
    """A prefill: when it arrives, its work, and the length of its deadline, in seconds."""

    arrival_s: float
    work_s: float
    deadline_s: float


@dataclass(frozen=True, slots=True)
class GuardRule:
    """How the server guards; a chunk is of ``grain_s`` at least unless it ends its prefill."""

    late_share: float = 0.1
    patience_s: float = np.inf
    grain_s: float = 1e-6


class Server:
    """Serves jobs to their end; the slot of each is its place in the list.

    Args:
        jobs: what arrives, in order of arrival.
        policy: its name.
        guard: how to guard; None is not at all.
        rate: seconds of work done in a second.

    Attributes:
        finish_s: end of the batch that ended each prefill.
        guarded_s: start of the batch in which each became guarded; nan for never.
        guarded_work_s: work that was left then in each and in the unfinished ones that arrived before it.
        by_policy_s, by_guard_s: work done in each batch, in the policy's order and ahead of it.
    """

    def __init__(self, jobs: Iterable[Job], policy: str, *, guard: GuardRule | None = None, rate: float = 1.0) -> None:
        self.jobs = list(jobs)
        self.ranking = load_policy(policy)
        self.guard = guard
        self.rate = rate
        self.arrival_us = _microseconds(job.arrival_s for job in self.jobs)
        self.deadline_us = _microseconds(job.deadline_s for job in self.jobs)
        self.work_us = _microseconds(job.work_s for job in self.jobs)
        self.left_us = self.work_us.copy()
        self.last_chunk_us = self.arrival_us.copy()
        self.guarded = np.zeros(len(self.jobs), np.bool_)
        self.owed_s = 0.0
        self.finish_s = np.full(len(self.jobs), np.nan)
        self.guarded_s = np.full(len(self.jobs), np.nan)
        self.guarded_work_s = np.full(len(self.jobs), np.nan)
        self.by_policy_s: list[float] = []
        self.by_guard_s: list[float] = []
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
            now_us += round(done_us / self.rate)
            self.finish_s[slots[self.left_us[slots] == 0]] = now_us / US

    def _batch(self, slots: Ints, now_us: int) -> int:
        """Serve one quantum; returns the work done."""
        budget_us = round(QUANTUM_S * self.rate * US)
        columns = self._columns(slots)
        ahead_us = 0 if self.guard is None else self._serve_guarded(columns, slots, now_us, budget_us)
        used_us = ahead_us
        for row in order(self.ranking, columns, slots=slots, now_s=now_us / US):
            if used_us == budget_us:
                break
            used_us += self._chunk(slots[row], now_us, budget_us - used_us)
        self.by_guard_s.append(ahead_us / US)
        self.by_policy_s.append((used_us - ahead_us) / US)
        return used_us

    def _serve_guarded(self, columns: Columns, slots: Ints, now_us: int, budget_us: int) -> int:
        """Serve the guarded up to the guard's limit; returns the work done."""
        assert self.guard is not None
        rule, now_s, was_guarded = self.guard, now_us / US, self.guarded[slots]
        guarded = is_guarded(
            columns,
            now_s,
            last_chunk_s=self.last_chunk_us[slots] / US,
            was_guarded=was_guarded,
            patience_s=rule.patience_s,
        )
        rows = guarded_rows(columns, guarded, slots=slots, first=slots.size)
        self._note_guarded(slots, guarded & ~was_guarded, now_s)
        limit_s = guard_limit_s(budget_us / US, late_share=rule.late_share, owed_s=self.owed_s)
        limit_us, used_us = round(limit_s * US), 0
        for slot in slots[rows]:
            room_us = limit_us - used_us
            if self.left_us[slot] > room_us < rule.grain_s * US:
                break
            used_us += self._chunk(slot, now_us, room_us)
        self.owed_s = max(0.0, limit_s - used_us / US) if self.left_us[slots[rows]].any() else 0.0
        return used_us

    def _note_guarded(self, slots: Ints, new: NDArray[np.bool_], now_s: float) -> None:
        """Record the newly guarded among the unfinished."""
        self.guarded[slots[new]] = True
        self.guarded_s[slots[new]] = now_s
        self.guarded_work_s[slots[new]] = (np.cumsum(self.left_us[slots]) / US)[new]

    def _chunk(self, slot: int, now_us: int, room_us: int) -> int:
        """Work on one job within the room; returns the work done."""
        chunk_us = int(min(self.left_us[slot], room_us))
        if chunk_us > 0:
            self.left_us[slot] -= chunk_us
            self.last_chunk_us[slot] = now_us
        return chunk_us

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
