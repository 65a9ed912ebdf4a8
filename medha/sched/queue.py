"""The requests that a scheduler knows: how far each has come, and columns over those whose prefill is not done.

The columns are numpy arrays that are kept, not built, so that a decision over 100,000 waiting requests takes
milliseconds: a request is a row, added at the end, and the last row takes the place of one that leaves.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medha.batch import Row
from medha.config import SchedulerConfig
from medha.cost.prefill_time import PrefillTimes
from medha.sched.decision import SchedulerRequest
from medha.sched.policy import COLUMN_NAMES, Bools, Columns, Ranking, RowNumbers, keys_of, sort_rows
from medha.sched.prefix import Chain, PrefixCache
from medha.sched.tenants import Tenants


@dataclass(slots=True)
class State:
    """Progress of one request."""

    request: SchedulerRequest
    num_known_tokens: int  # the prompt and the tokens sampled so far; with async scheduling also those being sampled
    num_prefill_tokens: int  # of its prompt, and after it was preempted all that it had by then
    deadline_s: float = math.inf  # seconds from arrival to when its first token is due; inf is none
    num_scheduled_tokens: int = 0  # sent in some batch; there is work while it is fewer than the known
    num_computed_tokens: int = 0  # in a batch that is complete, or swapped out
    num_in_flight: int = 0  # batches
    last_batch: int = -1  # the newest that it is in
    has_started: bool = False  # it is bound to a group and may hold memory
    ended: bool = False  # it finished or was cancelled; it is closed once nothing of it is in flight
    num_preempted: int = 0
    tenant: int = 0  # its number
    num_cached: int = 0  # of its prefill, tokens that it need not compute as others have
    chain: Chain | None = None  # ids of its tokens
    slot: int = field(init=False)
    tpot_s: float = field(init=False)  # its objective; inf is none

    def __post_init__(self) -> None:
        self.slot, slo = self.request.slot, self.request.slo
        self.tpot_s = math.inf if slo is None or slo.tpot_s is None else slo.tpot_s
        if self.request.prefix:
            self.chain = Chain(self.request.prefix)

    @property
    def prefilling(self) -> bool:
        """Whether tokens of its prefill are left to schedule."""
        return self.num_scheduled_tokens < self.num_prefill_tokens

    @property
    def num_left(self) -> int:
        """Tokens of its prefill not yet scheduled."""
        return self.num_prefill_tokens - self.num_scheduled_tokens

    def foresee(self) -> None:
        """Count the token that a row just sent will give, unless it is the last one there can be."""
        if self.num_known_tokens < self.request.num_kv_tokens:
            self.num_known_tokens += 1

    @property
    def can_decode(self) -> bool:
        """Whether its next token can be computed."""
        return not self.prefilling and self.num_scheduled_tokens < self.num_known_tokens


_KEPT = 0.99  # of a batch's weight in how prefills get on, with each that follows


# The columns: those that a policy sees, and the scheduler's own.
_COLUMNS: dict[str, type[np.generic]] = {
    **{name: np.float64 if name.endswith("_s") else np.int64 for name in COLUMN_NAMES},
    "last_chunk_s": np.float64,  # when it last had a chunk in a batch; its arrival before the first
    "slot": np.int64,
    "tenant": np.int64,
    "started": np.bool_,
    "relegated": np.bool_,  # it comes after all others
    "guarded": np.bool_,  # the guard looks after it; written by the packer
}


class Queue:
    """All requests of a scheduler.

    Args:
        config: of a request without a TTFT objective the deadline is ``max(deadline_floor_s, deadline_factor *
            predicted seconds alone)``; with async scheduling tokens count as known once what samples them is sent.
        times: predicted seconds of prefills that run alone, by the tokens of the prompt.

    Attributes:
        waiting: not started, in order of arrival; preempted ones come first.
        newest_s: when the last one came.
        ending: slots of started requests that have ended and are not forgotten, as something of them is in flight.
    """

    def __init__(self, config: SchedulerConfig, times: Callable[[int], PrefillTimes]) -> None:
        self.config = config
        self.times = times
        self.foresees = bool(config.async_scheduling)
        self.running: dict[int, State] = {}  # started and not closed, in the order of their first chunks
        self.decoding: dict[int, State] = {}  # of those, the ones whose prompt is scheduled whole
        self.waiting: OrderedDict[int, State] = OrderedDict()
        self.ending: set[int] = set()
        self.tenants = Tenants(config.tenant_weights)  # the accounts of those whose requests are not forgotten
        self.newest_s = -math.inf
        self._taken_s = self._alone_s = self._sent_s = 0.0  # see :meth:`batch_sent`; the last of the batch being filled
        self.num_prefills = 0  # rows of the columns
        self._states: list[State] = []  # by row
        self._row_of: dict[int, int] = {}
        self._table = {name: np.zeros(64, dtype) for name, dtype in _COLUMNS.items()}

    def __contains__(self, slot: int) -> bool:
        return slot in self.waiting or slot in self.running

    # -- columns -----------------------------------------------------------------------------------------------------

    def columns(self, factor: float) -> Columns:
        """Views of the columns for a policy; ``factor`` corrects the predicted seconds, and :attr:`stretch`."""
        factor *= self.stretch
        views = {name: self.column(name) for name in COLUMN_NAMES}
        if factor != 1.0:
            views |= {name: views[name] * factor for name in ("work_total_s", "work_left_s")}
        return Columns(**views)

    def order(self, ranking: Ranking, now_s: float, *, factor: float, first: int, among: Bools | None) -> RowNumbers:
        """The first rows of ``among``, None is all, in the order of a policy: within a class those of a tenant that is
        ahead come last, and whoever is relegated after all others. ``factor`` is as of :meth:`columns`."""
        columns, last = self.columns(factor), self.column("relegated")
        if not len(columns):
            return np.empty(0, np.intp)
        keys, before = keys_of(ranking, columns, now_s), [columns.priority] * ranking.by_class
        if last.any():
            keys = np.where(last, np.inf, keys)
            before.append(last.astype(np.int64))
        if self.tenants.are_several:
            before.append(self.are_ahead(ranking).astype(np.int64))
        return sort_rows((*before, keys, columns.arrival_s, self.column("slot")), first=first, among=among)

    def are_ahead(self, ranking: Ranking) -> Bools:
        """Which rows wait for those of other tenants."""
        classes = self.column("priority") if ranking.by_class else np.zeros(self.num_prefills, np.int64)
        return self.tenants.ahead(self.column("tenant"), 2 * classes + self.column("relegated"))  # who come last anyway

    def mark_guarded(self, now_s: float, patience_s: float) -> None:
        """Note which prefills are late or were passed over for long."""
        guarded = self.column("guarded")
        guarded |= self.column("arrival_s") + self.column("deadline_s") < now_s
        guarded |= self.column("last_chunk_s") + patience_s <= now_s

    def tightest_tpot_s(self, span_of: Callable[[int], tuple[int, int]], group: int) -> float:
        """The tightest TPOT objective of the decodes on a group; ``span_of`` says on which groups a slot lies."""
        tightest = math.inf
        for state in self.decoding.values():
            if state.tpot_s < tightest:
                first, count = span_of(state.slot)
                if first <= group < first + count:
                    tightest = state.tpot_s
        return tightest

    def column(self, name: str) -> NDArray[Any]:
        """A view of one column of ``_COLUMNS``."""
        return self._table[name][: self.num_prefills]

    def rows_of(self, slots: Iterable[int]) -> list[int]:
        """The rows of those that have one."""
        return [self._row_of[slot] for slot in slots if slot in self._row_of]

    def states_of_rows(self, rows: Iterable[int]) -> list[State]:
        """The requests of some rows of the columns."""
        return [self._states[row] for row in rows]

    def work_s(self, state: State, factor: float) -> tuple[float, float]:
        """As in :meth:`columns`: of the whole of a prefill and of what is left; its prompt is not scheduled whole."""
        row, factor = self._row_of[state.slot], factor * self.stretch
        return self._table["work_total_s"][row] * factor, self._table["work_left_s"][row] * factor

    def prefills(self) -> Iterator[State]:
        """Started requests with prompt tokens left, in the order in which they started."""
        return (state for state in self.running.values() if state.prefilling and not state.ended)

    # -- a request's life --------------------------------------------------------------------------------------------

    def add(self, request: SchedulerRequest, factor: float, num_cached: int = 0) -> State:
        """A request arrives, of which some tokens are there, as :meth:`look_again` notes; ``factor`` corrects the
        predicted seconds of its derived deadline."""
        length, self.newest_s = request.num_prompt_tokens, max(self.newest_s, request.arrival_s)
        total_s = self.left_s(num_cached, length) if num_cached else self.times(length).total_s(length)
        deadline_s = None if request.slo is None else request.slo.ttft_s
        deadline_s = deadline_s or max(self.config.deadline_floor_s, self.config.deadline_factor * (total_s * factor))
        state = State(request, length, length, math.inf if request.is_relegated else deadline_s)
        state.tenant = self.tenants.enter(request.tenant)
        self.waiting[request.slot] = state
        self._append(state, total_s, request.arrival_s)
        return state

    def arrived(self, request: SchedulerRequest) -> None:
        """A request comes whose prompt others have computed, and whose first token they have drawn: it decodes."""
        length = request.num_prompt_tokens
        state = State(request, length + 1, length, has_started=True)
        state.num_scheduled_tokens = state.num_computed_tokens = length
        state.tenant = self.tenants.enter(request.tenant)
        self.running[request.slot] = self.decoding[request.slot] = state

    def found(self, state: State, num_tokens: int) -> None:
        """So many tokens of a request that has not started are there already."""
        if num_tokens == state.num_cached == state.num_computed_tokens:
            return
        state.num_cached = state.num_scheduled_tokens = state.num_computed_tokens = num_tokens
        row = self._row_of[state.slot]
        self._table["num_prompt_tokens"][row] = state.num_prefill_tokens - num_tokens
        self._table["work_left_s"][row] = self.left_s(num_tokens, state.num_prefill_tokens)
        self._table["work_total_s"][row] = self._table["work_left_s"][row]

    def look_again(self, state: State, prefix: PrefixCache) -> None:
        """Find out how much is there of a request that waits, and watch that."""
        if state.chain is not None:
            self.found(state, prefix.watch(state.slot, state.chain, state.num_prefill_tokens - 1))

    def preempt(self, state: State, now_s: float, *, num_kept: int = 0) -> None:
        """A started request loses what was computed, all but ``num_kept`` tokens, and waits again, first in line."""
        self.running.pop(state.slot)
        self.decoding.pop(state.slot, None)
        if state.slot in self._row_of:
            self._remove(state.slot)
        state.num_prefill_tokens = state.num_known_tokens
        state.num_scheduled_tokens = state.num_computed_tokens = num_kept
        state.num_cached = 0
        state.has_started = False
        state.num_preempted += 1
        self.waiting[state.slot] = state
        self.waiting.move_to_end(state.slot, last=False)
        self._append(state, self.times(state.num_prefill_tokens).total_s(state.num_prefill_tokens), now_s)

    def start(self, state: State) -> None:
        """A request gets its first chunk."""
        state.has_started = True
        self._table["started"][self._row_of[state.slot]] = True
        self.running[state.slot] = self.waiting.pop(state.slot)

    def sent(self, state: State, row: Row, now_s: float) -> None:
        """A row of a request goes into a batch."""
        state.num_scheduled_tokens = row.kv_len
        state.num_in_flight += 1
        if self.foresees and row.samples:
            state.foresee()
        if row.is_decode:
            return
        index, left = self._row_of[state.slot], self._table["work_left_s"]
        left_s = self.left_s(row.kv_len, state.num_prefill_tokens) if state.prefilling else 0.0
        self.tenants.charge(state.tenant, left[index] - left_s)
        self._sent_s += float(left[index] - left_s)
        if not state.prefilling:
            self._remove(state.slot)
            self.decoding[state.slot] = state
            return
        self._table["last_chunk_s"][index] = now_s
        left[index] = left_s

    def batch_sent(self, seconds: float, factor: float) -> None:
        """A batch is predicted to take so long, by this factor: what prefill is in it would take so much less alone."""
        if self._sent_s > 0:
            self._taken_s = _KEPT * self._taken_s + seconds
            self._alone_s = _KEPT * self._alone_s + self._sent_s * factor
            self._sent_s = 0.0

    @property
    def stretch(self) -> float:
        """How much longer prefills take, by the batches of late, than alone: decodes share these, and what the decodes'
        objectives leave makes small chunks. 1 without decodes."""
        return self._taken_s / self._alone_s if self._alone_s and self.decoding else 1.0

    def computed(self, rows: Iterable[Row]) -> None:
        """The rows of a batch are done in every stage."""
        running = self.running
        for slot, _, q_len, is_decode, _, _, _, _ in rows:  # a starred name would take a third of the time
            state = running[slot]
            state.num_in_flight -= 1
            state.num_computed_tokens += q_len
            if not is_decode and (index := self._row_of.get(slot)) is not None:
                self._table["num_computed_tokens"][index] = state.num_computed_tokens - state.num_cached

    def end(self, state: State) -> None:
        """Nothing more of a request is to be scheduled."""
        state.ended = True
        if state.has_started:
            self.ending.add(state.slot)
        if state.slot in self._row_of:
            self._remove(state.slot)
        self.decoding.pop(state.slot, None)

    def drop(self, slot: int) -> None:
        """Forget a request."""
        if (state := self.waiting.pop(slot, None) or self.running.pop(slot, None)) is not None:
            self.tenants.leave(state.tenant)
        self.decoding.pop(slot, None)
        self.ending.discard(slot)

    # -- work --------------------------------------------------------------------------------------------------------

    def left_s(self, num_done: int, num_tokens: int) -> float:
        """Seconds that the rest of a prefill takes alone, uncorrected."""
        return self.times(num_tokens).remaining_s(num_done, num_tokens)

    def _append(self, state: State, total_s: float, last_chunk_s: float) -> None:
        """A row for a request that has not started; what was kept of it counts as done."""
        row = self.num_prefills
        if row == self._table["slot"].size:
            self._table = {name: np.concatenate([column, column]) for name, column in self._table.items()}
        request, num_kept = state.request, state.num_computed_tokens
        left_s = self.left_s(num_kept, state.num_prefill_tokens) if num_kept else total_s
        times = request.arrival_s, state.deadline_s, total_s, left_s
        sizes = state.num_prefill_tokens, num_kept, request.priority
        values = *times, *sizes, last_chunk_s, state.slot, state.tenant, False, request.is_relegated, False
        for column, value in zip(self._table.values(), values, strict=True):
            column[row] = value
        self._states.append(state)
        self._row_of[state.slot] = row
        self.num_prefills += 1

    def _remove(self, slot: int) -> None:
        """Take a request's row out; the last row takes its place."""
        row = self._row_of.pop(slot)
        last = self.num_prefills - 1
        moved = self._states.pop()
        if row != last:
            for column in self._table.values():
                column[row] = column[last]
            self._states[row] = moved
            self._row_of[moved.slot] = row
        self.num_prefills = last
