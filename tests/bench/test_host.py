"""What a step takes beside the runner, on a clock that is set by hand."""

from __future__ import annotations

from typing import Any, cast

from medha.batch import Batch, Row
from medha.bench.host import HostClock, HostStep
from medha.engine.engine import Engine


class FakeEngine:
    """An engine whose steps the test tells."""

    def __init__(self) -> None:
        self.on_step: Any = None
        self.now_s = 10.0

    def now(self) -> float:
        return self.now_s

    def step(self, *, num_rows: int, seconds: float, busy_s: float) -> None:
        self.now_s += seconds
        rows = tuple(Row(slot, 8, 1, True, True) for slot in range(num_rows))
        self.on_step(Batch(0, rows, (), ()), None, busy_s)


def test_seconds_between_steps_less_the_busy_ones() -> None:
    engine = FakeEngine()
    clock = HostClock(cast(Engine, engine))
    clock.begin()
    engine.step(num_rows=2, seconds=1.0, busy_s=0.75)
    engine.step(num_rows=3, seconds=0.5, busy_s=0.375)
    assert clock.steps == [HostStep(2, 0.25), HostStep(3, 0.125)]


def test_a_new_pass_begins_at_its_own_time_and_leaves_the_last_one_alone() -> None:
    engine = FakeEngine()
    clock = HostClock(cast(Engine, engine))
    engine.step(num_rows=1, seconds=1.0, busy_s=0.5)
    first = clock.steps
    engine.now_s += 100.0  # between the passes
    clock.begin()
    engine.step(num_rows=1, seconds=1.0, busy_s=0.875)
    assert clock.steps == [HostStep(1, 0.125)]
    assert first == [HostStep(1, 0.5)]
