"""How much of a trace's prompts a prefix cache saves, by memory and by what goes first; beside Belady's optimum.

python -m tools.prefix_hits conversation_trace.jsonl --shares 0.1,0.3,1 --plot docs/prefix-cache.png

The trace brings hashes of its prompts' blocks (Mooncake's). Llama-3 8B on 8 A100s (tp 8), default policy; the KV pool
holds these shares of the trace's distinct tokens. Prints a table in Markdown. Belady's optimum keeps whole blocks of
512 tokens, serves one request after the other, takes no memory for those that run, and knows the future.
"""

from __future__ import annotations

from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from medha.config import ParallelConfig, SchedulerConfig
from medha.cost.hardware import load_spec
from medha.sim.replica import Replica, find_model
from medha.sim.simulator import Simulation
from medha.workload.io import read_trace
from medha.workload.metrics import percentile
from medha.workload.trace import HASHED_TOKENS, Trace
from tools.command import main, numbers, print_head, print_row

NEVER = 1 << 60
POLICIES = {"none kept": SchedulerConfig(prefix_caching=False), "lru": SchedulerConfig()}


def belady(trace: Trace, capacity: int) -> float:
    """Share of the prompts' tokens that the best eviction of so many blocks saves."""
    chains = [
        [int(one) for one in row.prefix_hashes or ()][: row.prompt_tokens // HASHED_TOKENS] for row in trace.rows()
    ]
    following: dict[int, int] = {}
    next_use: list[list[int]] = [[] for _ in chains]
    for index in range(len(chains) - 1, -1, -1):
        next_use[index] = [following.get(one, NEVER) for one in chains[index]]
        following.update(dict.fromkeys(chains[index], index))
    kept: dict[int, int] = {}  # block: its next use
    heap: list[tuple[int, int]] = []
    hits = 0
    for chain, uses in zip(chains, next_use, strict=True):
        found = next((at for at, one in enumerate(chain) if one not in kept), len(chain))
        hits += found
        for one, use in zip(chain, uses, strict=True):
            kept[one] = use
            heappush(heap, (-use, one))
        while len(kept) > capacity:
            use, one = heappop(heap)
            if kept.get(one) == -use:
                del kept[one]
    return hits * HASHED_TOKENS / int(trace.prompt_tokens.sum())


def play(trace: Trace, num_blocks: int, scheduler: SchedulerConfig) -> tuple[float, float, float]:
    """Hit rate, and TTFT at P50 and P99 in seconds."""
    model, where = find_model("llama-3-8b"), ParallelConfig(tp=8)
    outcome = Simulation(
        *Replica(load_spec("a100-80g"), model, where, scheduler, num_blocks=num_blocks).build(), trace
    ).run()
    p50, p99 = (percentile(outcome.times.ttft_s, percent) or float("nan") for percent in (50, 99))
    return outcome.num_cached_tokens / int(trace.prompt_tokens.sum()), p50, p99


def prefix_hits(
    trace: Path, shares: str = "0.1,0.3,1", num_prompts: int | None = None, plot: Path | None = None
) -> None:
    """Play a trace with KV pools that hold some shares of its distinct tokens."""
    if plot is not None:
        import matplotlib.pyplot as plt  # before minutes of playing, should it not be there
    given, parts = read_trace(trace).trace.first(num_prompts), numbers("shares", shares)
    rows = given.rows()
    distinct = len({one for row in rows for one in (row.prefix_hashes or ())[: row.prompt_tokens // HASHED_TOKENS]})
    print(f"{len(given):,} requests, {distinct * HASHED_TOKENS:,} distinct tokens in whole blocks")
    print_head("memory", "eviction", "hit rate", "TTFT P50 / P99")
    lines: dict[str, list[float]] = {name: [] for name in (*POLICIES, "Belady")}
    for share in parts:
        capacity = max(int(distinct * share), 1)
        for name, scheduler in POLICIES.items():
            rate, p50, p99 = play(given, capacity * HASHED_TOKENS // 256, scheduler)
            lines[name].append(rate)
            print_row(f"{share:.0%}", name, f"{rate:.1%}", f"{p50:.2f} / {p99:.1f} s")
        lines["Belady"].append(belady(given, capacity))
        print_row(f"{share:.0%}", "Belady", f"{lines['Belady'][-1]:.1%}", "")
    if plot is not None:
        figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
        for name in ("Belady", "lru"):
            axes.plot(100 * np.array(parts), 100 * np.array(lines[name]), marker="o", label=name)
        axes.set(
            xlabel="KV memory, % of the trace's distinct tokens", ylabel="prompt tokens not computed, %", ylim=(0, 45)
        )
        axes.legend()
        figure.savefig(plot, dpi=110)


if __name__ == "__main__":
    main(prefix_hits)
