"""What a child process does: it answers the messages of :class:`medha.child.process.Child`, within bounds."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection

from medha.child.process import ChildError

_WATCH_S = 1.0

_MEMORY_BYTES = 1 << 28  # that an answer may take, beside so many bytes for each that came in
_MEMORY_PER_BYTE = 64
_CPU_S = 10
_LARGE_BYTES = 1 << 20  # of a message or its answer, after which memory is given back


def serve(setup: Callable[[bytes], Callable[[bytes], bytes]]) -> None:
    """In the child: answer messages until the parent is gone.

    ``setup`` takes the first message and returns what makes an answer of the others. What that raises is an answer,
    too, a ChildError its text alone.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal, or systemd, sends them to the parent, too
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")  # where memory runs out it is this process that ends, not its parent
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with Connection(int(sys.argv[1])) as pipe, suppress(EOFError, OSError):
        answer = setup(pipe.recv_bytes())
        while True:
            message = pipe.recv_bytes()
            try:
                is_error, found = b"", answer(message)
            except BaseException as error:  # a panic of an extension is no Exception
                text = str(error) if isinstance(error, ChildError) else f"{type(error).__name__}: {error}"[:1000]
                is_error, found = b"error", text.encode(errors="replace")
            pipe.send_bytes(is_error)
            pipe.send_bytes(found)
            if len(message) + len(found) > _LARGE_BYTES:  # else what was freed, many times as much, stays this process'
                message = found = b""
                with suppress(AttributeError):  # glibc has it
                    ctypes.CDLL(None).malloc_trim(0)


def _end_with(parent: int) -> None:
    """End this process when its parent is gone, also in the middle of an answer that would take for ever."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)


def limit_resources(num_bytes: int) -> None:
    """Let this process take so much more than it has taken so far, of memory no more than half the machine's."""
    usage, page = resource.getrusage(resource.RUSAGE_SELF), resource.getpagesize()
    limits = {resource.RLIMIT_CPU: int(usage.ru_utime + usage.ru_stime) + 1 + _CPU_S + num_bytes // 1_000_000}
    with suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:  # Linux has it
        most = min(_MEMORY_BYTES + _MEMORY_PER_BYTE * num_bytes, os.sysconf("SC_PHYS_PAGES") * page // 2)
        limits[resource.RLIMIT_AS] = int(file.read().split()[0]) * page + most
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
