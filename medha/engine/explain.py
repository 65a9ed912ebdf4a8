"""Where the time to first token of each request went.

The time from a request's arrival to its first token is cut at the ends of batches. A *tick* is the time by which a
batch ends later than the one before it (or than its own start, if nothing was in flight). Of a tick,

- the busy seconds of the slowest group are dealt out among the rows in proportion to what each would take alone, as
  the predictor says: to the request's own chunk, to decodes, to others' chunks;
- the rest, and what the other groups were idle, is the pipeline: its filling, transfers, the host;
- a tick in whose batch the request was refused for want of KV memory is a wait for memory as a whole.

Between ticks nothing was in flight: idle. So the parts sum to the TTFT. A tick in which the request arrived counts in
proportion. The seconds are of the group on which the request begins: what runs beside it elsewhere takes nothing of it.
Not in the paper.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from medha.batch import Batch, Row
from medha.cost.predictor import Predictor, Work, dealt_work
from medha.outputs import Explanation
from medha.sched.decision import Admitted, Decision, Observer, SchedulerRequest
from medha.sched.policy import Floats

_CHUNKS_KEPT = 256
_SPANS_KEPT = 256
_MAX_SAMPLES = 12
_TOP = 3
_IDLE, _MEMORY, _DECODES = 0, 1, 2
"""Kinds of seconds: columns of what a request has spent. Decodes of each group follow, then chunks of each group."""


@dataclass(slots=True, eq=False)
class _Account:
    """One request."""

    request: SchedulerRequest
    name: str
    deadline_s: float  # time at which its first token is due
    group: int | None = None  # on which it begins, once it has
    end_s: float | None = None  # of its first token or cancellation, once known
    has_first_token: bool = False
    own_s: float = 0.0
    slack: list[tuple[float, float]] = field(default_factory=list)  # (seconds since arrival, slack in seconds)

    def sample(self, now_s: float, slack_s: float) -> None:
        """Keep its slack, if it has a deadline."""
        if slack_s != math.inf:
            self.slack.append((now_s - self.request.arrival_s, slack_s))


class _Sent(NamedTuple):
    """A batch in flight: when it was scheduled, predicted seconds of its rows, and who was refused."""

    start_s: float
    decodes_s: Floats  # by group
    chunks: list[tuple[Row, float]]
    refused: frozenset[_Account]


class _Chunk(NamedTuple):
    """A chunk that ran in a tick from ``start_s`` to ``end_s``, for some seconds of it."""

    account: _Account
    groups: range
    start_s: float
    end_s: float
    seconds: float
    refused: frozenset[_Account]  # in that tick


class Explainer(Observer):
    """Explains the TTFT of requests from what it is told of a scheduler (:class:`medha.sched.decision.Observer`).

    Args:
        num_groups: KV-parallel groups.
        predictor: says in what proportion rows take a batch's seconds.
        lane: where batches of several groups complete independently, the group of whose batches this one tells; None
            where all complete in order.
    """

    def __init__(self, num_groups: int, predictor: Predictor, lane: int | None = None) -> None:
        self._num_groups = num_groups
        self._predictor = predictor
        self._lane = lane
        self.restarted()

    def restarted(self, learned: object = None) -> None:
        """Forget every request."""
        self._accounts: dict[int, _Account] = {}
        self._in_flight: deque[_Sent] = deque()
        self._chunks: deque[_Chunk] = deque(maxlen=_CHUNKS_KEPT)
        self._spans: deque[tuple[float, float, Floats]] = deque(maxlen=_SPANS_KEPT)  # as _spend was told of them
        self._time_s = -math.inf  # the end of the last span
        self._arrival_s = np.full(64, np.inf)  # by slot; inf: nobody there waits for a first token
        self._waiting: set[int] = set()  # the other slots
        self._spent = np.zeros((64, _DECODES + 2 * self._num_groups))  # seconds by slot and kind
        self._idle = np.eye(1, self._spent.shape[1], _IDLE)[0]  # of each second, where nothing is in flight

    def added(self, request: SchedulerRequest, now_s: float | None, admitted: Admitted, name: str) -> None:
        """A request was queued; whoever had its slot before is forgotten."""
        slot, arrival_s = request.slot, request.arrival_s
        account = _Account(replace(request, prefix=b""), name, arrival_s + admitted.deadline_s)
        self._accounts[slot] = account
        account.sample(arrival_s, admitted.slack_s)
        if slot >= len(self._arrival_s):
            self._arrival_s = np.concatenate([self._arrival_s, np.full(slot, np.inf)])
            self._spent = np.concatenate([self._spent, np.zeros((slot, self._spent.shape[1]))])
        self._arrival_s[slot], self._spent[slot] = arrival_s, 0.0
        self._waiting.add(slot)
        for start_s, end_s, rates in reversed(self._spans):  # it may have arrived before the scheduler heard of it
            if end_s <= arrival_s:
                break
            self._spent[slot] += (end_s - max(start_s, arrival_s)) * rates
        else:  # what was before the spans kept counts as idle
            self._spent[slot, _IDLE] += max(self._spans[0][0] - arrival_s, 0.0) if self._spans else 0.0

    def cancelled(self, slot: int, closed: Sequence[int]) -> None:
        """A request was cancelled: its account ends with the last tick."""
        if self._accounts[slot].end_s is None:
            self._end(self._accounts[slot])

    def scheduled(self, now_s: float, decision: Decision) -> None:
        """A batch was scheduled, or nothing was."""
        if (batch := decision.batch) is None:
            return
        for row in batch.chunks:
            if (account := self._accounts[row.slot]).group is None:
                account.group = row.group
        if not self._sees(batch):
            return
        decodes_s, chunks = _row_seconds(batch, self._predictor, self._num_groups)
        for (row, _), slack_s in zip(chunks, decision.slack_s, strict=True):
            self._accounts[row.slot].sample(now_s, slack_s)
        refused = {*decision.refused} - {row.slot for row, _ in chunks}
        self._in_flight.append(_Sent(now_s, decodes_s, chunks, frozenset(self._accounts[slot] for slot in refused)))

    def completed(self, batch: Batch, now_s: float, results: object, busy_s: float, closed: Sequence[int] = ()) -> None:
        """A batch is done in every stage."""
        if not self._sees(batch):
            return
        sent = self._in_flight.popleft()
        if sent.start_s > self._time_s:
            self._spend(sent.start_s, self._idle)
        start_s, length_s = self._time_s, max(now_s - self._time_s, 0.0)
        busy_s = min(max(busy_s, 0.0), length_s) if math.isfinite(busy_s) else length_s
        chunks_s = np.zeros(self._num_groups)
        for row, seconds in sent.chunks:
            chunks_s[row.group : row.writer + 1] += seconds
        slowest_s = float((sent.decodes_s + chunks_s).max())
        scale = busy_s / slowest_s if slowest_s > 0 else 0.0
        tick = np.concatenate(([0.0, 0.0], sent.decodes_s * scale, chunks_s * scale))
        if length_s > 0:
            shares = self._spend(now_s, tick / length_s) / length_s
            for account in sent.refused:
                if account.end_s is None:
                    slot = account.request.slot
                    self._spent[slot] -= shares[slot] * tick
                    self._spent[slot, _MEMORY] += shares[slot] * length_s
        for row, seconds in sent.chunks:
            account = self._accounts[row.slot]
            if seconds * scale > 0:
                self._chunks.append(_Chunk(account, row.groups, start_s, now_s, seconds * scale, sent.refused))
            if account.end_s is None:
                self._count_chunk(account, row, seconds * scale, tick)

    def _sees(self, batch: Batch) -> bool:
        return self._lane is None or self._lane in batch.groups

    def begins(self, slot: int) -> bool:
        """Whether the request that has a slot, or had it last, begins on this one's lane."""
        return self._accounts[slot].group == self._lane

    def _count_chunk(self, account: _Account, row: Row, seconds: float, tick: Floats) -> None:
        account.own_s += seconds
        if account.group is not None and account.group not in row.groups:
            for first in (_DECODES, _DECODES + self._num_groups):  # preempted, it began anew elsewhere: as there
                self._spent[row.slot, first + account.group] += tick[first + row.group] - tick[first + account.group]
        if row.samples:
            self._end(account)
            account.has_first_token = True
            account.sample(self._time_s, account.deadline_s - self._time_s)

    def _end(self, account: _Account) -> None:
        account.end_s = self._time_s
        self._arrival_s[account.request.slot] = np.inf
        self._waiting.discard(account.request.slot)

    def _spend(self, end_s: float, rates: Floats) -> Floats:
        """A span ends, in which those who wait spent ``rates`` of each second on each kind; seconds of it by slot."""
        seconds: Floats = np.zeros(0)  # nobody asks for anybody's
        if self._waiting:
            seconds = np.maximum(end_s - np.maximum(self._arrival_s, self._time_s), 0.0)
            self._spent += seconds[:, None] * rates
        self._spans.append((self._time_s, end_s, rates))
        self._time_s = end_s
        return seconds

    def of(self, slot: int) -> Explanation:
        """Where the time of the request that has a slot, or had it last, went; KeyError if none has had it."""
        account, spent = self._accounts[slot], self._spent[slot]
        by_group = spent[_DECODES:].reshape(2, -1)  # of decodes, and of chunks
        # where it has begun nowhere: the busiest
        group = int(by_group.sum(axis=0).argmax()) if account.group is None else account.group
        end_s = self._time_s if account.end_s is None else account.end_s
        total_s = max(end_s - account.request.arrival_s, 0.0)
        own_s, (decodes_s, chunks_s) = account.own_s, by_group[:, group].tolist()
        idle_s, memory_s = float(spent[_IDLE]), float(spent[_MEMORY])
        others_s = max(chunks_s - own_s, 0.0)
        pipeline_s = max(total_s - (own_s + decodes_s + others_s + memory_s + idle_s), 0.0)
        # of its slack a few: the first, the last, and at even numbers of chunks between them
        samples = (*account.slack[:-1][:: len(account.slack) // _MAX_SAMPLES + 1], *account.slack[-1:])
        others = self._others(account, group, end_s)
        head = account.name, account.has_first_token, total_s
        return Explanation(*head, own_s, decodes_s, others_s, others, memory_s, pipeline_s, idle_s, samples)

    def _others(self, account: _Account, group: int, end_s: float) -> tuple[tuple[str, float], ...]:
        """(name, seconds) of the other requests that took most of a group until ``end_s``."""
        seconds: Counter[_Account] = Counter()
        arrival_s = account.request.arrival_s
        for chunk in reversed(self._chunks):
            if chunk.end_s <= arrival_s:
                break
            is_other = chunk.account is not account and account not in chunk.refused
            if is_other and chunk.end_s <= end_s and group in chunk.groups:
                share = (chunk.end_s - max(chunk.start_s, arrival_s)) / (chunk.end_s - chunk.start_s)
                seconds[chunk.account] += chunk.seconds * share  # type: ignore[assignment]
        return tuple((other.name, float(took_s)) for other, took_s in seconds.most_common(_TOP))


def explained(explainers: Sequence[Explainer], slot: int) -> Explanation:
    """Where the time of the request that has a slot, or had it last, went.

    With lanes that of the group on which it begins says so, which is in all of its runs; of a request that has begun
    nowhere, that of the group that was busiest meanwhile.
    """
    its = [one for one in explainers if one.begins(slot)] or explainers
    return max((one.of(slot) for one in its), key=lambda found: (found.others_s, found.total_s))


def _row_seconds(batch: Batch, predictor: Predictor, num_groups: int) -> tuple[Floats, list[tuple[Row, float]]]:
    """What the decodes of each group, and each chunk, would take alone."""
    num_decodes = batch.num_decodes
    chunks = [(row, _seconds_alone(predictor, _work(row))) for row in batch.chunks]
    if num_groups == 1 and not chunks:
        return np.array([float(num_decodes)]), chunks  # one kind on one group: any number is the proportion
    decodes: list[list[Work]] = [[] for _ in range(num_groups)]
    for row in batch.rows[:num_decodes]:
        if row.num_groups == 1:  # nearly all, so made without a call
            decodes[row.group].append(Work(1, row.position, True, None, True))
            continue
        for group in row.groups:
            decodes[group].append(_work(row))
    return np.array([predictor.tick(works).seconds for works in decodes]), chunks


def _work(row: Row) -> Work:
    if row.is_dealt:
        return dealt_work(row)
    # A shared context is spread evenly enough for a proportion.
    run = row.span if row.is_shared else None
    return Work(row.q_len, row.position // row.num_groups, row.is_decode, run, row.samples)


def _seconds_alone(predictor: Predictor, chunk: Work) -> float:
    tick, most = predictor.tick(), predictor.max_tokens  # a whole prompt may exceed the predictor's tables
    parts = [(min(most, chunk.q_len - done), chunk.kv_before + done) for done in range(0, chunk.q_len, most)]
    return sum(tick.with_chunk(q_len, kv_before, run=chunk.run, ring=chunk.ring) for q_len, kv_before in parts)
