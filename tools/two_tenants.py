"""A tenant with short requests beside one that floods the machine with long prompts, live.

    python -m tools.two_tenants --num-threads 2 --hf-overrides NARROW --long-len 32768 --num-short 40 --runs 3

"alone" is the one with short requests on half of the threads without anybody beside it, "beside" both on all of them.
In turn; a random Llama, TTFTs in seconds of the wall clock. Prints a line of JSON a run, then the ratio of the P99s, in
the median of the runs.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from functools import partial
from itertools import count

import numpy as np
import torch

from medha.bench.load import serve_load
from medha.bench.serve import warm_up
from medha.bench.timing import in_turn
from medha.engine.engine import Engine
from tools.command import main
from tools.live import engines_of, long_and_short, random_llama


def two_tenants(
    hf_overrides: str = "{}",
    num_threads: int = 2,
    long_len: int = 32768,
    num_long: int = 2,
    num_short: int = 40,
    output_len: int = 8,
    request_rate: float = 2.0,
    runs: int = 3,
) -> None:
    """Time short requests alone and beside a flood of long prompts, in turn."""
    subject = random_llama(hf_overrides)
    vocab_size = subject.model_config(longest=1).vocab_size
    sides = {"alone": (max(num_threads // 2, 1), 0), "beside": (num_threads, num_long)}  # threads, and long prompts
    load = partial(long_and_short, vocab_size=vocab_size, long_len=long_len, num_short=num_short, rate=request_rate)

    def p99_s(side: str, engine: Engine, seeds: Iterator[int]) -> float:
        run, (threads, flood) = next(seeds), sides[side]
        torch.set_num_threads(threads)
        arrivals = load(run, long_at_s=[0.0] * flood, output_len=output_len)
        warm_up(engine, [one for one in arrivals if one.tenant == "short"][:4])
        outcomes = serve_load(engine, arrivals).outcomes
        ttfts_s = [one.ttft_s for one in outcomes if one.ttft_s is not None and one.request_id.startswith("short")]
        p50, p99 = np.percentile(ttfts_s, [50, 99]).tolist()
        print(json.dumps({"run": run, "side": side, "threads": threads, "p50_s": p50, "p99_s": p99}))
        return float(p99)

    with engines_of(subject, {side: {} for side in sides}, longest=long_len + output_len) as engines:
        tails = in_turn({side: partial(p99_s, side, engines[side], count()) for side in sides}, warmup=0, runs=runs)
    ratios = [beside / alone for alone, beside in zip(*tails.values(), strict=True)]
    print(json.dumps({"p99_ratio": statistics.median(ratios), "of_runs": ratios}))


if __name__ == "__main__":
    main(two_tenants)
