"""Medha and vLLM on one file of shared prefixes: how many prompt tokens each finds, and how long it takes.

python -m tools.prefix_peer trace.jsonl --peer-python PYTHON --num-requests 100 --divide-by 8

The file is in Mooncake's format; tokens are drawn by its hashes, the rest of a prompt by its line. Lengths are divided
so that a small machine gets through. All requests are there at once, in the file's order. Engines take turns on the
same weights, threads and memory, the idle one stopped; each run begins with an empty cache. Prints JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from medha.bench.compare import start_peer
from medha.bench.peers import PAGE
from medha.bench.timing import in_turn
from medha.models.folder import parse_json_object
from medha.worker.shard import TORCH_DTYPES
from medha.workload.io import read_trace
from medha.workload.trace import HASHED_TOKENS, Trace
from tools.command import main
from tools.live import random_llama


def prompts_of(trace: Trace, divide_by: int, vocab_size: int) -> list[list[int]]:
    """Tokens of each prompt: those of a block depend on its hash alone."""
    size, prompts = HASHED_TOKENS // divide_by, []
    for number, row in enumerate(trace.rows()):
        length = max(row.prompt_tokens // divide_by, 1)
        blocks = [np.random.default_rng([1, one]).integers(0, vocab_size, size) for one in row.prefix_hashes or ()]
        ids = np.concatenate(blocks)[: length - length % size] if blocks else np.empty(0, np.int64)
        rest = np.random.default_rng([2, number]).integers(0, vocab_size, length - len(ids))
        prompts.append([*ids.tolist(), *rest.tolist()])
    return prompts


def prefix_peer(
    trace: Path,
    peer_python: Annotated[str, typer.Option()],
    hf_overrides: str = "{}",
    num_requests: int = 100,
    divide_by: int = 8,
    num_kv_tokens: int = 1 << 20,
    engine_options: str = "{}",
    dtype: str = "float32",
    runs: int = 3,
) -> None:
    """Serve the first requests of a trace by both engines in turn."""
    if dtype not in TORCH_DTYPES:
        raise typer.BadParameter(f"{dtype!r}; accepted: {', '.join(TORCH_DTYPES)}", param_hint="--dtype")
    rows = read_trace(trace, "mooncake").trace.first(num_requests)
    subject = random_llama(hf_overrides)
    model = subject.model_config(longest=1)
    prompts = prompts_of(rows, divide_by, model.vocab_size)
    outputs = [max(row.output_tokens // divide_by, 1) for row in rows.rows()]
    longest = max(len(ids) + number for ids, number in zip(prompts, outputs, strict=True))
    settings: dict[str, Any] = {"dtype": dtype, "num_threads": 2, "enable_prefix_caching": True, "seed": 0}
    kv_bytes = num_kv_tokens * model.kv_bytes_per_token(TORCH_DTYPES[dtype].itemsize)
    settings |= {"kv_cache_memory_bytes": kv_bytes, "max_model_len": longest}
    settings["engine_options"] = parse_json_object(engine_options.encode(errors="replace"), "engine_options")
    work = {"prompts": prompts, "num_outputs": outputs, "way": "anew"}
    with subject.checkpoint(longest, dtype=dtype, seed=0) as folder, ExitStack() as stack:
        settings["model"] = folder
        pythons = {"medha": sys.executable, "vllm": peer_python}
        workers = {name: stack.enter_context(start_peer(name, at, settings)) for name, at in pythons.items()}
        found = in_turn({name: partial(one.ask, **work) for name, one in workers.items()}, warmup=1, runs=runs)
    total = sum(map(len, prompts))
    report: dict[str, Any] = {"prompt_tokens": total, "output_tokens": sum(outputs), "page": PAGE}
    for name, answers in found.items():
        hits = [sum(tokens[0] for tokens in one["tokens"]) for one in answers]
        seconds = [one["seconds"] for one in answers]
        report[name] = {"hit_tokens": hits, "seconds": seconds, "median_s": statistics.median(seconds)}
        report[name] |= {key: workers[name].ready[key] for key in ("versions", "options")}
    pairs = zip(found["medha"][-1]["tokens"], found["vllm"][-1]["tokens"], strict=True)
    report["num_equal"] = sum(ours[1:] == theirs[1:] for ours, theirs in pairs)
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main(prefix_peer)
