"""What the prefix cache costs where nothing is shared: thread CPU time of a step with it on, against off.

python -m tools.prefix_cost                                      # a random Llama of two narrow layers: host work shows
python -m tools.prefix_cost --hidden-size 512 --num-layers 4 --kv-blocks 2000

Three engines in one process, one with it on and two with it off, serve the same requests, no two of which begin alike,
on one thread. They take turns step by step, and who is first changes each time, so that all see the same machine. The
requests fill the pool, so blocks that are kept go all the time. Prints JSON: CPU seconds of a round by the thread that
steps, with adding, and the ratios to off over the rounds: that of the second one that is off says how exact that is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import deque
from contextlib import ExitStack

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


def _round(engines: dict[str, Engine], given: argparse.Namespace, round_: int) -> dict[str, float]:
    """CPU seconds of each engine's steps, with adding; they take turns."""
    spent = dict.fromkeys(engines, 0.0)
    for name, engine in engines.items():
        begin = time.thread_time()
        _add(engine, given, round_)
        spent[name] += time.thread_time() - begin
    order = deque(engines)
    while any(engine.has_unfinished for engine in engines.values()):
        for name in order:
            begin = time.thread_time()
            engines[name].step()
            spent[name] += time.thread_time() - begin
        order.rotate()
    return spent


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = {"hidden_size": 64, "num_layers": 2, "kv_blocks": 400, "num_requests": 32, "prompt": 500, "outputs": 300}
    for name, value in (defaults | {"rounds": 7}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with ExitStack() as stack:
        made = {name: stack.enter_context(_make(given, is_on=name == "on")) for name in ("on", "off", "off again")}
        engines = {name: llm.engine for name, llm in made.items()}
        _round(engines, given, 0)  # warms up, and fills the cache
        rounds = [_round(engines, given, 1 + number) for number in range(given.rounds)]
        num_kept = sum(engines["on"].scheduler.memory.prefix.num_idle)
    print(
        json.dumps({"config": vars(given), "blocks_kept": num_kept} | {name: _told(rounds, name) for name in engines})
    )


def _told(rounds: list[dict[str, float]], name: str) -> dict[str, float]:
    ratios = [spent[name] / spent["off"] for spent in rounds]
    cpu_s = statistics.median(spent[name] for spent in rounds)
    return {"cpu_s": cpu_s, "ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


if __name__ == "__main__":
    main()
