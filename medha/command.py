"""What medha's command lines share: exit codes, Ctrl-C, log lines, the spellings of an option.

A command is a function that returns its exit code: 0 done, 2 bad usage or model, 3 some requests failed, 4 the engine
failed, 130 interrupted. Text that was asked for goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import typer

from medha.config import OPTION_ALIASES
from medha.errors import ConfigError, EngineDeadError, MedhaError, RequestError, exit_code
from medha.parallel.health import write_state
from medha.parallel.launch import is_first_rank, is_launched

logger = logging.getLogger("medha")

FAILED_REQUESTS = 3
"""Exit code of a run that ended with some requests failed."""

_BAD_INPUT = 2
_SPEAK_S = 2.0  # how long other ranks wait for rank 0 to say what all of them found
_ECHO_S = 2.0  # a signal that follows another within so long comes from the launcher

# Other names of options; those of the engine's are known to medha.config.
_ALIASES = {**OPTION_ALIASES, "model_path": "model", "max_new_tokens": "max_tokens"}

# Wrong usage of the command line in click's terms; typer brings its own copy of click or imports it, by version.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def make_app(*, help: str | None = None) -> typer.Typer:
    """A typer app whose options may go by their aliases, and with ``_`` for ``-``; run it with :func:`run_app`."""
    return typer.Typer(
        help=help,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "token_normalize_func": _canonical,
        },
    )


def _canonical(option: str) -> str:
    """The name by which an option (without its dashes) is declared."""
    name = option.replace("-", "_")
    return _ALIASES.get(name, name).replace("_", "-")


def run_app(app: typer.Typer, prog_name: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command line; an error of ours becomes one line on stderr.

    Args:
        app: what :func:`make_app` returned.
        prog_name: what help calls the program.
        arguments: ``sys.argv`` by default.

    Returns:
        The exit code.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character is no reason to end
    try:
        return int(app(args=arguments, prog_name=prog_name, standalone_mode=False) or 0)
    except _UsageError as error:
        message = error.format_message()  # type: ignore[attr-defined]
        return complain(f"{message} (see {prog_name} --help)", 2)
    except MedhaError as error:
        root: BaseException = error
        while (
            isinstance(root, MedhaError) and root.__cause__ is not None
        ):  # the failed rank shows where, the others not
            root = root.__cause__
        if isinstance(error, EngineDeadError) and not isinstance(root, MedhaError):
            logger.error("the engine failed", exc_info=root)
        code = FAILED_REQUESTS if isinstance(error, RequestError) else exit_code(error)
        return complain(f"{type(error).__name__}: {error}", code)
    except (KeyboardInterrupt, typer.Abort):
        return exit_code(KeyboardInterrupt())


def end_process(code: int) -> NoReturn:
    """Exit; one more Ctrl-C while the interpreter shuts down changes nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if code and is_launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the clean-up of process groups would wait for ranks that may be gone
    sys.exit(code)


def complain(message: str, code: int) -> int:
    """Write an error to stderr, on one line, on the rank that speaks; returns ``code``."""
    if is_first_rank():
        print("error:", " ".join(message.split()), file=sys.stderr, flush=True)
    elif code == _BAD_INPUT:
        time.sleep(_SPEAK_S)  # the launcher ends every rank as soon as one has ended, and rank 0 has to speak yet
    return code


def ignore_signals() -> None:
    """Leave Ctrl-C and termination to rank 0, which lets the others stop in order."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def first_interrupt() -> Iterator[list[int]]:
    """Within, the first Ctrl-C is noted in the list that is yielded; the second raises KeyboardInterrupt.

    Under a launcher a termination counts as well, and a signal right after the first is its echo: Ctrl-C reaches every
    process of the terminal, and the launcher passes it on.
    """
    noted: list[int] = []
    last_s = 0.0

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal last_s
        is_echo = is_launched() and time.monotonic() - last_s < _ECHO_S
        last_s = time.monotonic()
        if not noted:
            noted.append(signum)
        elif not is_echo:
            raise KeyboardInterrupt

    # a plain process ends on a termination as it always did
    numbers = (signal.SIGINT, signal.SIGTERM) if is_launched() else (signal.SIGINT,)
    try:
        before = {number: signal.signal(number, note) for number in numbers}
    except ValueError:  # not the main thread: there is no Ctrl-C to note
        yield noted
        return
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def state_on_signal(describe: Callable[[], str]) -> Iterator[None]:
    """Within, SIGUSR1 makes this process write what it works on, and where its threads are, to stderr.

    A thread of its own does it, since the main thread may be stuck in a transfer, where no handler of Python runs.

    Args:
        describe: what this process works on, as text.
    """
    here, there = socket.socketpair()
    there.setblocking(False)

    def listen() -> None:
        while numbers := here.recv(64):
            if signal.SIGUSR1 in numbers:
                write_state(describe)

    try:
        before = signal.signal(signal.SIGUSR1, lambda *_: None)
        before_fd = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    except ValueError:  # not the main thread, which alone may
        yield
        return
    threading.Thread(target=listen, name="medha-state", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before_fd)
        signal.signal(signal.SIGUSR1, before)
        there.close()


def start_logging(level: str) -> None:
    """Log medha's own messages to stderr.

    Raises:
        ConfigError: no such level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError(f"log_level={level!r}; accepted: debug, info, warning, error")
    # the C++ side of torch.distributed prints stack traces when another rank is gone; read when torch is imported
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("medha: %(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(number if is_first_rank() else logging.ERROR)


class _StderrHandler(logging.Handler):
    """Prints to what ``sys.stderr`` is at the time: while a live display runs, that is a stream that spares it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr)
