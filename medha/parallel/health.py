"""Noticing that a rank is gone, stopped or behind, and telling every rank the first real error.

torchrun ends the other ranks when a process has failed, before they can say why; it does not notice one that is
stopped, behind or cut off. Here a rank has failed when its process is gone or stopped, which the ranks of its node see,
or when it says so. One that runs has not failed, however long it says nothing, as Python may hold the interpreter's
lock for a minute. It is *named* in the log when others have waited for it for long; what ends the job is the timeout of
the transfers, with that name. A rank of another node has failed, too, when its connection to rank 0 has ended
(:mod:`medha.parallel.lifelines`).

One thread talks with the other ranks through the job's key-value store, and may be stuck there. The other one waits for
nobody: it notices that, and ends the process where the main thread does not come to know of a failure in time, as a
collective that waits for a missing rank cannot be undone.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from medha.batch import Batch
from medha.errors import ConfigError, MedhaError, RankFailedError, exit_code, is_interrupt, printable
from medha.parallel.launch import Launch, Process, exit_at_once, write_state
from medha.parallel.lifelines import LIFELINES, Lifelines, connect

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger("medha")

EXIT_CODE = 4
BEHIND_S = 30.0
"""How long others wait for a rank before it is named; ten times the predicted step where that is longer."""

_BEAT_S = 0.5
_TROUBLE_S = 2.0  # how long a process is gone or stopped before it has failed
_STORE_S = 4.0  # how long a store elsewhere may answer nothing: a thread of C++ serves it, which no Python holds up
_SUSPECT_S = 2.0  # how long a rank is silent, or waited for, to be taken for the cause of a lost connection
_GRACE_S = 2.5  # how long the main thread may take to hear of a failure by itself
_SAVE_S = 2.0  # how long what is called before the end may take
_WAIT_IN = ("torch/distributed/", "torch/cuda/", "/shared_memory.py")  # code that waits for ranks, or a GPU that does


class Monitor:
    """Watches the other ranks for this one.

    Args:
        launch: this rank's place, and the processes that are known from the start.
        name: how messages call a rank.
    """

    def __init__(self, launch: Launch, *, name: Callable[[int], str]) -> None:
        first = launch.rank - launch.local_rank
        self._launch, self._rank = launch, launch.rank
        self._others = [r for r in range(launch.world_size) if r != launch.rank]
        self._local = [r for r in range(first, first + launch.local_world_size) if r != launch.rank]
        self._name = name
        self.place = name(launch.rank)  # in messages
        self.before_end: Callable[[str], None] = lambda error: None  # in another thread, just before end; has _SAVE_S
        self.predicted_s: Callable[[], float] = float  # that the longest batch in flight is predicted to take
        self.waits_for: Callable[[], str | None] = lambda: None  # what of other ranks; None while this one computes
        self.computing = threading.main_thread()  # what computes
        self.describe: Callable[[], str] = str  # what this rank works on, for the log, when a rank is behind
        self.store_holder = "torchrun's agent" if launch.agent_has_store else name(0)
        agent = launch.agent_pid if launch.agent_has_store and first == 0 else None
        self._agent = None if agent is None else Process.of(agent)  # which holds it, on its own node
        self._activity, self._since = "start", time.monotonic()
        self._mine: str | None = None  # this rank's error
        self._error: str | None = None  # everybody's
        self.is_refused = False  # the job, on this rank, between two transfers
        self._suspecting: float | None = None  # since when
        self._leaving = False
        self._num_answers = self._num_dumps = 0
        self._named: tuple[int, str] | None = None  # rank and activity
        pids = {**launch.processes, launch.rank: os.getpid()}
        self._processes = {rank: Process.of(pid) for rank, pid in pids.items()}
        self._trouble_s: dict[int, float] = {}
        self._statuses: dict[int, tuple[bytes, float]] = {}  # last of each rank, and seconds without a newer one
        self._lifelines: Lifelines | None = None  # on rank 0, of the ranks of other nodes
        self._lifeline: socket.socket | None = None  # on those
        self._lost: list[int] = []  # ranks of other nodes whose connection has ended
        self._wake = threading.Event()
        self._known = threading.Event()  # an error is
        self._heard = threading.Event()  # by the main thread
        self._told = threading.Event()  # rank 0 knows too; on rank 0: all do
        self._left = threading.Event()
        self._talker: threading.Thread | None = None

    # -- for the main thread; none of these waits for the store itself -------------------------------------------------

    def start(self) -> None:
        """Begin to watch the launcher; no store is needed."""
        threading.Thread(target=self._watch, name="medha-watch", daemon=True).start()

    def stop(self) -> None:
        """Watch and talk no more, after a failure. Whoever has met others still leaves them at once when it ends."""
        self._left.set()
        self._wake.set()

    def attach(self, store: Store) -> None:
        """Begin to talk with the other ranks, through a connection to the job's store that nothing else uses."""
        atexit.register(self._at_exit)
        store.set(f"process/{self._rank}", json.dumps(Process.of(os.getpid())))
        if self._rank == 0 and len(self._local) < len(self._others):
            self._lifelines = Lifelines(store)
        self._talker = threading.Thread(target=self._talk, args=(store,), name="medha-talk", daemon=True)
        self._talker.start()

    def doing(self, activity: str) -> None:
        """Note what this rank is about, for the message of whoever misses it; ``idle`` is nothing."""
        self._activity, self._since = activity, time.monotonic()

    def report(self, message: str) -> None:
        """Make this the error that every rank tells, unless another came first."""
        self._mine = self._mine or printable(message)
        self._wake.set()

    def first_error(self, *, suspect: bool = False, wait_s: float = _SUSPECT_S + 4 * _BEAT_S) -> str | None:
        """The first error of the job, waiting a little for it; None when there is none. The main thread knows now.

        With ``suspect`` a transfer has failed, and the cause is another rank: find it, with stricter limits.
        """
        if suspect:
            self._suspecting = self._suspecting or time.monotonic()
            self._wake.set()
        self._known.wait(wait_s)
        self._heard.set()
        self._wake.set()
        return self._error

    @property
    def has_failure(self) -> bool:
        """Whether some rank has failed."""
        return self._known.is_set()

    def linger(self, wait_s: float = 2.0) -> bool:
        """Before leaving with an error, wait until rank 0 knows it, and on rank 0 until all do; whether rank 0 does.

        A launcher ends every rank as soon as one has ended. Rank 0 is the one that speaks, so the others of its node
        wait for its end then.
        """
        self._wait(self._told.is_set, wait_s)
        if self._told.is_set() and 0 in self._local:
            self._wait(lambda: self._trouble_of(0) is not None, _GRACE_S + _SAVE_S)
        return self._rank == 0 or self._told.is_set()

    def part(self, error: str) -> None:
        """Leave with an error: rank 0 tells the user, and this rank where rank 0 is gone."""
        if not self.linger():
            logger.error("%s", error)
        self.stop()

    def leave(self) -> None:
        """Stop without an error, rank 0 last since it may hold the store; RankFailedError if one failed before that."""
        self._leaving = True
        self._wait(lambda: self._left.is_set() or self._known.is_set(), limit_s=60.0)
        if not self._left.is_set():
            raise RankFailedError(self.first_error() or f"{self.place}: not every rank has left in time")
        if self._talker is not None:
            self._talker.join(_STORE_S)  # one that is in C++ when the interpreter ends aborts the process
        atexit.unregister(self._at_exit)
        # What these ask holds this, in a circle.
        self.describe, self.waits_for, self.predicted_s = str, lambda: None, float

    def _wait(self, is_over: Callable[[], bool], limit_s: float) -> None:
        """Let the other threads do their work, while there is someone to talk with."""
        deadline = time.monotonic() + limit_s
        while not is_over() and self._talks() and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(0.02)

    # -- the thread that talks -----------------------------------------------------------------------------------------

    def _talks(self) -> bool:
        return self._talker is not None and self._talker.is_alive()

    def _talk(self, store: Store) -> None:
        last = time.monotonic()
        try:
            while not self._left.is_set():
                now = time.monotonic()
                self._round(store, min(now - last, 2 * _BEAT_S))  # whoever was stopped itself has seen nothing then
                last = now
                self._num_answers += 1
                self._wake.wait(0.05 if self._known.is_set() else _BEAT_S)
                self._wake.clear()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            self.report(f"{self.store_holder} has died: {self.place} lost its store in {self._activity}: {reason}")
        for ends in (self._lifelines, self._lifeline):
            if ends is not None:
                ends.close()

    def _round(self, store: Store, elapsed_s: float) -> None:
        """One exchange with the store."""
        waits = self._suspecting is not None or self.waits_for() is not None or _is_in_transfer(self.computing)
        store.set(f"status/{self._rank}", json.dumps((time.monotonic() - self._since, waits, self._activity)))
        # on another node than rank 0
        if self._rank > self._launch.local_rank and self._lifeline is None and store.check([LIFELINES]):
            self._num_answers += 1
            self._lifeline = connect(store, self._launch.host, self._rank)
        self._lost = [] if self._lifelines is None else self._lifelines.lost()
        for rank in (*self._local, *self._lost):
            self._num_answers += 1
            self._look_at_rank(store, rank, elapsed_s)
        if (self._rank == 0 or self._suspecting is not None) and not self._known.is_set():
            self._look_for_late(store, elapsed_s)
        if store.check([f"dump/{self._num_dumps}"]):
            self._num_dumps += 1
            write_state(self.describe)
        if self._mine is not None:
            self._found(store.compare_set("error", "", self._mine).decode())
        elif store.check(["error"]):
            self._found(store.get("error").decode())
        if self._known.is_set():
            store.set(f"knows/{self._rank}", "")
            if store.check([f"knows/{rank}" for rank in self._others] if self._rank == 0 else ["knows/0"]):
                self._told.set()
        elif self._leaving:
            store.set(f"left/{self._rank}", "")
            if self._rank != 0 or store.check([f"left/{rank}" for rank in self._others]):
                self._left.set()

    def _look_at_rank(self, store: Store, rank: int, elapsed_s: float) -> None:
        """Report a rank that is gone, stopped or lost; one that has left may end."""
        if rank not in self._processes and store.check([f"process/{rank}"]):
            self._processes[rank] = Process(*json.loads(store.get(f"process/{rank}")))
        trouble = self._trouble_of(rank)
        self._trouble_s[rank] = self._trouble_s.get(rank, 0.0) + elapsed_s if trouble else 0.0
        is_certain = self._trouble_s[rank] >= _TROUBLE_S or (self._suspecting is not None and trouble == "has died")
        if trouble and is_certain and not store.check([f"left/{rank}"]):
            last = f", last in {json.loads(store.get(key))[2]}" if store.check([key := f"status/{rank}"]) else ""
            self.report(f"{self._name(rank)} {trouble}{last}; noticed by {self.place} in {self._activity}")

    def _trouble_of(self, rank: int) -> str | None:
        """What is wrong with a rank, as far as its process or its connection tells."""
        if rank in self._lost:
            return "has died, or its node cannot be reached"
        return self._processes[rank].trouble if rank in self._processes else None

    def _look_for_late(self, store: Store, elapsed_s: float) -> None:
        """Name the rank that others wait for; after a failed transfer make it the error."""
        is_suspecting = self._suspecting is not None
        limit_s = _SUSPECT_S if is_suspecting else max(BEHIND_S, 10 * self.predicted_s())
        late, somebody_waits = [(False, 0.0, self._rank, "")], False
        for rank in (self._rank, *self._others):
            self._num_answers += 1
            if not store.check([f"status/{rank}"]):
                continue
            latest = store.get(f"status/{rank}")
            before, silence_s = self._statuses.get(rank, (b"", 0.0))
            silence_s = silence_s + elapsed_s if latest == before else 0.0
            self._statuses[rank] = latest, silence_s
            seconds, waits, activity = json.loads(latest)
            somebody_waits |= waits
            if silence_s >= limit_s and rank not in self._local:
                late.append((True, silence_s, rank, activity))
            elif not waits and (is_suspecting or activity != "idle"):
                late.append((False, seconds + silence_s, rank, activity))
        is_silent, seconds, rank, activity = max(late)
        if self._suspecting is not None and time.monotonic() - self._suspecting < _SUSPECT_S:
            return  # a process that has ended is noticed before
        if is_silent:
            what = f"is silent for {seconds:.0f} s: cut off, stopped, or busy in Python; last in {activity}"
        elif seconds >= limit_s and somebody_waits:
            what = f"is behind: in {activity} for {seconds:.0f} s while others wait for it"
        else:
            return
        if is_suspecting:
            self.report(f"{self._name(rank)} {what}")
        elif self._named != (rank, activity):
            self._named = rank, activity
            logger.warning("%s %s", self._name(rank), what)
            store.set(f"dump/{self._num_dumps}", "")

    def _found(self, error: str) -> None:
        if not self._known.is_set():
            self._error = error
            self._known.set()

    # -- the thread that waits for nobody ------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until an error is known, look at the launcher and at the other thread; then see that the main one hears."""
        answers, silence_s, last = -1, 0.0, time.monotonic()
        while not self._known.wait(_BEAT_S) and not self._left.is_set():
            now = time.monotonic()
            elapsed_s, last = min(now - last, 2 * _BEAT_S), now
            if (agent := self._launch.agent_pid) not in (None, os.getppid()):
                self.report(f"{self.place}: the process that started it, {agent}, has died, in {self._activity}")
            is_talking = self._talks()
            silence_s = silence_s + elapsed_s if is_talking and answers == self._num_answers else 0.0
            answers = self._num_answers
            if trouble := self._trouble_of_store(silence_s):
                silent = f"the store that it holds has not answered {self.place} for {silence_s:.0f} s"
                self.report(f"{self.store_holder} {trouble}: {silent}, in {self._activity}")
            if self._mine is not None and (not is_talking or silence_s >= 2 * _BEAT_S):  # nobody can be told
                self._found(self._mine)
        if self._known.is_set() and not self._heard.wait(_GRACE_S) and not self._left.is_set():
            self._end_stuck(self._error or "")

    def _trouble_of_store(self, silence_s: float) -> str | None:
        """What is wrong with who holds the store; where it can be seen to run it is slow, and has not failed."""
        holder = self._agent if self._launch.agent_has_store else self._processes.get(0)
        if holder is not None and holder.is_here:
            return holder.trouble if silence_s >= _TROUBLE_S else None
        limit_s = BEHIND_S if 0 in (self._rank, *self._local) else _STORE_S  # its own node: not known so far
        return "is stopped or cannot be reached" if silence_s >= limit_s else None

    def _end_stuck(self, error: str) -> None:
        """End the process, whose main thread waits for a rank that has failed."""
        self._heard.set()
        speaks = not self.linger(0.5) or self._rank == 0
        limit = threading.Timer(_SAVE_S, self._end, (f"{error} (what was unfinished is not saved)", speaks))
        limit.start()
        try:
            self.before_end(error)
        except Exception as failure:
            logger.error("what was unfinished could not be saved in full: %s: %s", type(failure).__name__, failure)
        limit.cancel()
        self._end(error, speaks)

    def _end(self, error: str, speaks: bool) -> None:
        exit_at_once(EXIT_CODE, f"error: RankFailedError: {error}\n" if speaks else "")

    def _at_exit(self) -> None:
        """The process ends while in the job: no destructor of a process group may wait for the others."""
        cause, dist = getattr(sys, "last_value", None), sys.modules["torch"].distributed
        if cause is None and self._left.is_set() and (self.is_refused or not dist.is_initialized()):
            return  # the program has caught the error of its job, whose groups, if there are any, have nothing to do
        what = " ended without closing its LLM" if cause is None else f": {type(cause).__name__}: {cause}"
        self.report(self.place + what)
        self.first_error(wait_s=1.0)
        self.linger()
        exit_at_once(EXIT_CODE if cause is None else exit_code(cause))  # the program's own error is no failed engine


