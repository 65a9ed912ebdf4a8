"""Reads traces of any format into columns, and writes our own."""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import re
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

import numpy as np
from numpy.typing import NDArray

from medha.errors import ConfigError
from medha.workload.formats import (
    FORMATS,
    TIME_UNITS,
    Fields,
    Format,
    RowError,
    characters_over,
    format_named,
    medha_line,
    recognised,
)
from medha.workload.trace import NORMAL, Row, Trace, TraceFormatError, repeats

logger = logging.getLogger("medha")

CHARS_PER_TOKEN = 4.0
"""An estimate for English text and vocabularies of 32K to 128K tokens."""

_BLOCK = 65_536

OnFault = Callable[[TraceFormatError], None]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a file held.

    Attributes:
        trace: its requests, sorted by arrival.
        format: the format's name.
        has_arrivals: whether the file has arrival times; without, all are 0.
        num_dropped: requests that the format tells to leave out (failed, or without both texts).
        num_faults: wrong requests that were handed to ``on_fault`` and left out.
        was_sorted: whether arrivals were in order.
    """

    trace: Trace
    format: str
    has_arrivals: bool
    num_dropped: int
    num_faults: int
    was_sorted: bool


def read_trace(
    path: Path | str,
    format: str | None = None,
    *,
    time_unit: str | None = None,
    count_tokens: Callable[[str], int] | None = None,
    on_fault: OnFault | None = None,
) -> Reading:
    """Read a trace file into columns; some 40 bytes of memory a request, more with ids and prefix hashes.

    Arrivals out of order are sorted (stably) with a warning.

    Args:
        path: plain or gzip.
        format: a name of :data:`medha.workload.formats.FORMATS`; by default seen from the content.
        time_unit: ``s``, ``ms`` or ``us`` instead of the format's own.
        count_tokens: tokens of a text, for ShareGPT; by default characters / CHARS_PER_TOKEN, with a warning.
        on_fault: called for each wrong request, which is then left out; by default the first is raised.

    Raises:
        ConfigError: the file cannot be read, or an argument is not accepted.
        TraceFormatError: a request is wrong, none is right, or the file as a whole is damaged.
    """
    path = Path(path)
    kind = detect(path) if format is None else format_named(format)
    columns = _Columns(path, kind)
    for line, row in _numbered(path, kind, time_unit, count_tokens):
        if isinstance(row, RowError):
            columns.fault(line, row, on_fault)
        elif row is None:
            columns.num_dropped += 1
        else:
            columns.add(line, row)
    return columns.reading(on_fault)


def _numbered(
    path: Path, kind: Format, time_unit: str | None, count_tokens: Callable[[str], int] | None
) -> Iterator[tuple[int, Row | RowError | None]]:
    """What each line or object of a file is: a request, something wrong, or None to be dropped."""
    if time_unit is not None and (kind.unit is None or time_unit not in TIME_UNITS):
        accepted = "none, the format has its own" if kind.unit is None else ", ".join(TIME_UNITS)
        raise ConfigError(f"time_unit={time_unit!r} for a {kind.name} file; accepted: {accepted}")
    if kind.name == "sharegpt" and count_tokens is None:
        logger.warning("%s: tokens are an estimate, characters / %g", path, CHARS_PER_TOKEN)
    parse = kind.parser(TIME_UNITS[time_unit or kind.unit or "s"], count_tokens or characters_over(CHARS_PER_TOKEN))
    if kind.is_csv:
        found = csv_rows(path, kind.needs)
    else:
        found = json_objects(path) if kind.name == "sharegpt" else json_lines(path)
    for line, fields in found:
        if isinstance(fields, RowError):
            yield line, fields
            continue
        try:
            yield line, parse(fields)
        except RowError as fault:
            yield line, fault


class _Columns:
    """Collects requests in arrays of 8 bytes a number."""

    def __init__(self, path: Path, kind: Format) -> None:
        self._path, self._kind = path, kind
        self._times, self._ttft, self._tpot = array("d"), array("d"), array("d")
        self._prompts, self._outputs, self._lines = array("q"), array("q"), array("q")
        self._priorities = array("b")
        self._ids: list[str] = []
        self._id_blocks: list[NDArray[Any]] = []
        self._hashes: list[array[int] | None] = []
        self._has_hashes = self._has_slo = self._has_priority = self._has_arrivals = False
        self.num_dropped = self.num_faults = 0

    def fault(self, line: int, fault: RowError, on_fault: OnFault | None) -> None:
        error = TraceFormatError(self._path, line, str(fault))
        if on_fault is None:
            raise error from fault
        self.num_faults += 1
        on_fault(error)

    def add(self, line: int, row: Row) -> None:
        self._has_arrivals |= row.arrival_s is not None
        self._times.append(row.arrival_s or 0.0)
        self._prompts.append(row.prompt_tokens)
        self._outputs.append(row.output_tokens)
        self._lines.append(line)
        if self._kind.name in ("medha", "mooncake"):
            self._hashes.append(row.prefix_hashes)
            self._has_hashes |= row.prefix_hashes is not None
        if self._kind.name == "medha":
            self._add_own(line, row)

    def _add_own(self, line: int, row: Row) -> None:
        """What only our own format has."""
        self._ids.append(f"line-{line}" if row.request_id is None else row.request_id)
        if len(self._ids) == _BLOCK:
            self._pack_ids()
        self._has_slo |= row.ttft_slo_s is not None or row.tpot_slo_s is not None
        self._ttft.append(np.nan if row.ttft_slo_s is None else row.ttft_slo_s)
        self._tpot.append(np.nan if row.tpot_slo_s is None else row.tpot_slo_s)
        self._has_priority |= row.priority is not None
        self._priorities.append(NORMAL if row.priority is None else row.priority)

    def _pack_ids(self) -> None:
        self._id_blocks.append(np.array(self._ids, dtype=np.dtypes.StringDType()))
        self._ids = []

    def reading(self, on_fault: OnFault | None) -> Reading:
        self._pack_ids()
        columns: dict[str, Any] = {
            "arrival_s": _frozen(self._times, np.float64),
            "prompt_tokens": _frozen(self._prompts, np.int64),
            "output_tokens": _frozen(self._outputs, np.int64),
        }
        if self._has_hashes:
            columns["prefix_hashes"] = np.fromiter(self._hashes, dtype=np.object_)
        if self._has_slo:
            columns |= {"ttft_slo_s": _frozen(self._ttft, np.float64), "tpot_slo_s": _frozen(self._tpot, np.float64)}
        if self._has_priority:
            columns["priority"] = _frozen(self._priorities, np.int8)
        if self._kind.name == "medha":
            columns["request_ids"] = ids = np.concatenate(self._id_blocks)
            if len(repeated := self._refuse_repeats(ids, on_fault)):
                columns = _taken(columns, np.delete(np.arange(len(ids)), repeated))
        return self._sorted(columns)

    def _refuse_repeats(self, ids: NDArray[Any], on_fault: OnFault | None) -> NDArray[np.intp]:
        later, earlier = repeats(ids)
        for row, other in zip(later.tolist(), earlier.tolist(), strict=True):
            reason = f"id={ids[row]!r:.80} is that of line {self._lines[other]}; accepted: different ids"
            self.fault(self._lines[row], RowError(reason), on_fault)
        return later

    def _sorted(self, columns: dict[str, Any]) -> Reading:
        times = columns["arrival_s"]
        if not len(times):
            counts = f"{self.num_dropped} dropped, {self.num_faults} wrong"
            raise TraceFormatError(self._path, None, f"has no requests ({counts}); accepted: at least 1")
        late = times[1:] < times[:-1]
        if late.any():
            message = "%s: arrivals are not in order, first at request %d; the trace is sorted"
            logger.warning(message, self._path, int(np.argmax(late)) + 2)
            columns = _taken(columns, np.argsort(times, kind="stable"))
        if self._kind.name == "azure":  # its times are relative to the first line, which may not be the earliest
            columns["arrival_s"] = columns["arrival_s"] - columns["arrival_s"][0]
        trace = Trace(**columns)
        return Reading(trace, self._kind.name, self._has_arrivals, self.num_dropped, self.num_faults, not late.any())


def _frozen(numbers: array[Any], dtype: type[np.generic]) -> NDArray[Any]:
    """The same memory, read-only, so that a trace takes it without a copy."""
    column = np.frombuffer(numbers, dtype=dtype)
    column.flags.writeable = False
    return column


def _taken(columns: dict[str, Any], rows: NDArray[np.intp]) -> dict[str, Any]:
    return {name: column[rows] for name, column in columns.items()}


MAX_LINE_BYTES = 1 << 27
"""A longer line, or object of a JSON array, is taken for a damaged file; a 10M-token prompt as ids is 70 MB."""
_HEAD_BYTES = 1 << 16
_GAP = re.compile(r"[\s,\[\]]*")


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """A file to read, decompressed.

    Raises:
        ConfigError: it cannot be opened or read.
        TraceFormatError: its gzip data are damaged or end early.
    """
    try:
        with path.open("rb") as file:
            packed = file.peek(2)[:2] == b"\x1f\x8b"
            yield cast(BinaryIO, gzip.GzipFile(fileobj=file) if packed else file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceFormatError(path, None, f"the gzip data are damaged or end early: {error}") from error
    except OSError as error:
        raise ConfigError(f"trace file {path}: {error.strerror or error}") from error


def detect(path: Path) -> Format:
    """The format of a file, from its first line that is not blank.

    Raises:
        ConfigError: the file cannot be read.
        TraceFormatError: it is empty, or no format is recognised.
    """
    with open_bytes(path) as file:
        head = file.read(_HEAD_BYTES).decode("utf-8-sig", errors="replace").lstrip()
    if not head:
        raise TraceFormatError(path, None, "is empty; accepted: a trace with requests")
    kind = recognised(head)
    if kind is None:
        known = "; ".join(f"{f.name}: {', '.join(f.needs)}" for f in FORMATS.values())
        first = head.split("\n", 1)[0]
        raise TraceFormatError(
            path, 1, f"{first[:80]!r} is of no known format; accepted, with their columns or keys: {known}"
        )
    return kind


def lines(path: Path) -> Iterator[tuple[int, str | RowError]]:
    """The lines that are not blank, numbered from 1, without their ends; a RowError for one that is not UTF-8.

    Raises:
        ConfigError, TraceFormatError: as of :func:`open_bytes`, and for a line that is too long.
    """
    with open_bytes(path) as file:
        number = 0
        while data := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(data) > MAX_LINE_BYTES:
                raise TraceFormatError(path, number, f"more than {MAX_LINE_BYTES} bytes; accepted: shorter lines")
            try:
                text = data.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                yield number, RowError(f"{data[:40]!r} is not UTF-8 ({error.reason}); accepted: UTF-8")
                continue
            if text:
                yield number, text


def json_lines(path: Path) -> Iterator[tuple[int, Fields | RowError]]:
    """One JSON object a line, or a RowError where there is something else."""
    for number, text in lines(path):
        yield number, text if isinstance(text, RowError) else _object(text)


def _object(text: str) -> Fields | RowError:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return RowError(f"{text[:40]!r} is not JSON ({error}); accepted: a JSON object")
    return value if isinstance(value, dict) else RowError(f"{text[:40]!r}; accepted: a JSON object")


def csv_rows(path: Path, needs: tuple[str, ...]) -> Iterator[tuple[int, Fields | RowError]]:
    """The rows below a CSV header by column, or a RowError for one that does not fit it; a row is one line.

    Raises:
        TraceFormatError: the header lacks a column of ``needs`` or has one twice.
    """
    rows = lines(path)
    number, first = next(rows, (1, RowError("there is no header line")))
    header = _cells(first)
    if isinstance(header, RowError):
        raise TraceFormatError(path, number, f"{header}; accepted: a header with {', '.join(needs)}")
    header = [name.strip() for name in header]
    missing = [name for name in needs if name not in header]
    if missing or len(set(header)) < len(header):
        wrong = f"lacks {', '.join(missing)}" if missing else "has a column twice"
        raise TraceFormatError(path, number, f"header {header!r:.160} {wrong}; accepted: {', '.join(needs)}, once each")
    for number, text in rows:
        cells = _cells(text)
        if not isinstance(cells, RowError) and len(cells) != len(header):
            cells = RowError(f"{str(text)[:40]!r} has {len(cells)} fields; accepted: {len(header)}, as the header")
        yield number, cells if isinstance(cells, RowError) else dict(zip(header, cells, strict=True))


def _cells(text: str | RowError) -> list[str] | RowError:
    if isinstance(text, RowError):
        return text
    if '"' not in text:
        return text.split(",")
    try:
        return next(csv.reader([text], strict=True))
    except csv.Error as error:
        return RowError(f"{text[:40]!r} is not CSV ({error}); accepted: fields split by commas, quotes closed")


def json_objects(path: Path, chunk_chars: int = 1 << 20) -> Iterator[tuple[int, Fields]]:
    """The objects of a JSON array, or of a row of objects, with the line that each begins on.

    Memory is that of the largest object and a few chunks.

    Raises:
        ConfigError: the file cannot be read.
        TraceFormatError: something else than an object, after which it is not known where the next one begins.
    """
    with open_bytes(path) as file:
        try:
            yield from _objects(path, io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n"), chunk_chars)
        except UnicodeDecodeError as error:
            raise TraceFormatError(path, None, f"is not UTF-8 ({error.reason}); accepted: UTF-8") from error


def _objects(path: Path, file: TextIO, chunk_chars: int) -> Iterator[tuple[int, Fields]]:
    decoder = json.JSONDecoder()
    buffer, start, line, at_end = "", 0, 1, False
    brackets = ""
    while True:
        gap = _GAP.match(buffer, start)
        assert gap is not None, "an empty gap matches"
        brackets = (brackets + re.sub(r"[\s,]", "", gap[0]))[:3]
        line += gap[0].count("\n")
        start = gap.end()
        if start < len(buffer):
            try:
                if buffer[start] != "{":
                    raise ValueError("no object begins here")
                value, end = decoder.raw_decode(buffer, start)
            except (ValueError, RecursionError) as error:
                is_cut = isinstance(error, json.JSONDecodeError) and not at_end
                if not is_cut or len(buffer) - start > MAX_LINE_BYTES:
                    shown, reason = buffer[start : start + 40], getattr(error, "msg", str(error))
                    message = f"{shown!r} is not JSON ({reason}); accepted: a JSON object"
                    raise TraceFormatError(path, line, message) from error
            else:
                yield line, value
                line += buffer.count("\n", start, end)
                start = end
                continue
        elif at_end:
            if brackets not in ("", "[]"):
                message = f"the brackets outside of objects are {brackets!r}; accepted: none, or one array"
                raise TraceFormatError(path, line, message)
            return
        more = file.read(max(chunk_chars, len(buffer) - start))  # as much again, so that a long object is tried seldom
        at_end = not more
        buffer, start = buffer[start:] + more, 0


def write_trace(path: Path | str, trace: Trace) -> None:
    """Write a trace in medha's own format; the same trace gives the same bytes.

    Args:
        path: gzip if it ends in ``.gz``.
        trace: with at least one request, as readers refuse an empty file.

    Raises:
        ConfigError: the trace is empty, or the file cannot be written.
    """
    path = Path(path)
    if not len(trace):
        raise ConfigError(f"{path}: the trace has no requests; accepted: at least 1")
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as raw:
            packed = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if path.suffix == ".gz" else raw
            with io.TextIOWrapper(packed, encoding="utf-8", newline="\n") as file:
                file.writelines(medha_line(row) + "\n" for row in trace.rows())
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"trace file {path} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            partial.unlink()
