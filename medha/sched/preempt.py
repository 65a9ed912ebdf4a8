"""Who gives way when a request finds no KV memory, and how: it is computed again later (recompute), or what it had goes
to host memory and comes back (swap), whichever takes less.

By default nobody has to: claims and the banker's test (:mod:`medha.sched.memory`) keep everybody's end possible. Two
options change that.

- Priority classes (a policy ``priority…``): a prefill that was refused memory, or a place among the running, displaces
  requests of lower classes, decodes too: the lowest class first, and in a class whoever loses least.
- ``overcommit``: memory is taken without regard to claims. A decode that finds no block displaces prefills, whoever
  loses least, and a decode only where no prefill is left. So does the oldest started request while it is a prefill.

Only a request with nothing in flight can give way. What it loses is the predicted time to compute again what it had, or
to move it out and in: the most that this can be, as moves run beside what others compute. Only one that lies on one
KV-parallel group is swapped, and it comes back to that group.
With overcommit the oldest started request never gives way and may always displace: it comes to its end, and then the
next one does, so nothing waits for ever. With classes, who gives way is of a lower class than who comes, so no two
displace each other, and it comes back when no prefill of a higher class is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from medha.sched.memory import KVMemory
from medha.sched.queue import Queue, State

Fits = Callable[[Collection[int]], bool]
"""Whether a request would find what it needs if these slots were gone."""


LossFn = Callable[[State], float]
"""Predicted seconds that a request loses if it gives way."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What a request loses if it gives way.

    Attributes:
        seconds: predicted; without a predictor, of what is computed again tokens of short context.
        is_swap: it is swapped out, and not computed again.
    """

    seconds: float
    is_swap: bool = False


def loss(queue: Queue, memory: KVMemory, state: State, *, factor: float = 1.0) -> Loss:
    """What a started request loses if it gives way, the cheaper of the two ways.

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
    """Who can give way to a request by class: the lowest class first, then whoever loses least."""
    below = [s for s in _idle(queue) if s.request.priority > state.request.priority]
    return sorted(below, key=lambda s: (-s.request.priority, lost_s(s), s.slot))


def by_loss(queue: Queue, state: State, lost_s: LossFn, *, by_class: bool) -> list[State]:
    """Who can give way to a request with overcommit: prefills before decodes, or with classes the lowest first.

    Nobody who must not: the oldest, and those of a higher class than a request that is not the oldest itself.
    """
    first = oldest(queue.running.values())
    others = [s for s in _idle(queue) if s is not first and s is not state]
    if not by_class:
        return sorted(others, key=lambda s: (not s.prefilling, lost_s(s), s.slot))
    if state is not first:
        others = [s for s in others if s.request.priority >= state.request.priority]
    return sorted(others, key=lambda s: (-s.request.priority, not s.prefilling, lost_s(s), s.slot))


def fewest(candidates: list[State], fits: Fits) -> list[State] | None:
    """As few of the candidates, from the front, as make it fit, without those that do not matter; None if all do not.

    Args:
        candidates: in the order in which they give way.
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
