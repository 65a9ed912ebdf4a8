"""What a step gives back, and the interface of whatever runs steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from medha.batch import Batch, Row
from medha.params import SamplingParams
from medha.worker.sampling import Sampled


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a batch produced.

    Attributes:
        rows: the rows that sampled, in batch order.
        sampled: their tokens.
        busy_s: seconds of compute, waits excluded.
    """

    rows: tuple[Row, ...]
    sampled: list[Sampled]
    busy_s: float


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A batch that was submitted.

    Attributes:
        wait: returns its result as soon as there is one; called once.
    """

    wait: Callable[[], StepResult]

    def result(self) -> StepResult:
        """What the batch produced; waits for it. To be called once."""
        return self.wait()


class BatchRunner(Protocol):
    """What runs batches: :class:`medha.worker.runner.Runner` on one rank, or all ranks behind rank 0."""

    def open(
        self,
        slot: int,
        prompt_ids: npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        seed: int,
        end_ids: tuple[int, ...],
    ) -> None:
        """Take a request ahead of its first batch."""
        ...

    def close(self, slot: int) -> None:
        """Forget a request."""
        ...

    def submit(self, batch: Batch) -> PendingStep:
        """Run a batch, or start it."""
        ...

    def reset(self) -> None:
        """Forget everything, after a step that did not finish."""
        ...


def sampling_rows(batch: Batch, group: int) -> tuple[Row, ...]:
    """The rows of a batch after which a group draws a token, in order: those whose span begins there."""
    return tuple(row for row in batch.rows if row.samples and row.group == group)


def last_tokens_of(batch: Batch, group: int) -> list[int]:
    """Index in the batch of the last token of each row after which a group draws a token."""
    ends = np.cumsum([row.q_len for row in batch.rows]).tolist()
    return [end - 1 for end, row in zip(ends, batch.rows, strict=True) if row.samples and row.group == group]
