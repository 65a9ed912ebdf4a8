"""A Chrome trace of what ran when (opens in ui.perfetto.dev and chrome://tracing)."""

from __future__ import annotations

import gzip
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from medha.batch import Batch
from medha.records import WAITS, RankRecords

logger = logging.getLogger("medha")

_PARTS_KEPT = 1 << 18
_EVENTS_A_PIECE = 1000

_Event = dict[str, Any]
_Batch = tuple[Batch, float, float, Sequence[str]]


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
        self,
        batch: Batch,
        start_s: float,
        end_s: float,
        names: Sequence[str],
        slack_s: Sequence[float] = (),
        step_s: Mapping[str, float] | None = None,
    ) -> None:
        """Add a batch that ran; ``names`` are the requests of its rows, ``slack_s`` for how many seconds those of its
        chunks could still wait and have their first token in time, ``step_s`` times to count beside each other: what
        was predicted of it, what it took, what it might take."""
        self._keep((batch, start_s, end_s, names))
        chunks = zip(names[batch.num_decodes :], slack_s, strict=False)
        slack = {name: seconds for name, seconds in chunks if math.isfinite(seconds)}
        if slack:
            self._keep(counter_event("slack (s)", start_s, slack))
        if step_s:
            times = {series: seconds * 1e3 for series, seconds in step_s.items()}
            self._keep(counter_event("step time (ms)", end_s, times))

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

    def write(self, path: str | Path) -> None:
        """Write the trace; with several ranks that still run it asks them first."""
        self.collect()
        kept = len(self._parts)
        if kept < self._num_parts:
            what = "batches and points of counters"
            logger.warning("%s holds the newest %d %s; %d are left out", path, kept, what, self._num_parts - kept)
        write_events(Path(path), self._events())

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
            args |= {f"{what}_wait_s": getattr(record, f"{what}_wait_s") for what in WAITS}
            start_s, end_s = record.start_s - zero_s, record.end_s - zero_s
            yield slice_event(f"batch {record.batch_id}", 0, rank.rank, start_s, end_s, args)
    for before, after in pairwise(sorted(ranks, key=lambda rank: (rank.group, rank.tp_rank, rank.stage))):
        if (before.group, before.tp_rank) != (after.group, after.tp_rank):
            continue
        starts = {record.batch_id: record.start_s for record in after.batches}
        for record in before.batches:
            if record.batch_id in starts:
                # an arrow belongs to the slice that is open at its time, so it leaves just before the end
                leaves = max(_microseconds(record.start_s - zero_s), _microseconds(record.end_s - zero_s) - 1)
                common = {"name": "hidden states", "cat": "flow", "pid": 0, "args": {"batch": record.batch_id}}
                common["id"] = f"{before.rank}-{after.rank}-{record.batch_id}"
                yield {**common, "ph": "s", "tid": before.rank, "ts": leaves}
                comes = _microseconds(starts[record.batch_id] - zero_s)
                yield {**common, "ph": "f", "bp": "e", "tid": after.rank, "ts": comes}


def write_events(path: Path, events: Iterable[_Event]) -> None:
    """Write a Chrome trace; gzip when the name ends in ``.gz``. The same events give the same bytes.

    In pieces, so that the interpreter lock is never held for long: the job that was traced still lives."""
    with path.open("wb") as file, ExitStack() as stack:
        out = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0)) if path.suffix == ".gz" else file
        out.write(b'{"traceEvents": [')
        rest, before = iter(events), b""
        while piece := list(islice(rest, _EVENTS_A_PIECE)):
            out.write(before + json.dumps(piece)[1:-1].encode())
            before = b", "
        out.write(b'], "displayTimeUnit": "ms"}')


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)  # whole ones are exact in every reader


def counter_event(name: str, time_s: float, values: dict[str, float]) -> dict[str, Any]:
    """One point of a counter track, beside the requests."""
    args = {series: round(value, 3) for series, value in values.items()}
    return {"name": name, "ph": "C", "ts": _microseconds(time_s), "pid": 1, "tid": 0, "args": args}


def name_event(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    """Name a lane: ``thread_name`` of a process's thread, or ``process_name``."""
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def slice_event(name: str, pid: int, tid: int, start_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    """A span on a lane; seconds."""
    ts, end = _microseconds(start_s), _microseconds(end_s)  # one that begins before its neighbour ends is not shown
    return {"name": name, "cat": "step", "ph": "X", "ts": ts, "dur": end - ts, "pid": pid, "tid": tid, "args": args}
