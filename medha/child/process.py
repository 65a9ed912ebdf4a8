"""A child process that answers messages, one at a time; what it does with them is in :mod:`medha.child.serving`.

What crashes in it, or takes more than it may, is an error of that message alone; the next one gets a new child. It is
started by the first message, and ends with its parent, whatever that dies of: its end of the pipe closes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

from medha.errors import is_interrupt

_END_S = 5.0


class ChildError(RuntimeError):
    """The child answered with an error, or died."""


class Child:
    """Asks a child process; any thread may, and the others wait.

    Args:
        module: what it runs, which calls :func:`medha.child.serving.serve`.
        setup: makes the message that each new child gets first and does not answer.
    """

    def __init__(self, module: str, *, setup: Callable[[], bytes] = bytes) -> None:
        self._module = module
        self._setup = setup
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ended = False  # the answer that some thread waits for; the process may be only about to start

    def ask(self, message: bytes | bytearray) -> bytes:
        """The answer to a message; ChildError where it is an error, or the child died. Other threads run meanwhile."""
        with self._lock:
            self._is_ended = False
            try:
                if self._process is not None and self._process.poll() is not None:
                    self._stop()  # it was killed while nobody asked; or it is the parent's, behind a fork
                if self._process is None:
                    self._start()
                if self._is_ended:
                    raise ChildError("the answer was given up")
                self._pipe.send_bytes(message)
                is_error, answer = self._pipe.recv_bytes(), self._pipe.recv_bytes()
            except BaseException as error:
                if isinstance(error, (OSError, EOFError)) and not is_interrupt(error):
                    raise ChildError(self._stop() or f"the process cannot be started: {error}") from error
                self._stop(wait_s=0.0)  # an answer that nobody took must not become the next one's
                raise
        if is_error:
            raise ChildError(answer.decode())
        return answer

    def interrupt(self) -> None:
        """End the answer that some thread waits for, which gets a ChildError; nothing where none does."""
        self._is_ended, process = True, self._process
        if process is not None and self._lock.locked():
            process.kill()

    def close(self) -> None:
        """End the child, and the answer that some thread waits for; a later message starts another."""
        self.interrupt()
        with self._lock:
            self._stop(wait_s=0.0)

    def _start(self) -> None:
        self._pipe, there = Pipe()
        nothing, fd = subprocess.DEVNULL, there.fileno()
        module = [self._module, str(fd)]
        with there:
            self._process = popen_module(module, stdin=nothing, stdout=nothing, stderr=nothing, pass_fds=[fd])
        self._end = weakref.finalize(self, _end, self._process, self._pipe, os.getpid())
        self._pipe.send_bytes(self._setup())

    def _stop(self, *, wait_s: float = _END_S) -> str:
        """Make an end of the child; returns what it died of, empty where there is none."""
        process, self._process = self._process, None
        if process is None:
            return ""
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
        self._end()
        code = process.returncode
        return "the process ended with " + (signal.Signals(-code).name if code < 0 else f"exit status {code}")


def popen_module(
    module: Sequence[str], environ: Mapping[str, str] = os.environ, **options: Any
) -> subprocess.Popen[Any]:
    """Start ``python -m`` a module with its arguments, and options of Popen; imports are found as they are here."""
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)  # which a program may have changed
    env = {**environ, "PYTHONPATH": path, "MEDHA_SAFE_PATH": "1" * sys.flags.safe_path}  # as its user has started this
    return subprocess.Popen([sys.executable, "-P", "-m", *module], env=env, **options)


def _end(process: subprocess.Popen[bytes], pipe: Connection, owner: int) -> None:
    if owner == os.getpid():
        process.kill()
        process.wait()
    pipe.close()
