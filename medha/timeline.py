"""What ran when: a record a batch on every rank, and a Chrome trace (opens in ui.perfetto.dev and chrome://tracing).

Times of records are of the machine's monotonic clock, which the processes of one machine share. Another node's lanes
are shifted by the difference of the wall clocks, so between nodes they are as exact as those agree.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import platform
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any, Literal

from medha.batch import Batch

logger = logging.getLogger("medha")

_RECORDS_KEPT = 1 << 16
_EVENTS_KEPT = 1 << 20
_EVENTS_A_PIECE = 1000

_Event = dict[str, Any]
_Lanes = dict[str, int]
"""The thread of each request."""


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """What one rank did for one batch; times in seconds of the monotonic clock.

    The waits are those since the batch before: of a rank's first batch they are the time without work.

    Attributes:
        num_tokens: of the batch.
        start_s, end_s: compute, from when the input was there to before the output was sent; the collectives of a
            tensor-parallel group are part of it.
        control_ready: the batch's message was here when the batch before ended.
        control_wait_s: waited for the batch's message.
        hidden_wait_s: waited for hidden states of the stage before.
        report_wait_s: waited for sampled tokens; on rank 0 for the end of the oldest batch in the pipeline.
        send_wait_s: waited for a free buffer to send the hidden states of the batch before.
        merge_wait_s: within the compute, waited for the other groups' parts of shared attention and merged them.
    """

    batch_id: int
    num_tokens: int
    start_s: float
    end_s: float
    control_ready: bool
    control_wait_s: float
    hidden_wait_s: float
    report_wait_s: float
    send_wait_s: float
    merge_wait_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds of compute."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class RankRecords:
    """The records of one rank in the order in which it ran them, and its place; ``group`` is the KV-parallel one."""

    rank: int
    stage: int
    tp_rank: int
    batches: tuple[BatchRecord, ...]
    group: int = 0


class Recorder:
    """Keeps the newest records of one rank.

    Args:
        clock: monotonic seconds.
        kept: how many records; older ones are dropped.

    Attributes:
        waits_for: what of other ranks this one waits for at present; None while it computes.
    """

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter, kept: int = _RECORDS_KEPT) -> None:
        self.control_ready = True
        self.waits_for: str | None = None
        self._clock = clock
        self._records: deque[BatchRecord] = deque(maxlen=kept)
        self._waits: dict[str, float] = defaultdict(float)
        self._start = 0.0

    @contextmanager
    def waiting(self, what: Literal["control", "hidden", "report", "send", "merge"]) -> Iterator[None]:
        """Count the time within as a wait, of the batch that ends next."""
        start, self.waits_for = self._clock(), what
        try:
            yield
        finally:
            self.waits_for = None
            self._waits[what] += self._clock() - start

    def begin(self) -> float:
        """Compute begins now; the last call before :meth:`end` counts. Returns the time."""
        self._start = self._clock()
        return self._start

    def end(self, batch: Batch) -> BatchRecord:
        """The compute of a batch ends now; returns its record."""
        waits = (self._waits[what] for what in ("control", "hidden", "report", "send", "merge"))
        times = (self._start, self._clock())
        record = BatchRecord(batch.batch_id, batch.num_tokens, *times, self.control_ready, *waits)
        self._records.append(record)
        self._waits.clear()
        return record

    def take(self) -> tuple[BatchRecord, ...]:
        """The records since the last call; they and the waits since are forgotten."""
        records = tuple(self._records)
        self._records.clear()
        self._waits.clear()
        return records


def encode_records(records: RankRecords) -> bytes:
    """A rank's records as JSON, with what tells its clock from that of another node."""
    return json.dumps(
        {
            "place": (records.rank, records.stage, records.tp_rank, records.group),
            "batches": [astuple(record) for record in records.batches],
            "node": platform.node(),
            "epoch_s": _epoch_s(),
        }
    ).encode()


def decode_records(data: bytes) -> RankRecords:
    """The inverse of :func:`encode_records`; times are of this node's clock."""
    sent = json.loads(data)
    shift = 0.0 if sent["node"] == platform.node() else sent["epoch_s"] - _epoch_s()
    names = [field.name for field in fields(BatchRecord)]
    batches = []
    for values in sent["batches"]:
        one = dict(zip(names, values, strict=True))
        one |= {"start_s": one["start_s"] + shift, "end_s": one["end_s"] + shift}
        batches.append(BatchRecord(**one))
    rank, stage, tp_rank, group = sent["place"]
    return RankRecords(rank, stage, tp_rank, tuple(batches), group)