def give_up(monitor: Monitor, error: BaseException) -> None:
    """Tell every rank that this one goes with an error; they end too."""
    if not isinstance(error, RankFailedError):
        monitor.report(f"{monitor.place}: {type(error).__name__}: {error}")
    monitor.part(monitor.first_error() or str(error))


@contextmanager
def failures_named(monitor: Monitor, batch: Batch | None = None, *, activity: str | None = None) -> Iterator[None]:
    """Within, where ``batch`` or ``activity`` runs, a failure of this rank is told to all, and that of another named.

    Raised is a RankFailedError with the first error that any rank reported; one of medha's own is raised as it is.
    """
    activity = activity or ("idle" if batch is None else f"batch {batch.batch_id}")
    monitor.doing(activity)
    try:
        yield
    except RankFailedError as error:
        monitor.part(str(error))
        raise
    except Exception as error:
        if is_interrupt(error):
            give_up(monitor, error)
            raise
        monitor.is_refused = isinstance(error, ConfigError)
        monitor.part(first := tell_failure(monitor, error, activity))
        if isinstance(error, MedhaError):
            raise
        raise RankFailedError(first) from (None if _is_lost_peer(error) else error)


def tell_failure(monitor: Monitor, error: Exception, activity: str) -> str:
    """Tell all ranks of a failure of this one, unless it is the echo of another's; returns the job's first error."""
    is_echo = _is_lost_peer(error)
    if not is_echo:
        monitor.report(f"{monitor.place}, {activity}: {type(error).__name__}: {error}")
    if (first := monitor.first_error(suspect=is_echo)) is None:
        first = f"{monitor.place}, {activity}: lost a peer: {error}"
        monitor.report(first)
    return first


def _is_lost_peer(error: Exception) -> bool:
    """Whether an error is only the echo of another rank's failure: gloo says so in words, NCCL by the class."""
    signs = ("closed by peer", "reset by peer", "Timed out waiting", "Broken pipe", "gloo", "NCCL")
    is_dist_error = any(kind.__name__ == "DistError" for kind in type(error).__mro__)  # torch's, not loaded here
    is_foreign = isinstance(error, RuntimeError) and not isinstance(error, MedhaError)
    return is_foreign and (is_dist_error or any(sign in str(error) for sign in signs))


def _is_in_transfer(thread: threading.Thread) -> bool:
    """Whether a thread is where it waits for other ranks."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and any(place in frame.f_code.co_filename for place in _WAIT_IN)
