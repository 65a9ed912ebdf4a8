"""Noticing that a rank died, threw or fell silent, and telling every rank the first real error.

Each rank beats twice a second in a thread of its own, so a long step does not stop it; rank 0 watches all ranks and all
watch rank 0. Beats, what each rank is doing, and the first error go through the job's key-value store. A rank that is
blocked on a dead peer hears of it at once from gloo ("connection closed"), and its monitor then finds who it was; the
beat is for a rank that is stopped, and for peers that wait for nobody. A second thread watches the first, because a
store whose host is stopped answers nothing.

A collective that waits for a missing rank cannot be undone, not even by aborting its group. So a process whose main
thread does not come to know of a failure in time is ended; whoever has something to save before that sets
:attr:`Monitor.before_end`.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import Store

from medha.errors import exit_code

logger = logging.getLogger("medha")

EXIT_CODE = 4
SILENT_S = 5.0
"""How long a rank may not beat before it counts as failed."""

_BEAT_S = 0.5
_SUSPECT_S = 2.0  # the same for ranks that may be the one whose connection has closed
_TOLD_S = 1.5  # how long rank 0 waits for ranks of which one may be dead
_GRACE_S = 2.5  # how long the main thread may take to hear of a failure by itself
_SAVE_S = 2.0  # how long what is called before the end may take


class Monitor:
    """Beats for this rank and watches others.

    Args:
        store: shared by all ranks, through a connection that nothing else uses.
        rank, world_size: this rank's place.
        holder: who holds the store, for messages.
        parent: process id of the launcher if this process shall not outlive it.
        name: how messages call a rank.
        silent_s: a rank that has not beaten for so long has failed.
        end: called with a message, and whether to print it, when the main thread is stuck; ends the process.

    Attributes:
        before_end: called with the error, in another thread, just before ``end``. It has two seconds.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        holder: str = "rank 0",
        parent: int | None = None,
        name: Callable[[int], str] = lambda rank: f"rank {rank}",
        silent_s: float = SILENT_S,
        end: Callable[[str, bool], None] | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._others = [r for r in range(world_size) if r != rank]
        self._watched = self._others if rank == 0 else [0]
        self._holder = holder
        self._parent = parent
        self._name = name
        self._silent_s = silent_s
        self._end = end or end_process
        self.before_end: Callable[[str], None] | None = None
        self._activity = "start"
        self._mine: str | None = None
        self._error: str | None = None
        self._is_first = True  # whether this rank's error is the first
        self._suspecting = self._leaving = False
        self._num_rounds = 0
        self._wake = threading.Event()
        self._known = threading.Event()  # an error is
        self._heard = threading.Event()  # by the main thread
        self._told = threading.Event()  # rank 0 knows too; on rank 0: all do
        self._left = threading.Event()
        self._beats: dict[int, tuple[bytes, float]] = {}  # last beat, seconds of silence since
        self._store.set(f"beat/{rank}", f"-1 {self._activity}")  # from here on the others miss this rank
        self._beater = threading.Thread(target=self._beat, name="medha-beat", daemon=True)
        self._watchdog = threading.Thread(target=self._watch_store, name="medha-watchdog", daemon=True)

    # -- for the main thread; none of these waits for the store itself -------------------------------------------------

    def start(self) -> None:
        """Begin to beat and to watch."""
        atexit.register(self._at_exit)
        self._beater.start()
        self._watchdog.start()

    def doing(self, activity: str) -> None:
        """Note what this rank is about, for the message of whoever finds it silent."""
        self._activity = activity

    def report(self, message: str) -> None:
        """Make this the error that every rank tells, unless another came first."""
        if self._mine is None:
            self._mine = message
        self._wake.set()

    def suspect(self) -> None:
        """A peer's connection has closed: look at all ranks, and more strictly."""
        self._suspecting = True
        self._wake.set()

    def first_error(self, *, wait_s: float = _SUSPECT_S + 3 * _BEAT_S) -> str | None:
        """The first error of the job, waiting a little for it; None when there is none. The main thread knows now."""
        self._known.wait(wait_s)
        self._heard.set()
        self._wake.set()
        return self._error

    @property
    def has_failure(self) -> bool:
        """Whether some rank has failed."""
        return self._known.is_set()

    def linger(self, wait_s: float = 3.0) -> bool:
        """Before leaving with an error, wait until rank 0 knows it, and on rank 0 until all do; whether rank 0 does.

        A launcher ends every rank as soon as one has ended, and rank 0 is the one that speaks, but it may also hold
        the store in which the others read why.
        """
        deadline = time.monotonic() + (min(wait_s, _TOLD_S) if self._rank == 0 else wait_s)
        while not self._told.wait(0.02) and self._beater.is_alive() and time.monotonic() < deadline:
            pass
        return self._told.is_set() or self._rank == 0

    def leave(self, *, wait_s: float = 2 * SILENT_S) -> bool:
        """Stop without an error, rank 0 last since it may hold the store; False if a failure came before that."""
        self._leaving = True
        deadline = time.monotonic() + wait_s
        while not self._left.wait(0.02) and not self._known.is_set() and time.monotonic() < deadline:
            self._wake.set()
        if self._left.is_set():
            atexit.unregister(self._at_exit)
        return self._left.is_set()

    # -- threads -------------------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._left.is_set():
            self._wake.wait(0.05 if self._known.is_set() else _BEAT_S)
            self._wake.clear()
            now = time.monotonic()
            try:
                self._round(now - last)
            except RuntimeError as error:
                if not self._leaving:
                    reason = str(error).partition("\n")[0]
                    here = f"{self._name(self._rank)} lost its store in {self._activity}"
                    self._found(f"{self._holder} has died: {here}: {reason}")
                return
            last = now
            self._num_rounds += 1

    def _round(self, elapsed_s: float) -> None:
        """One exchange with the store."""
        self._store.set(f"beat/{self._rank}", f"{self._num_rounds} {self._activity}")
        if self._mine is None and not self._known.is_set():
            self._mine = self._failure(elapsed_s)
        if self._mine is not None and not self._known.is_set():
            first = self._store.compare_set("error", "", self._mine).decode()
            self._is_first = first == self._mine
            self._found(first)
        elif not self._known.is_set() and self._store.check(["error"]):
            self._is_first = False
            self._found(self._store.get("error").decode())
        if self._known.is_set():
            self._tell()
        elif self._leaving:
            self._store.set(f"left/{self._rank}", "")
            if self._rank != 0 or self._store.check([f"left/{rank}" for rank in self._others]):
                self._left.set()

    def _tell(self) -> None:
        """Let rank 0 and the others know of each other that they know."""
        self._store.set(f"knows/{self._rank}", "")
        if self._store.check([f"knows/{rank}" for rank in self._others] if self._rank == 0 else ["knows/0"]):
            self._told.set()

    def _failure(self, elapsed_s: float) -> str | None:
        """What has failed, if anything."""
        if self._parent is not None and os.getppid() != self._parent:
            return f"{self._name(self._rank)}: the process that started it, {self._parent}, has died"
        limit_s = min(_SUSPECT_S, self._silent_s) if self._suspecting else self._silent_s
        for rank in self._others if self._suspecting else self._watched:
            if not self._store.check([f"beat/{rank}"]):
                continue  # has not come yet
            beat, silence_s = self._beats.get(rank, (b"", 0.0))
            latest = self._store.get(f"beat/{rank}")
            # a watcher that was itself stopped for a while has heard nothing in that time
            silence_s = 0.0 if latest != beat else silence_s + min(elapsed_s, 2 * _BEAT_S)
            self._beats[rank] = (latest, silence_s)
            if silence_s >= limit_s and not self._store.check([f"left/{rank}"]):
                activity = latest.decode().partition(" ")[2]
                return (
                    f"{self._name(rank)} died or is stopped: silent for {silence_s:.0f} s, last in {activity}; "
                    f"noticed by {self._name(self._rank)} in {self._activity}"
                )
        return None

    def _watch_store(self) -> None:
        seen, silence_s, last = -1, 0.0, time.monotonic()
        while not self._left.wait(_BEAT_S) and self._beater.is_alive():
            now = time.monotonic()
            silence_s = 0.0 if seen != self._num_rounds else silence_s + min(now - last, 2 * _BEAT_S)
            seen, last = self._num_rounds, now
            if silence_s >= self._silent_s:
                self._found(
                    f"{self._holder} is stopped or cannot be reached: the store that it holds has not answered "
                    f"{self._name(self._rank)} for {silence_s:.0f} s, in {self._activity}"
                )
                return

    def _found(self, error: str) -> None:
        """An error is known: let the main thread raise it, and end the process if that is stuck."""
        if self._known.is_set():
            return
        self._error = error
        self._known.set()
        threading.Thread(target=self._end_if_stuck, name="medha-end", daemon=True).start()

    def _end_if_stuck(self) -> None:
        if self._heard.wait(_GRACE_S) or self._left.is_set():
            return
        assert self._error is not None, "an error is known"
        self._heard.set()
        self._wake.set()
        told = self.linger(0.5)
        if self.before_end is not None:
            _run_for(_SAVE_S, self.before_end, self._error)
        self._end(self._error, self._rank == 0 or not told)

    def _at_exit(self) -> None:
        """The process ends while in the job: no destructor of a process group may wait for the others."""
        cause = getattr(sys, "last_value", None)
        self.report(
            f"{self._name(self._rank)} ended without closing its LLM"
            if cause is None
            else f"{self._name(self._rank)}: {type(cause).__name__}: {cause}"
        )
        self.first_error(wait_s=1.0)
        self.linger(2.0)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_CODE if cause is None else exit_code(cause))  # the program's own error is no failed engine


def _run_for(limit_s: float, save: Callable[[str], None], message: str) -> None:
    """Call ``save(message)``, and go on after a time; what goes wrong with it is logged."""
    troubles = [f"it has taken more than {limit_s:g} s"]

    def run() -> None:
        try:
            save(message)
            troubles.clear()
        except Exception as error:
            troubles[0] = f"{type(error).__name__}: {error}"

    thread = threading.Thread(target=run, name="medha-save", daemon=True)
    thread.start()
    thread.join(limit_s)
    for trouble in troubles:
        logger.error("what was unfinished could not be saved in full: %s", trouble)


def end_process(message: str, speak: bool) -> None:
    """End this process at once, without the clean-up that would wait for other ranks; say why if ``speak``."""
    if speak:
        print(f"error: RankFailedError: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(EXIT_CODE)
