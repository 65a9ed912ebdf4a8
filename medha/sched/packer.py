"""Batch packing under a time budget: Algorithms 1 and 2 of arXiv:2409.17264v5, with the guard of a share for the late.

Decodes first, their predicted time counted; then prefills in the policy's order, each with the largest chunk that fits
the budget. Chunks shrink as KV grows because the same budget holds fewer tokens: adaptive chunking needs no rule of its
own. With KV parallelism every group has a budget, and a chunk that lies on several takes the least that any leaves.

The guard: under an overload of short requests SRPT and LARS starve a long one for as long as it lasts, and LARS can
hold a short one for nearly its whole deadline. So a prefill that is late, or that has been passed over for
``patience_s``, is guarded until its prefill ends. In each batch the guarded are served first, by arrival, up to
``late_share`` of the prefill budget; a share of 0 turns that off. With time counted in seconds of prefill budget, B
that of one batch, and s the share: a guarded request with w seconds of work left, and W left in the guarded that
arrived before it, ends its prefill within (W + w) / s + B, whoever comes later; the policy's order runs as on a machine
slower by at most 1 / (1 - s). Where the share is too small for an efficient chunk, or a second long prefill has no
place, the oldest keeps its turn, and what it did not get is owed to the guarded, up to one budget, or where no place is
free four quanta: the bound grows by so much over s. If that holds none, it gets the least one, and owes the rest.

Departures from the paper, and why:

- Algorithm 2 read literally lets every request yield a share of the whole budget, also the short ones it is yielded
  to. Here only a long prefill yields, only while a short one waits, and of what the decodes leave.
- A request that is passed over now has its first token ``(depth + 1)`` budgets later at the latest. So policies are
  asked for the order at the time so far ahead; else LARS holds a short request until it is late by just as much.
- What a long prefill yields and no short one takes goes back to it. Each group goes on for as long as the slowest.
- Decodes and short prompts have a share of the time of long prefills, ``interactive_share``. Where decodes alone would
  take more of a batch, it takes up to 1.9 quanta. What they leave of their share is spent on batches that leave out the
  prefills of more than four quanta. What the policy puts before all of those left out would hold them up in any case
  and costs nothing, unless somebody is guarded: so for the guard's bound the machine is slower by that share.
- Where several groups have batches of a set time, no batch leaves prefills out, as other groups would idle: decodes
  share batches of half that time, or of so much that they are ``interactive_share`` of it.
- A request that is refused (a second long one, no memory, no time) does not block those behind it. But where memory is
  what lacks, long prefills leave it to that which ends first, and a newcomer to one that has three quarters: else
  several hold what none can end with, and what they hold lies idle. This goes with the guard, on one group.
- Where a deep KV cache leaves no room for an efficient chunk, a request first goes on on its next KV-parallel group
  (growth for latency, v5 section 3.3).
- Without decodes a batch takes up to four quanta if that reads more, until the first prefill ends at most, where the
  time since the last arrival makes a newcomer in it unlikely: the quantum is for newcomers, no empty system pays it.
- Where decodes alone, or the KV all the same, leave no room for one, the first prefill of a group gets the least
  efficient one, beyond the budget; where no objective bounds the batch, one that is read at nearly full speed.

The file is long because of what stands above, and because the budget and what is packed into it change together.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice, takewhile

import numpy as np

from medha.config import SchedulerConfig
from medha.cost.predictor import Decodes, Predictor, Tick, Work, largest_dealt, ring_or_gather_s
from medha.cost.prefill_time import chunk_rules, least_chunk
from medha.params import PRIORITIES
from medha.sched.batch_builder import BatchBuilder, Packer
from medha.sched.decision import Prediction
from medha.sched.policy import SHORTEST_S, Bools, RowNumbers, load_policy, sort_rows
from medha.sched.queue import Queue, State

# Requests of the order that are looked at in one round, and the most rounds of a batch; of an empty one with none in
# flight every request is tried, so that whatever can run does.
_FIRST = 64
_ROUNDS = 2
_MAX_ROUNDS = 1 << 20
_MOST_QUANTA = 4  # that a batch takes where its decodes' objectives allow it, or nobody waits: fewer and larger chunks
_SHARED_QUANTA = 1.9  # that a batch takes so that its decodes have no more than their share of it
_MUCH = 1.2  # times as long: then a request that is alone is spread over the groups
_FULLY = 0.97  # of the best tokens a second: no batch takes longer to read more
_UNLIKELY = 0.05  # newcomers expected within a batch that takes longer than a quantum for a prefill that is alone


@dataclass(slots=True)
class GroupTime:
    """Time of one group in the batch that is being filled."""

    tick: Tick  # what is in it, predicted
    budget_s: float  # for the whole batch
    limit_s: float  # what the present phase may fill
    decodes_s: float  # what the decodes take
    most_s: float  # for the whole batch, where an efficient chunk needs longer than the budget
    last_s: float  # what prefills took in the batch before
    long_slot: int | None = None  # the long prefill in it, if any


class MedhaPacker(Packer):
    """The paper's packer."""

    def __init__(self, config: SchedulerConfig, predictor: Predictor, depth: int) -> None:
        self.config = config
        self.predictor = predictor
        self.depth = depth
        self._quantum_s, self._least_chunk = chunk_rules(config, predictor)
        self._full_chunk = least_chunk(config, predictor, nearly=_FULLY)
        self._is_set = (config.t_target_s or config.quantum_s) is not None  # the time of a batch, which may be long
        self._least_dealt = cache(partial(least_chunk, config, predictor))
        self._ranking = load_policy(config.policy)
        self._refused: list[int] = []
        self._ending: State | None = None
        self._stalled: set[int] = set()  # running prefills that were refused memory, and have had no chunk since
        self._asked: list[int] = []  # for whom somebody is left out of the batch, to give way when it is not in flight
        self._owed_s: list[float] = []
        self._spare_s = self._most_spare_s = _MOST_QUANTA * self._quantum_s  # for batches that leave out long prefills
        self._least_s = predictor.uncorrected().tick().with_chunk(1, 0)  # of a batch, whatever is in it
        self._groups: list[GroupTime] = []
        self._ahead_s, self._factor = 0.0, 1.0
        self._yields = False  # long prefills leave time to short ones
        self._yielders: list[State] = []  # those to which that left too little for a chunk

    def fill(self, queue: Queue, builder: BatchBuilder) -> Prediction | None:
        favoured = self._make_room(queue, builder) if self._ranking.by_class else []
        if self._ranking.by_class:
            self._leave_out_decodes(queue, builder)
        builder.prefers_ring = self._prefers_ring
        builder.is_closed = partial(self._is_closed, least=self.config.min_chunk)
        builder.busy_s = lambda group: self._groups[group].tick.seconds
        builder.add_decodes()
        before, self._groups, decodes = self._groups, [], len(builder.rows)
        lone_s, share = 0.0, self.config.spare_share
        # A machine that is slower than predicted reads as much in a batch, at the same speed.
        quantum_s = self._quantum_s * (1.0 if self._is_set else max(1.0, self.predictor.factor("prefill")))
        if queue.num_prefills and not (queue.decoding or self._is_set):  # until one ends a newcomer alone is held up
            kv = int(queue.column("num_computed_tokens").max())
            lone_s = self.predictor.tick().with_chunk(self._full_chunk(kv), kv)
            lone_s = min(lone_s, _UNLIKELY * (builder.now_s - queue.newest_s) / self.depth)
            if queue.num_prefills > 1:
                first_s = float(queue.column("work_left_s").min()) * self.predictor.factor("prefill")
                lone_s = min(lone_s, first_s)
        for index in range(builder.memory.num_groups):
            tick = self.predictor.tick(*builder.works(index))
            most_s = self.config.t_target_s
            if most_s is None:  # a decode comes round after a period of batches
                most_s = queue.tightest_tpot_s(builder.memory.span, index) / self.config.period
            budget_s = min(quantum_s, most_s)
            if self.config.quantum_s is None and budget_s < most_s:  # what an objective leaves is used
                shared_s = min(tick.seconds / share, _SHARED_QUANTA * quantum_s) if share and decodes else 0.0
                longer_s = most_s if most_s < math.inf else max(budget_s, lone_s, shared_s)
                budget_s = min(_MOST_QUANTA * quantum_s, longer_s)
            last_s = before[index].tick.seconds - before[index].decodes_s if before else 0.0
            self._groups.append(GroupTime(tick, budget_s, budget_s, tick.seconds, most_s, last_s))
        if queue.tenants.are_several and decodes:
            row_s = sum(group.decodes_s for group in self._groups) / decodes
            for row in builder.rows:
                queue.tenants.charge(queue.running[row.slot].tenant, row_s)
        decodes_s = max(group.decodes_s for group in self._groups)
        shortens = self._is_set and len(self._groups) > 1 and share > 0
        for group in self._groups if shortens and decodes else ():
            group.budget_s = min(group.budget_s, max(self._quantum_s / 2, decodes_s / share))
        if queue.num_prefills:
            self._factor = self.predictor.factor("mixed" if builder.rows else "prefill")
            self._ahead_s = (self.depth + 1) * max(group.budget_s for group in self._groups)
            if self.config.guarded_share:
                queue.mark_guarded(builder.now_s, self.config.patience_s)
            self._ending = self._ends_first(queue, builder)
            are_long = bool((queue.column("work_left_s") > self._most_spare_s).any())
            if favoured or shortens or not are_long or not self._leave_out(queue, builder, decodes_s):
                self._serve(queue, builder, favoured)
                prefills_s = max(group.tick.seconds for group in self._groups) - decodes_s
                spare_s = self._spare_s + share * prefills_s - decodes_s * are_long
                self._spare_s = min(max(spare_s, 0.0), self._most_spare_s)
        if builder.rows:
            self._stalled = (self._stalled | queue.running.keys() & builder.refused) - builder.chunked.keys()
        self._refused = list(dict.fromkeys([*self._asked, *builder.refused]))
        return self._prediction(queue, builder) if builder.rows else None

    # -- phases ------------------------------------------------------------------------------------------------------

    def _leave_out(self, queue: Queue, builder: BatchBuilder, decodes_s: float) -> bool:
        """Fill a batch with decodes and prefills of up to four quanta alone, where time is spared for that; whether it
        was. Unless somebody is guarded, those that come before all others are free."""
        left_s, least_s = queue.column("work_left_s"), decodes_s or self._least_s * self._factor
        if not self.config.spare_share or self._spare_s < least_s:
            return False
        rows = self._order(queue, builder)
        is_short = left_s[rows] <= self._most_spare_s
        are_free = np.logical_and.accumulate(is_short) & (not queue.column("guarded").any())
        wanted_s = np.cumsum(np.where(are_free, 0.0, left_s[rows] * self._factor)[is_short]) + least_s
        longest_s = max(group.budget_s for group in self._groups)  # who outlasts it pays for the rest in the next
        count = int(np.searchsorted(np.minimum(wanted_s, longest_s), self._spare_s, side="right"))
        if not count and not decodes_s:
            return False
        for state in queue.states_of_rows(rows[is_short][:count]):
            if state.prefilling and self._has_room(builder, may_exceed=True):
                self._give(state, queue, builder, may_exceed=True)
        if builder.rows:
            wanted = float(wanted_s[count - 1]) if count else decodes_s
            self._spare_s -= min(wanted, max(group.tick.seconds for group in self._groups))
        return bool(builder.rows)

    def _serve(self, queue: Queue, builder: BatchBuilder, favoured: list[State]) -> None:
        """Prefills: those that others gave way to, the guarded for their share, the rest in order."""
        is_short = queue.column("num_prompt_tokens") < self.config.long_threshold
        self._yields = self.config.yielded_share > 0 and bool(is_short.any())
        self._yielders.clear()
        for state in favoured:
            self._give(state, queue, builder, may_exceed=True)
        self._serve_guarded(queue, builder)
        for group in self._groups:
            group.limit_s = group.budget_s
        builder.open_further()
        self._serve_in_order(queue, builder)
        self._fill_up(queue, builder)

    def _ends_first(self, queue: Queue, builder: BatchBuilder) -> State | None:
        """Of the long prefills that have started and lack memory to end, that of the highest class with the least left:
        the others leave it what comes free. While one that has three quarters, and was refused, lacks it, nobody
        starts: what it holds lies idle."""
        memory, by_class = builder.memory, self._ranking.by_class
        if memory.num_groups > 1 or memory.overcommit or not self.config.guarded_share:
            return None
        lacking = [state for state in queue.prefills() if self._is_long(state) and memory.lacks(state.slot)]
        for state in lacking:
            if state.slot in self._stalled and 4 * state.num_left <= state.num_prefill_tokens - state.num_cached:
                self._close(builder, state)
        return min(lacking, key=lambda state: (state.request.priority * by_class, state.num_left), default=None)

    def _leaves_memory(self, state: State, queue: Queue, builder: BatchBuilder) -> bool:
        """Whether a long prefill leaves what is free to that which ends first, as it lacks memory too. None starts that
        has more left, or before which another came that waits for long: of those before that one there are ever fewer.
        """
        ending, priority = self._ending, state.request.priority
        if ending is None or ending is state or (self._ranking.by_class and ending.request.priority > priority):
            return False
        if state.has_started:
            return builder.memory.lacks(state.slot)
        waits = queue.column("guarded") & (queue.column("num_prompt_tokens") >= self.config.long_threshold)
        if self._ranking.by_class:
            waits &= queue.column("priority") <= priority
        is_later = bool((queue.column("arrival_s")[waits] < state.request.arrival_s).any())
        return is_later or state.num_left > ending.num_left

    def _close(self, builder: BatchBuilder, state: State) -> None:
        """Nobody of a class or below starts: a request of it finds no memory."""
        builder.closed_from = min(builder.closed_from, state.request.priority if self._ranking.by_class else 0)

    def _make_room(self, queue: Queue, builder: BatchBuilder) -> list[State]:
        """Requests for which lower classes were preempted: of those refused memory in the batch before, and where all
        places are taken the first of the highest class."""
        builder.preemption.by_class, is_in_way = True, builder.preemption.would_be_in_way
        states = queue.states_of_rows(queue.rows_of(self._refused[:_FIRST]))
        if queue.num_prefills and len(queue.running) >= self.config.max_num_seqs:
            by = queue.column("priority"), queue.column("arrival_s")
            rows = sort_rows(by, first=_FIRST, among=~queue.column("started"))
            states += [state for state in queue.states_of_rows(rows) if not is_in_way(state)][:1]
        lowest = max((state.request.priority for state in queue.running.values()), default=0) if states else 0
        lower = [state for state in states if state.request.priority < lowest]
        below = cache(builder.preemption.of_lower_class)
        asking = (s for s in lower if not (is_in_way(s) or builder.is_held(s)))
        able = (s for s in asking if not builder.left_out and builder.make_room(s, below(s.request.priority)))
        favoured = list(islice(able, 1))  # who has not taken that room yet: the others ask when it is taken
        self._asked = [s.slot for s in lower if s not in favoured] if builder.left_out else []
        return favoured

    def _leave_out_decodes(self, queue: Queue, builder: BatchBuilder) -> None:
        """Leave decodes of lower classes out of the batch where they would break the cadence of a higher one.

        Those that fit come in turns. In the guard's share of the batches one of them gives its place, or where none
        fits a place is made, to whoever waits longest: of n that are left out each has a token in n / share batches.
        """
        decoding = queue.decoding.values()
        kinds = {(state.request.priority, state.tpot_s) for state in decoding}
        objectives = {kind for kind in kinds if kind[1] < math.inf}
        if self.config.t_target_s or not objectives or min(objectives)[0] >= max(kinds)[0]:
            return
        positions = [state.num_scheduled_tokens for state in decoding]
        tick = self.predictor.tick(Decodes(len(positions), sum(positions), max(positions)))
        q_len = min(self.config.min_chunk, self.predictor.max_tokens) if queue.num_prefills else 0
        deepest = int(queue.column("num_computed_tokens").max()) if q_len else 0
        least_s = min(tpot_s for _, tpot_s in objectives) / self.config.period
        if (tick.with_chunk(q_len, deepest) if q_len else tick.seconds) <= least_s:
            return  # all at once, as on one group
        share = self.config.guarded_share
        is_guards = share > 0 and builder.batch_id % math.ceil(1 / share) == 0
        kept = {state.slot: state for state in builder.due_decodes(by_class=True)}
        num_due = len(kept)
        for group in range(builder.memory.num_groups):
            rows = (builder.decode_row(state) for state in kept.values())
            mine = [row for row in rows if row.concerns(group)]
            classed = [(kept[row.slot].request.priority, builder.memory.work_of(row, group)) for row in mine]
            least = q_len, deepest
            for index in builder.preemption.too_many(classed, objectives, least, int(is_guards), self.config.period):
                del kept[mine[index].slot]
        if len(kept) == num_due:
            return
        others = [state for state in decoding if state.slot not in kept]
        late = min(filter(builder.is_due, others), key=lambda state: state.last_batch) if is_guards else None
        builder.left_out.update(state.slot for state in others if state is not late)

    def _serve_guarded(self, queue: Queue, builder: BatchBuilder) -> None:
        """Those that the policy has passed over get their share first, in order of arrival."""
        share, guarded = self.config.guarded_share, queue.column("guarded")
        if not guarded.any():
            self._owed_s = []
            return
        is_turn, least_s = True, 0.0  # what a chunk beyond the budget takes is owed by them
        # The batch in which a place comes free may be longer, as it has no decodes.
        most_s = self._most_spare_s if len(queue.running) >= self.config.max_num_seqs else 0.0
        earned, limits = list[float](), list[float]()
        for group, owed_s in zip(self._groups, self._owed_s or [0.0] * len(self._groups), strict=True):
            prefill_s = max(0.0, group.budget_s - group.decodes_s)
            earned.append(owed_s + share * (prefill_s if owed_s >= 0 else max(prefill_s, group.last_s)))
            limits.append(min(prefill_s, earned[-1]))
            group.limit_s = group.decodes_s + limits[-1]
            is_turn &= limits[-1] >= prefill_s
        is_whole, lengths = all(g.limit_s >= g.budget_s for g in self._groups), queue.column("num_prompt_tokens")
        may_be_long = is_whole or np.count_nonzero(lengths >= self.config.long_threshold) < 2
        if queue.tenants.are_several and len(queue.running) + len(queue.waiting) > self.config.max_num_seqs:
            guarded = guarded & (queue.column("started") | ~queue.are_ahead(self._ranking))  # these take no places
        guarded = guarded & self._candidates(queue, builder, (), longs=True)  # who has no place would hide others
        rows = sort_rows((queue.column("arrival_s"), queue.column("slot")), first=_FIRST, among=guarded)
        for state in queue.states_of_rows(rows):
            if not state.prefilling or builder.is_held(state) or not builder.has_place(state):
                continue  # or it was read to its end in the turn of one that shares its prompt
            if self._is_long(state) and not may_be_long:
                break  # it would shut out the other long ones for a share of the batch: it waits for a whole one
            if self._give(state, queue, builder, may_exceed=False, waits=True):  # as the smallest takes nearly as long
                continue
            if is_turn and state.slot not in builder.refused and self._give(state, queue, builder, may_exceed=True):
                least_s = -math.inf
                continue
            if state.slot not in builder.refused:
                break
            self._close(builder, state)
        parts = zip(limits, earned, self._groups, strict=True)
        left_s = [max(limit, min(had_s, most_s)) - its.tick.seconds + its.decodes_s for limit, had_s, its in parts]
        self._owed_s = [max(min(limit, least_s), left) for limit, left in zip(limits, left_s, strict=True)]

    def _serve_in_order(self, queue: Queue, builder: BatchBuilder) -> None:
        """Everybody in the policy's order, some at a time; who cannot enter now is not looked at."""
        tried: set[int] = set()
        # what is in flight, but in no batch, is on its way to a decode instance: its memory will come back
        will_be_room = bool(builder.rows) or any(state.num_in_flight for state in queue.running.values())
        for _ in range(_MAX_ROUNDS if builder.is_idle and not will_be_room else _ROUNDS):
            states = queue.states_of_rows(self._order(queue, builder, tried))
            has_room, is_cramped = self._has_room(builder, may_exceed=True), self._is_cramped(builder)
            for state in states:
                if not has_room:
                    return
                if state.ended or not state.prefilling:
                    continue
                if is_cramped and state.num_left >= self.config.min_chunk and state.slot not in builder.chunked:
                    asks_again = self._yields and len(self._groups) > 1 and self._is_long(state)
                    if not (asks_again or (self.config.ring and builder.width(state) > 1)):
                        continue
                if builder.has_place(state) and self._give(state, queue, builder, may_exceed=True):
                    has_room, is_cramped = self._has_room(builder, may_exceed=True), self._is_cramped(builder)
            if len(states) < _FIRST or is_cramped:
                return
            tried.update(state.slot for state in states)

    def _order(self, queue: Queue, builder: BatchBuilder, tried: Collection[int] = ()) -> RowNumbers:
        """Rows of the first that may enter, until one of them is scheduled whole: then rows move."""
        now_s, among = builder.now_s + self._ahead_s, self._candidates(queue, builder, tried)
        return queue.order(self._ranking, now_s, factor=self._factor, first=_FIRST, among=among)

    def _fill_up(self, queue: Queue, builder: BatchBuilder) -> None:
        """What long prefills yielded and nobody took, and what the guarded may have on top of their share."""
        self._yields = False
        slowest_s = max(group.tick.seconds for group in self._groups)
        for group in self._groups:  # one that ends before would be idle
            group.limit_s = max(group.limit_s, slowest_s)
        builder.open_further()
        states = [state for slot in list(builder.chunked) if (state := queue.running[slot]).prefilling]
        for state in (*sorted(states, key=self._is_long), *self._yielders):
            if not self._has_room(builder, may_exceed=False):
                return
            self._give(state, queue, builder, may_exceed=False)

    def _candidates(self, queue: Queue, builder: BatchBuilder, tried: Collection[int], longs: bool = False) -> Bools:
        """Which rows may enter the batch: no new ones where all places are taken or nobody of their class may start, or
        which gave way to a class above that is not done, no long ones where each group has one, none a second time."""
        may_enter = np.ones(queue.num_prefills, np.bool_)
        if len(queue.running) >= self.config.max_num_seqs:
            may_enter &= queue.column("started")
        elif builder.closed_from < len(PRIORITIES):
            may_enter &= queue.column("started") | (queue.column("priority") < builder.closed_from)
        gave_way = takewhile(lambda state: state.num_preempted, queue.waiting.values())
        if self._ranking.by_class and (rows := queue.rows_of(state.slot for state in gave_way)):
            may_enter[rows] &= queue.column("priority")[rows] == queue.column("priority").min()
        if not longs and all(group.long_slot is not None for group in self._groups):
            may_enter &= queue.column("num_prompt_tokens") < self.config.long_threshold
        may_enter[queue.rows_of(tried)] = False
        return may_enter

    # -- one request -------------------------------------------------------------------------------------------------

    def _give(
        self, state: State, queue: Queue, builder: BatchBuilder, *, may_exceed: bool, waits: bool = False
    ) -> bool:
        """Try to put a chunk of a request into the batch; one that ``waits`` gets an efficient one, or none."""
        is_long, groups = self._is_long(state), self._groups
        if not (state.has_started or state.num_cached or state.num_preempted):  # it begins at one of these
            groups = [groups[first] for first in builder.memory.first_groups(state.request.num_kv_tokens)]
        if builder.is_held(state) or (is_long and all(g.long_slot not in (None, state.slot) for g in groups)):
            return False
        if (leader := builder.leader(state)) is not None:  # which gets on in its turn, and shares what it computes
            if leader.slot in builder.chunked or not leader.prefilling or builder.is_held(leader):
                return False
            if self._give(leader, queue, builder, may_exceed=may_exceed):
                return True  # otherwise it does not get on, and is not waited for
        if is_long and self._leaves_memory(state, queue, builder):
            return False
        share = self._yielded(state, queue, builder) if is_long and self._yields else 0.0
        asks_again = share > 0 and len(self._groups) > 1  # or its group is idle for as long as another computes
        if self._is_cramped(builder, state):
            if asks_again:
                self._yielders.append(state)
            return False
        position, has_chunk = state.num_scheduled_tokens, state.slot in builder.chunked
        prefers_least = (may_exceed or waits) and not share and not has_chunk

        def may_enter(first: int, count: int) -> bool:
            return not is_long or all(g.long_slot in (None, state.slot) for g in self._groups[first : first + count])

        def fitting(first: int, count: int, most: int) -> int:
            tokens = self._fitting(state, builder, first, count, most, share) if may_enter(first, count) else 0
            is_first = prefers_least and not any(builder.has_chunk[first : first + count])
            needed = least(first, count, most) if is_first else min(self.config.min_chunk, most)
            return tokens if tokens >= needed or has_chunk else 0

        def least(first: int, count: int, most: int) -> int:
            if any(builder.has_chunk[first : first + count]) or not may_enter(first, count):
                return 0
            if count > 1 and builder.width(state) > 1:
                efficient = min(most, self._least_dealt(count)(position))
            else:
                efficient = min(most, self._least_chunk(position // count))
            return max(self._fitting(state, builder, first, count, efficient), min(most, self.config.min_chunk))

        if builder.memory.num_groups > 1 and state.has_started and not has_chunk:
            self._grow(state, queue, builder)
        had = len(builder.refused) + len(builder.awaiting)
        q_len = builder.add_chunk(state, fitting)
        if may_exceed and not (q_len or all(builder.has_chunk)) and had == len(builder.refused) + len(builder.awaiting):
            q_len = builder.add_chunk(state, least)  # where it fits nowhere: on one that has no chunk yet
        if not q_len:
            if asks_again:
                self._yielders.append(state)
            return False
        row = builder.rows[builder.chunked[state.slot]]
        for index in row.groups:
            group = self._groups[index]
            if is_long:
                group.long_slot = state.slot
            if has_chunk:  # which is longer now
                group.tick = self.predictor.tick(*builder.works(index))
            else:
                group.tick.add(builder.memory.work_of(row, index))
        return True

    def _grow(self, state: State, queue: Queue, builder: BatchBuilder) -> None:
        """Let a request take its next group where the KV on its last alone would soon leave no efficient chunk, or
        where it is alone and its decodes are predicted to be much shorter once it lies evenly on all groups.

        Its KV stays where it is, so it has to happen while an efficient chunk still fits behind it, merges included.
        """
        memory, position, num_tokens = builder.memory, state.num_scheduled_tokens, state.request.num_kv_tokens
        first, count = memory.place(state.slot, position)
        share = -(-num_tokens // (memory.num_groups - first))
        if len(queue.running) + len(queue.waiting) == 1 and position >= share * count:
            alone, spread = Work(1, num_tokens, True), Work(1, share, True, (first, memory.num_groups - 1))
            pays = self.predictor.predict([alone]) > _MUCH * self.predictor.predict([spread])
            if pays and memory.grow(state.slot, position, num_tokens, widens=True):
                return
        *others, last = range(first, first + count)
        least, margin = self.config.min_chunk, memory.block_size + 2 * self.config.min_chunk

        def fits(index: int, kv: int) -> bool:
            group = self._groups[index]
            return group.tick.largest_chunk(kv, group.budget_s, least, run=(first, last + 1)) >= least

        kv_on = partial(memory.kv_before, state.slot, position)
        if builder.has_chunk[last] or fits(last, kv_on(last) + margin) or not fits(last, 0):
            return
        if all(fits(index, kv_on(index)) for index in others):  # else it would not help
            memory.grow(state.slot, position, num_tokens)

    def _yielded(self, state: State, queue: Queue, builder: BatchBuilder) -> float:
        """The share of the time after decodes that a long request leaves to short ones (Algorithm 2, space sharing)."""
        total_s, left_s = queue.work_s(state, self._factor)
        slack_s = state.request.arrival_s + state.deadline_s - (builder.now_s + self._ahead_s) - left_s
        return min(self.config.yielded_share, max(0.0, slack_s / max(total_s, SHORTEST_S)))

    def _is_long(self, state: State) -> bool:
        """By what it computes itself."""
        return state.num_prefill_tokens - state.num_cached >= self.config.long_threshold

    def _prefers_ring(self, position: int, q_len: int, first: int, count: int) -> bool:
        """Whether a chunk of a dealt request is predicted to end its batch sooner where it is dealt than where all of
        its groups compute it."""
        ticks = [group.tick for group in self._groups[first : first + count]]
        ring_s, gather_s = ring_or_gather_s(ticks, position, q_len, first=first)
        return ring_s < gather_s

    def _fitting(
        self, state: State, builder: BatchBuilder, first: int, count: int, most: int, share: float | None = None
    ) -> int:
        """The most tokens that fit the time of each group, of which ``share`` is left to others; without one, all that
        a batch may take."""
        tokens, limits, step = most, [], self.config.chunk_granularity
        run = (first, first + count - 1) if count > 1 else None
        for index in range(first, first + count):
            group = self._groups[index]
            kv = builder.memory.kv_before(state.slot, state.num_scheduled_tokens, index)
            if index < first + count - 1:
                kv += builder.chunk_tokens(state.slot)
            limit_s = group.most_s
            if share is not None:
                limit_s = group.decodes_s + (group.limit_s - group.decodes_s) * (1.0 - share)
            limits.append(limit_s)
            samples = tokens == state.num_left and index == first
            tokens = group.tick.largest_chunk(kv, limit_s, tokens, step, run=run, samples=samples)
        if count > 1 and builder.width(state) > 1:
            ticks = [group.tick for group in self._groups[first : first + count]]
            tokens = max(tokens, largest_dealt(ticks, state.num_scheduled_tokens, limits, most, step))
        return tokens

    def _has_room(self, builder: BatchBuilder, *, may_exceed: bool) -> bool:
        """Whether some group can take a chunk more."""
        groups = zip(self._groups, builder.tokens_left, builder.has_chunk, strict=True)
        return any(
            left > 0 and ((may_exceed and not has_chunk) or group.tick.largest_chunk(0, group.limit_s, 1) > 0)
            for group, left, has_chunk in groups
        )

    def _is_cramped(self, builder: BatchBuilder, state: State | None = None) -> bool:
        """Whether there is surely no time on any group for the smallest chunk, of one request or of any that is not
        dealt, so that many need not be tried."""
        least, kv, num_groups = self.config.min_chunk, 0, len(self._groups)
        if state is not None:
            least = 1 if state.slot in builder.chunked else min(least, state.num_left)
            kv = state.num_scheduled_tokens if num_groups == 1 else 0  # of several at least none is on the one
            least = max(1, least // num_groups) if builder.width(state) > 1 else least
        return all(self._is_closed(builder, group, least, kv) for group in range(num_groups))

    def _is_closed(self, builder: BatchBuilder, index: int, least: int, kv: int = 0) -> bool:
        """Whether a group surely has no time for a chunk of so many tokens, or of as many as a batch may still take."""
        group, left = self._groups[index], builder.tokens_left[index]
        if not left or not builder.has_chunk[index]:
            return not left
        least = min(least, left, self.predictor.max_tokens, self.config.chunk_size or left)
        return group.tick.with_chunk(least, kv) > group.limit_s * (1 + 1e-9)  # however the sum is rounded

    def _prediction(self, queue: Queue, builder: BatchBuilder) -> Prediction:
        """Of the batch, which is not empty."""
        slowest = max(self._groups, key=lambda group: group.tick.seconds)
        tick, seconds = slowest.tick, max(slowest.tick.seconds, moved_s := builder.memory.moved_s())
        queue.batch_sent(seconds, tick.factor)
        return Prediction(tick.kind, seconds, tick.factor, slowest.budget_s, moved_s)