class Timeline:
    """Collects one slice a batch and one a row of it, then writes them as Chrome Trace Event JSON.

    Process 0 is the stages (one thread a rank), process 1 the requests (one thread each). What is kept are the batches
    themselves, the newest of them; slices are made of them as they are written.

    Args:
        kept: how many slices and points of counters; older ones are dropped, with a warning when the trace is written.
    """

    def __init__(self, *, kept: int = _EVENTS_KEPT) -> None:
        self._kept = kept
        self._parts: deque[tuple[int, Callable[[_Lanes], Iterator[_Event]]]] = deque()  # each with how many it makes
        self._num_events = self._num_dropped = 0
        self._gather: Callable[[], Sequence[RankRecords]] | None = None
        self._zero_s = 0.0
        self._ranks: dict[int, list[RankRecords]] = defaultdict(list)

    def record(self, batch: Batch, start_s: float, end_s: float, request_id: Callable[[int], str]) -> None:
        """Add a batch that ran from ``start_s`` to ``end_s``; ``request_id`` names a slot."""
        names = tuple(request_id(row.slot) for row in batch.rows)
        self._keep(1 + len(names), partial(_batch_events, batch, start_s, end_s, names))

    def count_step(self, time_s: float, predicted_s: float, busy_s: float, *, budget_s: float) -> None:
        """Add a batch that is done to the counters: what was predicted of it, what it took, what it might take."""
        times = {"predicted": predicted_s * 1e3, "busy": busy_s * 1e3}
        budget = {"budget": budget_s * 1e3, "left": (budget_s - busy_s) * 1e3}
        self._keep(1, partial(_counter_events, "step time (ms)", time_s, times))
        self._keep(1, partial(_counter_events, "step budget (ms)", time_s, budget))

    def count_slack(self, time_s: float, slack_s: Mapping[str, float]) -> None:
        """Add to the counters for how many seconds requests could still wait and have their first token in time."""
        finite = {request_id: seconds for request_id, seconds in slack_s.items() if math.isfinite(seconds)}
        if finite:
            self._keep(1, partial(_counter_events, "slack (s)", time_s, finite))

    def gather_from(self, gather: Callable[[], Sequence[RankRecords]], *, zero_s: float) -> None:
        """Show the lanes of several ranks.

        Args:
            gather: returns their records since it was last called.
            zero_s: the time of their clock at which the times given to :meth:`record` are 0.
        """
        self._gather, self._zero_s = gather, zero_s

    def collect(self) -> None:
        """Take what the ranks have recorded so far; with a single rank there is nothing to take."""
        for records in self._gather() if self._gather is not None else ():
            self._ranks[records.rank].append(records)

    def close(self) -> None:
        """Take what the ranks have recorded; they go, so it is for the last time."""
        self.collect()
        self._gather = None

    def write(self, path: Path) -> None:
        """Write the trace; gzip when the name ends in ``.gz``. With several ranks that still run it asks them first."""
        self.collect()
        if self._num_dropped:
            logger.warning("%s holds the newest %d events; %d are left out", path, self._num_events, self._num_dropped)
        write_events(path, self._events())

    def _keep(self, num_events: int, make: Callable[[_Lanes], Iterator[_Event]]) -> None:
        self._parts.append((num_events, make))
        self._num_events += num_events
        while self._num_events > self._kept and len(self._parts) > 1:
            oldest = self._parts.popleft()[0]
            self._num_events -= oldest
            self._num_dropped += oldest

    def _events(self) -> Iterator[_Event]:
        yield name_event("process_name", 0, 0, "stages")
        if self._ranks:
            yield from _stage_events([_joined(parts) for _, parts in sorted(self._ranks.items())], self._zero_s)
        else:
            yield name_event("thread_name", 0, 0, "stage 0")
        yield name_event("process_name", 1, 0, "requests")
        lanes: _Lanes = {}
        for _, make in self._parts:
            yield from (event for event in make(lanes) if event["pid"] != 0 or not self._ranks)


def _batch_events(batch: Batch, start_s: float, end_s: float, names: Sequence[str], lanes: _Lanes) -> Iterator[_Event]:
    """A slice of a batch and one of each of its rows, whose requests ``names`` are; ``lanes`` grows by new ones."""
    args = {"batch": batch.batch_id, "decodes": batch.num_decodes, "tokens": batch.num_tokens}
    yield slice_event(f"batch {batch.batch_id}", 0, 0, start_s, end_s, args)
    for row, request_id in zip(batch.rows, names, strict=True):
        if request_id not in lanes:
            lanes[request_id] = len(lanes)
            yield name_event("thread_name", 1, lanes[request_id], request_id)
        name = "decode" if row.is_decode else f"chunk [{row.position}:{row.kv_len}]"
        row_args = {"batch": batch.batch_id, "position": row.position, "tokens": row.q_len}
        yield slice_event(name, 1, lanes[request_id], start_s, end_s, row_args)


