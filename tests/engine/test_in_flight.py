"""Which batch in flight completes next, and who waits for that."""

import threading
import time
from typing import Any

import pytest

from medha.batch import Batch, Row
from medha.engine.in_flight import InFlight
from medha.sched.decision import Decision
from medha.worker.step import PendingStep

NOTHING: Any = None


class Flight:
    """Batches in flight on given groups, whose ends are set by hand."""

    def __init__(self, news: threading.Event, *groups: tuple[int, ...]) -> None:
        self.flight = InFlight(news)
        self.done: set[int] = set()
        for number, its in enumerate(groups):
            batch = Batch(number, tuple(Row(number, 0, 1, False, False, group) for group in its))
            step = PendingStep(NOTHING, lambda number=number: number in self.done)  # type: ignore[misc]
            self.flight.sent(NOTHING, Decision(batch), float(number), batch, step)

    def next(self, wait_s: float = 0.0) -> int | None:
        """The number of the batch to complete now."""
        index = self.flight.await_done(wait_s)
        return None if index is None else self.flight[index].batch.batch_id


def test_on_lanes_any_that_is_done_is_next_but_none_before_an_older_one_of_its_groups() -> None:
    one = Flight(threading.Event(), (0, 1), (1, 2), (2,), (3,))
    assert one.next() is None
    one.done |= {1, 2}
    assert one.next() is None  # 1 is behind 0 on group 1, and 2 behind 1 on group 2
    one.done.add(3)
    assert one.next() == 3
    one.done.add(0)
    assert one.next() == 0
    one.flight.completed(0, 5.0)
    assert one.next() == 1


@pytest.mark.parametrize("ends", [True, False])
def test_news_end_a_wait(ends: bool) -> None:
    """That a batch is done, or something else."""
    one = Flight(news := threading.Event(), (0,))

    def strike() -> None:
        one.done |= {0} if ends else set()
        one.flight.wake()

    threading.Timer(0.05, strike).start()
    start_s = time.monotonic()
    assert one.next(wait_s=60.0) == (0 if ends else None)
    assert time.monotonic() - start_s < 30 and not news.is_set()


def test_a_batch_begins_when_it_is_decided_and_its_lanes_are_free() -> None:
    one = Flight(threading.Event(), (0, 1), (1, 2), (3,), (3,))
    assert one.flight.completed(2, 7.0) == 2.0
    assert one.flight.completed(0, 9.0) == 0.0
    assert [one.flight.completed(0, 9.5), one.flight.completed(0, 9.6)] == [9.0, 7.0]
    assert not one.flight
