"""Batching by iteration and chunked prefills: what a post on Orca and Sarathi says in numbers, Llama-3 70B.

The post ("Dynamic Batching: Orca, Sarathi, and Iteration-Level Scheduling Algorithms") says H100 SXM, and neither how
many nor what lengths. Taken here: TP 4, lengths of conversations, and 128 users as 128 places under a backlog, so that
time to the first token, which hangs on arrivals, is not judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from examples.reproduce.plotting import Panel, lines
from examples.reproduce.result import Answer, FigureResult, Options, figure
from examples.reproduce.timing import H100, LLAMA_70B, stage_predictors
from medha.config import ParallelConfig, SchedulerConfig
from medha.cost.predictor import Work
from medha.sim.replica import Replica
from medha.sim.simulator import Simulation
from medha.workload.synth import synthesize
from medha.workload.trace import Trace

BUDGETS = (128, 256, 512, 1024, 2048, 4096)
USERS = 128
_PARALLEL = ParallelConfig(tp=4)
_PROMPT, _CHUNK, _STREAMS, _CONTEXT = 2048, 256, 32, 1024
POST_TOKENS_S = (1800, 2200, 2600, 2900, 3100, 3150)
"""Output tokens a second that the post's curve has at BUDGETS."""
_SLOTS = ((62, 4), (52, 3), (342, 2), (172, 1))
"""Steps of the post's example, and how many of its four places are in use meanwhile."""


@dataclass(frozen=True, slots=True)
class Run:
    """Output tokens a second, and seconds between tokens."""

    tokens_s: float
    p50_s: float
    p99_s: float


def played(trace: Trace, scheduler: str, **config: Any) -> Run:
    """A backlog under a scheduler, which has 128 places and one batch in flight."""
    asked = SchedulerConfig(scheduler=scheduler, depth=1, max_num_seqs=USERS, **config)
    replica = Replica(H100, LLAMA_70B, _PARALLEL, asked, max_model_len=1 << 14)
    outcome = Simulation(*replica.build(), trace).run()
    tokens_s = float(trace.output_tokens.sum()) / float(np.max(outcome.requests.finish_s))
    return Run(tokens_s, outcome.gaps.quantile_s(0.5), outcome.gaps.quantile_s(0.99))


@figure("batching", "Static, iteration-level and chunked batches (a post on Orca and Sarathi)")
def run(options: Options) -> FigureResult:
    """Decodes beside a prompt, and a backlog by token budget; ``quick`` has a quarter of the requests."""
    count = 256 if options.quick else 1024
    trace = synthesize("sharegpt4-8k", "at-once", num_requests=count, seed=options.seed)
    static, orca = (played(trace, name) for name in ("static", "orca"))
    runs = {size: played(trace, "sarathi", chunk_size=size, max_batch_tokens=size) for size in BUDGETS}
    waits = {"P50": [one.p50_s for one in runs.values()], "P99": [one.p99_s for one in runs.values()]}
    panels = [
        Panel(
            "Backlog of conversations, Llama-3 70B, 4 H100s",
            "token budget, tokens",
            "output tokens/s",
            lines(BUDGETS, {"ours": [one.tokens_s for one in runs.values()], "the post": POST_TOKENS_S}),
            levels={"ours, whole prompts (Orca)": orca.tokens_s, "ours, static batches": static.tokens_s},
            log="x",
        ),
        Panel(
            "the same",
            "token budget, tokens",
            "time between tokens, ms",
            lines(BUDGETS, waits, scale=1e3),
            levels={"P99, whole prompts (Orca)": 1e3 * orca.p99_s},
            log="xy",
        ),
    ]
    return FigureResult(panels, {**_beside(), **_table(orca, runs, static)})


def _beside() -> dict[str, Answer]:
    """What decodes wait beside a prompt, whole and in chunks, by GPUs."""
    decodes, found = [Work(1, _CONTEXT, True)] * _STREAMS, {}
    for tp in (2, 4, 8):
        predictor = stage_predictors(H100, LLAMA_70B, ParallelConfig(tp=tp))[0]
        works: tuple[list[Work], ...] = ([], [Work(_PROMPT, 0, False)], [Work(_CHUNK, _PROMPT - _CHUNK, False)])
        found[tp] = [1e3 * predictor.predict([*decodes, *work]) for work in works]
    listed = "; ".join(f"TP {tp} {a:.0f}, {b:.0f} and {c:.0f} ms" for tp, (a, b, c) in found.items())
    sizes = {"streams": _STREAMS, "context": _CONTEXT, "prompt": _PROMPT, "chunk": _CHUNK}
    alone, whole, chunk = found[2]
    used, steps = sum(steps * places for steps, places in _SLOTS), 4 * sum(steps for steps, _ in _SLOTS)
    return {
        "post-static-utilization": Answer(100 * used / steps, used=used, steps=steps),
        "post-stall": Answer(whole, listed=listed, **sizes),
        "post-chunk": Answer(100 * (chunk / alone - 1)),
    }


def _table(orca: Run, runs: dict[int, Run], static: Run) -> dict[str, Answer]:
    named = {"static": static, "whole prompts": orca, **{f"budget {size}": one for size, one in runs.items()}}
    listed = "; ".join(
        f"{name} {one.tokens_s:,.0f} tokens/s, {1e3 * one.p50_s:.0f} and {1e3 * one.p99_s:.0f} ms"
        for name, one in named.items()
    )
    rows = [orca, *(runs[size] for size in (512, 256, 128))]
    orders = [a.tokens_s >= b.tokens_s and a.p99_s >= b.p99_s for a, b in pairwise(rows)]
    return {
        "post-orca-static": Answer(orca.tokens_s / static.tokens_s, users=USERS, listed=listed),
        "post-chunks-cost": Answer(100 * (1 - runs[128].tokens_s / orca.tokens_s), users=USERS),
        "post-p99": Answer(orca.p99_s / runs[512].p99_s),
        "post-order": Answer(orders),
        "post-budget-curve": Answer(runs[2048].tokens_s / runs[128].tokens_s),
        "post-budget-flat": Answer(runs[4096].tokens_s / runs[2048].tokens_s),
    }
