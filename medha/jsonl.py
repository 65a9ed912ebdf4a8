"""Request files in, output files out: one JSON object a line.

A request line holds ``id`` (optional), one of ``prompt``, ``prompt_token_ids``, ``messages`` (and with it ``tools``,
``chat_template_kwargs``, ``add_generation_prompt``), any field of
:class:`medha.SamplingParams`, ``arrival_s``, ``slo`` {``ttft_s``, ``tpot_s``} and ``priority``. A line that is wrong
becomes an arrival with an error, so that the rest still run. Fields nobody knows are ignored and named once in the log;
known ones that medha does not implement are errors. :class:`OutputLines` writes one line for each request, also where
the main thread of a rank is stuck.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from medha.driver import Arrival, Joiner, unserved
from medha.errors import ConfigError, MedhaError, RankFailedError, RequestError, ValidationError
from medha.request import (
    CHAT_OPTIONS,
    FIELD_ALIASES,
    SLO,
    UNSUPPORTED_FIELDS,
    RequestOutput,
    SamplingParams,
    check_priority,
)

if TYPE_CHECKING:
    from medha.engine import Engine

logger = logging.getLogger("medha")

_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages", *CHAT_OPTIONS)
_OTHER_FIELDS = ("id", "request_id", "arrival_s", "slo", "priority")
_SAMPLING_FIELDS = {*FIELD_ALIASES, *(f.name for f in dataclasses.fields(SamplingParams))} - {"output_kind"}


def read_requests(path: Path, defaults: Mapping[str, Any]) -> list[Arrival]:
    """Read a request file.

    Args:
        path: JSON lines; blank lines are skipped.
        defaults: sampling fields for lines that do not give them.

    Returns:
        Arrivals in order of ``arrival_s`` (then of the file), wrong lines as arrivals with ``error`` set.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"request file {path}: {error.strerror}") from error
    arrivals: list[Arrival] = []
    unknown: Counter[str] = Counter()
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if line.strip():
            arrival = _read_line(line, number, defaults, unknown)
            if arrival.request_id in seen and arrival.error is None:
                arrival = _wrong(
                    arrival.request_id, f"line {number}: id {arrival.request_id!r:.80} is in the file already"
                )
            seen.add(arrival.request_id)
            arrivals.append(arrival)
    if unknown:
        logger.warning("request fields ignored (with how many lines): %s", dict(unknown))
    return sorted(arrivals, key=lambda a: a.arrival_s)


class OutputLines:
    """Puts what a run yields together and writes one line for each request, once.

    Args:
        engine: runs the requests.
        arrivals: all of them; their outputs are deltas.
        files: where each line goes; see :func:`write_line`.
    """

    def __init__(self, engine: Engine, arrivals: Sequence[Arrival], files: Sequence[TextIO]) -> None:
        self._engine = engine
        # lines of a request file may have one id, if all but one of them are wrong
        self._unwritten: dict[tuple[str, Exception | None], Arrival] = {(a.request_id, a.error): a for a in arrivals}
        self._files = files
        self._joiner = Joiner()
        self._lock = threading.Lock()

    def add(self, piece: RequestOutput) -> RequestOutput | None:
        """Take an output; writes and returns the whole one if it was its request's last.

        Raises:
            RequestError: a file cannot be written.
        """
        with self._lock:
            whole = self._joiner.add(piece)
            if whole is not None:
                for file in self._files:
                    _write_or_say_why(file, whole)
                if self._unwritten.pop((whole.request_id, whole.error), None) is None:
                    self._unwritten.pop((whole.request_id, None), None)
            return whole

    def fail(self, message: str) -> None:
        """Write a line for each request that has none, with a RankFailedError and the tokens that it has got.

        For another thread than the one that steps the engine, which is stuck; the process must end after it. If the
        stuck thread moves after all, it writes nothing more, and is held in :meth:`add` or :meth:`close`.
        """
        self._lock.acquire()  # for good
        dead = self._engine.fail(RankFailedError(message))
        ended = {output.request_id: output for output in dead.outputs}
        wholes = []
        for arrival in self._unwritten.values():
            output = ended.get(arrival.request_id) if arrival.error is None else None
            # the times of an unserved request do not show in its line
            wholes.append(self._joiner.add(output or unserved(arrival, 0.0, error=dead)))
        for file in self._files:  # the first in full, should the second not take it
            for whole in filter(None, wholes):
                _write_or_say_why(file, whole)

    def close(self) -> None:
        """Return when no line is being written; never after :meth:`fail`."""
        with self._lock:
            pass


def _write_or_say_why(file: TextIO, whole: RequestOutput) -> None:
    with full_disk_reported(getattr(file, "name", "stdout")):
        write_line(file, whole)


@contextmanager
def full_disk_reported(path: str | Path) -> Iterator[None]:
    """Within, a file that cannot be written is a RequestError with its path."""
    try:
        yield
    except BrokenPipeError:  # whoever read stdout has gone: typer ends the process without a word
        raise
    except OSError as error:
        raise RequestError(f"output file {path}: {error.strerror}; what was written before is kept") from error


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """Open an output file without changing it yet, so that one that cannot be written is found before the run.

    Each line goes to the file as it is written.

    Raises:
        ConfigError: it cannot be opened.
    """
    try:
        file = path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"output file {path}: {error.strerror}") from error
    try:
        yield file
    finally:
        with suppress(OSError):  # every line was flushed when it was written, and an error reported
            file.close()


