"""CPU time in which a CDSP plan is made: ``python -m tools.plan_times``.

As Table 2 of Tetris: random prompts and queues, so many plans for each largest SP size, which is also the number of
groups. The latency model is the ring's on A100s, of Llama-3 8B with TP 1. Plans of any number of chunks, and of at most
two; queues up to a second, five and twenty; improvement rates 0 and 0.3. Thread CPU time, of one thread.
"""

from __future__ import annotations

import time
from itertools import product
from typing import Annotated

import numpy as np
import typer

from medha.cli.report import print_report, stamp
from medha.config import CDSP, ParallelConfig, SchedulerConfig
from medha.cost.hardware import load_spec
from medha.sched.cdsp import Planner
from medha.sim.replica import Replica, find_model
from tools.command import main

_SHORTEST, _LONGEST = 4_000, 190_000
_PERCENTILES = (99, 100)


def planner_of(num_groups: int, max_chunks: int | None) -> Planner:
    """Over so many groups, with every power of two as a size."""
    config, parallel = SchedulerConfig(CDSP, max_chunks=max_chunks), ParallelConfig(kvp=num_groups)
    replica = Replica(load_spec("a100-80g"), find_model("llama-3-8b"), parallel, config, _LONGEST)
    return replica.planner(replica.stages()[0])


def plan_times(
    runs: Annotated[int, typer.Option(min=1, help="Plans of each line.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and queues.")] = 0,
) -> None:
    """Time plans over 16 and 128 groups."""
    lines = []
    for num_groups, max_chunks, most_s, rate in product((16, 128), (None, 2), (1.0, 5.0, 20.0), (0.0, 0.3)):
        planner, random, taken, chunks = planner_of(num_groups, max_chunks), np.random.default_rng(seed), [], []
        for _ in range(runs):
            prompt, queue_s = int(random.integers(_SHORTEST, _LONGEST)), random.uniform(0, most_s, num_groups).tolist()
            start_s = time.thread_time()
            plan = planner.plan(prompt, queue_s, rate)
            taken.append(1e3 * (time.thread_time() - start_s))
            chunks.append(len(plan.chunks))
        p99, most = np.percentile(taken, _PERCENTILES).tolist()
        line = {"groups": num_groups, "chunks at most": max_chunks or "any", "queues to, s": most_s, "rate": rate}
        figures = {"mean ms": float(np.mean(taken)), "P99 ms": p99, "max ms": most}
        lines.append({**line, **figures, "chunks": float(np.mean(chunks))})
    print_report({"title": f"CDSP plans, {runs:,} a line, seed {seed}", "machine": stamp()["cpu"], "plans": lines})


if __name__ == "__main__":
    main(plan_times)
