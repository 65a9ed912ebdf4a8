"""The batches in flight: which one completes next, and who waits for that.

Where batches complete in order it is the oldest. Where they run on *lanes* those that share no group complete
independently: it is any that is done, and before which nothing is in flight on its groups.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import NamedTuple

from medha.batch import Batch
from medha.sched.decision import Decision
from medha.sched.scheduler import Scheduler
from medha.worker.step import PendingStep

_ONE_LANE = frozenset({-1})  # of every batch where all complete in order
_LOOK_S = 0.5  # how often a wait for any batch looks whether a rank has failed, or prompts are to be planned anew


class Sent(NamedTuple):
    """A batch that was submitted: when it was decided, as what, and by which scheduler."""

    start_s: float
    decision: Decision
    batch: Batch  # on the groups where it runs
    pending: PendingStep
    lanes: frozenset[int]  # its groups; it completes before younger batches on any of them
    scheduler: Scheduler


class InFlight(deque[Sent]):
    """The batches in flight, oldest first.

    ``news`` is set by the runner when a batch may have come to be done; None where batches complete in order.
    """

    def __init__(self, news: threading.Event | None) -> None:
        super().__init__()
        self._news = news
        self._completed_s: dict[int, float] = {}  # by lane, when the last batch was

    def sent(self, scheduler: Scheduler, decision: Decision, start_s: float, batch: Batch, step: PendingStep) -> None:
        """Note a batch that was submitted, on the groups where it runs."""
        lanes = _ONE_LANE if self._news is None else frozenset(batch.groups)
        self.append(Sent(start_s, decision, batch, step, lanes, scheduler))

    def wake(self) -> None:
        """Let :meth:`await_done` return, as there is something to do; for another thread."""
        if self._news is not None:
            self._news.set()

    def await_done(self, wait_s: float | None) -> int | None:
        """The index of a batch to complete now; waits for one, and gives up when it is woken or late, without a limit
        when it is time to see whether something else may begin."""
        end_s = time.monotonic() + (_LOOK_S if wait_s is None else wait_s)
        while (index := self._first_done()) is None:
            left_s = end_s - time.monotonic()
            if self._news is None or left_s <= 0:
                return None
            if self._news.wait(min(left_s, _LOOK_S)):
                self._news.clear()
                return self._first_done()
        return index

    def _first_done(self) -> int | None:
        """The first batch that is done, and before which nothing is in flight on its lanes."""
        busy: frozenset[int] = frozenset()
        for index, sent in enumerate(tuple(self)):
            if not busy & sent.lanes and sent.pending.is_done():
                return index
            busy |= sent.lanes
        return None

    def completed(self, index: int, now_s: float) -> float:
        """Forget a batch that is done; returns when it could begin: when it was decided, and its lanes were free."""
        sent = self[index]
        del self[index]
        start_s = max(sent.start_s, *(self._completed_s.get(lane, 0.0) for lane in sent.lanes))
        self._completed_s.update(dict.fromkeys(sent.lanes, now_s))
        return start_s
