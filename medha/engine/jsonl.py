"""Request files in, output files out: one JSON object a line.

A request line holds ``id`` (optional), one of ``prompt``, ``prompt_token_ids``, ``messages`` (and with it ``tools``,
``chat_template_kwargs``, ``add_generation_prompt``), any field of :class:`medha.SamplingParams`, ``arrival_s``, ``slo``
{``ttft_s``, ``tpot_s``}, ``priority``, ``tenant`` and ``cache_salt``; or, as OpenAI's batch files have it,
``custom_id`` and all else in a ``body``. A line that is wrong becomes an arrival with an error, so that the rest still
run. Fields nobody knows are ignored and named once in the log; known ones that medha does not implement are errors.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import logging
import math
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from medha.engine.arrivals import Arrival, Joiner
from medha.errors import ConfigError, MedhaError, RankFailedError, RequestError, ValidationError, not_accepted
from medha.models.folder import parse_json_object
from medha.outputs import CompletionOutput, RequestOutput
from medha.params import (
    CHAT_OPTIONS,
    FIELD_ALIASES,
    LOGPROBS,
    MOST_COMPLETIONS,
    PROMPT_FORMS,
    PROMPT_OPTIONS,
    SLO,
    UNSUPPORTED_FIELDS,
    SamplingParams,
    check_priority,
    check_seconds,
    prompt_form,
)

if TYPE_CHECKING:
    from medha.engine.engine import Engine

logger = logging.getLogger("medha")

STDIN = Path("-")
"""What a user calls standard input."""

_ID_FIELDS = ("id", "request_id", "custom_id")
_OTHER_FIELDS = {*PROMPT_FORMS, *CHAT_OPTIONS, *_ID_FIELDS, "arrival_s", "slo", "priority", "tenant", *PROMPT_OPTIONS}
_URLS = ("/v1/chat/completions", "/v1/completions")
_SAMPLING_FIELDS = {*FIELD_ALIASES, *(f.name for f in dataclasses.fields(SamplingParams))} - {"output_kind"}
KNOWN_FIELDS = {*_OTHER_FIELDS, *_SAMPLING_FIELDS, *UNSUPPORTED_FIELDS}


def read_requests(path: Path, defaults: Mapping[str, Any], *, seed: int = 0) -> list[Arrival]:
    """Arrivals of a request file in order of ``arrival_s`` (then of the file), wrong lines with ``error`` set.

    Args:
        path: JSON lines; blank lines are skipped. ``-`` is standard input.
        defaults: sampling fields for lines that do not give them.
        seed: of the run. A line that brings none draws by this and by its place in the file, so that its tokens do
            not depend on which other lines are run.

    Raises:
        ConfigError: the file cannot be read, or no line of it can be run.
    """
    arrivals: dict[int, Arrival] = {}  # by number of the line
    unknown: Counter[str] = Counter()
    seen: set[str] = set()
    for number, line in enumerate(read_input(path, "request file").split(b"\n"), start=1):
        if line.strip():
            name = f"line-{number}"
            while name in seen:  # as what another line is called
                name += "-"
            arrival = _read_line(line, number, name, defaults, unknown, seed)
            if arrival.request_id in seen:
                error = ValidationError(f"id {arrival.request_id!r:.80} is in the file already")
                arrival = Arrival(name, "", error=error, custom_id=arrival.custom_id)
            seen.add(arrival.request_id)
            arrivals[number] = arrival
    wrong = [number for number, arrival in arrivals.items() if arrival.error is not None]
    if wrong:
        what = f"{len(wrong)} of {len(arrivals)} requests in {path} cannot be run"
        first = f"line {wrong[0]}: {arrivals[wrong[0]].error}"
        if len(wrong) == len(arrivals):
            raise ConfigError(f"{what}; {first}")
        logger.warning("%s; the first is %s", what, first)
    if unknown:
        logger.warning("request fields ignored (with how many lines): %s", dict(unknown))
    return sorted(arrivals.values(), key=lambda a: a.arrival_s)


def read_input(path: Path, what: str) -> bytes:
    """What a user gives to read: a file, or with ``-`` standard input; a byte order mark is left out."""
    try:
        data = sys.stdin.buffer.read() if path == STDIN else path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{what} {path}: {error.strerror}") from error
    return data.removeprefix(codecs.BOM_UTF8)


@contextmanager
def unwritable_reported(path: str | Path) -> Iterator[None]:
    """Within, a file that cannot be written is a RequestError with its path."""
    try:
        yield
    except OSError as error:
        name = path if path == "stdout" else f"output file {path}"
        raise RequestError(f"{name}: {error.strerror}; what was written before is kept") from error


class OutputLines:
    """Puts what a run of ``arrivals`` yields, as deltas, together and writes one line for each to all ``files``."""

    def __init__(self, engine: Engine, arrivals: Sequence[Arrival], files: Sequence[TextIO]) -> None:
        self._engine = engine
        self._unwritten = {arrival.request_id: arrival for arrival in arrivals}
        self._files = files
        self._joiner = Joiner()
        self._lock = threading.Lock()

    def add(self, piece: RequestOutput) -> RequestOutput | None:
        """Take an output; writes and returns the whole one if it was its request's last.

        A file that cannot be written is a RequestError.
        """
        with self._lock:
            whole = self._joiner.add(piece)
            if whole is not None:
                self._write([whole])
                del self._unwritten[whole.request_id]
            return whole

    def _write(self, wholes: Sequence[RequestOutput]) -> None:
        for file in self._files:  # the first in full, should the second not take it
            for whole in wholes:
                write_line(file, whole, custom_id=self._unwritten[whole.request_id].custom_id)

    def fail(self, message: str) -> None:
        """Write a line for each request that has none, with a RankFailedError and the tokens that it has got.

        For another thread than the one that steps the engine, which is stuck; the process must end after it. A stuck
        thread that moves after all writes nothing more, and is held in :meth:`add` or :meth:`close`.
        """
        self._lock.acquire()  # for good
        dead = self._engine.fail(RankFailedError(message))
        ended = {output.request_id: output for output in dead.outputs}
        # the times of an unserved request do not show in its line
        last = [ended.get(name) or arrival.unserved(0.0, error=dead) for name, arrival in self._unwritten.items()]
        self._write([whole for output in last if (whole := self._joiner.add(output)) is not None])

    def close(self) -> None:
        """Return when no line is being written; never after :meth:`fail`."""
        with self._lock:
            pass


def output_line(output: RequestOutput, *, custom_id: str | None = None) -> dict[str, Any]:
    """The output line of a finished request; times in seconds, null where there is none.

    With ``n`` completions ``text`` and the like are those of the first, and ``outputs`` has all of them.
    ``ttft_parts_s`` says where the time to the first token went, ``held_up_by`` which other requests took most of it;
    ``decode_wait_s``, where there was any, what the request then waited for a decode instance.
    """
    completion, metrics, error = output.outputs[0], output.metrics, output.error
    explanation = metrics.explanation
    line: dict[str, Any] = {
        "id": output.request_id,
        **({} if custom_id is None else {"custom_id": custom_id}),
        **_told(completion),
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
        "error": None if error is None else {"type": type(error).__name__, "message": str(error)},
    }
    if explanation is not None and explanation.decode_wait_s:
        line["decode_wait_s"] = explanation.decode_wait_s
    line |= _logprobs(completion)
    if len(output.outputs) > 1:
        line["outputs"] = [{"index": one.index} | _told(one) | _logprobs(one) for one in output.outputs]
    return line


def _told(completion: CompletionOutput) -> dict[str, Any]:
    """What a line says of each completion."""
    return {name: getattr(completion, name) for name in ("text", "token_ids", "finish_reason", "stop_reason")}


def _logprobs(completion: CompletionOutput) -> dict[str, Any]:
    """The logprob of each token by its id, null for minus infinity; nothing where none were asked for."""
    if completion.logprobs is None:
        return {}
    values = [{str(i): entry.logprob for i, entry in step.items()} for step in completion.logprobs]
    return {"logprobs": [{i: v if math.isfinite(v) else None for i, v in step.items()} for step in values]}


def write_line(file: TextIO, output: RequestOutput, *, custom_id: str | None = None) -> None:
    """Append a finished request to a stream whose ``errors`` are ``backslashreplace``: so a lone surrogate becomes the
    escape that JSON has. RequestError where it cannot be written."""
    is_utf8 = (file.encoding or "").lower().replace("-", "") == "utf8"
    line = output_line(output, custom_id=custom_id)
    with unwritable_reported(getattr(file, "name", "stdout")):
        file.write(json.dumps(line, ensure_ascii=not is_utf8, allow_nan=False) + "\n")
        file.flush()


def _read_line(
    line: bytes, number: int, name: str, defaults: Mapping[str, Any], unknown: Counter[str], run_seed: int
) -> Arrival:
    """One arrival, called ``name`` unless the line says how; whatever is wrong with it ends up in its ``error``."""
    request_id, custom_id = name, None
    seed = (run_seed * 1_000_003 + number - 1) * MOST_COMPLETIONS  # each completion of a line has one of its own
    seed = (seed + 2**63) % 2**64 - 2**63  # as SamplingParams takes them
    try:
        fields = parse_json_object(line, "a request", error=ValidationError)
        ids = {name: fields[name] for name in _ID_FIELDS if fields.get(name) is not None}
        for name, value in ids.items():
            if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
                raise not_accepted(name, value, "a string or an integer")
        request_id = str(next(iter(ids.values()), request_id))
        custom_id = str(ids["custom_id"]) if "custom_id" in ids else None
        fields = _flat(fields)
        unknown.update(name for name in fields if name not in KNOWN_FIELDS)
        arrival = read_fields(request_id, fields, {"seed": seed, **defaults})
        arrival_s = check_seconds("arrival_s", 0.0 if fields.get("arrival_s") is None else fields["arrival_s"])
        if arrival_s < 0:
            raise not_accepted("arrival_s", fields["arrival_s"], "seconds, not negative")
        return dataclasses.replace(arrival, arrival_s=arrival_s, custom_id=custom_id)
    except MedhaError as error:
        return Arrival(request_id, "", error=error, custom_id=custom_id)


def read_fields(request_id: str, fields: Mapping[str, Any], defaults: Mapping[str, Any]) -> Arrival:
    """A request of the fields of a JSON object; raises ValidationError or UnsupportedFeatureError.

    ``defaults`` are sampling fields that it need not give. What nobody knows is left out, as is what is None.
    """
    asked = {name: fields[name] for name in UNSUPPORTED_FIELDS if name in fields}
    asked |= {
        name: its for name in _SAMPLING_FIELDS if (its := fields.get(name)) is not None and (name, its) != ("seed", -1)
    }
    form, prompt, options = prompt_form({name: fields.get(name) for name in (*PROMPT_FORMS, *CHAT_OPTIONS)})
    params = SamplingParams.from_dict({**defaults, **asked})
    slo = None if fields.get("slo") is None else SLO.from_dict(fields["slo"])
    priority = check_priority("normal" if fields.get("priority") is None else fields["priority"])
    tenant = "" if fields.get("tenant") is None else fields["tenant"]
    options |= {name: fields[name] for name in PROMPT_OPTIONS if fields.get(name) is not None}
    return Arrival(request_id, {form: prompt} | options, params, slo, priority=priority, tenant=tenant)


def count_logprobs(body: dict[str, Any]) -> dict[str, Any]:
    """The fields of a chat, in which OpenAI has ``logprobs`` say whether, and ``top_logprobs`` how many."""
    asks, top = body.get("logprobs"), body.get("top_logprobs") or 0
    if top and asks is not True:
        raise not_accepted("top_logprobs", top, "with logprobs true")
    if not LOGPROBS.holds(top):
        raise not_accepted("top_logprobs", top, LOGPROBS.accepted)
    return {**body, "logprobs": top if asks else None, "top_logprobs": None} if isinstance(asks, bool) else body


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a line; those of a ``body``, as OpenAI's batch format has it, as the line's own."""
    if "body" not in fields:
        return fields
    line = {name: value for name, value in fields.items() if name not in ("body", "method", "url")}
    body, url = fields["body"], fields.get("url")
    if url is not None and url not in _URLS:
        raise not_accepted("url", url, ", ".join(_URLS))
    if not isinstance(body, dict):
        raise not_accepted("body", body, "a JSON object")
    left_out = ("model", "stream", "stream_options", "top_logprobs")
    return {**{name: value for name, value in count_logprobs(body).items() if name not in left_out}, **line}
