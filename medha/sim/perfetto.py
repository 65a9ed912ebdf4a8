"""The Chrome trace of a simulated run (opens in ui.perfetto.dev)."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from medha.sim.outcome import Outcome
from medha.sim.pipeline import Segment
from medha.timeline import BatchRecord, RankRecords, counter_event, name_event, slice_event, stage_events, write_events

logger = logging.getLogger("medha")


MAX_SEGMENTS = 200_000  # batches on a stage that a trace holds; those that come later are left out, with a warning


def write_trace(path: Path, outcome: Outcome, segments: Sequence[Segment]) -> None:
    """Write the trace of a run in microseconds of virtual time; gzip when the name ends in ``.gz``.

    Process 0 is the stages, a lane each, with arrows along which a batch goes on. Process 1 is the requests, a lane
    each: waiting, prefill, decode; and what share of the KV blocks is in use.
    """
    if len(segments) > MAX_SEGMENTS:
        logger.warning("%s has the first %s batches on a stage of %s", path, f"{MAX_SEGMENTS:,}", f"{len(segments):,}")
    events = [name_event("process_name", 0, 0, "stages"), name_event("process_name", 1, 0, "requests")]
    events += stage_events(_records(segments[:MAX_SEGMENTS]), 0.0)
    events += _request_events(outcome)
    used = zip(outcome.usage_at_s, outcome.usage, strict=True)
    points = (counter_event("KV blocks in use (%)", at_s, {"used": 100 * share}) for at_s, share in used)
    events += islice(points, MAX_SEGMENTS)
    write_events(path, events)


def _records(segments: Sequence[Segment]) -> list[RankRecords]:
    """Batches on stages as the stages of a live engine have them."""
    batches = defaultdict(list)
    for one in segments:
        record = BatchRecord(one.batch_id, one.num_tokens, one.start_s, one.end_s, True)
        batches[one.group, one.stage].append(record)
    return [
        RankRecords(i, stage, 0, tuple(batches[group, stage]), group)
        for i, (group, stage) in enumerate(sorted(batches))
    ]


def _request_events(outcome: Outcome) -> Iterator[dict[str, Any]]:
    times, end_s = outcome.times, outcome.duration_s
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
