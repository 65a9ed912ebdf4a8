"""What crosses the scheduler's seam: a request as the scheduler knows it, and what the scheduler decides.

The engine, explanations, the journal and the simulator are handed these and ask the scheduler nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medha.batch import Batch
from medha.cost.predictor import Kind
from medha.params import SLO


@dataclass(frozen=True, slots=True)
class SchedulerRequest:
    """What the scheduler knows of a request at arrival."""

    slot: int  # integer handle; unique among requests not yet closed
    num_prompt_tokens: int
    max_new_tokens: int  # with the prompt it makes the reservation of KV memory
    arrival_s: float  # in seconds of the engine's clock
    slo: SLO | None = None
    priority: int = 2  # class, 0 (realtime) to 3 (low)
    is_relegated: bool = False  # no deadline, whatever its objectives, and after all others of its class
    tenant: str = ""  # who shares the machine fairly with the others
    prefix: bytes = b""  # ids of its prompt's units (medha.sched.prefix); none shares nothing

    @property
    def num_kv_tokens(self) -> int:
        """Its reservation of KV memory in tokens; the last sampled token is never written."""
        return self.num_prompt_tokens + self.max_new_tokens - 1


@dataclass(frozen=True, slots=True)
class Admitted:
    """What the scheduler made of a request that was added."""

    deadline_s: float  # seconds from its arrival to when its first token is due, given or derived; inf for none
    slack_s: float  # for which it could wait at its arrival and have its first token in time; inf for no deadline
    is_relegated: bool  # by the scheduler, or by who added it
    alone_tpot_s: float | None = None  # predicted, of a request that decodes alone, where its objective is shorter


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a batch was predicted to take, before it was sent."""

    kind: Kind  # what it consists of, on the group that takes longest
    seconds: float  # busy, of the slowest stage of that group; or of the copies of swapped blocks if they take longer
    factor: float  # the correction within ``seconds``
    budget_s: float  # what the batch was to take at most
    moved_s: float = 0.0  # in which blocks are swapped beside that, on the group that moves most


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request that gave up its KV memory."""

    slot: int
    lost_s: float  # predicted, to compute again or to move out and in
    swapped_tokens: int = 0  # tokens that go to host memory; 0 where they are computed again


@dataclass(frozen=True, slots=True)
class Decision:
    """What one call of :meth:`medha.sched.scheduler.Scheduler.schedule` decided."""

    batch: Batch | None = None  # what runs next; None where nothing can enter the pipeline now
    prediction: Prediction | None = None  # of the batch, where the packer predicts
    preempted: tuple[Preempted, ...] = ()  # who gave up KV memory, in order; also where no batch came of it
    refused: tuple[int, ...] = ()  # slots of prefills that found no KV memory
    # Of each prefill chunk of the batch, in the order of its rows: seconds for which its request could still wait and
    # have its first token in time; inf without a deadline.
    slack_s: tuple[float, ...] = ()


Results = Sequence[tuple[int, int, bool]]
"""(slot, number of new tokens, finished) of the rows of a batch that sampled."""


class Observer:
    """Who is told what the scheduler was asked and what it decided; the loop needs nothing of it."""

    def added(self, request: SchedulerRequest, now_s: float | None, admitted: Admitted, name: str) -> None:
        """A request was queued, and judged at ``now_s``, if it was."""

    def extended(self, slot: int, ids: bytes) -> None:
        """The output of a request has filled units of these ids."""

    def forgot(self) -> None:
        """What is kept of ended requests was forgotten."""

    def cancelled(self, slot: int, closed: Sequence[int]) -> None:
        """A request was cancelled; these slots were closed by that."""

    def scheduled(self, now_s: float, decision: Decision) -> None:
        """The scheduler was asked for a batch."""

    def completed(self, batch: Batch, now_s: float, results: Results, busy_s: float, closed: Sequence[int]) -> None:
        """A batch is done in every stage; these slots were closed by that."""

    def restarted(self, learned: dict[str, tuple[float, int]]) -> None:
        """A new scheduler is in place of the former one, with no request; its predictor has learned this."""
