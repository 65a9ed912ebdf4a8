"""The monitor by itself, four times as fast: processes that are gone or stopped, ranks that are behind, words over a
real store."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
from torch._C._distributed_c10d import HashStore, TCPStore

from medha.parallel import health
from medha.parallel.health import Monitor
from medha.parallel.launch import Launch, Process
from medha.parallel.lifelines import Lifelines
from tests.commands import LIMIT_S, wait_until

Sleeper = subprocess.Popen[bytes]


class Ranks:
    """Monitors of several ranks in one process, each with its own connection; what they would end with is kept."""

    def __init__(self) -> None:
        timeout = timedelta(seconds=LIMIT_S)
        self.server = TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
        self.ended: dict[int, tuple[str, bool]] = {}
        self.monitors: list[Monitor] = []

    def monitor(
        self, rank: int, world_size: int, *, local_ranks: range = range(0), talks: bool = True, **options: Any
    ) -> Monitor:
        """A monitor that watches and talks; what its main thread is about, it says itself."""
        local_ranks = local_ranks or range(rank, rank + 1)
        launch = Launch(rank, world_size, rank - local_ranks.start, len(local_ranks), "127.0.0.1", 1, **options)
        monitor = Monitor(launch, name="rank {}".format)
        monitor._end = lambda *told: self.ended.setdefault(rank, told)
        monitor.waits_for = lambda: "control"
        monitor.start()
        if talks:
            monitor.attach(self.server.clone())
        self.monitors.append(monitor)
        return monitor


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr("atexit.register", lambda *args: None)  # these monitors never leave a job
    for name in ("_BEAT_S", "_TROUBLE_S", "_STORE_S", "_SUSPECT_S", "_GRACE_S", "_SAVE_S"):
        monkeypatch.setattr(health, name, getattr(health, name) / 4)
    yield (ranks := Ranks())
    for monitor in ranks.monitors:
        monitor._heard.set()
        monitor.stop()
    for thread in threading.enumerate():
        if thread.name in ("medha-watch", "medha-talk"):
            thread.join(LIMIT_S)
            assert not thread.is_alive()  # in the store's C++ while the interpreter ends, it would abort the process


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


# -- words -----------------------------------------------------------------------------------------------------------


def test_the_first_report_is_what_every_rank_tells(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its text is."""
    monkeypatch.setattr(health, "_GRACE_S", LIMIT_S)  # the main thread may be slow
    monitors = [ranks.monitor(rank, 3) for rank in range(3)]
    monitors[2].report("rank 2: größer\0b\ud800\x1b[31m\n" + "x" * 5_000_000)
    wait_until(lambda: monitors[0].has_failure)
    monitors[1].report("rank 1: second")
    (error,) = {monitor.first_error(wait_s=LIMIT_S) for monitor in monitors}
    assert error.startswith("rank 2: größer\\x00b\\ud800\\x1b[31m\nxxx")
    assert error.endswith("0023 characters)") and len(error) < 2100
    for monitor in monitors:
        monitor.doing("batch 1")  # no longer in start, where others wait for the end of rank 0
    assert all(monitor.linger(LIMIT_S) for monitor in monitors)
    time.sleep(0.2)
    assert ranks.ended == {}  # the main threads know, so nothing is ended


def test_a_main_thread_that_is_stuck_is_ended_and_one_that_hears_is_not(ranks: Ranks) -> None:
    """What is to be saved is saved before that."""
    calls: list[tuple[str, bool]] = []
    monitors = [ranks.monitor(rank, 2) for rank in range(2)]
    for rank, monitor in enumerate(monitors):
        monitor.before_end = lambda message, rank=rank: calls.append((message, rank in ranks.ended))  # type: ignore[misc]
    assert monitors[1].first_error(wait_s=0.0) is None  # it hears of it before it is known, and so in time
    monitors[1].report("rank 1: boom")
    assert monitors[1].first_error(wait_s=LIMIT_S) == "rank 1: boom"
    wait_until(lambda: 0 in ranks.ended)
    time.sleep(1.0)
    assert (calls, ranks.ended) == ([("rank 1: boom", False)], {0: ("rank 1: boom", True)})


def test_saving_that_fails_or_hangs_delays_the_end_a_little(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    monitors = [ranks.monitor(rank, 2) for rank in range(2)]
    monitors[0].before_end = Mock(side_effect=OSError("disk full"))
    monitors[1].before_end = lambda message: wait_until(lambda: 1 in ranks.ended)
    with caplog.at_level(logging.ERROR, "medha"):
        monitors[0].report("rank 0: boom")
        wait_until(lambda: len(ranks.ended) == 2)
    assert [record.getMessage().rpartition("in full: ")[2] for record in caplog.records] == ["OSError: disk full"]
    assert ranks.ended[0] == ("rank 0: boom", True)
    assert ranks.ended[1][0] == "rank 0: boom (what was unfinished is not saved)"


@pytest.mark.parametrize("unread", ["stdout", "stderr"])
def test_a_process_is_ended_whose_output_nobody_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unread: str
) -> None:
    monkeypatch.setattr("os._exit", ended := Mock())
    monkeypatch.setattr(sys, unread, Mock(write=Mock(side_effect=BrokenPipeError), flush=Mock(side_effect=OSError)))
    Monitor._end(Mock(), "rank 1: boom", True)
    ended.assert_called_once_with(4)
    assert capsys.readouterr().err == ("error: RankFailedError: rank 1: boom\n" if unread == "stdout" else "")


