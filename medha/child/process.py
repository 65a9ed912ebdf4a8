"""A child process that answers messages, one at a time.

What crashes in it, or takes more than it may, is an error of that message alone; the next one gets a new child. It is
started by the first message, and ends with its parent, whatever that dies of: its end of the pipe closes.
"""

from __future__ import annotations

import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

_LENGTH = struct.Struct("<Q")
_END_S = 5.0
_WATCH_S = 1.0


class ChildError(RuntimeError):
    """The child answered with an error, or died."""


class Child:
    """Asks a child process; any thread may, and the others wait.

    Args:
        module: what it runs, which calls :func:`serve`.
        setup: makes the message that each new child gets first and does not answer.
    """

    def __init__(self, module: str, *, setup: Callable[[], bytes] = bytes) -> None:
        self._module = module
        self._setup = setup
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, message: bytes) -> bytearray:
        """The answer to a message; other threads run meanwhile.

        Raises:
            ChildError: it is an error, or there is none because the child died; the text says which.
        """
        with self._lock:
            try:
                process = self._process or self._start()
                assert process.stdin is not None and process.stdout is not None, "they are pipes"
                _write(process.stdin, message)
                is_error, answer = _read(process.stdout), _read(process.stdout)
            except (OSError, EOFError) as error:
                raise ChildError(self._stop() or f"the process cannot be started: {error}") from error
            except BaseException:  # an interrupt: an answer that nobody took must not become the next one's
                self._stop(wait_s=0.0)
                raise
        if is_error:
            raise ChildError(answer.decode())
        return answer

    def interrupt(self) -> None:
        """End the answer that some thread waits for, which gets a ChildError; nothing where none does."""
        process = self._process
        if process is not None and self._lock.locked():
            process.kill()

    def _start(self) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        process = self._process = popen_module([self._module], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        weakref.finalize(self, _end, process)
        assert process.stdin is not None, "it is a pipe"
        _write(process.stdin, self._setup())
        return process

    def _stop(self, *, wait_s: float = _END_S) -> str:
        """Make an end of the child; returns what it died of, empty where there is none."""
        process, self._process = self._process, None
        if process is None:
            return ""
        with suppress(subprocess.TimeoutExpired):
            process.wait(wait_s)
        _end(process)
        code = process.returncode
        return "the process ended with " + (signal.Signals(-code).name if code < 0 else f"exit status {code}")


def popen_module(
    module: Sequence[str], environ: Mapping[str, str] = os.environ, **options: Any
) -> subprocess.Popen[Any]:
    """Start ``python -m`` a module with its arguments; imports are found where they are found here.

    Args:
        module: its name and arguments.
        environ: its environment.
        options: as of Popen.
    """
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)  # which a program may have changed
    return subprocess.Popen([sys.executable, "-P", "-m", *module], env={**environ, "PYTHONPATH": path}, **options)


def serve(answer: Callable[[bytes], bytes], *, setup: Callable[[bytes], None] = lambda _: None) -> None:
    """In the child: answer messages until the parent is gone.

    Args:
        answer: makes an answer; what it raises is an answer, too, a ChildError its text alone.
        setup: takes the first message.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal it comes here as well; the parent sees to it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    source, out = sys.stdin.buffer, sys.stdout.buffer
    with suppress(EOFError):
        setup(bytes(_read(source)))
        while True:
            message = bytes(_read(source))
            try:
                is_error, found = b"", answer(message)
            except ChildError as error:
                is_error, found = b"error", str(error).encode(errors="replace")
            except BaseException as error:  # a panic of an extension is no Exception
                is_error, found = b"error", f"{type(error).__name__}: {error}"[:1000].encode(errors="replace")
            _write(out, is_error)
            _write(out, found)


def _end_with(parent: int) -> None:
    """End this process when its parent is gone, also in the middle of an answer that would take for ever."""
    while os.getppid() == parent:
        time.sleep(_WATCH_S)
    os._exit(1)


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_LENGTH.pack(len(data)))
    pipe.write(data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytearray:
    """What :func:`_write` wrote; raises EOFError where it wrote nothing more."""
    (length,) = _LENGTH.unpack(_read_bytes(pipe, _LENGTH.size))
    return _read_bytes(pipe, length)


def _read_bytes(pipe: IO[bytes], count: int) -> bytearray:
    data = bytearray(count)
    rest = memoryview(data)
    while rest:
        read = pipe.readinto(rest)  # type: ignore[attr-defined]
        if not read:
            raise EOFError("the pipe has ended")
        rest = rest[read:]
    return data


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # bytes that the dead child never read
            assert pipe is not None, "it is a pipe"
            pipe.close()
