"""What ran when, as a Chrome trace (opens in ui.perfetto.dev and chrome://tracing)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from medha.batch import Batch


class Timeline:
    """Collects one slice a batch and one a row of it, then writes them as Chrome Trace Event JSON.

    Process 0 is the stages (thread s is stage s), process 1 the requests (one thread each).
    """

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = [_name("process_name", 0, 0, "stages")]
        self._events += [_name("thread_name", 0, 0, "stage 0"), _name("process_name", 1, 0, "requests")]
        self._threads: dict[str, int] = {}

    def record(self, batch: Batch, start_s: float, end_s: float, request_id: Callable[[int], str]) -> None:
        """Add a batch that ran from ``start_s`` to ``end_s``; ``request_id`` names a slot."""
        args = {"batch": batch.batch_id, "decodes": batch.num_decodes, "tokens": batch.num_tokens}
        self._events.append(_slice(f"batch {batch.batch_id}", 0, 0, start_s, end_s, args))
        for row in batch.rows:
            thread = self._thread(request_id(row.slot))
            name = "decode" if row.is_decode else f"chunk [{row.position}:{row.kv_len}]"
            row_args = {"batch": batch.batch_id, "position": row.position, "tokens": row.q_len}
            self._events.append(_slice(name, 1, thread, start_s, end_s, row_args))

    def write(self, path: Path) -> None:
        """Write the trace; gzip when the name ends in ``.gz``."""
        data = json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)

    def _thread(self, request_id: str) -> int:
        if request_id not in self._threads:
            self._threads[request_id] = len(self._threads)
            self._events.append(_name("thread_name", 1, self._threads[request_id], request_id))
        return self._threads[request_id]


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _slice(name: str, pid: int, tid: int, start_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    ts, dur = round(start_s * 1e6, 1), round((end_s - start_s) * 1e6, 1)
    return {"name": name, "cat": "step", "ph": "X", "ts": ts, "dur": dur, "pid": pid, "tid": tid, "args": args}
