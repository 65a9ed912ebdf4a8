"""What medha's command lines share: exit codes, Ctrl-C, log lines, the spellings of an option.

A command is a function that returns its exit code: 0 done, 2 bad usage or model, 3 some requests failed, 4 the engine
failed, 130 interrupted. Text that was asked for goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TextIO, get_args, get_origin, get_type_hints

import typer
import typer.core
from typer.models import OptionInfo

from medha.config.engine_config import FOREIGN_OPTIONS, OPTION_ALIASES, note_foreign
from medha.config.fields import parse_size
from medha.errors import ConfigError, EngineDeadError, MedhaError, RequestError, exit_code
from medha.parallel.launch import exit_at_once, has_agent, is_first_rank, is_launched, write_state

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

logger = logging.getLogger("medha")

FAILED_REQUESTS = 3
"""Exit code of a run that ended with some requests failed."""

_BAD_INPUT = 2
_SPEAK_S = 2.0  # how long other ranks wait for rank 0 to say what all of them found
_ECHO_S = 2.0  # a signal that follows another within so long comes from the launcher

# Other names of options; those of the engine's are known to medha.config.
_ALIASES = {
    **OPTION_ALIASES,
    "model_path": "model",
    "max_new_tokens": "max_tokens",
    "random_input_len": "input_len",
    "random_output_len": "output_len",
    "no_enable_prefix_caching": "no_prefix_caching",
}

# Short forms of options that medha does not have.
_SHORT_FOREIGN = {
    "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-q": "--quantization",
}

# Wrong usage of the command line in click's terms; typer brings its own copy of click or imports it, by version.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class _Command(typer.core.TyperCommand):
    """A command that knows options of vLLM and SGLang that medha does not have."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.help = re.sub(r"(?<!\n)\n(?!\n)", " ", self.help or "")  # a docstring's lines are not those of a terminal

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """With columns so close together that the longest names are whole at 80 columns."""
        from typer import rich_utils  # here because it takes a while

        rich_utils.STYLE_OPTIONS_TABLE_PADDING = (0, 1, 0, 0)  # type: ignore[assignment]
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As click does, without the options of another engine that change nothing; others raise ConfigError."""
        while True:
            try:
                return super().parse_args(ctx, list(args))
            except _UsageError as error:
                unknown = getattr(error, "option_name", "")
                if not any(_is_foreign(typed, unknown) and _drop_foreign(args, at) for at, typed in enumerate(args)):
                    raise


def _is_foreign(typed: str, unknown: str) -> bool:
    """Whether an argument is the option that click does not know, and another engine does."""
    head = typed.partition("=")[0]
    if head in _SHORT_FOREIGN:
        return head.startswith(unknown or " ")
    name = head.removeprefix("--").removeprefix("no-").removeprefix("no_").replace("-", "_")
    return head.replace("_", "-") == unknown and name in FOREIGN_OPTIONS


def _drop_foreign(args: list[str], at: int) -> bool:
    """Take an option of another engine from the arguments, with its value, and say that it changes nothing."""
    typed = args.pop(at)
    head, _, value = typed.partition("=")
    given = _SHORT_FOREIGN.get(head, head).removeprefix("--").replace("-", "_")
    name = given.removeprefix("no_")
    is_flag = any(isinstance(one, bool) for one in FOREIGN_OPTIONS[name][0] or ())  # it stands without a value
    if not is_flag and not value and args[at:] and not args[at].startswith("--"):
        value = args.pop(at)
        typed = f"{typed} {value}"
    note = note_foreign(name, value if value or not is_flag else name == given, typed)
    if is_first_rank():
        print("medha:", note, file=sys.stderr)
    return True


class _App(typer.Typer):
    """An app of such commands, whose integers may be written ``1k``, ``128K`` or ``10M``."""

    def command(self, name: str | None = None, **options: Any) -> Any:
        register = super().command(name, cls=_Command, **options)

        def registered(function: Callable[..., int]) -> Callable[..., int]:
            function.__annotations__ = hints = get_type_hints(function, include_extras=True)
            for hint in hints.values():
                kind, *infos = get_args(hint) if get_origin(hint) is Annotated else [hint]
                for info in infos:
                    if isinstance(info, OptionInfo) and int in (kind, *get_args(kind)):
                        info.parser = partial(_integer, least=info.min, most=info.max)
                        info.metavar = info.metavar or "INTEGER"
            return register(function)

        return registered


def _integer(text: str | int, *, least: float | None, most: float | None) -> int:
    try:
        number = parse_size(text) if isinstance(text, str) and text[-1:].isalpha() else int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not an integer such as 2048 or 128K") from None
    for bound, sign, words in ((least, 1, "least"), (most, -1, "most")):
        if bound is not None and sign * number < sign * bound:
            raise typer.BadParameter(f"{number} is not at {words} {bound}")
    return number


def make_app(*, help: str | None = None) -> typer.Typer:
    """A typer app whose options may go by their aliases, and with ``_`` for ``-``; run it with :func:`run_app`."""
    return _App(
        help=help,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _canonical},
    )


def _canonical(option: str) -> str:
    name = option.replace("-", "_")
    return _ALIASES.get(name, name).replace("_", "-")


def run_app(app: typer.Typer, prog_name: str, arguments: Sequence[str] | None = None) -> int:
    """Run a command line of :func:`make_app`, by default that of this process; returns the exit code."""
    bound_spinning()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # it was closed
            stream = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)  # what comes in its place has its number alone, which it keeps open
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character is no reason to end
    sys.stderr, _ = lossy(sys.stderr)  # nor is a log that nobody takes
    sys.stdout, lost = lossy(sys.stdout, raises=True)

    def run() -> int:
        code = int(app(args=arguments, prog_name=prog_name, standalone_mode=False) or 0)
        sys.stdout.flush()
        return code

    try:
        return run_guarded(run)
    except _UsageError as error:
        message = error.format_message()  # type: ignore[attr-defined]
        return complain(f"{message} (see {prog_name} --help)", 2)
    except OSError as error:
        if error is not lost():
            raise
        has_left = isinstance(error, BrokenPipeError)  # a reader that had enough
        return 1 if has_left else complain(f"stdout cannot be written: {error.strerror}", _BAD_INPUT)


def bound_spinning() -> None:
    """Have OpenMP's threads wait as they do under medha's commands; in force where torch is imported after it.

    A thread that spins without end while it waits takes the core from what it waits for: beside one busy program two
    threads took 75 times as long. One that sleeps soon is woken in every gap: a small model's decode of one request in
    bfloat16 took 3.7 ms with 0.1 ms of spinning, 2.5 with half a millisecond, which covers the gap between two steps,
    and no less with more; beside a busy program 5, some 10, and 91 ms without end.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def run_guarded(run: Callable[[], int]) -> int:
    """Call what returns an exit code; an error of ours becomes one line on stderr, and its code."""
    try:
        return run()
    except MedhaError as error:
        root: BaseException = error
        while isinstance(root, MedhaError) and root.__cause__ is not None:
            root = root.__cause__
        if isinstance(error, EngineDeadError) and not isinstance(root, MedhaError):  # the failed rank shows where
            logger.error("the engine failed", exc_info=root)
        code = FAILED_REQUESTS if isinstance(error, RequestError) else exit_code(error)
        return complain(f"{type(error).__name__}: {error}", code)
    except (KeyboardInterrupt, typer.Abort):
        return exit_code(KeyboardInterrupt())


