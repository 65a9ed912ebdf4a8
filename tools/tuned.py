"""The default options against hand-tuned ones, live, each load in turn on all of them: 16 requests of 128 + 64 tokens,
four prompts of 2K, one of 16K.

    python -m tools.tuned --hf-overrides NARROW --num-threads 2 --rounds 7 --loads four

A random Llama, one engine for each set of options over the same weights. Prints for each load and set the median of the
rounds, seconds of the wall clock: all requests served, and the median TTFT. The first round warms up.
"""

from __future__ import annotations

import json
import statistics
from functools import partial
from typing import Any

import numpy as np
import torch

from medha.bench.harness import random_prompt
from medha.bench.load import fixed_output, serve_load
from medha.bench.timing import in_turn
from medha.engine.arrivals import Arrival
from medha.engine.engine import Engine
from tools.command import chosen, main
from tools.live import engines_of, random_llama

LOADS = {"chats": [(128, 64)] * 16, "four": [(2048, 1)] * 4, "one": [(16384, 1)]}
SETS: dict[str, dict[str, Any]] = {
    "default": {},
    "quantum of 1 s": {"quantum_s": 1.0},
    "chunks of 512": {"chunk_size": 512, "quantum_s": 1.0},
    "as vLLM, 2,048": {"scheduler": "vllm", "max_batch_tokens": 2048},
}


def tuned(hf_overrides: str = "{}", num_threads: int = 2, rounds: int = 7, loads: str = ",".join(LOADS)) -> None:
    """Serve loads under the default options and under hand-tuned ones, in turn."""
    names = chosen("loads", loads, LOADS)
    torch.set_num_threads(num_threads)
    subject, chance = random_llama(hf_overrides), np.random.default_rng(0)
    vocab_size = subject.model_config(longest=1).vocab_size

    def served(engine: Engine, load: str) -> tuple[float, float]:
        arrivals = [
            Arrival(f"{i}", random_prompt(prompt, vocab_size, chance), fixed_output(output))
            for i, (prompt, output) in enumerate(LOADS[load])
        ]
        outcomes, duration_s = serve_load(engine, arrivals)
        return duration_s, statistics.median(one.ttft_s for one in outcomes if one.ttft_s is not None)

    with engines_of(subject, SETS, longest=16385) as engines:
        runs = {(load, name): partial(served, engine, load) for load in names for name, engine in engines.items()}
        found = in_turn(runs, warmup=1, runs=rounds)
    for (load, name), times in sorted(found.items()):
        total_s, ttft_s = (statistics.median(column) for column in zip(*times, strict=True))
        print(json.dumps({"load": load, "options": name, "total_s": round(total_s, 4), "ttft_s": round(ttft_s, 4)}))


if __name__ == "__main__":
    main(tuned)
