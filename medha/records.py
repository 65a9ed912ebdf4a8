"""What each rank ran and waited for: a record a batch.

Times are of the machine's monotonic clock, which the processes of one machine share. Another node's records are shifted
by the difference of the wall clocks, so between nodes they are as exact as those agree.
"""

from __future__ import annotations

import json
import platform
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, Protocol, get_args

from medha.batch import Batch

_RECORDS_KEPT = 1 << 16

_Wait = Literal["control", "hidden", "report", "send", "merge", "shift"]
WAITS: tuple[_Wait, ...] = get_args(_Wait)


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


class Tracer(Protocol):
    """Is told what ran when; see :class:`medha.timeline.Timeline`, which writes it into a file."""

    def record(
        self,
        batch: Batch,
        start_s: float,
        end_s: float,
        names: Sequence[str],
        slack_s: Sequence[float],
        step_s: Mapping[str, float],
    ) -> None: ...
    def gather_from(self, gather: Callable[[], Sequence[RankRecords]], *, zero_s: float) -> None: ...
    def close(self) -> None: ...


class Recorder:
    """Keeps the newest records of one rank, in monotonic seconds."""

    def __init__(self) -> None:
        self.waits_for: str | None = None  # what of other ranks this one waits for at present; None while it computes
        self._records: deque[BatchRecord] = deque(maxlen=_RECORDS_KEPT)
        self._waits: dict[str, float] = defaultdict(float)
        self._start = self._cpu_start = 0.0

    @contextmanager
    def waiting(self, what: _Wait) -> Iterator[None]:
        """Count the time within as a wait, of the batch that ends next."""
        start, self.waits_for = time.perf_counter(), what
        try:
            yield
        finally:
            self.waits_for = None
            self._waits[what] += time.perf_counter() - start

    def begin(self) -> float:
        """Compute begins now; the last call before :meth:`end` counts. Returns the time."""
        self._start, self._cpu_start = time.perf_counter(), time.thread_time()
        return self._start

    def end(self, batch: Batch) -> BatchRecord:
        """The compute of a batch ends now; returns its record."""
        waits = {f"{what}_wait_s": seconds for what, seconds in self._waits.items()}
        times, cpu_s = (self._start, time.perf_counter()), time.thread_time() - self._cpu_start
        record = BatchRecord(batch.batch_id, batch.num_tokens, *times, cpu_s=cpu_s, **waits)
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