# -- processes -------------------------------------------------------------------------------------------------------


def test_trouble_of_a_process(sleeper: Sleeper) -> None:
    process = Process.of(sleeper.pid)
    assert process.trouble is None
    assert process._replace(started=process.started + 1).trouble == "has died"  # another one has its id by now
    assert process._replace(machine="elsewhere").trouble is None
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(lambda: process.trouble == "is stopped")
    sleeper.send_signal(signal.SIGCONT)
    wait_until(lambda: process.trouble is None)
    sleeper.kill()
    wait_until(lambda: process.trouble == "has died")  # before anybody has waited for it
    sleeper.wait()
    assert process.trouble == "has died"


@pytest.mark.parametrize(("number", "what"), [(signal.SIGKILL, "has died"), (signal.SIGSTOP, "is stopped")])
def test_a_rank_that_is_gone_or_stopped_is_named(ranks: Ranks, sleeper: Sleeper, number: int, what: str) -> None:
    """A rank of its node notices, and those of other nodes hear of it. While it says nothing and runs it has
    not failed: its Python may hold the interpreter's lock for long."""
    ranks.server.set("process/1", json.dumps(Process.of(sleeper.pid)))
    ranks.server.set("status/1", '[0.1, false, "batch 7"]')
    monitors = {rank: ranks.monitor(rank, 4, local_ranks=range(rank, rank + 2)) for rank in (0, 2)}
    wait_until(lambda: 1 in monitors[0]._processes)
    time.sleep(1.5)
    assert not monitors[0].has_failure
    sleeper.send_signal(number)
    begin = f"rank 1 {what}, last in batch 7; noticed by rank 0 in start"
    assert {monitor.first_error(wait_s=LIMIT_S) for monitor in monitors.values()} == {begin}


def test_a_launcher_that_has_died(ranks: Ranks) -> None:
    """Before there is a store, in which others could be told."""
    ranks.monitor(1, 2, agent_pid=os.getppid() + 1, talks=False)
    wait_until(lambda: bool(ranks.ended))
    assert ranks.ended[1][0] == f"rank 1: the process that started it, {os.getppid() + 1}, has died, in start"


