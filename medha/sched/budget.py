"""The seconds of a batch: how many it may take on each group, and the guard.

The guard: plain LARS can hold a short request for nearly its whole deadline, and an overload of short requests starves
a long one for as long as it lasts (see :mod:`medha.sched.policy`). So a prefill that is late, or that has been passed
over for a stated time, is guarded until its prefill ends. In each batch the guarded are served first, in order of
arrival, up to ``late_share`` of the prefill budget; then everybody in the policy's order up to the whole. The paper has
no such guard; a share of 0 turns it off.

What follows, with time counted in seconds of prefill budget, B that of one batch, and s the share:

- A guarded request with w seconds of work left, and W left in the unfinished ones that arrived before it, ends its
  prefill within (W + w) / s + B. Requests that arrive later never enter this bound: that is why the guarded are served
  by arrival, and not by slack or in equal parts.
- The policy's own order keeps at least 1 - s of each batch: it runs as on a machine slower by at most 1 / (1 - s).

A share may be too small for any chunk, or a batch may have no place for a second long prefill. Then the oldest guarded
request keeps its turn, and what it did not get is owed to the guarded in the next batches, up to one whole budget: the
first bound grows by B / s, the second holds over any stretch but for one B.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from medha.config import SchedulerConfig
from medha.cost.predictor import Tick
from medha.sched.memory import KVMemory
from medha.sched.policy import Columns, Floats, Ints, candidates, sort_rows
from medha.sched.queue import Queue


@dataclass(slots=True)
class GroupTime:
    """Time of one group in the batch that is being filled.

    Attributes:
        tick: what is in it, predicted.
        budget_s: for the whole batch.
        limit_s: what the present phase may fill.
        decodes_s: what the decodes take.
        long_slot: the long prefill in it, if any.
        is_joined: a chunk in it was made longer, and is in ``tick`` as two.
    """

    tick: Tick
    budget_s: float
    limit_s: float
    decodes_s: float
    long_slot: int | None = None
    is_joined: bool = False

    @property
    def prefill_s(self) -> float:
        """The budget that the decodes leave."""
        return max(0.0, self.budget_s - self.decodes_s)


def batch_budget_s(config: SchedulerConfig, queue: Queue, memory: KVMemory, group: int, *, depth: int) -> float:
    """Seconds of a batch: as set, or what the tightest TPOT among its decodes allows, or the preemption quantum.

    A decode returns with every batch in flight, so it may take a depth-th of the TPOT; with a decode lag it is in every
    batch.

    """
    if config.t_target_s is not None:
        return config.t_target_s
    period = 1 if config.decode_lag else depth
    tightest = config.quantum_s * period
    for state in queue.decoding.values():
        slo = state.request.slo
        if slo is not None and slo.tpot_s is not None and slo.tpot_s < tightest:
            first, count = memory.span(state.slot)
            if first <= group < first + count:
                tightest = slo.tpot_s
    return tightest / period


def is_guarded(
    columns: Columns, now_s: float, *, last_chunk_s: Floats, was_guarded: NDArray[np.bool_], patience_s: float
) -> NDArray[np.bool_]:
    """Which requests are guarded: those that were, the late ones, and those passed over for ``patience_s``.

    Args:
        columns: the requests whose prefill is not done.
        now_s: time.
        last_chunk_s: when each last had a chunk in a batch; its arrival before the first.
        was_guarded: what this function said in the step before; False for a new request.
        patience_s: how long a request may be passed over; inf guards the late ones alone.
    """
    is_late = columns.arrival_s + columns.deadline_s < now_s
    return was_guarded | is_late | (last_chunk_s + patience_s <= now_s)


def guarded_rows(columns: Columns, guarded: NDArray[np.bool_], *, slots: Ints, first: int) -> NDArray[np.intp]:
    """Rows of the ``first`` guarded requests in the order in which they are served: arrival, slot."""
    rows = candidates(columns.arrival_s, first, among=guarded)
    return rows[sort_rows((columns.arrival_s[rows], slots[rows]), first=first)]


def guard_limit_s(budget_s: float, *, late_share: float, owed_s: float) -> float:
    """Seconds of a batch's prefill budget that the guarded may fill before the policy's order takes the rest.

    ``owed_s`` is what they did not get of the limit before, by the predicted time of their chunks; 0 if none was left.
    """
    return min(budget_s, owed_s + late_share * budget_s)
