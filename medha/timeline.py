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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from medha.batch import Batch

logger = logging.getLogger("medha")

_RECORDS_KEPT = 1 << 16
_PARTS_KEPT = 1 << 18
_EVENTS_A_PIECE = 1000

_Event = dict[str, Any]
_Batch = tuple[Batch, float, float, Sequence[str]]
_Wait = Literal["control", "hidden", "report", "send", "merge", "shift"]
_WAITS: tuple[_Wait, ...] = get_args(_Wait)


class BatchRecord(NamedTuple):
    """What one rank did for one batch; times in seconds of the monotonic clock, waits since the batch before.

    Attributes:
        start_s, end_s: compute, from when the input was there to before the output was sent; the collectives of a
            tensor-parallel group are part of it.
        control_wait_s, hidden_wait_s: waited for that message, and for hidden states of the stage before.
        merge_wait_s: within the compute, waited for the other groups' parts of shared attention and merged them.
        shift_wait_s: likewise, for history that moves between groups.
    """

    batch_id: int
    num_tokens: int
    start_s: float
    end_s: float
    control_ready: bool  # the batch had arrived and was prepared when the batch before had run
    control_wait_s: float = 0.0
    hidden_wait_s: float = 0.0
    report_wait_s: float = 0.0  # waited for sampled tokens that it embeds
    send_wait_s: float = 0.0  # waited for a free buffer to send the hidden states of the batch before
    merge_wait_s: float = 0.0
    shift_wait_s: float = 0.0
    cpu_s: float = 0.0  # of the compute, on the processor: of the thread that ran it, waits excluded

    @property
    def busy_s(self) -> float:
        """Seconds of compute."""
        return self.end_s - self.start_s


class RankRecords(NamedTuple):
    """The records of one rank in the order in which it ran them, and its place; ``group`` is the KV-parallel one."""

    rank: int
    stage: int
    tp_rank: int
    batches: tuple[BatchRecord, ...]
    group: int = 0


