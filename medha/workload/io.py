"""Reads traces of any format into columns, and writes our own."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import logging
import sys
import zlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from medha.cli.replacing import replacing
from medha.errors import ConfigError
from medha.workload.formats import CHARS_PER_TOKEN, FORMATS, Fields, Format, RowError, medha_line, recognised
from medha.workload.trace import COLUMNS, NORMAL, Row, Trace, TraceFormatError

logger = logging.getLogger("medha")

MAX_LINE_BYTES = 1 << 27  # A longer line is taken for a damaged file; a 10M-token prompt as ids is 70 MB
_HEAD_BYTES = 1 << 16

STDIO = Path("-")
"""What a user calls standard input, and output."""

OnFault = Callable[[TraceFormatError], None]
Placed = tuple[str, Row | RowError | None]
"""The place of a line or an object in a file, and what it is: a request, something wrong, or None to be dropped."""


class Reading(NamedTuple):
    """What a file held."""

    trace: Trace  # sorted by arrival
    format: str
    has_arrivals: bool  # without, all times are 0
    num_dropped: int  # requests that the format tells to leave out (failed, or without both texts)
    num_faults: int  # wrong requests that were handed to ``on_fault`` and left out


def read_trace(path: Path | str, format: str | None = None, *, on_fault: OnFault | None = None) -> Reading:
    """Read a trace file into columns; some 40 bytes of memory a request, more with ids and prefix hashes.

    Arrivals out of order are sorted (stably) with a warning. A JSON array (ShareGPT), standard input (``-``) and pipes
    are read whole.

    ``format`` is a name of :data:`medha.workload.formats.FORMATS`, by default seen from the content. ``on_fault`` is
    called for each wrong request, which is then left out; by default the first is raised.

    Raises:
        ConfigError: the file cannot be read, or an argument is not accepted.
        TraceFormatError: a request is wrong, none is right, or the file as a whole is damaged.
    """
    path = Path(path)
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format={format!r}; accepted: {', '.join(FORMATS)}")
    with open_bytes(path) as file:
        kind = detect(path, file) if format is None else FORMATS[format]
        return _reading(path, kind, _requests(path, file, kind), on_fault)


def _reading(path: Path, kind: Format, requests: Iterator[Placed], on_fault: OnFault | None) -> Reading:
    columns: list[Any] = [array("d"), array("q"), array("q"), [], [], array("d"), array("d"), array("b"), []]
    missing = (np.nan, 0, 0, None, None, np.nan, np.nan, -1, "")
    columns = columns if kind.name in ("medha", "mooncake") else columns[:3]  # the others have no more
    places: dict[str, str] = {}
    fault, num_dropped, num_faults = None, 0, 0
    for place, row in requests:
        if isinstance(row, Row) and kind.name == "medha":
            row = row if row.request_id is not None else row._replace(request_id=place.replace(" ", "-"))
            if (earlier := places.setdefault(str(row.request_id), place)) != place:
                row = RowError(f"id={row.request_id!r:.80} is that of {earlier}; accepted: different ids")
        if row is None:
            num_dropped += 1
        elif isinstance(row, RowError):
            fault = TraceFormatError(path, str(row), place)
            if on_fault is None:
                raise fault from row
            num_faults += 1
            on_fault(fault)
        else:
            for column, value, instead in zip(columns, row, missing, strict=False):
                column.append(instead if value is None else value)
    if not columns[0]:
        counts = f"{num_dropped} dropped, {num_faults} wrong"
        raise TraceFormatError(path, f"has no requests ({counts}); accepted: at least 1") from fault
    trace, has_arrivals = _trace(path, kind, columns)
    return Reading(trace, kind.name, has_arrivals, num_dropped, num_faults)


def _trace(path: Path, kind: Format, columns: list[Any]) -> tuple[Trace, bool]:
    """The requests in order of arrival, and whether the file has arrival times."""
    # a string type of its own, as arrays that share one can share their memory
    dtypes: dict[str, Any] = {name: np.dtypes.StringDType() for name in ("request_ids", "tenant")}
    found: dict[str, Any] = {}
    for name, column in zip(COLUMNS, columns, strict=False):
        if isinstance(column, array):
            found[name] = np.frombuffer(column, column.typecode)
        elif any(value is not None and value != "" for value in column):
            found[name] = np.fromiter(column, dtypes.get(name, object), len(column))
    times, priority = found["arrival_s"], found.get("priority", np.array(-1))
    has_arrivals = not np.isnan(times).all()
    times[np.isnan(times)] = 0.0
    if (priority < 0).all():
        found.pop("priority", None)
    priority[priority < 0] = NORMAL
    late = times[1:] < times[:-1]
    if late.any():
        message = "%s: arrivals are not in order, first at request %d; the trace is sorted"
        logger.warning(message, path, int(np.argmax(late)) + 2)
        order = np.argsort(times, kind="stable")
        found = {name: column[order] for name, column in found.items()}
    if kind.name == "azure":  # since 1970 so far
        found["arrival_s"] = np.round(found["arrival_s"] - found["arrival_s"][0], 6)
    for column in found.values():
        column.flags.writeable = False  # so that the trace takes it without a copy
    return Trace(**found), has_arrivals


def _requests(path: Path, file: BinaryIO, kind: Format) -> Iterator[Placed]:
    """What each line or object of a file is."""
    if kind.name == "sharegpt":
        logger.warning("%s: tokens are an estimate, characters / %g", path, CHARS_PER_TOKEN)
    for place, fields_of in _csv_rows(path, file, kind.needs) if kind.is_csv else _json_objects(path, file):
        try:
            yield place, kind.parse(fields_of())
        except RowError as fault:
            yield place, fault


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """A file to read, decompressed, as often as one seeks its start; ConfigError if it cannot be read, TraceFormatError
    if its gzip data are damaged."""
    try:
        is_file = path != STDIO
        with open(path if is_file else 0, "rb", closefd=is_file) as given:
            file = given if is_file and given.seekable() else io.BytesIO(given.read())
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            yield cast(BinaryIO, gzip.GzipFile(fileobj=file) if packed else file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceFormatError(path, f"the gzip data are damaged or end early: {error}") from error
    except OSError as error:
        raise ConfigError(f"trace file {path}: {error.strerror or error}") from error


def _head(file: BinaryIO) -> str:
    """How a file begins."""
    file.seek(0)
    return file.read(_HEAD_BYTES).decode("utf-8-sig", errors="replace").lstrip()


def detect(path: Path, file: BinaryIO) -> Format:
    """The format of a file, from its first line that is not blank; TraceFormatError if there is none."""
    if not (head := _head(file)):
        raise TraceFormatError(path, "is empty; accepted: a trace with requests")
    kind = recognised(head)
    if kind is None:
        known = "; ".join(f"{f.name}: {', '.join(f.needs)}" for f in FORMATS.values())
        first = head.split("\n", 1)[0]
        what = f"{first[:80]!r} is of no known format"
        raise TraceFormatError(path, f"{what}; accepted, with their columns or keys: {known}", "line 1")
    return kind


def _lines(path: Path, file: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """The lines that are not blank, with their places, without their ends."""
    file.seek(0)
    for number, data in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), start=1):
        if len(data) > MAX_LINE_BYTES:
            raise TraceFormatError(path, f"more than {MAX_LINE_BYTES} bytes; accepted: shorter lines", f"line {number}")
        if stripped := data.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").strip():
            yield f"line {number}", stripped


def _start(data: bytes) -> str:
    return repr(data[:40].decode(errors="replace"))


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{_start(data)} is not JSON ({error}); accepted: a JSON object") from None


def _object(value: Any) -> Fields:
    if not isinstance(value, dict):
        raise RowError(f"{value!r:.40}; accepted: a JSON object")
    return value


def _json_objects(path: Path, file: BinaryIO) -> Iterator[tuple[str, Callable[[], Fields]]]:
    """What gives the object of each line, or of each entry of an array."""
    if not _head(file).startswith("["):
        yield from ((place, lambda data=data: _object(_json(data))) for place, data in _lines(path, file))
        return
    file.seek(0)
    try:
        values = _json(file.read())
    except RowError as error:
        raise TraceFormatError(path, str(error)) from error
    yield from ((f"entry {i}", lambda value=value: _object(value)) for i, value in enumerate(values, 1))


def _csv_rows(path: Path, file: BinaryIO, needs: tuple[str, ...]) -> Iterator[tuple[str, Callable[[], Fields]]]:
    """What gives the cells of each line below a CSV header by column; the header has those of ``needs``, once each."""
    rows = _lines(path, file)
    place, first = next(rows, ("line 1", b""))
    try:
        header = [name.strip() for name in _cells(first)]
    except RowError as error:
        raise TraceFormatError(path, f"{error}; accepted: a header with {', '.join(needs)}", place) from error
    missing = [name for name in needs if name not in header]
    if missing or len(set(header)) < len(header):
        problem = f"lacks {', '.join(missing)}" if missing else "has a column twice"
        what = f"header {header!r:.160} {problem}"
        raise TraceFormatError(path, f"{what}; accepted: {', '.join(needs)}, once each", place)

    def fields_of(data: bytes) -> Fields:
        cells = _cells(data)
        if len(cells) != len(header):
            raise RowError(f"{_start(data)} has {len(cells)} fields; accepted: {len(header)}, as the header")
        return dict(zip(header, cells, strict=True))

    yield from ((place, lambda data=data: fields_of(data)) for place, data in rows)


def _cells(data: bytes) -> list[str]:
    try:
        text = data.decode()
        return text.split(",") if '"' not in text else next(csv.reader([text], strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        accepted = "UTF-8, fields split by commas, quotes closed"
        raise RowError(f"{_start(data)} is not CSV ({error}); accepted: {accepted}") from None


def write_trace(path: Path | str, trace: Trace) -> None:
    """Write a trace in medha's own format, gzip if the name ends in ``.gz``, for ``-`` to standard output; the same
    trace gives the same bytes.

    ConfigError where the trace is empty, which readers refuse, or the file cannot be written.
    """
    path = Path(path)
    if not len(trace):
        raise ConfigError(f"{path}: the trace has no requests; accepted: at least 1")
    lines = (medha_line(row) + "\n" for row in trace.rows())
    if path == STDIO:
        sys.stdout.writelines(lines)
        return
    with replacing(path, "trace file") as part, part.open("wb") as raw:
        packed = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if path.suffix == ".gz" else raw
        with io.TextIOWrapper(packed, encoding="utf-8", newline="\n") as file:
            file.writelines(lines)