class _Lossy(io.FileIO):
    """Takes everything, also when its reader has gone or its disk is full; ``failure`` is why it is lost then, and
    raised once where it ``raises``."""

    failure: OSError | None = None
    raises = False

    def write(self, data: Buffer, /) -> int:
        if self.failure is None:
            try:
                return super().write(data)
            except OSError as error:
                self.failure = error
                if self.raises:
                    raise
        return memoryview(data).nbytes


def lossy(stream: TextIO, *, raises: bool = False) -> tuple[TextIO, Callable[[], OSError | None]]:
    """A stream like ``stdout`` or ``stderr`` that never fails, or once, and what tells the reason since when all is
    lost; what is no file of the process is returned as it is."""
    try:
        raw = _Lossy(stream.fileno(), "w", closefd=False)
    except (AttributeError, OSError, ValueError):
        return stream, lambda: None
    raw.raises = raises
    by_line = stream is sys.stderr or raw.isatty() or getattr(stream, "write_through", False)
    text = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=by_line)
    return text, lambda: raw.failure


def end_process(code: int) -> NoReturn:
    """Exit; one more Ctrl-C while the interpreter shuts down changes nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if code and is_launched():
        exit_at_once(code)
    sys.exit(code)


def complain(message: str, code: int) -> int:
    """Write an error to stderr, on one line, on the rank that speaks; returns ``code``."""
    line = " ".join(message.split())
    # Of each rank: torchrun's own report, below which nothing else is seen, is of the one that it saw end first.
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))
    if is_first_rank():
        print("error:", line, file=sys.stderr, flush=True)
    elif code == _BAD_INPUT:
        time.sleep(_SPEAK_S)  # the launcher ends every rank as soon as one has ended, and rank 0 has to speak yet
    return code


def ignore_signals() -> None:
    """Leave Ctrl-C and termination to rank 0, which lets the others stop in order."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def first_interrupt(*, also_terminate: bool = False) -> Iterator[list[int]]:
    """Within, the first Ctrl-C is noted in the list that is yielded; the second raises KeyboardInterrupt.

    Under a launcher, or with ``also_terminate``, a termination counts as well, and a signal right after the first is
    its echo under a launcher: Ctrl-C reaches every process of the terminal, and the launcher passes it on.
    """
    noted: list[int] = []
    last_s = 0.0

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal last_s
        is_echo = has_agent() and time.monotonic() - last_s < _ECHO_S
        last_s = last_s if is_echo else time.monotonic()
        if not noted:
            noted.append(signum)
        elif not is_echo:
            raise KeyboardInterrupt

    # a plain process ends on a termination as it always did
    numbers = (signal.SIGINT, signal.SIGTERM) if also_terminate or is_launched() else (signal.SIGINT,)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def state_on_signal(describe: Callable[[], str]) -> Iterator[None]:
    """Within, SIGUSR1 makes this process write what it works on, in words, and where its threads are, to stderr.

    A thread of its own does it, since the main thread may be stuck in a transfer, where no handler of Python runs.
    """
    here, there = socket.socketpair()
    there.setblocking(False)

    def listen() -> None:
        while numbers := here.recv(64):
            if signal.SIGUSR1 in numbers:
                write_state(describe)

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    before_fd = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    listener = threading.Thread(target=listen, name="medha-state", daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before_fd)
        signal.signal(signal.SIGUSR1, before)
        there.close()
        listener.join(1.0)  # it holds what it describes, and tensors must not be freed while the interpreter ends


def check_apart(writes: Sequence[Path | None], reads: Sequence[Path | None]) -> None:
    """Refuse a file or pipe that is written twice, as stdout is, or written and read; a device takes everything, and
    ``-`` is stdin or stdout."""
    files = [(path, "is read") for path in reads if path is not None and str(path) != "-"]
    files.append((Path("/dev/stdout"), "is written too"))
    for path in filter(None, writes):
        is_there = os.path.exists(path)  # Path's own raises where a name is too long, or a folder is closed to us
        for other, what in files:
            is_same = path.samefile(other) if is_there and os.path.exists(other) else path.resolve() == other.resolve()
            if is_same and not (is_there and path.is_char_device()):
                raise ConfigError(f"output file {path} is {other}, which {what}; accepted: another file")
        files.append((path, "is written too"))


def start_logging(level: str) -> None:
    """Log medha's own messages to stderr; raises ConfigError where there is no such level."""
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