class Recorder:
    """Keeps the newest records of one rank, by a clock of monotonic seconds."""

    def __init__(
        self, *, clock: Callable[[], float] = time.perf_counter, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self.control_ready = True
        self.waits_for: str | None = None  # what of other ranks this one waits for at present; None while it computes
        self._clock, self._cpu_clock = clock, cpu_clock
        self._records: deque[BatchRecord] = deque(maxlen=_RECORDS_KEPT)
        self._waits: dict[str, float] = defaultdict(float)
        self._start = self._cpu_start = 0.0

    @contextmanager
    def waiting(self, what: _Wait) -> Iterator[None]:
        """Count the time within as a wait, of the batch that ends next."""
        start, self.waits_for = self._clock(), what
        try:
            yield
        finally:
            self.waits_for = None
            self._waits[what] += self._clock() - start

    def begin(self) -> float:
        """Compute begins now; the last call before :meth:`end` counts. Returns the time."""
        self._start, self._cpu_start = self._clock(), self._cpu_clock()
        return self._start

    def end(self, batch: Batch) -> BatchRecord:
        """The compute of a batch ends now; returns its record."""
        times = (self._start, self._clock())
        waits = (self._waits[what] for what in _WAITS)
        cpu_s = self._cpu_clock() - self._cpu_start
        record = BatchRecord(batch.batch_id, batch.num_tokens, *times, self.control_ready, *waits)._replace(cpu_s=cpu_s)
        self._records.append(record)
        self._waits.clear()
        return record

    def take(self) -> tuple[BatchRecord, ...]:
        """The records since the last call; they and the waits since are forgotten."""
        records = tuple(self._records)
        self._records.clear()
        self._waits.clear()
        return records


def _epoch_s() -> float:
    """The wall clock's time at which the monotonic clock was 0."""
    return time.time() - time.perf_counter()


def encode_records(records: RankRecords) -> bytes:
    """A rank's records as JSON, with what tells its clock from that of another node."""
    return json.dumps({"records": records, "node": platform.node(), "epoch_s": _epoch_s()}).encode()


def decode_records(data: bytes) -> RankRecords:
    """The inverse of :func:`encode_records`; times are of this node's clock."""
    sent = json.loads(data)
    shift = 0.0 if sent["node"] == platform.node() else sent["epoch_s"] - _epoch_s()
    rank, stage, tp_rank, values, group = sent["records"]
    records = (BatchRecord(*one) for one in values)
    batches = tuple(one._replace(start_s=one.start_s + shift, end_s=one.end_s + shift) for one in records)
    return RankRecords(rank, stage, tp_rank, batches, group)


class Timeline:
    """Collects one slice a batch and one a row of it, for a file of Chrome Trace Event JSON.

    Process 0 is the stages (one thread a rank), process 1 the requests (one thread each). The newest ``kept`` batches
    and points of counters are kept; older ones are dropped, with a warning when the trace is written.
    """

    def __init__(self, *, kept: int = _PARTS_KEPT) -> None:
        self._parts: deque[_Batch | _Event] = deque(maxlen=kept)
        self._num_parts = 0  # with those that were dropped
        self._gather: Callable[[], Sequence[RankRecords]] = tuple
        self._zero_s = 0.0
        self._ranks: dict[int, RankRecords] = {}

    def record(
        self, batch: Batch, start_s: float, end_s: float, names: Sequence[str], slack_s: Sequence[float] = ()
    ) -> None:
        """Add a batch that ran; ``names`` are the requests of its rows, ``slack_s`` for how many seconds those of its
        chunks could still wait and have their first token in time."""
        self._keep((batch, start_s, end_s, names))
        chunks = (name for row, name in zip(batch.rows, names, strict=True) if not row.is_decode)
        slack = {name: seconds for name, seconds in zip(chunks, slack_s, strict=False) if math.isfinite(seconds)}
        if slack:
            self._keep(counter_event("slack (s)", start_s, slack))

    def count_step(self, time_s: float, predicted_s: float, busy_s: float, *, budget_s: float) -> None:
        """Add a batch that is done to the counters: what was predicted of it, what it took, what it might take."""
        times = {"predicted": predicted_s * 1e3, "busy": busy_s * 1e3, "budget": budget_s * 1e3}
        self._keep(counter_event("step time (ms)", time_s, times))

    def gather_from(self, gather: Callable[[], Sequence[RankRecords]], *, zero_s: float) -> None:
        """Show the lanes of several ranks: ``gather`` returns their records since it was last called, and ``zero_s`` is
        the time of their clock at which the times given to :meth:`record` are 0."""
        self._gather, self._zero_s = gather, zero_s

    def collect(self) -> None:
        """Take what the ranks have recorded so far; with a single rank there is nothing to take."""
        for new in self._gather():
            before = self._ranks[new.rank].batches if new.rank in self._ranks else ()
            self._ranks[new.rank] = new._replace(batches=before + new.batches)

    def close(self) -> None:
        """The same for the last time: the ranks go."""
        self.collect()
        self._gather = tuple

    def write(self, path: Path) -> None:
        """Write the trace; with several ranks that still run it asks them first."""
        self.collect()
        kept = len(self._parts)
        if kept < self._num_parts:
            what = "batches and points of counters"
            logger.warning("%s holds the newest %d %s; %d are left out", path, kept, what, self._num_parts - kept)
        write_events(path, self._events())

    def _keep(self, part: _Batch | _Event) -> None:
        self._parts.append(part)
        self._num_parts += 1

    def _events(self) -> Iterator[_Event]:
        yield name_event("process_name", 0, 0, "stages")
        if self._ranks:
            yield from stage_events([ranks for _, ranks in sorted(self._ranks.items())], self._zero_s)
        else:
            yield name_event("thread_name", 0, 0, "stage 0")
        yield name_event("process_name", 1, 0, "requests")
        lanes: dict[str, int] = {}  # the thread of each request
        for part in self._parts:
            if isinstance(part, dict):
                yield part
                continue
            batch, start_s, end_s, names = part
            if not self._ranks:
                args = {"batch": batch.batch_id, "decodes": batch.num_decodes, "tokens": batch.num_tokens}
                yield slice_event(f"batch {batch.batch_id}", 0, 0, start_s, end_s, args)
            for row, request_id in zip(batch.rows, names, strict=True):
                if request_id not in lanes:
                    lanes[request_id] = len(lanes)
                    yield name_event("thread_name", 1, lanes[request_id], request_id)
                name = "decode" if row.is_decode else f"chunk [{row.position}:{row.kv_len}]"
                args = {"batch": batch.batch_id, "position": row.position, "tokens": row.q_len}
                yield slice_event(name, 1, lanes[request_id], start_s, end_s, args)


def stage_events(ranks: Sequence[RankRecords], zero_s: float) -> Iterator[_Event]:
    """A lane a rank, a slice a batch, and arrows along which hidden states went; ``zero_s`` becomes 0."""
    has_tp, has_groups = any(rank.tp_rank for rank in ranks), any(rank.group for rank in ranks)
    for rank in ranks:
        name = f"group {rank.group}, " * has_groups + f"stage {rank.stage}" + f", tp {rank.tp_rank}" * has_tp
        yield name_event("thread_name", 0, rank.rank, name)
        for record in rank.batches:
            args: dict[str, Any] = {"batch": record.batch_id, "tokens": record.num_tokens}
            args |= {f"{what}_wait_s": getattr(record, f"{what}_wait_s") for what in _WAITS}
            start_s, end_s = record.start_s - zero_s, record.end_s - zero_s
            yield slice_event(f"batch {record.batch_id}", 0, rank.rank, start_s, end_s, args)
    for before, after in pairwise(sorted(ranks, key=lambda rank: (rank.group, rank.tp_rank, rank.stage))):
        if (before.group, before.tp_rank) != (after.group, after.tp_rank):
            continue
        starts = {record.batch_id: record.start_s for record in after.batches}
        for record in before.batches:
            if record.batch_id in starts:
                # an arrow belongs to the slice that is open at its time, so it leaves just before the end
                leaves_s = max(record.start_s, record.end_s - 1e-6)
                common = {"name": "hidden states", "cat": "flow", "pid": 0, "args": {"batch": record.batch_id}}
                common["id"] = f"{before.rank}-{after.rank}-{record.batch_id}"
                yield {**common, "ph": "s", "tid": before.rank, "ts": _microseconds(leaves_s - zero_s)}
                comes = _microseconds(starts[record.batch_id] - zero_s)
                yield {**common, "ph": "f", "bp": "e", "tid": after.rank, "ts": comes}


def write_events(path: Path, events: Iterable[_Event]) -> None:
    """Write a Chrome trace; gzip when the name ends in ``.gz``. The same events give the same bytes.

    In pieces, so that the interpreter lock is never held for long: the job that was traced still lives."""
    with path.open("wb") as file, ExitStack() as stack:
        is_zipped = path.suffix == ".gz"
        out = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0)) if is_zipped else file
        out.write(b'{"traceEvents": [')
        rest, before = iter(events), b""
        while piece := list(islice(rest, _EVENTS_A_PIECE)):
            out.write(before + json.dumps(piece)[1:-1].encode())
            before = b", "
        out.write(b'], "displayTimeUnit": "ms"}')


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def counter_event(name: str, time_s: float, values: dict[str, float]) -> dict[str, Any]:
    """One point of a counter track, beside the requests."""
    args = {series: round(value, 3) for series, value in values.items()}
    return {"name": name, "ph": "C", "ts": _microseconds(time_s), "pid": 1, "tid": 0, "args": args}


def name_event(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    """Name a lane: ``thread_name`` of a process's thread, or ``process_name``."""
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def slice_event(name: str, pid: int, tid: int, start_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    """A span on a lane; seconds."""
    ts, dur = _microseconds(start_s), _microseconds(end_s - start_s)
    return {"name": name, "cat": "step", "ph": "X", "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}
