"""The ledger: where the time to first token of each request went.

The time from a request's arrival to its first token is cut at the ends of batches. A *tick* is the time by which a batch
ends later than the one before it (or than its own start, if nothing was in flight). Of a tick,

- the busy seconds of the slowest group are dealt out among the rows in proportion to what each would take alone, as
  the predictor says, or to their tokens without one: to the request's own chunk, to decodes, to others' chunks;
- the rest, and what the other groups were idle, is the pipeline: its filling, transfers, the host;
- a tick in whose batch the request was refused for want of KV memory is a wait for memory as a whole.

Between ticks nothing was in flight: idle. So the parts sum to the TTFT. A tick in which the request arrived counts in
proportion. The seconds are of the group on which the request begins: what runs beside it elsewhere takes nothing of it.

Kept are running totals and not one record a request and batch: O(rows) a batch, and bounded memory. Not in the paper.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from medha.batch import Batch, Row
from medha.sched.policy import Floats
from medha.sched.predictor import Predictor, Work
from medha.sched.queue import RequestHead
from medha.sched.scheduler import Scheduler

_CHUNKS_KEPT = 1 << 16
_TICKS_KEPT = 256
_MAX_WAITS = 64
_MAX_SAMPLES = 12
_TOP = 3


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where the seconds from a request's arrival to its first token went, or up to the last tick while it has none.

    Attributes:
        slot: of the request.
        has_first_token: whether ``total_s`` is the TTFT.
        total_s: sum of the parts.
        own_s: computing its own chunks.
        decodes_s: decodes.
        others_s: chunks of other requests.
        others: (slot, seconds) of those with the largest part in ``others_s``, as far back as chunks are kept.
        memory_s: waiting for KV memory.
        pipeline_s: in flight beyond the busy time of its group.
        idle_s: nothing was in flight.
        slack_s: (seconds since arrival, seconds for which it could still wait and be in time), some samples; empty
            without a deadline.
    """

    slot: int
    has_first_token: bool
    total_s: float
    own_s: float
    decodes_s: float
    others_s: float
    others: tuple[tuple[int, float], ...]
    memory_s: float
    pipeline_s: float
    idle_s: float
    slack_s: tuple[tuple[float, float], ...]

    def text(self, name: Callable[[int], str] = "slot {}".format) -> str:
        """A few lines for a person; ``name`` says how a slot is called."""
        what = "TTFT" if self.has_first_token else "no first token after"
        top = [f"{name(slot)} {seconds:.3f}" for slot, seconds in self.others]
        lines = [
            f"{name(self.slot)}: {what} {self.total_s:.3f} s",
            f"  own compute {self.own_s:.3f}, decodes {self.decodes_s:.3f}, other prefills {self.others_s:.3f}"
            + (f" ({', '.join(top)})" if top else ""),
            f"  memory {self.memory_s:.3f}, pipeline {self.pipeline_s:.3f}, idle {self.idle_s:.3f}",
        ]
        if self.slack_s:
            samples = ", ".join(f"{slack_s:+.3f} at {at_s:.3f}" for at_s, slack_s in self.slack_s)
            lines.append(f"  slack {samples}")
        return "\n".join(lines)


@dataclass(slots=True)
class _Account:
    """One request.

    Attributes:
        number: of the request, unlike its slot never used again.
        group: on which it begins, once it has.
        start, end: totals at its arrival and its end, once known.
        refused: of the totals, what ran while it waited for memory; ``refused_s`` in all.
        waits: ranges of ticks in which it did, first and last of each.
        slack: samples.
    """

    head: RequestHead
    number: int
    refused: Floats
    group: int | None = None
    start: Floats | None = None
    end: Floats | None = None
    end_s: float = math.inf
    has_first_token: bool = False
    own_s: float = 0.0
    refused_s: float = 0.0
    waits: list[list[int]] = field(default_factory=list)
    slack: list[tuple[float, float]] = field(default_factory=list)

    def waited_in(self, tick: int) -> bool:
        """Count a tick as a wait for memory; False if no more stretches of them are told apart."""
        if self.waits and self.waits[-1][1] == tick - 1:
            self.waits[-1][1] = tick
        elif len(self.waits) < _MAX_WAITS:
            self.waits.append([tick, tick])
        else:
            return False
        return True

    def sample(self, now_s: float, slack_s: float) -> None:
        """Keep a sample; where they are many every other goes."""
        if slack_s < math.inf:
            self.slack.append((now_s - self.head.arrival_s, slack_s))
            if len(self.slack) > _MAX_SAMPLES:
                self.slack = [*self.slack[:-1:2], self.slack[-1]]