def emptied(file: TextIO) -> TextIO:
    """Drop what an earlier run left in a file of :func:`opened`; a device is left alone."""
    if Path(file.name).is_file():
        file.truncate(0)
    return file


def output_line(output: RequestOutput) -> dict[str, Any]:
    """The output line of a finished request; times in seconds, null where there is none.

    With ``n`` completions ``text`` and the like are those of the first, and ``outputs`` has all of them.

    ``ttft_parts_s`` says where the time to the first token went, ``held_up_by`` which other requests took most of it;
    ``met_slo`` is null without an objective, and false for a request that was refused, aborted or relegated.
    """
    completion, metrics = output.outputs[0], output.metrics
    explanation = metrics.explanation
    line: dict[str, Any] = {
        "id": output.request_id,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_output_tokens": sum(len(one.token_ids) for one in output.outputs),
        "queue_s": metrics.queue_time,
        "ttft_s": metrics.ttft,
        "ttft_parts_s": None if explanation is None else explanation.parts_s,
        "held_up_by": None if explanation is None else explanation.others,
        "tpot_s": metrics.tpot,
        "e2e_s": metrics.e2e,
        "met_slo": metrics.met_slo,
        "is_relegated": metrics.is_relegated,
        "error": _error_object(output.error),
    }
    if completion.logprobs is not None:
        line["logprobs"] = [
            {str(i): _finite_or_none(entry.logprob) for i, entry in step.items()} for step in completion.logprobs
        ]
    if len(output.outputs) > 1:
        names = ("index", "text", "token_ids", "finish_reason", "stop_reason")
        line["outputs"] = [{name: getattr(one, name) for name in names} for one in output.outputs]
    return line


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def write_line(file: TextIO, output: RequestOutput) -> None:
    """Append a finished request to a stream and flush it.

    Args:
        file: its ``errors`` must be ``backslashreplace``, by which a lone surrogate becomes the escape that JSON has.
        output: whole, not a delta.
    """
    is_utf8 = (file.encoding or "").lower().replace("-", "") == "utf8"
    file.write(json.dumps(output_line(output), ensure_ascii=not is_utf8, allow_nan=False) + "\n")
    file.flush()


def _error_object(error: Exception | None) -> dict[str, str] | None:
    return None if error is None else {"type": type(error).__name__, "message": str(error)}


def _read_line(line: bytes, number: int, defaults: Mapping[str, Any], unknown: Counter[str]) -> Arrival:
    """One arrival; whatever is wrong with the line ends up in its ``error``."""
    request_id = f"line-{number}"
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        return _wrong(request_id, f"line {number} is not JSON: {error}")
    if not isinstance(fields, dict):
        return _wrong(request_id, f"line {number} is {type(fields).__name__}; accepted: a JSON object")
    given_id = fields.get("id", fields.get("request_id"))
    if given_id is not None:
        if isinstance(given_id, bool) or not isinstance(given_id, (str, int)) or given_id == "":
            return _wrong(request_id, f"line {number}: id={given_id!r:.80}; accepted: a string or an integer")
        request_id = str(given_id)
    try:
        return _arrival(request_id, fields, defaults, unknown)
    except MedhaError as error:
        return Arrival(request_id, "", error=error)


def _arrival(request_id: str, fields: dict[str, Any], defaults: Mapping[str, Any], unknown: Counter[str]) -> Arrival:
    prompt = {name: fields[name] for name in _PROMPT_FIELDS if fields.get(name) is not None}
    sampling = dict(defaults)
    for name, value in fields.items():
        if (name in _SAMPLING_FIELDS and value is not None) or name in UNSUPPORTED_FIELDS:
            sampling[name] = value
        elif name not in (*_PROMPT_FIELDS, *_OTHER_FIELDS, *_SAMPLING_FIELDS):
            unknown[name] += 1
    return Arrival(
        request_id,
        prompt,
        SamplingParams.from_dict(sampling),
        _slo(fields.get("slo")),
        _seconds(fields.get("arrival_s")),
        check_priority(fields["priority"]) if fields.get("priority") is not None else "normal",
    )


def _slo(value: Any) -> SLO | None:
    if value is None:
        return None
    if not isinstance(value, dict) or set(value) - {"ttft_s", "tpot_s"}:
        raise ValidationError(
            f"slo={value!r:.80}; accepted: an object with ttft_s and tpot_s", param="slo", value=value
        )
    return SLO(**value)


def _seconds(value: Any) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
        raise ValidationError(
            f"arrival_s={value!r:.80}; accepted: seconds, finite and not negative", param="arrival_s", value=value
        )
    return float(value)


def _wrong(request_id: str, message: str) -> Arrival:
    return Arrival(request_id, "", error=ValidationError(message))
