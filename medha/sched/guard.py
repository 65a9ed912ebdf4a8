"""The guard: a share of each batch's prefill budget for requests that the policy has passed over.

Plain LARS can hold a short request for nearly its whole deadline, and an overload of short requests starves a long one
for as long as it lasts (see :mod:`medha.sched.policy`). So a prefill that is late, or that has been passed over for a
stated time, is guarded until its prefill ends. In each batch the guarded are served first, in order of arrival, up to
``late_share`` of the prefill budget; then everybody in the policy's order up to the whole. A departure: the paper has
no such guard. Without it (a share of 0) the policy stands alone.

What follows, with time counted in seconds of prefill budget, B that of one batch, and s the share:

- A guarded request with w seconds of work left, and W left in the unfinished ones that arrived before it, ends its
  prefill within (W + w) / s + B. Requests that arrive later never enter this bound: that is why the guarded are served
  by arrival, and not by slack or in equal parts. For the oldest, W is 0.
- The policy's own order keeps at least 1 - s of each batch: it runs as on a machine slower by at most 1 / (1 - s). A
  request whose place in the order is fixed (``fcfs``, ``sjf``) ends its prefill no later than there.

A share may be too small for any chunk (a deep KV cache, a small budget), or a batch may have no place for a second long
prefill. Then the oldest guarded request keeps its turn, and what it did not get is owed to the guarded in the next
batches, up to one whole budget. The first bound grows by B / s, the second holds over any stretch but for one B. With
nothing owed the share is kept in every batch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from medha.sched.policy import Columns, Floats, Ints, candidates, sort_rows


def is_guarded(
    columns: Columns, now_s: float, *, last_chunk_s: Floats, was_guarded: NDArray[np.bool_], patience_s: float
) -> NDArray[np.bool_]:
    """Which requests are guarded: those that were, the late ones, and those passed over for ``patience_s``.

    Args:
        columns: the requests whose prefill is not done.
        now_s: time, seconds of the scheduler's clock.
        last_chunk_s: when each last had a chunk in a batch; its arrival before the first.
        was_guarded: what this function said in the step before; False for a new request. A guard ends with the prefill
            alone: one that ended with the first chunk would bound nothing.
        patience_s: how long a request may be passed over; inf guards the late ones alone.

    Returns:
        One bool a request.
    """
    is_late = columns.arrival_s + columns.deadline_s < now_s
    return was_guarded | is_late | (last_chunk_s + patience_s <= now_s)


def guarded_rows(
    columns: Columns, guarded: NDArray[np.bool_], *, slots: Ints, first: int | None = None
) -> NDArray[np.intp]:
    """Rows of the guarded requests in the order in which they are served: by arrival, then slot.

    Whoever serves them stops at the first one that the limit has no time for; one refused for another cause (memory) is
    passed.

    Args:
        columns: the requests.
        guarded: one bool a request.
        slots: their ids, in the same order.
        first: how many rows are wanted; None is all.
    """
    rows = np.flatnonzero(guarded) if first is None else candidates(columns.arrival_s, first, among=guarded)
    return rows[sort_rows((columns.arrival_s[rows], slots[rows]), first=first)]


def guard_limit_s(budget_s: float, *, late_share: float, owed_s: float) -> float:
    """Seconds at the head of a batch that the guarded may fill before the policy's order takes the rest.

    Args:
        budget_s: the batch's prefill budget: what its decodes leave.
        late_share: the guarded requests' part of it, from 0 to below 1.
        owed_s: what :func:`owed_after_s` said of the batch before; 0 at first.
    """
    return min(budget_s, owed_s + late_share * budget_s)


def owed_after_s(limit_s: float, *, given_s: float, any_left: bool) -> float:
    """Seconds of a batch's limit that the guarded did not get and may take in the next.

    Args:
        limit_s: what :func:`guard_limit_s` said of this batch.
        given_s: predicted seconds of the chunks that filled it; not of those in the policy's order.
        any_left: whether a guarded request has work left; nothing is owed to nobody.
    """
    return max(0.0, limit_s - given_s) if any_left else 0.0
