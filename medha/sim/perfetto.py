"""A simulation as a Chrome trace (opens in ui.perfetto.dev): stages, requests, counters; microseconds of virtual time.

Process 0 is the stages, a lane each, with arrows along which a batch goes on. Process 1 is the requests, a lane each:
waiting, prefill, decode, and how many wait, are active, and what share of the KV blocks is in use.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medha.sim.pipeline import Segment
from medha.sim.report import Times
from medha.sim.simulator import Outcome
from medha.timeline import counter_event, microseconds, name_event, slice_event, write_events

logger = logging.getLogger("medha")

MAX_SEGMENTS = 200_000
"""Batches on a stage that a trace holds; those that come later are left out, with a warning."""
_MAX_POINTS = 20_000


def write_trace(path: Path, outcome: Outcome, segments: Sequence[Segment]) -> None:
    """Write the trace of a run; gzip when the name ends in ``.gz``.

    Args:
        path: a new file, or one that is replaced.
        outcome: what became of the requests.
        segments: every batch on every stage, in the order in which the pipeline told them.
    """
    if len(segments) > MAX_SEGMENTS:
        logger.warning("%s has the first %s batches on a stage of %s", path, f"{MAX_SEGMENTS:,}", f"{len(segments):,}")
        segments = segments[:MAX_SEGMENTS]
    events = [name_event("process_name", 0, 0, "stages"), name_event("process_name", 1, 0, "requests")]
    events += _stages(segments)
    events += _requests(outcome)
    events += _counters(outcome)
    write_events(path, events)


def _stages(segments: Sequence[Segment]) -> Iterator[dict[str, Any]]:
    num_stages = 1 + max((segment.stage for segment in segments), default=0)
    num_groups = 1 + max((segment.group for segment in segments), default=0)
    for group in range(num_groups):
        for stage in range(num_stages):
            name = f"group {group}, stage {stage}" if num_groups > 1 else f"stage {stage}"
            yield name_event("thread_name", 0, group * num_stages + stage, name)
    came: dict[int, Segment] = {}
    for segment in segments:
        lane = segment.group * num_stages + segment.stage
        args = {"batch": segment.batch_id, "decodes": segment.num_decodes, "tokens": segment.num_tokens}
        yield slice_event(f"batch {segment.batch_id}", 0, lane, segment.start_s, segment.end_s, args)
        before = came.get(segment.group)
        if before is not None and (before.batch_id, before.stage + 1) == (segment.batch_id, segment.stage):
            yield from _arrow(before, segment, lane)
        came[segment.group] = segment


def _arrow(before: Segment, after: Segment, lane: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """From just before the end of a slice, as it belongs to the slice that is open, to the start of another."""
    common = {"name": "hidden states", "cat": "flow", "pid": 0, "args": {"batch": after.batch_id}}
    common["id"] = f"{after.group}-{after.stage}-{after.batch_id}"
    leaves_s = max(before.start_s, before.end_s - 1e-6)
    return (
        {**common, "ph": "s", "tid": lane - 1, "ts": microseconds(leaves_s)},
        {**common, "ph": "f", "bp": "e", "tid": lane, "ts": microseconds(after.start_s)},
    )


def _requests(outcome: Outcome) -> Iterator[dict[str, Any]]:
    times, end_s = Times.of(outcome), outcome.duration_s
    end_s += float(times.arrival_s[0]) if len(times) else 0.0
    columns = (times.arrival_s, times.first_scheduled_s, times.first_token_s, times.finish_s)
    moments = np.stack(columns, axis=1).tolist()
    for lane, (row, refused) in enumerate(zip(moments, times.is_refused.tolist(), strict=True)):
        yield name_event("thread_name", 1, lane, str(outcome.trace.request_ids[lane]))
        if refused:
            continue
        args = {"prompt tokens": int(times.prompt_tokens[lane]), "output tokens": int(times.num_tokens[lane])}
        for name, start_s, to_s in zip(("waiting", "prefill", "decode"), row, row[1:], strict=False):
            if start_s == start_s:  # it came so far
                yield slice_event(name, 1, lane, start_s, to_s if to_s == to_s else end_s, args)


def _counters(outcome: Outcome) -> Iterator[dict[str, Any]]:
    times = Times.of(outcome)
    for name, (at_s, counts) in (("waiting", times.waiting()), ("active", times.active())):
        for time_s, count in zip(*_thinned(at_s, counts), strict=True):
            yield counter_event(f"{name} requests", time_s, {name: count})
    for time_s, _, _, share in outcome.series.rows:
        yield counter_event("KV blocks in use (%)", time_s, {"used": 100 * share})


def _thinned(at_s: NDArray[np.float64], counts: NDArray[np.int64]) -> tuple[list[float], list[int]]:
    every = -(-len(at_s) // _MAX_POINTS) or 1
    return at_s[::every].tolist(), counts[::every].tolist()
