"""``medha bench latency``: how long one request takes by itself, over prompt lengths.

The whole engine runs: scheduler, paged cache, sampler. One request is there at a time; the lengths take turns. The
fields of a length are those of ``vllm bench latency`` (``avg_latency``, ``latencies``, ``percentiles``: end to end,
seconds), with the time to the first token and between tokens apart.

With ``whole`` each prompt is also read as one chunk, in turn: the ratio is the price of chunks, which are what makes a
prefill preemptible. Then TTFTs are held against the matrix products of this machine. Useful operations of ``n`` tokens
are ``2 * P * n + 2 * n**2 * N * H * L``: ``P`` parameters of the layers, ``N`` query heads of ``H`` dimensions, ``L``
layers; the second part is attention under the causal mask. The embedding is a look-up and the head runs for the last
token alone; neither counts. MFU is their rate as a share of the product's on one rank, times the ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from medha.bench.cli import COUNT, SUBJECT, Report, asked, counted, lengths, verb, warmups
from medha.bench.harness import Local, Subject, count_parameters, on_ranks, random_prompt, terms
from medha.bench.load import fixed_output, serve_load
from medha.bench.timing import in_turn, matrix_product, timing_of
from medha.cli.options import MEMORY, PARALLEL, SCHEDULING
from medha.config import ModelConfig
from medha.engine.admission import Prompt
from medha.engine.arrivals import Arrival
from medha.engine.engine import Engine
from medha.errors import ConfigError
from medha.workload.metrics import Outcome, seconds_of

PERCENTILES = (10, 25, 50, 75, 90, 99)
"""Those of ``vllm bench latency``."""

CHUNKED, WHOLE = "in chunks", "whole"
_PRODUCT = "matrix product"


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """What is measured."""

    subject: Subject = field(default_factory=Subject)
    input_lens: tuple[int, ...] = lengths("input_len", "128,1024,4096", "Prompt tokens, comma separated.")
    output_len: int = asked(16, "Tokens that each request generates.", COUNT)
    whole: bool = asked(False, "Also read each prompt as one chunk: the price of chunks; MFU.", flags=("--whole",))
    warmup: int = warmups(1)
    runs: int = counted(5)
    seed: int = 0


def latency(options: LatencyOptions) -> Report | None:
    """One request at a time, over prompt lengths: time to the first token, between tokens, end to end.

    TTFT: arrival to first token, queueing included. TPOT: (last - first token) / (tokens - 1). Under torchrun, or with
    --tp, --spp or --kvp alone, the engine runs on several ranks.
    """
    longest = max(options.input_lens) + options.output_len
    return on_ranks(options.subject, lambda local: _measure(local, options), longest=longest)


def _measure(local: Local, options: LatencyOptions) -> Report:
    engines = {CHUNKED: local.engine}
    if options.whole:
        one_chunk = {"chunk_size": max(options.input_lens), "max_batch_tokens": max(options.input_lens)}
        engines[WHOLE] = local.engine_with(scheduler="orca", policy="fcfs", **one_chunk)
    chance = np.random.default_rng(options.seed)
    contestants: dict[Any, Callable[[], Any]] = {}
    product = matrix_product(local.dtype, local.device) if options.whole else None
    if product is not None:
        contestants[_PRODUCT] = product.seconds
    for length in dict.fromkeys(options.input_lens):
        prompt = random_prompt(length, local.model.vocab_size, chance)
        for way, engine in engines.items():
            contestants[length, way] = partial(_request, engine, prompt, options.output_len)
    found = in_turn(contestants, warmup=options.warmup, runs=options.runs)
    product_s = found.pop(_PRODUCT, [])
    lines: list[Report] = [
        {"input_len": length, "way": way} | latency_fields(outcomes) for (length, way), outcomes in found.items()
    ]
    report = local.report("latency", asdict(options)) | {"results": lines}
    if product is not None:
        rate = product.rate(product_s)
        report["matrix_product"] = rate
        best = rate["per_s"] * local.config.parallel.world_size
        whole_s = {line["input_len"]: line["ttft"]["median_s"] for line in lines if line["way"] == WHOLE}
        for line in lines:
            flops, ttft_s = useful_flops(local.model, line["input_len"]), line["ttft"]["median_s"]
            line |= {"flops": flops, "mfu": flops / ttft_s / best, "ratio": ttft_s / whole_s[line["input_len"]]}
    return report | (lines[0] if len(lines) == 1 else {})


def _request(engine: Engine, prompt: Prompt, output_len: int) -> Outcome:
    """Serve a request alone."""
    (outcome,) = serve_load(engine, [Arrival("request", prompt, fixed_output(output_len))]).outcomes
    if not outcome.is_completed:
        raise ConfigError(f"a request of {outcome.input_len} tokens has failed: {outcome.error}")
    return outcome


def latency_fields(outcomes: Sequence[Outcome]) -> Report:
    """The fields of ``vllm bench latency``, and medha's, of the runs of one request; times in seconds."""
    e2els, ttfts, tpots = (seconds_of(name, outcomes) for name in ("e2el", "ttft", "tpot"))
    return {
        "output_len": outcomes[0].output_len,
        "num_chunks": outcomes[-1].num_chunks,
        "num_iters": len(e2els),
        "avg_latency": statistics.fmean(e2els),
        "std_latency": statistics.pstdev(e2els),
        "latencies": e2els,
        "percentiles": {str(percent): float(np.percentile(e2els, percent)) for percent in PERCENTILES},
        "ttfts": ttfts,
        "tpots": tpots,
        "e2el": timing_of(e2els),
        "ttft": timing_of(ttfts),
        "tpot": timing_of(tpots) if tpots else None,
    }


def useful_flops(model: ModelConfig, prompt_len: int) -> float:
    """Operations of reading a prompt, see above."""
    linear = 2.0 * count_parameters(model, lambda name: name.startswith("model.layers.")) * prompt_len
    return linear + 2.0 * prompt_len**2 * model.num_heads * model.head_dim * model.num_layers


_SHOWS = {
    "matrix_product": (),
    "results": ("input_len", "way", "num_chunks", "ttft", "e2el", "tpot", "mfu", "ratio"),
}
_NOTES = (
    "one request at a time, in turn",
    terms("TTFT", "TPOT", "E2EL"),
    "mfu: useful operations over TTFT, of the matrix product's; ratio: to the TTFT of the whole prompt",
)
verb("latency", LatencyOptions, latency, _SHOWS, _NOTES, SUBJECT, SCHEDULING, MEMORY, PARALLEL)
