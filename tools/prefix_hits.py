"""How much of a trace's prompts a prefix cache saves, by memory and by what goes first; beside Belady's optimum.

python -m tools.prefix_hits conversation_trace.jsonl --shares 0.1,0.3,1 --plot docs/prefix-cache.png

The trace brings hashes of its prompts' blocks (Mooncake's). Llama-3 8B on 8 A100s (tp 8), default policy; the KV pool
holds these shares of the trace's distinct tokens. Prints a table in Markdown. Belady's optimum keeps whole blocks of
512 tokens, serves one request after the other, takes no memory for those that run, and knows the future.
"""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from examples.reproduce.timing import A100, LLAMA_8B
from medha.config import ParallelConfig, SchedulerConfig
from medha.sim.replica import Replica
from medha.sim.simulator import Simulation
from medha.workload.io import read_trace
from medha.workload.metrics import percentile
from medha.workload.trace import HASHED_TOKENS, Trace
from tools.command import main, numbers, print_head, print_row

NEVER = 1 << 60
POLICIES = {"none kept": SchedulerConfig(prefix_caching=False), "lru": SchedulerConfig()}


def belady(chains: list[list[int]], capacity: int) -> int:
    """Blocks that the best eviction of so many saves."""
    uses = defaultdict[int, list[int]](lambda: [NEVER])  # of a block: in which prompts it is, the next one last
    for index in reversed(range(len(chains))):
        for one in chains[index]:
            uses[one].append(index)
    kept: dict[int, int] = {}  # block: its next use
    heap: list[tuple[int, int]] = []
    hits = 0
    for chain in chains:
        hits += next((at for at, one in enumerate(chain) if one not in kept), len(chain))
        for one in chain:
            uses[one].pop()
            kept[one] = uses[one][-1]
            heappush(heap, (-kept[one], one))
        while len(kept) > capacity:
            use, one = heappop(heap)
            if kept.get(one) == -use:
                del kept[one]
    return hits


def play(trace: Trace, num_blocks: int, scheduler: SchedulerConfig) -> tuple[float, float, float]:
    """Hit rate, and TTFT at P50 and P99 in seconds."""
    replica = Replica(A100, LLAMA_8B, ParallelConfig(tp=8), scheduler, num_blocks=num_blocks)
    outcome = Simulation(*replica.build(), trace).run()
    p50, p99 = (percentile(outcome.times.ttft_s, percent) or float("nan") for percent in (50, 99))
    return outcome.num_cached_tokens / int(trace.prompt_tokens.sum()), p50, p99


def prefix_hits(
    trace: Path, shares: str = "0.1,0.3,1", num_prompts: int | None = None, plot: Path | None = None
) -> None:
    """Play a trace with KV pools that hold some shares of its distinct tokens."""
    if plot is not None:
        import matplotlib.pyplot as plt  # before minutes of playing, should it not be there
    given, parts = read_trace(trace).trace.first(num_prompts), numbers("shares", shares)
    num_tokens = int(given.prompt_tokens.sum())
    chains = [list(row.prefix_hashes or ())[: row.prompt_tokens // HASHED_TOKENS] for row in given.rows()]  # whole
    distinct = len(set[int]().union(*chains))
    print(f"{len(given):,} requests, {distinct * HASHED_TOKENS:,} distinct tokens in whole blocks")
    print_head("memory", "eviction", "hit rate", "TTFT P50 / P99")
    lines: dict[str, list[float]] = {name: [] for name in (*POLICIES, "Belady")}
    for share in parts:
        capacity = max(int(distinct * share), 1)
        for name, scheduler in POLICIES.items():
            rate, p50, p99 = play(given, capacity * HASHED_TOKENS // 256, scheduler)
            lines[name].append(rate)
            print_row(f"{share:.0%}", name, f"{rate:.1%}", f"{p50:.2f} / {p99:.1f} s")
        lines["Belady"].append(belady(chains, capacity) * HASHED_TOKENS / num_tokens)
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
