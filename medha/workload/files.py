"""Trace files as numbered lines or objects, in flat memory; gzip is seen by its first bytes, whatever the name.

What a line means is in :mod:`medha.workload.formats`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from medha.errors import ConfigError
from medha.workload.formats import FORMATS, Fields, Format, RowError, recognised
from medha.workload.trace import TraceFormatError

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
        known = "; ".join(f"{f.name}: {f.header or ', '.join(f.needs)}" for f in FORMATS.values())
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
