"""Reads traces: whole into columns, or request by request in flat memory."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medha.errors import ConfigError
from medha.workload.files import csv_rows, detect, json_lines, json_objects
from medha.workload.formats import TIME_UNITS, Format, RowError, characters_over, format_named
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


def iter_requests(
    path: Path | str,
    format: str | None = None,
    *,
    time_unit: str | None = None,
    count_tokens: Callable[[str], int] | None = None,
) -> Iterator[Row]:
    """The requests of a file in its order, in flat memory; arguments and errors as of :func:`read_trace`.

    Azure's times are relative to the first request of the file, so that they may be negative where it is not sorted.
    Ids are not compared.
    """
    path = Path(path)
    kind = detect(path) if format is None else format_named(format)
    for line, row in _numbered(path, kind, time_unit, count_tokens):
        if isinstance(row, RowError):
            raise TraceFormatError(path, line, str(row)) from row
        if row is not None:
            yield row


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
    if kind.header is not None:
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