@dataclass(frozen=True, slots=True)
class _Sent:
    """A batch in flight: when it was scheduled, predicted seconds of its rows, and who was refused."""

    batch: Batch
    start_s: float
    decodes_s: Floats
    chunks: list[tuple[Row, float]]
    refused: tuple[int, ...]


class Ledger:
    """Explains the TTFT of the requests of a scheduler; told of each event after the scheduler.

    Args:
        scheduler: whose events follow, from its first on.

    Memory: an account for each slot ever used at once, and the last 65,536 chunks.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._num_groups = scheduler.memory.num_groups
        self._accounts: dict[int, _Account] = {}
        self._unplaced: list[_Account] = []  # arrived after the last tick kept
        self._in_flight: deque[_Sent] = deque()
        self._totals = _Totals(self._num_groups)
        self._chunks = _Chunks()
        self._num_added = self._num_ticks = 0

    def added(self, head: RequestHead) -> None:
        """A request was queued; whoever had its slot before is forgotten."""
        account = _Account(head, self._num_added, self._totals.zeros())
        self._num_added += 1
        self._accounts[head.slot] = account
        account.sample(head.arrival_s, self._scheduler.slack_s(head.slot, head.arrival_s))
        account.start = self._totals.at(head.arrival_s)
        if account.start is None:
            self._unplaced.append(account)

    def cancelled(self, slot: int) -> None:
        """A request was cancelled: what it waits for from here on is not explained."""
        self._accounts[slot].end_s = self._totals.time_s

    def scheduled(self, batch: Batch, now_s: float) -> None:
        """A batch was scheduled."""
        decodes_s, chunks = _row_seconds(batch, self._scheduler.predictor, self._num_groups)
        for row, _ in chunks:
            account = self._accounts[row.slot]
            if account.group is None:
                account.group = row.group
            account.sample(now_s, self._scheduler.slack_s(row.slot, now_s))
        served = {row.slot for row, _ in chunks}
        refused = tuple(slot for slot in dict.fromkeys(self._scheduler.no_memory) if slot not in served)
        self._in_flight.append(_Sent(batch, now_s, decodes_s, chunks, refused))

    def completed(self, batch: Batch, now_s: float, busy_s: float) -> None:
        """A batch is done in every stage; arguments as of :meth:`medha.sched.scheduler.Scheduler.complete`."""
        sent = self._in_flight.popleft()
        assert sent.batch is batch, "batches complete in the order in which they were scheduled"
        start_s = max(self._totals.idle_until(sent.start_s), sent.start_s)
        length_s = max(now_s - start_s, 0.0)
        busy_s = min(max(busy_s, 0.0), length_s) if math.isfinite(busy_s) else length_s
        decodes_s, chunks_s = sent.decodes_s, _sums(sent.chunks, self._num_groups)
        slowest_s = float((decodes_s + chunks_s).max())
        scale = busy_s / slowest_s if slowest_s > 0 else 0.0
        delta = np.concatenate(([0.0], decodes_s * scale, chunks_s * scale))
        self._totals.advance(now_s, delta)
        self._place(self._unplaced)
        self._count_refused(sent, delta, start_s, now_s)
        for row, seconds in sent.chunks:
            account = self._accounts[row.slot]
            account.own_s += seconds * scale
            self._chunks.add(row, account.number, self._num_ticks, start_s, now_s, seconds * scale)
            if row.samples and account.end_s == math.inf:
                account.end, account.end_s, account.has_first_token = self._totals.now, now_s, True
                account.sample(now_s, account.slack_end_s(now_s))
        self._num_ticks += 1

    def of(self, slot: int) -> Explanation:
        """Where the time of the request that has, or last had, a slot went.

        Raises:
            KeyError: no request has had the slot.
        """
        raise NotImplementedError
