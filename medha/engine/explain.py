"""Where the time to first token of each request went.

The time from a request's arrival to its first token is cut at the ends of batches. A *tick* is the time by which a
batch ends later than the one before it (or than its own start, if nothing was in flight). Of a tick,

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
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from medha.batch import Batch, Row
from medha.cost.predictor import Predictor, Work
from medha.outputs import Explanation
from medha.sched.decision import Admitted, Decision, SchedulerRequest
from medha.sched.policy import Floats

_CHUNKS_KEPT = 1 << 13
_TICKS_KEPT = 256
_MAX_SAMPLES = 12
_TOP = 3


@dataclass(slots=True)
class _Account:
    """One request.

    Attributes:
        deadline_s: time at which its first token is due.
        number: of the request, unlike its slot never used again.
        group: on which it begins, once it has.
        start, end: totals at its arrival and at its first token or cancellation, once known.
        uncounted: of the totals, what is not its: of ticks in which it waited for memory, and the difference of ticks
            in which it ran on another group.
        memory_s: of the ticks in which it waited for memory, ``waits`` the last of them.
        slack: (seconds since arrival, slack in seconds) at its arrival, at its chunks and at the end.
    """

    request: SchedulerRequest
    name: str
    deadline_s: float
    number: int
    uncounted: Floats
    group: int | None = None
    start: Floats | None = None
    end: Floats | None = None
    end_s: float = math.inf
    has_first_token: bool = False
    own_s: float = 0.0
    memory_s: float = 0.0
    waits: deque[int] = field(default_factory=lambda: deque(maxlen=_CHUNKS_KEPT))
    slack: list[tuple[float, float]] = field(default_factory=list)

    def sample(self, now_s: float, slack_s: float) -> None:
        """Keep its slack, if it has a deadline."""
        if slack_s != math.inf:
            self.slack.append((now_s - self.request.arrival_s, slack_s))

    def samples(self) -> tuple[tuple[float, float], ...]:
        """A few of its slack: the first, the last, and at even numbers of chunks between them."""
        return (*self.slack[:-1][:: len(self.slack) // _MAX_SAMPLES + 1], *self.slack[-1:])


@dataclass(frozen=True, slots=True)
class _Sent:
    """A batch in flight: when it was scheduled, predicted seconds of its rows, and who was refused."""

    batch: Batch
    start_s: float
    decodes_s: Floats
    chunks: list[tuple[Row, float]]
    refused: tuple[_Account, ...]


class Explainer:
    """Explains the TTFT of requests from what it is told of a scheduler (:class:`medha.sched.decision.Observer`).

    It keeps an account for each slot ever used at once, and the last 8,192 chunks. The predictor says in what
    proportion rows take a batch's seconds; None goes by their tokens.
    """

    def __init__(self, num_groups: int, predictor: Predictor | None) -> None:
        self._num_groups = num_groups
        self._predictor = predictor
        self.restarted()

    def restarted(self, learned: object = None) -> None:
        """Forget every request."""
        self._accounts: dict[int, _Account] = {}
        self._unplaced: list[_Account] = []  # arrived after the last tick kept
        self._in_flight: deque[_Sent] = deque()
        self._totals = _Totals(self._num_groups)
        self._chunks = _Chunks()
        self._num_added = self._num_ticks = 0

    def added(self, request: SchedulerRequest, now_s: float, admitted: Admitted, name: str) -> None:
        """A request was queued; whoever had its slot before is forgotten."""
        arrival_s = request.arrival_s
        account = _Account(request, name, arrival_s + admitted.deadline_s, self._num_added, self._totals.zeros())
        self._accounts[request.slot] = account
        self._num_added += 1
        account.sample(arrival_s, admitted.slack_s)
        account.start = self._totals.at(arrival_s)
        if account.start is None:
            self._unplaced.append(account)

    def cancelled(self, slot: int, closed: Sequence[int]) -> None:
        """A request was cancelled: its account ends with the last tick."""
        account = self._accounts[slot]
        if account.end is None:
            account.end, account.end_s = self._totals.now, self._totals.time_s

    def scheduled(self, now_s: float, decision: Decision) -> None:
        """A batch was scheduled, or nothing was."""
        if (batch := decision.batch) is None:
            return
        decodes_s, chunks = _row_seconds(batch, self._predictor, self._num_groups)
        for (row, _), slack_s in zip(chunks, decision.slack_s, strict=True):
            account = self._accounts[row.slot]
            if account.group is None:
                account.group = row.group
            account.sample(now_s, slack_s)
        served = {row.slot for row, _ in chunks}
        refused = tuple(self._accounts[slot] for slot in dict.fromkeys(decision.refused) if slot not in served)
        self._in_flight.append(_Sent(batch, now_s, decodes_s, chunks, refused))

    def completed(self, batch: Batch, now_s: float, results: object, busy_s: float, closed: Sequence[int] = ()) -> None:
        """A batch is done in every stage."""
        sent = self._in_flight.popleft()
        assert sent.batch.batch_id == batch.batch_id, "batches complete in the order in which they were scheduled"
        self._totals.idle_until(sent.start_s)
        start_s = self._totals.time_s
        length_s = max(now_s - start_s, 0.0)
        busy_s = min(max(busy_s, 0.0), length_s) if math.isfinite(busy_s) else length_s
        chunks_s = np.zeros(self._num_groups)
        for row, seconds in sent.chunks:
            chunks_s[row.group : row.writer + 1] += seconds
        slowest_s = float((sent.decodes_s + chunks_s).max())
        scale = busy_s / slowest_s if slowest_s > 0 else 0.0
        tick = np.concatenate(([0.0], sent.decodes_s * scale, chunks_s * scale))
        self._totals.add(now_s, tick)
        waiting = [account for account in self._unplaced if account.end is None]
        for account in waiting:
            account.start = self._totals.at(account.request.arrival_s)
        self._unplaced = [account for account in waiting if account.start is None]
        for account in sent.refused:
            if account.end is None and length_s > 0:
                account.waits.append(self._num_ticks)
                share = min((now_s - account.request.arrival_s) / length_s, 1.0)
                account.uncounted += share * tick
                account.memory_s += share * length_s
        for row, seconds in sent.chunks:
            self._count_chunk(row, seconds * scale, start_s, tick)
        self._num_ticks += 1

    def of(self, slot: int) -> Explanation:
        """Where the time of the request that has a slot, or had it last, went; KeyError if none has had it."""
        account = self._accounts[slot]
        end = self._totals.now if account.end is None else account.end
        spent = self._totals.zeros() if account.start is None else end - account.start
        uncounted = account.uncounted
        group = account.group
        if group is None:  # it has begun nowhere: the busiest
            group = int((spent[1 : 1 + self._num_groups] + spent[1 + self._num_groups :]).argmax())
        decodes, chunks = 1 + group, 1 + self._num_groups + group
        end_s = min(account.end_s, self._totals.time_s)
        total_s = 0.0 if account.start is None else end_s - account.request.arrival_s
        parts = {
            "own_s": account.own_s,
            "decodes_s": float(spent[decodes] - uncounted[decodes]),
            "others_s": max(float(spent[chunks] - uncounted[chunks]) - account.own_s, 0.0),
            "memory_s": account.memory_s,
            "idle_s": float(spent[0]),
        }
        return Explanation(
            request_id=account.name,
            has_first_token=account.has_first_token,
            total_s=total_s,
            pipeline_s=max(total_s - sum(parts.values()), 0.0),
            others=self._chunks.top(account, group, end_s),
            slack_s=account.samples(),
            **parts,
        )

    def _count_chunk(self, row: Row, seconds: float, start_s: float, tick: Floats) -> None:
        account, now_s = self._accounts[row.slot], self._totals.time_s
        if seconds > 0:
            self._chunks.add((account.name, account.number, self._num_ticks, *row.span, start_s, now_s, seconds))
        if account.end is not None:
            return
        account.own_s += seconds
        if account.group is not None and not row.span[0] <= account.group <= row.span[1]:
            for first in (1, 1 + self._num_groups):  # preempted, it began anew elsewhere: the tick counts as there
                account.uncounted[first + account.group] += tick[first + account.group] - tick[first + row.group]
        if row.samples:
            account.end, account.end_s, account.has_first_token = self._totals.now, now_s, True
            account.sample(now_s, account.deadline_s - now_s)


class _Totals:
    """Seconds so far as functions of time, linear between the points kept: idle, decodes and chunks by group."""

    def __init__(self, num_groups: int) -> None:
        self.zeros = partial(np.zeros, 1 + 2 * num_groups)
        self._points: deque[tuple[float, Floats]] = deque(maxlen=_TICKS_KEPT)

    @property
    def time_s(self) -> float:
        """Of the last point; -inf before the first."""
        return self._points[-1][0] if self._points else -math.inf

    @property
    def now(self) -> Floats:
        """At the last point."""
        return self._points[-1][1] if self._points else self.zeros()

    def idle_until(self, now_s: float) -> None:
        """Nothing was in flight from the last point to ``now_s``, if that is later; the first call makes a point."""
        if not self._points:
            self._points.append((now_s, self.zeros()))
        elif now_s > self.time_s:
            totals = self.now.copy()
            totals[0] += now_s - self.time_s
            self._points.append((now_s, totals))

    def add(self, now_s: float, tick: Floats) -> None:
        """A tick ends, which began at the last point."""
        if now_s > self.time_s:
            self._points.append((now_s, self.now + tick))

    def at(self, time_s: float) -> Floats | None:
        """At a time; None after the last point. What was before the points kept counts as idle."""
        if time_s > self.time_s:
            return None
        index = bisect_left(self._points, time_s, key=lambda point: point[0])
        after_s, after = self._points[index]
        if index == 0:
            totals = after.copy()
            totals[0] -= after_s - time_s
            return totals
        before_s, before = self._points[index - 1]
        return before + (after - before) * ((time_s - before_s) / (after_s - before_s))


_INTS, _FLOATS = ("number", "tick", "first", "last"), ("start_s", "end_s", "seconds")
_CHUNK = np.dtype([("name", object), *((n, np.int64) for n in _INTS), *((n, np.float64) for n in _FLOATS)])


class _Chunks:
    """The last chunks that ran: whose, in which tick, on which groups, and for how many seconds of it."""

    def __init__(self) -> None:
        self._ring = np.zeros(_CHUNKS_KEPT, _CHUNK)
        self._count = 0

    def add(self, chunk: tuple[str, int, int, int, int, float, float, float]) -> None:
        """Keep one, in place of the oldest."""
        self._ring[self._count % _CHUNKS_KEPT] = chunk
        self._count += 1

    def top(self, account: _Account, group: int, end_s: float) -> tuple[tuple[str, float], ...]:
        """(name, seconds) of the other requests that took most of a group between an arrival and ``end_s``."""
        arrival_s = account.request.arrival_s
        kept = self._after(arrival_s)
        during = (kept["end_s"] <= end_s) & (kept["number"] != account.number)
        chunks = kept[during & (kept["first"] <= group) & (group <= kept["last"])]
        if account.waits:
            chunks = chunks[np.isin(chunks["tick"], list(account.waits), invert=True)]
        since_s = chunks["end_s"] - np.maximum(chunks["start_s"], arrival_s)
        seconds = chunks["seconds"] * since_s / (chunks["end_s"] - chunks["start_s"])
        _, where, whose = np.unique(chunks["number"], return_index=True, return_inverse=True)
        sums = np.bincount(whose, seconds, len(where))
        largest = np.argsort(-sums, kind="stable")[:_TOP]
        return tuple((chunks["name"][where[i]], float(sums[i])) for i in largest if sums[i] > 0)

    def _after(self, time_s: float) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """Those that ended after a time, oldest first: the ring in two pieces, each in order of time."""
        oldest = self._count % _CHUNKS_KEPT
        pieces = self._ring[oldest : self._count], self._ring[:oldest]
        return np.concatenate([piece[piece["end_s"].searchsorted(time_s, "right") :] for piece in pieces])


def _row_seconds(batch: Batch, predictor: Predictor | None, num_groups: int) -> tuple[Floats, list[tuple[Row, float]]]:
    """What the decodes of each group, and each chunk, would take alone; in tokens without a predictor."""
    num_decodes = batch.num_decodes
    chunks = [(row, _seconds_alone(predictor, _work(row))) for row in batch.rows[num_decodes:]]
    if num_groups == 1 and (predictor is None or not chunks):
        return np.array([float(num_decodes)]), chunks  # one kind on one group: any number is the proportion
    decodes: list[list[Work]] = [[] for _ in range(num_groups)]
    for row in batch.rows[:num_decodes]:
        if row.num_groups == 1:
            decodes[row.group].append(Work(1, row.position, True, None, True))
            continue
        work = _work(row)
        for group in row.groups:
            decodes[group].append(work)
    if predictor is None:
        return np.array([float(len(works)) for works in decodes]), chunks
    return np.array([predictor.tick(works).seconds for works in decodes]), chunks


def _work(row: Row) -> Work:
    # A shared context is spread evenly enough for a proportion.
    run = row.span if row.is_shared else None
    return Work(row.q_len, row.position // row.num_groups, row.is_decode, run, row.samples)


def _seconds_alone(predictor: Predictor | None, chunk: Work) -> float:
    if predictor is None:
        return float(chunk.q_len)
    whole, rest = divmod(chunk.q_len, predictor.max_tokens)  # a whole prompt may exceed the tables
    tick = predictor.tick()
    parts = [(predictor.max_tokens, i * predictor.max_tokens) for i in range(whole)]
    parts += [(rest, whole * predictor.max_tokens)] * (rest > 0)
    return sum(tick.with_chunk(q_len, chunk.kv_before + done, run=chunk.run) for q_len, done in parts)
