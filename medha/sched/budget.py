"""The seconds of a batch: how many it may take on each group, and what a long prefill yields to short ones."""

from __future__ import annotations

from dataclasses import dataclass

from medha.config import SchedulerConfig
from medha.cost.predictor import Tick
from medha.sched.memory import KVMemory
from medha.sched.policy import SHORTEST_S
from medha.sched.queue import Queue, State


@dataclass(slots=True)
class GroupTime:
    """Time of one group in the batch that is being filled.

    Attributes:
        tick: what is in it, predicted.
        budget_s: for the whole batch.
        limit_s: what the present phase may fill.
        decodes_s: what the decodes take.
        long_slot: the long prefill in it, if any.
        is_joined: a chunk in it was made longer, and is in ``tick`` as two.
        fitting: a whole prompt of so many tokens is known to fit on top within ``fitting_limit_s``.
    """

    tick: Tick
    budget_s: float
    limit_s: float
    decodes_s: float
    long_slot: int | None = None
    is_joined: bool = False
    fitting: int = 0
    fitting_limit_s: float = 0.0

    @property
    def prefill_s(self) -> float:
        """The budget that the decodes leave."""
        return max(0.0, self.budget_s - self.decodes_s)


def batch_budget_s(config: SchedulerConfig, queue: Queue, memory: KVMemory, group: int, *, depth: int) -> float:
    """Seconds of a batch: as set, or what the tightest TPOT among its decodes allows, or the preemption quantum.

    A decode returns with every batch in flight, so it may take a depth-th of the TPOT; with a decode lag it is in every
    batch.

    Args:
        config: the budget, where it is set, and the quantum.
        queue: the requests.
        memory: where they lie.
        group: of the batch.
        depth: batches in flight at most.
    """
    if config.t_target_s is not None:
        return config.t_target_s
    period = 1 if config.decode_lag else depth
    tightest = config.quantum_s * period
    for state in queue.decoding.values():
        slo = state.request.slo
        if slo is not None and slo.tpot_s is not None and slo.tpot_s < tightest:
            first, count = memory.run(state.slot)
            if first <= group < first + count:
                tightest = slo.tpot_s
    return tightest / period


class Yielding:
    """How much of the budget a long prefill leaves to short ones (Algorithm 2, space sharing)."""

    def __init__(self, config: SchedulerConfig, queue: Queue, *, factor: float, now_s: float) -> None:
        self._rho_max = config.rho_max
        self._queue = queue
        self.factor = factor
        self._now_s = now_s
        self.has_short = config.rho_max > 0 and bool((queue.num_prompt_tokens < config.long_threshold).any())

    def yielded(self, state: State) -> float:
        """The share of the time after decodes that a long request yields."""
        if not self.has_short:
            return 0.0
        total_s, left_s = self._queue.work_s(state, self.factor)
        slack_s = state.request.arrival_s + state.deadline_s - self._now_s - left_s
        return min(self._rho_max, max(0.0, slack_s / max(total_s, SHORTEST_S)))
