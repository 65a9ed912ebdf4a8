"""Reads traces of either format into columns, and writes our own."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import logging
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from medha.errors import ConfigError
from medha.workload.formats import FORMATS, Fields, RowError, medha_line
from medha.workload.trace import COLUMNS, NORMAL, Trace, TraceFormatError

logger = logging.getLogger("medha")

MAX_LINE_BYTES = 1 << 27  # A longer line is taken for a damaged file; a 10M-token prompt as ids is 70 MB


class Reading(NamedTuple):
    """What a file held."""

    trace: Trace  # sorted by arrival
    format: str
    has_arrivals: bool  # without, all times are 0


def read_trace(path: Path | str) -> Reading:
    """Read a trace file into columns; some 40 bytes of memory a request, more with ids and prefix hashes.

    The first line tells the format. Arrivals out of order are sorted (stably) with a warning.

    Raises:
        ConfigError: the file cannot be read.
        TraceFormatError: a request is wrong, there is none, or the file as a whole is damaged.
    """
    path, name = Path(path), ""
    columns: list[Any] = [array("d"), array("q"), array("q"), [], [], array("d"), array("d"), array("b"), []]
    missing = (np.nan, 0, 0, None, None, np.nan, np.nan, -1, "")
    places: dict[str, str] = {}
    for place, data in _lines(path):
        try:
            fields = _object(data)
            name = name or ("mooncake" if "input_length" in fields else "medha")
            row = FORMATS[name](fields)
            if name == "medha":
                row = row if row.request_id is not None else row._replace(request_id=place.replace(" ", "-"))
                if (earlier := places.setdefault(str(row.request_id), place)) != place:
                    raise RowError(f"id={row.request_id!r:.80} is that of {earlier}; accepted: different ids")
        except RowError as fault:
            raise TraceFormatError(path, str(fault), place) from fault
        for column, value, instead in zip(columns, row, missing, strict=True):
            column.append(instead if value is None else value)
    if not columns[0]:
        raise TraceFormatError(path, "has no requests; accepted: at least 1")
    trace, has_arrivals = _trace(path, columns)
    return Reading(trace, name, has_arrivals)


def _trace(path: Path, columns: list[Any]) -> tuple[Trace, bool]:
    """The requests in order of arrival, and whether the file has arrival times."""
    # a string type of its own, as arrays that share one can share their memory
    text = np.dtypes.StringDType
    dtypes: tuple[Any, ...] = (float, np.int64, np.int64, text(), object, float, float, np.int8, text())
    found = {
        name: np.frombuffer(column, dtype) if isinstance(column, array) else np.fromiter(column, dtype, len(column))
        for name, column, dtype in zip(COLUMNS, columns, dtypes, strict=False)
        if not isinstance(column, list) or any(value is not None and value != "" for value in column)
    }
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
    for column in found.values():
        column.flags.writeable = False  # so that the trace takes it without a copy
    return Trace(**found), has_arrivals


@contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """A file to read, decompressed; ConfigError if it cannot be read, TraceFormatError if its gzip data are damaged."""
    try:
        with path.open("rb") as file:
            packed = file.peek(2)[:2] == b"\x1f\x8b"
            yield cast(BinaryIO, gzip.GzipFile(fileobj=file) if packed else file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceFormatError(path, f"the gzip data are damaged or end early: {error}") from error
    except OSError as error:
        raise ConfigError(f"trace file {path}: {error.strerror or error}") from error


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines that are not blank, with their places, without their ends."""
    with open_bytes(path) as file:
        for number in count(1):
            if not (data := file.readline(MAX_LINE_BYTES + 1)):
                return
            if len(data) > MAX_LINE_BYTES:
                raise TraceFormatError(
                    path, f"more than {MAX_LINE_BYTES} bytes; accepted: shorter lines", f"line {number}"
                )
            if data := data.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").strip():
                yield f"line {number}", data


def _object(data: bytes) -> Fields:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        start = repr(data[:40].decode(errors="replace"))
        raise RowError(f"{start} is not JSON ({error}); accepted: a JSON object") from None
    if not isinstance(value, dict):
        raise RowError(f"{value!r:.40}; accepted: a JSON object")
    return value


def write_trace(path: Path | str, trace: Trace) -> None:
    """Write a trace in medha's own format, gzip if the name ends in ``.gz``; the same trace gives the same bytes.

    ConfigError where the trace is empty, which readers refuse, or the file cannot be written.
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
