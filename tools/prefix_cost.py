"""What the prefix cache costs where nothing is shared: thread CPU time of a step with it on, against off.

python -m tools.prefix_cost                                      # a random Llama of two narrow layers: host work shows
python -m tools.prefix_cost --hidden-size 512 --num-layers 4 --kv-blocks 2000

Three engines in one process, one with it on and two with it off, serve the same requests, no two of which begin alike,
on one thread. They take turns step by step, and who is first changes each time, so that all see the same machine. The
requests fill the pool, so blocks that are kept go all the time. Prints JSON: CPU seconds of a round by the thread that
steps, with adding, and the ratios to off over the rounds: that of the second one that is off says how exact that is.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import deque

import numpy as np
import torch

from medha import SamplingParams
from medha.bench.harness import Subject
from medha.engine.engine import Engine
from tools.command import main
from tools.live import engines_of


def prefix_cost(
    hidden_size: int = 64,
    num_layers: int = 2,
    kv_blocks: int = 400,
    num_requests: int = 32,
    prompt: int = 500,
    outputs: int = 300,
    rounds: int = 7,
) -> None:
    """Time the steps of engines with the prefix cache on and off, in turn."""
    given = dict(locals())
    torch.set_num_threads(1)
    shape = {"hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_hidden_layers": num_layers}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    options = {"num_threads": 1, "dtype": "float32", "block_size": 64, "num_kv_blocks": kv_blocks}
    sets = {name: options | {"prefix_caching": name == "on"} for name in ("on", "off", "off again")}

    params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)

    def spent(engines: dict[str, Engine], round_: int) -> dict[str, float]:
        """CPU seconds of each engine's steps, with adding; they take turns."""
        seconds = dict.fromkeys(engines, 0.0)
        for name, engine in engines.items():
            begin = time.thread_time()
            for number in range(num_requests):
                ids = np.random.default_rng([round_, number]).integers(0, 512, prompt).tolist()
                engine.add_request(f"{round_}-{number}", {"prompt_token_ids": ids}, params)
            seconds[name] += time.thread_time() - begin
        order = deque(engines)
        while any(engine.has_unfinished for engine in engines.values()):
            for name in order:
                begin = time.thread_time()
                engines[name].step()
                seconds[name] += time.thread_time() - begin
            order.rotate()
        return seconds

    with engines_of(Subject(hf_overrides=shape), sets, longest=4096) as engines:
        spent(engines, 0)  # warms up, and fills the cache
        found = [spent(engines, 1 + number) for number in range(rounds)]
        num_kept = sum(engines["on"].scheduler.memory.prefix.num_idle)
    report: dict[str, object] = {"config": given, "blocks_kept": num_kept}
    for name in sets:
        ratios = [seconds[name] / seconds["off"] for seconds in found]
        cpu_s = statistics.median(seconds[name] for seconds in found)
        report[name] = {"cpu_s": cpu_s, "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
    print(json.dumps(report))


if __name__ == "__main__":
    main(prefix_cost)
