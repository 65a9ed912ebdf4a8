"""Which requests are preempted when one finds no KV memory, and how: a preempted request is computed again later, or
its KV is swapped to host memory and back, whichever takes less.

By default nobody is preempted: reservations and the banker's test (:mod:`medha.sched.memory`) let every request come to
its end. Two options change that.

- Priority classes (a policy ``priority…``): a prefill that was refused memory, or a place among the running, preempts
  requests of lower classes, decodes too: the lowest class first, and in a class whoever loses least. No two preempt
  each other, and a preempted request comes back when no prefill of a higher class is left. So nobody is preempted more
  often than requests of higher classes come.
- ``overcommit``: requests take memory without regard to reservations. A decode that finds no block preempts prefills,
  whoever loses least, and a decode only where no prefill is left. So does the oldest started request while it is a
  prefill; it is never preempted, so it comes to its end, and then the next one does.

Which decodes of lower classes a batch leaves out for the cadence of a higher one is said here, too.

Only a request with nothing in flight can be preempted. Where batches are made ahead a decode always is: who is to give
way to a higher class is left out of batches until nothing of it is in flight, and nobody of a lower class starts
meanwhile, who would be in the way next. A preempted request loses the predicted time to compute again what it had, or
to copy it out and in: the most that this can be, as the copies run beside what others compute. What others hold too
stays in the prefix cache; what nobody holds then counts as lost, as it is its memory that is wanted.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable
from itertools import accumulate, groupby, takewhile
from operator import attrgetter

from medha.cost.predictor import Decodes, Predictor, Tick, Work
from medha.sched.decision import Preempted
from medha.sched.memory import KVMemory
from medha.sched.queue import Queue, State


class Preemption:
    """Takes KV memory from some requests for others."""

    def __init__(self, queue: Queue, memory: KVMemory, predictor: Predictor) -> None:
        self.by_class = False  # whether priority classes say who gives way
        self.preempted: list[Preempted] = []  # requests that gave up their memory since the last decision
        self.queue = queue
        self.memory = memory
        self._predictor = predictor

    def would_be_in_way(self, state: State) -> bool:
        """Whether a request that has not started gave way to a class above, of which prefills are left: it does not
        start before them. Nor does a long one, unless it is guarded, start before another of its class, or above, that
        gave way and has less left: it would take what is there of that one in the prefix cache."""
        queue, config, priority = self.queue, self.queue.config, state.request.priority
        if not self.by_class or state.has_started or not next(iter(queue.waiting.values()), state).num_preempted:
            return False  # who was preempted comes first there
        if state.num_preempted and (queue.column("priority") < priority).any():
            return True
        is_long = state.num_prefill_tokens - state.num_cached >= config.long_threshold
        is_guarded = queue.column("guarded")[queue.rows_of([state.slot])].any()
        if not is_long or self.memory.num_groups > 1 or not config.guarded_share or is_guarded:
            return False
        gave_way = takewhile(attrgetter("num_preempted"), queue.waiting.values())
        before = (other for other in gave_way if other.num_cached and other.num_left < state.num_left)
        return any(other.request.priority <= priority for other in before)

    def of_lower_class(self, priority: int) -> list[State]:
        """Whom requests of a class may preempt, once nothing of them is in flight: the lowest class first, then whoever
        loses least; nobody who is kept."""
        below = [s for s in self.queue.running.values() if s.request.priority > priority]
        below = [s for s in below if not s.ended and (s.prefilling or s.slot in self.queue.decoding)]
        return sorted(below, key=lambda s: (-s.request.priority, self.loss(s)[0], s.slot))

    def too_many(
        self,
        rows: list[tuple[int, Work]],
        objectives: set[tuple[int, float]],
        chunk: tuple[int, int],
        spare: int,
        period: int,
    ) -> range:
        """Of decodes (class, work) on a group, the highest classes first, those of lower classes for which a batch has
        no time, nor for ``spare`` more and the least chunk if prefills wait; none where an objective is broken without
        them."""
        kvs = [work.kv_before for _, work in rows]
        totals, longest = list(accumulate(kvs)), list(accumulate(kvs, max))
        spread = [(index, work.run) for index, (_, work) in enumerate(rows) if work.run is not None]

        def tick(count: int) -> Tick:
            if not count:
                return self._predictor.tick()
            runs = tuple(run for index, run in spread if index < count)
            return self._predictor.tick(Decodes(count, totals[count - 1], longest[count - 1], runs))

        end = 0
        for priority, members in groupby(priority for priority, _ in rows):
            start, end = end, end + sum(1 for _ in members)
            limit_s = min((s for above, s in objectives if above < priority), default=math.inf) / period
            if limit_s < math.inf and (least_s := tick(start).seconds) <= limit_s:
                with_chunk_s = tick(start).with_chunk(*chunk) if chunk[0] else least_s
                limit_s -= with_chunk_s - least_s if with_chunk_s <= limit_s else 0.0
                if tick(end).seconds > limit_s:
                    count = bisect_right(range(end), limit_s, lo=start, key=lambda count: tick(count).seconds) - 1
                    return range(max(start, count - spare), len(rows))
        return range(0)

    def by_loss(self, state: State) -> list[State]:
        """Whom a request may preempt with overcommit: prefills before decodes, or with classes the lowest first.

        Never the oldest, nor those of a higher class than a request that is not the oldest itself.
        """
        first = oldest(self.queue.running.values())
        idle = (s for s in self.queue.running.values() if not s.num_in_flight and not s.ended)
        others = [s for s in idle if s is not first and s is not state]
        if self.by_class and state is not first:
            others = [s for s in others if s.request.priority >= state.request.priority]

        def key(s: State) -> tuple[int, bool, float, int]:
            return -s.request.priority * self.by_class, not s.prefilling, self.loss(s)[0], s.slot

        return sorted(others, key=key)

    def loss(self, state: State) -> tuple[float, bool]:
        """Predicted seconds that a started request loses if it is preempted, and whether it is swapped out for that."""
        had = state.num_scheduled_tokens
        kept = min(self.memory.held_by_others(state.slot), had - 1)
        again_s = self.queue.left_s(kept, had) * self._predictor.factor("prefill") if had else 0.0
        blocks = self.memory.swappable(state.slot)
        moved_s = 2 * blocks * self.memory.swap_block_s
        return (moved_s, True) if blocks and moved_s < again_s else (again_s, False)

    def preempt(self, victims: Iterable[State], now_s: float) -> None:
        """Take all memory back from requests, which wait again; their KV goes to host memory where that is cheaper."""
        for state in victims:
            lost_s, is_swap = self.loss(state)
            num_kept = state.num_computed_tokens if is_swap else 0
            self.preempted.append(Preempted(state.slot, lost_s, num_kept))
            if is_swap:
                self.memory.swap_out(state.slot)
            self.memory.note(state.slot, state.num_computed_tokens)  # its output as well
            self.memory.release(state.slot)
            self.queue.preempt(state, now_s, num_kept=num_kept)
            if state.chain is not None and not is_swap:
                self.queue.look_again(state, self.memory.prefix)  # of what it had, all is there for now


def oldest(states: Iterable[State]) -> State | None:
    """The request that came first."""
    return min(states, key=lambda state: (state.request.arrival_s, state.slot), default=None)


def fewest(candidates: list[State], fits: Callable[[Collection[int]], bool]) -> list[State] | None:
    """The fewest candidates, from the front, without whose slots a request ``fits``; None if all are too few."""
    slots = [state.slot for state in candidates]
    if not fits(set(slots)):
        return None
    count = bisect_left(range(len(slots)), True, key=lambda count: fits(set(slots[:count])))
    chosen, gone = candidates[:count], set(slots[:count])
    for state in chosen[:-1]:
        if fits(gone - {state.slot}):
            gone.remove(state.slot)
    return [state for state in chosen if state.slot in gone]
