"""What crosses the scheduler's seam: a request as the scheduler knows it, and what the scheduler decides.

The engine, explanations, the journal and the simulator are handed these and ask the scheduler nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from medha.batch import Batch
from medha.cost.predictor import Kind
from medha.params import SLO


@dataclass(frozen=True, slots=True)
class SchedulerRequest:
    """What the scheduler knows of a request at arrival.

    Attributes:
        slot: integer handle; unique among requests not yet closed.
        max_new_tokens: with the prompt it makes the reservation of KV memory.
        arrival_s: when it arrived, in seconds of the engine's clock.
        slo: its objectives, if any.
        priority: class, 0 (realtime) to 3 (low).
        is_relegated: it has no deadline, whatever its objectives, and comes after all others of its class.
    """

    slot: int
    num_prompt_tokens: int
    max_new_tokens: int
    arrival_s: float
    slo: SLO | None = None
    priority: int = 2
    is_relegated: bool = False

    @property
    def num_kv_tokens(self) -> int:
        """Its reservation of KV memory in tokens; the last sampled token is never written."""
        return self.num_prompt_tokens + self.max_new_tokens - 1


@dataclass(frozen=True, slots=True)
class Admitted:
    """What the scheduler made of a request that was added.

    Attributes:
        deadline_s: seconds from its arrival to when its first token is due, given or derived; inf for none.
        slack_s: seconds for which it could wait at its arrival and have its first token in time; inf for no deadline.
        is_relegated: the scheduler, or who added it, relegated it.
    """

    deadline_s: float
    slack_s: float
    is_relegated: bool


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a batch was predicted to take, before it was sent.

    Attributes:
        kind: what it consists of, on the group that takes longest.
        seconds: busy seconds of the slowest stage of that group; where blocks are swapped, of the copies if they take
            longer, as the two overlap.
        factor: the correction within ``seconds``.
        budget_s: what the batch was to take at most.
    """

    kind: Kind
    seconds: float
    factor: float
    budget_s: float


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request that gave up its KV memory.

    Attributes:
        lost_s: predicted seconds to compute again what it had, or to move it out and in; without a predictor, of what
            is computed again tokens of short context.
        swapped_tokens: tokens that go to host memory; 0 where they are computed again.
    """

    slot: int
    lost_s: float
    swapped_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What one call of :meth:`medha.sched.scheduler.Scheduler.schedule` decided.

    Attributes:
        batch: what runs next; None where nothing can enter the pipeline now.
        prediction: of the batch, where the packer predicts.
        preempted: who gave up KV memory, in order; also where no batch came of it.
        refused: slots of prefills that found no KV memory.
        slack_s: of each prefill chunk of the batch, in the order of its rows, the seconds for which its request could
            still wait and have its first token in time; inf without a deadline.
    """

    batch: Batch | None = None
    prediction: Prediction | None = None
    preempted: tuple[Preempted, ...] = ()
    refused: tuple[int, ...] = ()
    slack_s: tuple[float, ...] = ()


Results = Sequence[tuple[int, int, bool]]
"""(slot, number of new tokens, finished) of the rows of a batch that sampled."""


class Observer(Protocol):
    """Who is told what the scheduler was asked and what it decided; the loop needs nothing of it."""

    def added(self, request: SchedulerRequest, now_s: float, admitted: Admitted, name: str) -> None:
        """A request was queued."""

    def cancelled(self, slot: int, closed: Sequence[int]) -> None:
        """A request was cancelled; these slots were closed by that."""

    def scheduled(self, now_s: float, decision: Decision) -> None:
        """The scheduler was asked for a batch."""

    def completed(self, batch: Batch, now_s: float, results: Results, busy_s: float, closed: Sequence[int]) -> None:
        """A batch is done in every stage; these slots were closed by that."""

    def restarted(self, learned: dict[str, tuple[float, int]] | None) -> None:
        """A new scheduler is in place of the former one, with no request; its predictor has learned this."""
