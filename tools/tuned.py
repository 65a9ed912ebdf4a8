"""The default options against hand-tuned ones, live, each load in turn on all of them: 16 requests of 128 + 64 tokens,
four prompts of 2K, one of 16K.

    python -m tools.tuned --hf-overrides NARROW --num-threads 2 --rounds 7 --loads four

A random Llama, one engine for each set of options over the same weights. Prints for each load and set the median of the
rounds, seconds of the wall clock: all requests served, and the median TTFT. The first round warms up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from medha import LLM
from medha.bench.harness import Subject, random_prompt
from medha.bench.load import fixed_output, serve_load
from medha.engine.arrivals import Arrival

LOADS = {"chats": [(128, 64)] * 16, "four": [(2048, 1)] * 4, "one": [(16384, 1)]}
SETS: dict[str, dict[str, Any]] = {
    "default": {},
    "quantum of 1 s": {"quantum_s": 1.0},
    "chunks of 512": {"chunk_size": 512, "quantum_s": 1.0},
    "as vLLM, 2,048": {"scheduler": "vllm", "max_batch_tokens": 2048},
}


def main() -> None:
    """Run the tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-overrides", type=json.loads, default={})
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=[*LOADS])
    given = parser.parse_args()
    torch.set_num_threads(given.num_threads)
    subject, longest = Subject(hf_overrides=given.hf_overrides), 16385
    vocab_size = subject.model_config(longest=1).vocab_size
    options: dict[str, Any] = {"load_format": "dummy", "prefix_caching": False, "max_model_len": longest}
    options |= {"hf_overrides": subject.overrides(longest)}
    chance = np.random.default_rng(0)
    found: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    with ExitStack() as stack:
        engines = {name: stack.enter_context(LLM(subject.folder, **options, **SETS[name])).engine for name in SETS}
        for turn in range(given.rounds + 1):
            names = [*SETS][turn % len(SETS) :] + [*SETS][: turn % len(SETS)]
            for load, name in ((load, name) for load in given.loads for name in names):
                arrivals = [
                    Arrival(f"{turn}-{i}", random_prompt(prompt, vocab_size, chance), fixed_output(output))
                    for i, (prompt, output) in enumerate(LOADS[load])
                ]
                start_s = time.perf_counter()
                outcomes = serve_load(engines[name], arrivals).outcomes
                total_s = time.perf_counter() - start_s
                ttft_s = statistics.median(one.ttft_s for one in outcomes if one.ttft_s is not None)
                if turn:
                    found[load, name].append((total_s, ttft_s))
    for (load, name), times in sorted(found.items()):
        total_s, ttft_s = (statistics.median(column) for column in zip(*times, strict=True))
        print(json.dumps({"load": load, "options": name, "total_s": round(total_s, 4), "ttft_s": round(ttft_s, 4)}))


if __name__ == "__main__":
    main()
