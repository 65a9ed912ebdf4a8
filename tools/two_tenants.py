"""A tenant with short requests beside one that floods the machine with long prompts, live.

    python -m tools.two_tenants --num-threads 2 --hf-overrides NARROW --long-len 32768 --num-short 40 --runs 3

"alone" is the one with short requests on half of the threads without anybody beside it, "beside" both on all of them.
In turn; a random Llama, TTFTs in seconds of the wall clock. Prints a line of JSON a run, then the ratio of the P99s, in
the median of the runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import ExitStack

import numpy as np
import torch

from medha import LLM
from medha.bench.harness import Subject, random_prompt
from medha.bench.load import fixed_output, serve_load
from medha.bench.serve import warm_up
from medha.engine.arrivals import Arrival


def arrivals_of(given: argparse.Namespace, seed: int, *, with_flood: bool, vocab_size: int) -> list[Arrival]:
    """Short requests by a Poisson process, the same with and without the long prompts that are there from the start."""
    chance = np.random.default_rng(seed)
    times = np.cumsum(chance.exponential(1 / given.request_rate, given.num_short)).tolist()
    lengths = chance.integers(50, 401, given.num_short).tolist()
    found = []
    for i in range(given.num_long if with_flood else 0):
        prompt = random_prompt(given.long_len, vocab_size, np.random.default_rng([seed, i]))
        found.append(Arrival(f"long-{i}", prompt, fixed_output(1), tenant="flood"))
    for i, (at_s, length) in enumerate(zip(times, lengths, strict=True)):
        prompt = random_prompt(length, vocab_size, chance)
        found.append(Arrival(f"short-{i}", prompt, fixed_output(given.output_len), arrival_s=at_s, tenant="chat"))
    return found


def main() -> None:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-overrides", type=json.loads, default={})
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--long-len", type=int, default=32768)
    parser.add_argument("--num-long", type=int, default=2)
    parser.add_argument("--num-short", type=int, default=40)
    parser.add_argument("--output-len", type=int, default=8)
    parser.add_argument("--request-rate", type=float, default=2.0)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    subject = Subject(hf_overrides=given.hf_overrides)
    vocab_size, longest = subject.model_config(longest=1).vocab_size, given.long_len + 1
    options = {"load_format": "dummy", "prefix_caching": False, "max_model_len": longest}
    options |= {"hf_overrides": subject.overrides(longest)}
    threads = {"alone": given.num_threads // 2, "beside": given.num_threads}
    tails: dict[str, list[float]] = {side: [] for side in threads}
    with ExitStack() as stack:
        engines = {side: stack.enter_context(LLM(subject.folder, **options)).engine for side in threads}
        for run in range(given.runs):
            for side, engine in engines.items():
                torch.set_num_threads(threads[side])
                arrivals = arrivals_of(given, run, with_flood=side == "beside", vocab_size=vocab_size)
                warm_up(engine, [one for one in arrivals if one.tenant == "chat"][:4])
                outcomes = serve_load(engine, arrivals).outcomes
                ttfts_s = [one.ttft_s for one in outcomes if one.ttft_s is not None and one.input_len < given.long_len]
                p50, p99 = np.percentile(ttfts_s, [50, 99]).tolist()
                tails[side].append(p99)
                print(json.dumps({"run": run, "side": side, "threads": threads[side], "p50_s": p50, "p99_s": p99}))
    ratios = [beside / alone for alone, beside in zip(*tails.values(), strict=True)]
    print(json.dumps({"p99_ratio": statistics.median(ratios), "of_runs": ratios}))


if __name__ == "__main__":
    main()