def test_a_store_that_does_not_answer(ranks: Ranks, sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder is on another node, where nobody sees it; one that is seen to run is slow until it is stopped, and one
    of this node whose process is not known so far is taken to be slow for long."""
    monkeypatch.setattr(health, "BEHIND_S", LIMIT_S)
    holds = threading.Event()
    monkeypatch.setattr(Monitor, "_round", lambda *args: holds.wait(LIMIT_S))  # nor is anybody's process known by it
    monitors = {1: ranks.monitor(1, 3), 2: ranks.monitor(2, 3, processes={0: sleeper.pid})}
    monitors[3] = ranks.monitor(3, 4, local_ranks=range(4))
    monitors[4] = ranks.monitor(0, 4, local_ranks=range(4), agent_has_store=True, agent_pid=os.getppid())
    wait_until(lambda: monitors[1].has_failure)
    assert not monitors[2].has_failure
    assert not monitors[3].has_failure
    assert monitors[4].store_holder == "torchrun's agent"
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(lambda: monitors[2].has_failure)
    monkeypatch.setattr(health, "BEHIND_S", 1.0)
    wait_until(lambda: monitors[3].has_failure)
    assert not monitors[4].has_failure  # its agent, the parent of this process, runs
    holds.set()
    unknown = "is stopped or cannot be reached"
    for rank, what in ((1, unknown), (2, "is stopped"), (3, unknown)):
        said = monitors[rank].first_error(wait_s=LIMIT_S)
        assert f"rank 0 {what}: the store that it holds has not answered rank {rank} for" in str(said)


# -- ranks that are behind -------------------------------------------------------------------------------------------


@patch.object(health, "BEHIND_S", 1.0)
def test_a_rank_for_which_others_wait_is_named(ranks: Ranks, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """It is no failure; every rank writes what it works on."""
    monitors = [ranks.monitor(rank, 3) for rank in range(3)]
    for rank, monitor in enumerate(monitors):
        monitor.describe = lambda rank=rank: f"here is rank {rank}"  # type: ignore[misc]
        monitor.doing("batch 7")
    monitors[1].waits_for = lambda: None
    written = tmp_path / "stderr"  # reading what pytest captures would lose what is written meanwhile
    with caplog.at_level(logging.WARNING, "medha"), written.open("w") as stderr, redirect_stderr(stderr):
        wait_until(lambda: written.read_text().count("Current thread") == 3)
    assert all(f"here is rank {rank}\n" in written.read_text() for rank in range(3))
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert re.fullmatch(r"rank 1 is behind: in batch 7 for \d+ s while others wait for it", message)
    time.sleep(0.5)
    assert not any(monitor.has_failure for monitor in monitors)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("activity", "wait", "predicted_s"), [("idle", None, 0.0), ("batch 7", "merge", 0.0), ("batch 7", None, 100.0)]
)
@patch.object(health, "BEHIND_S", 0.5)
def test_a_rank_is_not_behind_that_is_idle_or_waits_or_takes_what_was_predicted(
    ranks: Ranks, caplog: pytest.LogCaptureFixture, activity: str, wait: str | None, predicted_s: float
) -> None:
    monitors = [ranks.monitor(rank, 2) for rank in range(2)]
    monitors[0].predicted_s = lambda: predicted_s
    monitors[1].waits_for = lambda: wait
    monitors[1].doing(activity)
    time.sleep(1.0)
    assert caplog.records == []


def test_after_a_transfer_has_failed_a_silent_rank_of_another_node_is_the_cause(ranks: Ranks) -> None:
    ranks.server.set("status/1", '[0.1, true, "batch 7"]')
    error = ranks.monitor(0, 2).first_error(suspect=True, wait_s=LIMIT_S)
    assert re.match(r"rank 1 is silent for \d+ s: cut off, stopped, or busy in Python; last in", str(error))


def test_after_a_transfer_has_failed_the_rank_that_is_behind_is_the_cause(ranks: Ranks) -> None:
    monitors = [ranks.monitor(rank, 3) for rank in range(3)]
    for monitor in monitors:
        monitor.doing("batch 7")
        time.sleep(0.2)
    for monitor in monitors[1:]:  # rank 1 waits for the cause
        monitor.waits_for = lambda: None
    assert str(monitors[1].first_error(suspect=True, wait_s=LIMIT_S)).startswith("rank 2 is behind: in batch 7 for ")


# -- other nodes -----------------------------------------------------------------------------------------------------


def test_a_rank_of_another_node_is_reported_when_its_connection_ends(ranks: Ranks) -> None:
    monitors = [ranks.monitor(rank, 3) for rank in range(3)]  # each on a node of its own
    wait_until(lambda: len(monitors[0]._lifelines._of) == 2)
    monitors[2].doing("batch 7")
    time.sleep(0.5)
    assert not monitors[0].has_failure
    monitors[2]._left.set()  # its thread says no more and closes its end, as the end of its process does
    died = "rank 2 has died, or its node cannot be reached, last in batch 7; noticed by rank 0 in start"
    assert [monitor.first_error(wait_s=LIMIT_S) for monitor in monitors[:2]] == [died] * 2


def test_ranks_that_have_left_are_not_missed(ranks: Ranks, sleeper: Sleeper) -> None:
    """One of this node, whose process ends, and one of another, whose connection does."""
    here, near = (ranks.monitor(rank, 3, local_ranks=range(2)) for rank in range(2))
    far = ranks.monitor(2, 3)
    near.leave()
    here._processes[1] = Process.of(sleeper.pid)
    sleeper.kill()
    ranks.server.set("left/2", "")
    far._left.set()
    wait_until(lambda: here._lost == [2])
    time.sleep(1.5)
    assert not here.has_failure
    here.leave()


def test_a_stranger_at_the_port_of_the_connections_is_sent_away_and_lost_to_nobody(ranks: Ranks) -> None:
    monitors = [ranks.monitor(rank, 2) for rank in range(2)]
    port, token = json.loads(ranks.server.get("lifelines"))
    for said in (b"", b"GET / HTTP/1.1\r\nHost: rank0\r\n\r\n", bytes(16) + (1).to_bytes(4, "big")):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(said)
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.sendall(bytes.fromhex(token)[:7])  # never says the rest
        lines = monitors[0]._lifelines
        wait_until(lambda: len(lines._of) == 1 and len(lines._new) == 1)
        time.sleep(1.0)
        assert not monitors[0].has_failure


@patch("socket.create_connection", Mock(side_effect=ConnectionRefusedError("refused")))
def test_who_cannot_connect_to_rank_0_is_warned_of_and_goes_on(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "medha"):
        monitors = [ranks.monitor(rank, 2) for rank in range(2)]
        wait_until(lambda: "no connection to rank 0 at 127.0.0.1" in caplog.text)
    time.sleep(1.0)
    assert not any(monitor.has_failure for monitor in monitors)


def test_no_descriptor_for_a_connection() -> None:
    lines = Lifelines(HashStore())
    lines._listening.close()
    lines._listening = Mock(accept=Mock(side_effect=OSError(24, "Too many open files")))
    assert lines.lost() == []
