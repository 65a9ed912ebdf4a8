"""What the launcher (torchrun) says about this process, and what the system says of the processes of a job.

Here alone is read what torchrun sets of the ranks, and read of ``/proc`` whether a rank of this machine is gone or
stopped; where there is no ``/proc`` every process seems to run. Loads no torch.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import platform
import re
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

from medha.errors import ConfigError

logger = logging.getLogger("medha")

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SIGNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # MASTER_ADDR alone is set on many clusters
PARENT = "MEDHA_PARENT"  # by which a command tells its ranks who it is: it may die before they look
# Read before torch is imported: it takes seconds, in which the launcher may die and this process get another parent.
_PARENT = int(os.environ.get(PARENT, os.getppid()))
AGENT = "TORCHELASTIC_RUN_ID"
OWN = "medha"  # its value for ranks that a command starts
own_processes: dict[int, int] = {}  # ids of those of such ranks, on the first one
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among the job's."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    host: str  # where the ranks meet; differs between jobs that run at once
    port: int
    agent_pid: int | None = None  # torchrun's agent, or who started this rank in its place; None if nobody watches
    processes: Mapping[int, int] = field(default_factory=dict)  # ids of those of the ranks that this one has started
    agent_has_store: bool = False  # the agent holds the store at that address; rank 0 does otherwise
    attempt: int = 0  # how often the agent has restarted the job

    @property
    def address(self) -> str:
        """Where the ranks meet, for messages."""
        return f"{self.host}:{self.port}"

    def spare_cores(self, num_threads: int) -> int:
        """Cores that the ranks of this machine may run on beyond so many for each; below 0 where they share some.

        One rank may be bound to a part of them, but hardly who started it.
        """
        return num_cores(self.agent_pid or 0) - self.local_world_size * num_threads


def num_cores(pid: int = 0) -> int:
    """Cores that a process, by default this one, may run on."""
    try:
        return len(os.sched_getaffinity(pid))
    except (AttributeError, OSError):  # not on Linux, or the process has ended
        return os.cpu_count() or 1


def cpu_name() -> str:
    """The processor as its maker names it."""
    with suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.M):
            return found[1].strip()
    return platform.processor()


def read_launch(environ: Mapping[str, str] | None = None) -> Launch | None:
    """What torchrun set, or None for a process without others; ConfigError where it is not whole, or no rank."""
    env = os.environ if environ is None else environ
    there = [name for name in _SIGNS if name in env]
    if not there:
        return None
    if missing := [name for name in _NEEDED if name not in env]:
        what = f"the environment sets {', '.join(there)}, as torchrun does, but not {', '.join(missing)}"
        raise ConfigError(f"{what}; accepted: all of them (start with torchrun), or none for a single process")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    try:
        rank, size, local_rank, local_size, port = (int(env.get(n, env[n.removeprefix("LOCAL_")])) for n in names)
    except ValueError as error:
        raise ConfigError(f"{', '.join(names)} must be integers: {error}") from error
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={rank} with WORLD_SIZE={size}; accepted: 0 to WORLD_SIZE - 1")
    if size == 1:  # as some clusters set of every process, with an address that may be of no use
        return None
    if not 0 < port < 65536:
        raise ConfigError(f"MASTER_PORT={port}; accepted: 1 to 65535")
    return Launch(
        rank,
        size,
        local_rank,
        local_size,
        env["MASTER_ADDR"],
        port,
        agent_pid=_PARENT if AGENT in env else None,
        processes=dict(own_processes),
        agent_has_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


def is_first_rank() -> bool:
    """Whether this process may speak to the user: rank 0, or a plain Python process."""
    return os.environ.get("RANK", "0") == "0"


def is_launched() -> bool:
    """Whether a launcher started this process, even if it set only some of its variables."""
    return any(name in os.environ for name in _SIGNS)


def has_agent() -> bool:
    """Whether torchrun's agent has started this process; it passes on the signals that it gets."""
    return os.environ.get(AGENT, OWN) != OWN


def gloo_interface(launch: Launch) -> str:
    """The network interface that gloo listens on, for messages: where all ranks meet on the loopback and nobody chose
    one, this sets the loopback, instead of whatever address the host name resolves to."""
    is_here = launch.host in ("localhost", "127.0.0.1", "::1") and launch.local_world_size == launch.world_size
    if is_here and "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault(_GLOO_INTERFACE, "lo")
    return os.environ.get(_GLOO_INTERFACE, "the address of the host name")


class Process(NamedTuple):
    """A process of this machine or another."""

    machine: str  # where process ids mean the same
    pid: int
    started: int  # in the kernel's ticks, as ids come round; 0 where that is not known

    @classmethod
    def of(cls, pid: int) -> Process:
        """A process of this machine."""
        stat = _stat(pid)
        return cls(_machine(), pid, int(stat[19]) if stat else 0)

    @property
    def is_here(self) -> bool:
        """Whether it can be seen whether it runs."""
        return self.started != 0 and self.machine == _machine()

    @property
    def trouble(self) -> str | None:
        """``has died`` or ``is stopped``; None for one that runs, waits, is held by a debugger or cannot be seen."""
        if not self.is_here:
            return None
        try:
            stat = _stat(self.pid)
        except OSError:
            return None
        if stat is None or stat[0] in "ZX" or int(stat[19]) != self.started:
            return "has died"
        return "is stopped" if stat[0] == "T" else None


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
    except (FileNotFoundError, ProcessLookupError):
        return None


def write_state(describe: Callable[[], str]) -> None:
    """Write what this rank works on, and where each of its threads is, to stderr."""
    try:
        print(describe(), file=sys.stderr, flush=True)
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
    except Exception as error:  # what is described changes meanwhile, or stderr is no file
        logger.error("the state of this rank cannot be written: %s", error)


def exit_at_once(code: int, error: str = "") -> NoReturn:
    """End this process, with lines on stderr, and without the clean-up, which would wait for ranks that may be gone."""
    for stream, text in ((sys.stderr, error), (sys.stdout, "")):
        with suppress(Exception):  # nobody may read it any more
            print(text, end="", file=stream, flush=True)
    os._exit(code)
