"""The monitor by itself: beats over a real store, with short times."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from medha.parallel.health import Monitor
from tests.parallel.workers import free_port


class Ranks:
    """Monitors of several ranks in one process, each with its own connection; what they would end with is kept."""

    def __init__(self) -> None:
        self.port = free_port()
        self.server = self._connect(is_host=True)
        self.ended: dict[int, tuple[str, bool]] = {}
        self._monitors: list[Monitor] = []

    def monitor(self, rank: int, world_size: int, **options: float) -> Monitor:
        def end(message: str, speak: bool) -> None:
            self.ended[rank] = (message, speak)

        self._monitors.append(
            Monitor(self._connect(), rank=rank, world_size=world_size, end=end, **options)  # type: ignore[arg-type]
        )
        return self._monitors[-1]

    def stop(self) -> None:
        """End the threads: one that is in the store's C++ while the interpreter ends aborts the process."""
        for monitor in self._monitors:
            monitor._left.set()
            monitor._heard.set()
            monitor._wake.set()
        for monitor in self._monitors:
            for thread in (monitor._beater, monitor._watchdog):
                if thread.is_alive():
                    thread.join(10.0)
                    assert not thread.is_alive()

    def _connect(self, *, is_host: bool = False) -> TCPStore:
        return TCPStore(
            "127.0.0.1", self.port, None, is_host, timedelta(seconds=20), wait_for_workers=False, multi_tenant=True
        )


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr("atexit.register", lambda *args: None)  # these monitors never leave a job
    ranks = Ranks()
    yield ranks
    ranks.stop()


def until(condition: Callable[[], bool], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def test_the_first_report_is_what_every_rank_tells(ranks: Ranks) -> None:
    monitors = [ranks.monitor(rank, 3) for rank in range(3)]
    for monitor in monitors:
        monitor.start()
    monitors[2].report("rank 2: first")
    until(lambda: monitors[0].has_failure)
    monitors[1].report("rank 1: second")
    assert [monitor.first_error() for monitor in monitors] == ["rank 2: first"] * 3
    assert all(monitor.linger() for monitor in monitors)
    time.sleep(0.2)
    assert ranks.ended == {}  # the main threads know, so nothing is ended


def test_a_main_thread_that_is_stuck_is_ended(ranks: Ranks) -> None:
    monitors = [ranks.monitor(rank, 2) for rank in range(2)]
    for monitor in monitors:
        monitor.start()
    monitors[1].report("rank 1: boom")
    assert monitors[1].first_error() == "rank 1: boom"
    until(lambda: 0 in ranks.ended)
    assert ranks.ended == {0: ("rank 1: boom", True)}


def test_what_is_to_be_saved_is_saved_before_the_end(ranks: Ranks) -> None:
    calls: list[tuple[str, bool]] = []
    monitor = ranks.monitor(0, 1)
    monitor.before_end = lambda message: calls.append((message, 0 in ranks.ended))
    monitor.start()
    monitor.report("rank 0: boom")
    until(lambda: 0 in ranks.ended)
    assert calls == [("rank 0: boom", False)]


def test_an_end_that_is_heard_of_saves_nothing(ranks: Ranks) -> None:
    calls: list[str] = []
    monitor = ranks.monitor(0, 1)
    monitor.before_end = calls.append
    monitor.start()
    monitor.report("rank 0: boom")
    assert monitor.first_error() == "rank 0: boom"
    time.sleep(4.0)
    assert (calls, ranks.ended) == ([], {})


def test_saving_that_fails_or_hangs_is_told_and_delays_the_end_a_little(
    ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(message: str) -> None:
        raise OSError("disk full")

    monitors = [ranks.monitor(rank, 2) for rank in range(2)]
    monitors[0].before_end = fail
    monitors[1].before_end = lambda message: time.sleep(30.0)
    with caplog.at_level(logging.ERROR, "medha"):
        for monitor in monitors:
            monitor.start()
        monitors[0].report("rank 0: boom")
        until(lambda: len(ranks.ended) == 2)
    told = sorted(record.getMessage().rpartition("in full: ")[2] for record in caplog.records)
    assert told == ["OSError: disk full", "it has taken more than 2 s"]


def test_a_rank_that_never_beats_is_named_with_what_it_did(ranks: Ranks) -> None:
    monitors = [ranks.monitor(rank, 3, silent_s=1.5) for rank in range(3)]
    monitors[1].doing("batch 7")
    monitors[0].start()
    monitors[2].start()  # rank 1 came and never beats
    until(lambda: monitors[2].has_failure)
    error = monitors[2].first_error()
    assert error is not None
    assert error.startswith("rank 1 died or is stopped: silent for 2 s, last in start; noticed by rank 0 in start")


def test_ranks_that_leave_are_not_missed(ranks: Ranks) -> None:
    monitors = [ranks.monitor(rank, 2, silent_s=1.0) for rank in range(2)]
    for monitor in monitors:
        monitor.start()
    assert monitors[1].leave()
    time.sleep(2.5)
    assert not monitors[0].has_failure
    assert monitors[0].leave()


def test_a_failure_while_leaving(ranks: Ranks) -> None:
    monitors = [ranks.monitor(rank, 2, silent_s=1.0) for rank in range(2)]
    monitors[0].start()  # rank 1 never leaves
    assert not monitors[0].leave()
    assert "rank 1 died or is stopped" in str(monitors[0].first_error())


def test_the_wall_clock_does_not_matter(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter(range(0, 10**9, 86400))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))
    monitors = [ranks.monitor(rank, 2, silent_s=1.5) for rank in range(2)]
    for monitor in monitors:
        monitor.start()
    time.sleep(2.5)
    assert not any(monitor.has_failure for monitor in monitors)
    threads = [threading.Thread(target=monitor.leave) for monitor in monitors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5.0)
        assert not thread.is_alive()
