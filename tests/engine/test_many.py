"""Thousands of requests at once, on a runner that computes nothing."""

import gc
import os
from pathlib import Path
from typing import Any

import pytest

from medha.engine.engine import Engine
from medha.params import SamplingParams
from tools.serve_overhead import Timetable, make_engine


class Counted(Timetable):
    """Counts the requests that it has; a batch takes no time."""

    num_open = 0

    def open(self, *args: Any, **options: Any) -> None:
        self.num_open += 1

    def close(self, slot: int) -> None:
        self.num_open -= 1


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve_all(engine: Engine, num_requests: int) -> int:
    """Everything at once, to the end; returns the most memory meanwhile."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, output_kind="final_only")
    for i in range(num_requests):
        engine.add_request(str(i), [i % 256] * (5 + i % 50), params)
    num_served, most = 0, 0
    while engine.has_unfinished:
        num_served += sum(output.outputs[0].token_ids == [7] * 4 for output in engine.step())
        most = max(most, resident_bytes())
    assert num_served == num_requests
    return most


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_thousands_at_once_are_all_served_in_flat_memory() -> None:
    engine = make_engine(0.0, runner=(runner := Counted(0.0)))
    before, first = resident_bytes(), serve_all(engine, 2000)
    gc.collect()
    assert first - before < 140 * 2**20  # 70 KB a request
    assert serve_all(engine, 700) - first < 20 * 2**20  # nothing is kept of those that were served
    scheduler = engine.scheduler
    assert (runner.num_open, scheduler.num_running, scheduler.num_waiting, scheduler.memory.num_used) == (0, 0, 0, 0)
