"""Ranks that a command starts itself in torchrun's place, and a folder that the ranks of a machine share."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from medha.child.process import popen_module
from medha.parallel.launch import AGENT, OWN, PARENT, num_cores, own_processes, read_launch

_END_S = 30.0  # how long ranks may take to end with the first one
_FAIL_S = 3.0  # the same where that failed


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of the loopback that within the context nobody else is given, and the store may listen on.

    It is bound and does not listen: the kernel gives it to no other socket, but to one that sets ``SO_REUSEADDR``, as
    the store's does. Nor can a rank that comes before the store listens connect to itself.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def launch_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets of a rank of a job on this machine."""
    own = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size))
    return own | sizes | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


@contextmanager
def own_ranks(size: int, module: Sequence[str]) -> Iterator[None]:
    """Be, for the rest of this process, rank 0 of a job on this machine whose other ranks run ``python -m`` a module.

    Each rank gets its share of the threads, unless ``OMP_NUM_THREADS`` says how many. The ranks end with this one.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        share = max(1, num_cores() // size)
        os.environ["OMP_NUM_THREADS"] = str(share)
        if (torch := sys.modules.get("torch")) is not None:  # it has looked already
            torch.set_num_threads(share)
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:  # of a job that started this command
        del os.environ[name]
    ranks: list[subprocess.Popen[Any]] = []
    limit_s = _FAIL_S
    with reserved_port() as port:
        try:
            for rank in range(1, size):  # none outlives this process, which alone gets Ctrl-C and ends them
                own = {**launch_environment(rank, size, port), AGENT: OWN, PARENT: str(os.getpid())}
                ranks.append(popen_module(module, os.environ | own, stdin=subprocess.DEVNULL, start_new_session=True))
                own_processes[rank] = ranks[-1].pid
            os.environ.update(launch_environment(0, size, port))
            yield
            limit_s = _END_S
        finally:
            deadline = time.monotonic() + limit_s
            for process in ranks:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
                process.kill()
                process.wait()


@contextmanager
def job_folder(what: str) -> Iterator[Path]:
    """A temporary folder of one name on all ranks of the job; each removes it with what it holds."""
    launch = read_launch()
    job = str(os.getpid()) if launch is None else f"{launch.address.replace(':', '-')}-{launch.attempt}"
    folder = Path(tempfile.gettempdir()) / f"medha-{what}-{os.getuid()}-{job}"
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