def _counter_events(name: str, time_s: float, values: dict[str, float], lanes: _Lanes) -> Iterator[_Event]:
    yield counter_event(name, time_s, values)


def _joined(parts: Sequence[RankRecords]) -> RankRecords:
    """Records of one rank that were taken at several times."""
    first = parts[0]
    return replace(first, batches=tuple(b for part in parts for b in part.batches))


def _stage_events(ranks: Sequence[RankRecords], zero_s: float) -> Iterator[_Event]:
    """A lane a rank, a slice a batch, and arrows along which hidden states went."""
    num_tp = 1 + max(rank.tp_rank for rank in ranks)
    num_groups = 1 + max(rank.group for rank in ranks)
    for rank in ranks:
        name = f"group {rank.group}, " if num_groups > 1 else ""
        name += f"stage {rank.stage}" + (f", tp {rank.tp_rank}" if num_tp > 1 else "")
        yield name_event("thread_name", 0, rank.rank, name)
        yield from (_batch_slice(rank.rank, record, zero_s) for record in rank.batches)
    for place in product(range(num_groups), range(num_tp)):
        column = sorted((rank for rank in ranks if (rank.group, rank.tp_rank) == place), key=lambda rank: rank.stage)
        for before, after in pairwise(column):
            yield from _arrows(before, after, zero_s)


def _batch_slice(rank: int, record: BatchRecord, zero_s: float) -> _Event:
    waits = ("control_wait_s", "hidden_wait_s", "report_wait_s", "send_wait_s", "merge_wait_s")
    args = {"batch": record.batch_id, "tokens": record.num_tokens} | {name: getattr(record, name) for name in waits}
    return slice_event(f"batch {record.batch_id}", 0, rank, record.start_s - zero_s, record.end_s - zero_s, args)


def _arrows(before: RankRecords, after: RankRecords, zero_s: float) -> Iterator[_Event]:
    """From the end of each batch on one rank to its start on another."""
    starts = {record.batch_id: record.start_s for record in after.batches}
    for record in before.batches:
        if record.batch_id in starts:
            common = {"name": "hidden states", "cat": "flow", "pid": 0, "args": {"batch": record.batch_id}}
            common["id"] = f"{before.rank}-{after.rank}-{record.batch_id}"
            # An arrow belongs to the slice that is open at its time, so it leaves just before the end.
            leaves = max(record.start_s, record.end_s - 1e-6) - zero_s
            yield {**common, "ph": "s", "tid": before.rank, "ts": microseconds(leaves)}
            arrives = microseconds(starts[record.batch_id] - zero_s)
            yield {**common, "ph": "f", "bp": "e", "tid": after.rank, "ts": arrives}


def _epoch_s() -> float:
    """The wall clock's time at which the monotonic clock was 0."""
    return time.time() - time.perf_counter()


def write_events(path: Path, events: Iterable[_Event]) -> None:
    """Write a Chrome trace; gzip when the name ends in ``.gz``. The same events give the same bytes.

    It goes out in pieces, so that the interpreter lock is never held for long: the job that was traced still lives.
    """
    with path.open("wb") as file, ExitStack() as stack:
        is_zipped = path.suffix == ".gz"
        out = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0)) if is_zipped else file
        out.write(b'{"traceEvents": [')
        rest = iter(events)
        before = b""
        while piece := list(islice(rest, _EVENTS_A_PIECE)):
            out.write(before + json.dumps(piece)[1:-1].encode())
            before = b", "
        out.write(b'], "displayTimeUnit": "ms"}')


def microseconds(seconds: float) -> float:
    """As a trace has its times."""
    return round(seconds * 1e6, 1)


def counter_event(name: str, time_s: float, values: dict[str, float]) -> dict[str, Any]:
    """One point of a counter track, beside the requests."""
    args = {series: round(value, 3) for series, value in values.items()}
    return {"name": name, "ph": "C", "ts": microseconds(time_s), "pid": 1, "tid": 0, "args": args}


def name_event(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    """Name a lane: ``thread_name`` of a process's thread, or ``process_name``."""
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def slice_event(name: str, pid: int, tid: int, start_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    """A span on a lane; seconds."""
    ts, dur = microseconds(start_s), microseconds(end_s - start_s)
    return {"name": name, "cat": "step", "ph": "X", "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}
