"""What the system knows of the processes of this machine: whether a rank is gone or stopped. Loads no torch.

It is read from ``/proc``. Where there is none every process seems to run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple


class Process(NamedTuple):
    """A process of this machine or another.

    Attributes:
        machine: where process ids mean the same.
        started: when it began, in the kernel's ticks, as ids come round; 0 where that is not known.
    """

    machine: str
    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """A process of this machine."""
        stat = _stat(pid)
        return cls(_machine(), pid, 0 if stat is None else int(stat[19]))

    @property
    def trouble(self) -> str | None:
        """``has died`` or ``is stopped``; None for one that runs, waits, is held by a debugger or is elsewhere."""
        if not self.started or self.machine != _machine():
            return None
        stat = _stat(self.pid)
        if stat is None or stat[0] in "ZX" or int(stat[19]) != self.started:
            return "has died"
        return "is stopped" if stat[0] == "T" else None


def launched(agent: int, ranks: Collection[int]) -> dict[int, Process]:
    """The processes that torchrun's agent has started for some ranks of this node, which need not have said a word."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")) if Path("/proc/self/stat").exists() else ():
        stat = _stat(int(entry))
        if stat is None or int(stat[1]) != agent:
            continue
        try:
            rank = _rank(int(entry))
        except OSError:  # it has ended meanwhile
            continue
        if rank is not None and rank in ranks:
            found[rank] = Process.of(int(entry))
    return found


def is_rank(pid: int) -> bool:
    """Whether a process of this machine was started as a rank, like a script around one."""
    try:
        return _rank(pid) is not None
    except OSError:
        return True  # what cannot be seen is not to be relied on


def _rank(pid: int) -> int | None:
    """The rank that a process was started as, if any; raises OSError where that cannot be seen."""
    found = re.search(rb"(?:^|\0)RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes())
    return None if found is None else int(found[1])


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return "-"


def _stat(pid: int) -> list[str] | None:
    """State, parent, and further fields of ``/proc/PID/stat``; None for a process that is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
