"""Which requests are preempted when one finds no KV memory, and how: a preempted request is computed again later, or
its KV is swapped to host memory and back, whichever takes less.

By default nobody is preempted: claims and the banker's test (:mod:`medha.sched.memory`) let every request come to its
end. Two options change that.

- Priority classes (a policy ``priority…``): a prefill that was refused memory, or a place among the running, preempts
  requests of lower classes, decodes too: the lowest class first, and in a class whoever loses least.
- ``overcommit``: requests take memory without regard to claims. A decode that finds no block preempts prefills, whoever
  loses least, and a decode only where no prefill is left. So does the oldest started request while it is a prefill.

Only a request with nothing in flight can be preempted. It loses the predicted time to compute again what it had, or to
copy it out and in: the most that this can be, as the copies run beside what others compute. Only a request that lies on
one KV-parallel group is swapped, and it comes back to that group.

With overcommit the oldest started request is never preempted and may always preempt others: it comes to its end, and
then the next one does, so nothing waits for ever. With classes a request preempts lower classes alone, so no two
preempt each other, and a preempted request comes back when no prefill of a higher class is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from medha.sched.memory import KVMemory
from medha.sched.queue import Queue, State

Fits = Callable[[Collection[int]], bool]
"""Whether a request would find what it needs if these slots were gone."""


LossFn = Callable[[State], float]
"""Predicted seconds that a request loses if it is preempted."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What a request loses if it is preempted.

    Attributes:
        seconds: predicted; without a predictor, of what is computed again tokens of short context.
        is_swap: it is swapped out, and not computed again.
    """

    seconds: float
    is_swap: bool = False


def loss(queue: Queue, memory: KVMemory, state: State, *, factor: float = 1.0) -> Loss:
    """What a started request loses if it is preempted, in the cheaper of the two ways.

    Args:
        queue: predicts.
        memory: knows whether it can be swapped out. Where nothing is predicted one that can is.
        state: the request.
        factor: corrects the predicted seconds of prefills.
    """
    again_s = recompute_s(queue, state) * factor
    blocks = memory.swappable(state.slot)
    if not blocks:
        return Loss(again_s)
    moved_s = 2 * blocks * memory.swap_block_s
    return Loss(moved_s, is_swap=True) if moved_s < again_s or not queue.predicts else Loss(again_s)


def recompute_s(queue: Queue, state: State) -> float:
    """Predicted seconds to compute again what a request has, uncorrected."""
    return queue.prefill_s(state.num_scheduled_tokens) if state.num_scheduled_tokens else 0.0


def oldest(states: Iterable[State]) -> State | None:
    """The request that came first."""
    return min(states, key=lambda state: (state.request.arrival_s, state.slot), default=None)


def of_lower_class(queue: Queue, state: State, lost_s: LossFn) -> list[State]:
    """Whom a request may preempt by class: the lowest class first, then whoever loses least."""
    below = [s for s in _idle(queue) if s.request.priority > state.request.priority]
    return sorted(below, key=lambda s: (-s.request.priority, lost_s(s), s.slot))


def by_loss(queue: Queue, state: State, lost_s: LossFn, *, by_class: bool) -> list[State]:
    """Whom a request may preempt with overcommit: prefills before decodes, or with classes the lowest first.

    Never the oldest, nor those of a higher class than a request that is not the oldest itself.
    """
    first = oldest(queue.running.values())
    others = [s for s in _idle(queue) if s is not first and s is not state]
    if not by_class:
        return sorted(others, key=lambda s: (not s.prefilling, lost_s(s), s.slot))
    if state is not first:
        others = [s for s in others if s.request.priority >= state.request.priority]
    return sorted(others, key=lambda s: (-s.request.priority, not s.prefilling, lost_s(s), s.slot))


def fewest(candidates: list[State], fits: Fits) -> list[State] | None:
    """The fewest candidates, from the front, without which a request fits; None if it does not fit without all of them.

    Args:
        candidates: in the order in which they are preempted.
        fits: whether it would fit without some of them.
    """
    gone: set[int] = set()
    chosen: list[State] = []
    while not fits(gone):
        if len(chosen) == len(candidates):
            return None
        chosen.append(candidates[len(chosen)])
        gone.add(chosen[-1].slot)
    for state in chosen[:-1]:
        if fits(gone - {state.slot}):
            gone.remove(state.slot)
    return [state for state in chosen if state.slot in gone]


def _idle(queue: Queue) -> Iterable[State]:
    """Started requests of which nothing is in flight."""
    return (s for s in queue.running.values() if not s.num_in_flight and not s.ended)
