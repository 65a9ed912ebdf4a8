"""What the prefix cache costs where nothing is shared: thread CPU time of a step with it on, against off.

python -m tools.prefix_cost                                      # a random Llama of two narrow layers: host work shows
python -m tools.prefix_cost --hidden-size 512 --num-layers 4 --kv-blocks 2000

Two engines in one process serve the same requests, no two of which begin alike, on one thread. They take turns step by
step, and who is first changes each time, so that both see the same machine. With more requests than the pool holds,
blocks that are kept go all the time. Prints JSON: CPU seconds of a round by the thread that steps, with adding, and the
ratio of on to off over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch

from medha import LLM, SamplingParams
from medha.bench.harness import RANDOM_LLAMA
from medha.engine.engine import Engine


def _make(given: argparse.Namespace, *, is_on: bool) -> LLM:
    size = given.hidden_size
    shape = {"hidden_size": size, "intermediate_size": 2 * size, "num_hidden_layers": given.num_layers}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    return LLM(
        str(RANDOM_LLAMA), load_format="dummy", hf_overrides=shape, max_model_len=4096, num_threads=1, dtype="float32",
        block_size=64, num_kv_blocks=given.kv_blocks, enable_prefix_caching=is_on,
    )  # fmt: skip


def _add(engine: Engine, given: argparse.Namespace, round_: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=given.outputs, ignore_eos=True)
    for number in range(given.num_requests):
        ids = np.random.default_rng([round_, number]).integers(0, 512, given.prompt).tolist()
        engine.add_request(f"{round_}-{number}", {"prompt_token_ids": ids}, params)


def _round(engines: dict[bool, Engine], given: argparse.Namespace, round_: int) -> dict[bool, float]:
    """CPU seconds of each engine's steps, with adding; they take turns."""
    spent = dict.fromkeys(engines, 0.0)
    for is_on, engine in engines.items():
        begin = time.thread_time()
        _add(engine, given, round_)
        spent[is_on] += time.thread_time() - begin
    turn = 0
    while any(engine.has_unfinished for engine in engines.values()):
        for is_on in (True, False) if turn % 2 else (False, True):
            begin = time.thread_time()
            engines[is_on].step()
            spent[is_on] += time.thread_time() - begin
        turn += 1
    return spent


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"hidden_size": 64, "num_layers": 2, "kv_blocks": 400, "num_requests": 32, "prompt": 500, "outputs": 300}
    for name, value in (defaults | {"rounds": 7}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with _make(given, is_on=True) as on, _make(given, is_on=False) as off:
        engines = {True: on.engine, False: off.engine}
        _round(engines, given, 0)  # warms up, and fills the cache
        rounds = [_round(engines, given, 1 + number) for number in range(given.rounds)]
        cached = on.engine.scheduler.memory.prefix.num_idle
    seconds = {name: [spent[is_on] for spent in rounds] for name, is_on in (("on", True), ("off", False))}
    ratios = [spent[True] / spent[False] for spent in rounds]
    found: dict[str, Any] = {
        "config": vars(given),
        "thread_cpu_s": {name: statistics.median(values) for name, values in seconds.items()},
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        "blocks_kept": sum(cached),
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
