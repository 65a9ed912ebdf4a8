"""Noticing that a rank died, threw or fell silent, and telling every rank the first real error.

Each rank beats once a second in a thread of its own, so a long step does not stop it; rank 0 watches all ranks and all
watch rank 0. Beats and the first error go through the job's key-value store. A rank that is blocked on a dead peer
hears of it at once from gloo ("connection closed"); the beat is for a rank that is stopped, and for peers that wait for
nobody. Whoever notices ends its process: a collective that waits for a missing rank cannot be undone.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable

from torch._C._distributed_c10d import PrefixStore, Store

logger = logging.getLogger("medha")

EXIT_CODE = 4
_BEAT_S = 1.0
_GRACE_S = 2.0  # how long to wait for the error of the rank that failed before speaking of its silence


class Monitor:
    """Beats for this rank and watches others.

    Args:
        store: shared by all ranks.
        rank, world_size: this rank's place.
        silent_s: a rank that has not beaten for so long has failed.
        end: called with a message when a rank has failed; ends the process.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        silent_s: float = 10.0,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._store = PrefixStore("medha", store)
        self._rank = rank
        self._watched = [r for r in range(world_size) if r != rank] if rank == 0 else [0]
        self._silent_s = silent_s
        self._end = end or end_process
        self._stopped = threading.Event()
        self._store.set(f"beat/{rank}", "0")
        self._thread = threading.Thread(target=self._run, name="medha-monitor", daemon=True)

    def start(self) -> None:
        """Begin; every rank must have made its monitor before."""
        self._thread.start()

    def stop(self) -> None:
        """End without an error."""
        self._stopped.set()

    def report(self, message: str) -> None:
        """Make this the error that every rank tells, unless another came first."""
        try:
            self._store.compare_set("error", "", message)
        except RuntimeError as error:  # the store's host is gone; there is nobody to tell
            logger.debug("the store is gone: %s", error)

    def first_error(self, *, wait_s: float = _GRACE_S) -> str | None:
        """The first error that a rank reported, waiting a little for it; None when there is none."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                if self._store.check(["error"]):
                    return str(self._store.get("error").decode())
            except RuntimeError:
                return None
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)

    def _run(self) -> None:
        seen = {rank: (b"", time.monotonic()) for rank in self._watched}
        count = 0
        while not self._stopped.wait(_BEAT_S):
            count += 1
            try:
                self._store.set(f"beat/{self._rank}", str(count))
                failure = self._failure(seen)
            except RuntimeError as error:
                failure = (
                    f"rank {self._rank} lost the job's store, so the rank or agent that holds it has died: {error}"
                )
            if failure is not None and not self._stopped.is_set():
                self.report(failure)
                self._end(self.first_error(wait_s=0.0) or failure)
                return

    def _failure(self, seen: dict[int, tuple[bytes, float]]) -> str | None:
        """What has failed, if anything."""
        if self._store.check(["error"]):
            return str(self._store.get("error").decode())
        now = time.monotonic()
        for rank, (beat, since) in seen.items():
            latest = self._store.get(f"beat/{rank}")
            if latest != beat:
                seen[rank] = (latest, now)
            elif now - since > self._silent_s:
                return f"rank {rank} has been silent for {now - since:.0f} s; it has died or is stopped"
        return None


def end_process(message: str) -> None:
    """Say why and end this process at once, without the clean-up that would wait for other ranks."""
    print(f"medha: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(EXIT_CODE)
