"""Thousands of requests at once, on a runner that computes nothing."""

import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from medha.engine.engine import Engine
from medha.params import SamplingParams
from tools.serve_overhead import Timetable, make_engine

NUM_REQUESTS = 3_000


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


def serve_all(engine: Engine, prompts: Sequence[list[int]]) -> tuple[int, int]:
    """Everything at once, to the end: how many were served whole, and the most memory meanwhile."""
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, output_kind="final_only")
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    assert engine.num_unfinished == len(prompts)
    num_served, most = 0, 0
    while engine.has_unfinished:
        num_served += sum(output.outputs[0].token_ids == [7] * 4 for output in engine.step())
        most = max(most, resident_bytes())
    return num_served, most


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_thousands_at_once_are_all_served_in_flat_memory() -> None:
    engine = make_engine(0.0, runner=(runner := Counted(0.0)))
    scheduler = engine.scheduler
    prompts = [[i % 256] * (5 + i % 50) for i in range(NUM_REQUESTS)]
    before = resident_bytes()
    num_served, first = serve_all(engine, prompts)
    assert num_served == NUM_REQUESTS
    gc.collect()
    num_served, second = serve_all(engine, prompts[:1000])
    assert num_served == 1000
    assert first - before < 200 * 2**20  # 20 KB a request
    assert second - first < 20 * 2**20  # nothing is kept of those that were served
    assert (runner.num_open, scheduler.num_running, scheduler.num_waiting, scheduler.memory.num_used) == (0, 0, 0, 0)
