"""What an engine's step takes on the host beside the runner: scheduling, and what the engine keeps of its requests.

From the moment at which one step's tokens are there to that of the next, the runner's busy seconds are its own; the
rest is noted here: completing the step, outputs, the next decision, and whoever drives the engine in between. Where a
runner prepares a batch (block tables, positions, attention plans) it counts as its compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medha.batch import Batch
from medha.bench.timing import Timing
from medha.engine.engine import Engine
from medha.sched.decision import Prediction


@dataclass(frozen=True, slots=True)
class HostStep:
    """One step: the rows of its batch, and the seconds beside the runner's."""

    num_rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class HostFigures:
    """Host seconds of a step.

    Attributes:
        timing: over all steps.
        largest_batch: rows of the largest batch.
        at_largest: over the steps with so many rows.
    """

    timing: Timing
    largest_batch: int
    at_largest: Timing

    @classmethod
    def of(cls, steps: Sequence[HostStep]) -> HostFigures:
        """Summarise steps; there is at least one."""
        largest = max(step.num_rows for step in steps)
        at_largest = [step.seconds for step in steps if step.num_rows == largest]
        return cls(Timing.of([step.seconds for step in steps]), largest, Timing.of(at_largest))


class HostClock:
    """Listens to an engine's steps.

    Args:
        engine: its ``on_step`` is taken.

    Attributes:
        steps: those since :meth:`begin`; the first one's seconds begin there, so they have the requests' arrival.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._last_s = engine.now()
        self.steps: list[HostStep] = []
        engine.on_step = self._computed

    def begin(self) -> None:
        """Forget the steps so far."""
        self._last_s = self._engine.now()
        self.steps = []

    def _computed(self, batch: Batch, prediction: Prediction | None, busy_s: float) -> None:
        now_s = self._engine.now()
        self.steps.append(HostStep(len(batch.rows), now_s - self._last_s - busy_s))
        self._last_s = now_s
