"""One request by itself, and many that are all there from the start.

``medha bench latency``: One request at a time, over prompt lengths: TTFT, between tokens, end to end.
``medha bench throughput``: Requests that are all there from the start: requests and tokens a second.

The whole engine runs: scheduler, paged cache, sampler. Of ``latency`` the lengths take turns. The fields of a length
are those of ``vllm bench latency`` (``avg_latency``, ``latencies``, ``percentiles``: end to end, seconds), with the
time to the first token and between tokens apart.

With ``whole`` each prompt is also read as one chunk, in turn: the ratio is the price of chunks, which are what makes a
prefill preemptible. Then TTFTs are held against the matrix products of this machine. Useful operations of ``n`` tokens
are ``2 * P * n + 2 * n**2 * N * H * L``: ``P`` parameters of the layers, ``N`` query heads of ``H`` dimensions, ``L``
layers; the second part is attention under the causal mask. The embedding is a look-up and the head runs for the last
token alone; neither counts. MFU is their rate as a share of the product's on one rank, times the ranks.

The fields of ``throughput`` are those of ``vllm bench throughput``; those of the run with the median time are reported,
and the times of all runs beside them. ``host`` is what a step takes beside the runner's busy seconds, over the steps of
all runs, from one step's tokens to those of the next: completing the step, outputs, the next decision and whoever
drives the engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from medha.bench.cli import COUNT, SUBJECT, Report, Shows, asked, counted, lengths, verb, warmups
from medha.bench.harness import Local, Subject, on_ranks, random_prompt, terms
from medha.bench.load import NotedStep, Workload, arrivals_of, fixed_output, serve_load, steps_noted
from medha.bench.timing import in_turn, matrix_product, timing_of
from medha.cli.options import MEMORY, PARALLEL, SCHEDULING, SERVING
from medha.config import ModelConfig
from medha.engine.arrivals import Arrival
from medha.engine.engine import Engine
from medha.errors import ConfigError
from medha.workload.metrics import Outcome, Served
from medha.workload.trace import Trace

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
    whole: bool = asked(False, "Also read each prompt as one chunk: the price of chunks; MFU.")
    warmup: int = warmups(1)
    runs: int = counted(5)
    seed: int = 0


def latency(options: LatencyOptions) -> Report | None:
    """One request at a time, over prompt lengths: time to the first token, between tokens, end to end.

    TTFT: arrival to first token, queueing included. TPOT: (last - first token) / (tokens - 1). Under torchrun, or with
    --tp, --spp or --kvp alone, the engine runs on several ranks.
    """
    longest = max(options.input_lens) + options.output_len
    return on_ranks(options.subject, lambda local: _latency(local, options), longest=longest)


def _latency(local: Local, options: LatencyOptions) -> Report:
    engines = {CHUNKED: local.engine}
    if options.whole:
        one_chunk = {"chunk_size": max(options.input_lens), "max_batch_tokens": max(options.input_lens)}
        engines[WHOLE] = local.engine_with(scheduler="orca", policy="fcfs", **one_chunk)
    chance, params = np.random.default_rng(options.seed % 2**64), fixed_output(options.output_len)
    pool = local.role.runner.cache.k[0]
    product = matrix_product(pool.dtype, pool.device) if options.whole else None
    contestants: dict[Any, Callable[[], Any]] = {} if product is None else {_PRODUCT: product.seconds}
    for length in dict.fromkeys(options.input_lens):
        prompt = random_prompt(length, local.model.vocab_size, chance)
        for way, engine in engines.items():
            contestants[length, way] = partial(_served, engine, [Arrival("request", prompt, params)])
    found = in_turn(contestants, warmup=options.warmup, runs=options.runs)
    rate = None if product is None else product.rate(found.pop(_PRODUCT))
    lines: list[Report] = [
        {"input_len": length, "way": way} | latency_fields([one for served in runs for one in served.outcomes])
        for (length, way), runs in found.items()
    ]
    report = local.report("latency", asdict(options)) | {"results": lines}
    if rate is not None:
        report["matrix_product"] = rate
        best = rate["flops_per_s"] * local.config.parallel.world_size
        whole_s = {line["input_len"]: line["ttft"]["median_s"] for line in lines if line["way"] == WHOLE}
        for line in lines:
            flops, ttft_s = useful_flops(local.model, line["input_len"]), line["ttft"]["median_s"]
            line |= {"flops": flops, "mfu": flops / ttft_s / best, "ratio": ttft_s / whole_s[line["input_len"]]}
    return report | (lines[0] if len(lines) == 1 else {})


def _served(engine: Engine, arrivals: Sequence[Arrival]) -> Served:
    """Serve requests; ConfigError where one fails."""
    served = serve_load(engine, arrivals)
    for one in served.outcomes:
        if not one.is_completed:
            raise ConfigError(f"{one.request_id} of {one.input_len} tokens has failed: {one.error}")
    return served


def latency_fields(outcomes: Sequence[Outcome]) -> Report:
    """The fields of ``vllm bench latency``, and medha's, of the runs of one request; times in seconds."""
    e2els = [one.e2el_s for one in outcomes]
    ttfts = [one.ttft_s for one in outcomes if one.ttft_s is not None]
    tpots = [one.tpot_s for one in outcomes if one.tpot_s is not None]
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
    linear = 2.0 * model.num_layers * model.layer_parameters() * prompt_len
    return linear + 2.0 * prompt_len**2 * model.num_heads * model.head_dim * model.num_layers


_LATENCY: Shows = {
    "matrix_product": (),
    "results": ("input_len", "way", "num_chunks", "ttft", "e2el", "tpot", "mfu", "ratio"),
}
_LATENCY_NOTES = (
    "one request at a time, in turn",
    terms("TTFT", "TPOT", "E2EL"),
    "mfu: useful operations over TTFT, of the matrix product's; ratio: to the TTFT of the whole prompt",
)
verb("latency", LatencyOptions, latency, _LATENCY, _LATENCY_NOTES, SUBJECT, SCHEDULING, MEMORY, PARALLEL)


@dataclass(frozen=True, slots=True)
class ThroughputOptions:
    """What is measured: passes over all requests of a workload, whose arrivals do not count."""

    subject: Subject = field(default_factory=Subject)
    workload: Workload = field(default_factory=Workload)
    warmup: int = warmups(1, "Passes over all requests")
    runs: int = counted(3, "Passes over all requests")


def throughput(options: ThroughputOptions) -> Report | None:
    """A number of requests, all there from the start: requests and tokens a second; on one rank or several."""
    return on_ranks(options.subject, lambda local: _throughput(local, options), longest=options.workload.trace.longest)


def _throughput(local: Local, options: ThroughputOptions) -> Report:
    trace = options.workload.trace
    arrivals = arrivals_of(trace, local.model.vocab_size, seed=options.workload.seed)
    arrivals = [replace(one, arrival_s=0.0) for one in arrivals]
    passes: list[list[NotedStep]] = []

    def run() -> float:
        with steps_noted(local.engine) as steps:
            served = _served(local.engine, arrivals)
        passes.append(steps)
        return served.duration_s

    seconds = in_turn({"pass": run}, warmup=options.warmup, runs=options.runs)["pass"]
    found = throughput_fields(trace, seconds) | {"host": host_fields([*chain.from_iterable(passes[options.warmup :])])}
    return local.report("throughput", asdict(options)) | found


def throughput_fields(trace: Trace, seconds: Sequence[float]) -> Report:
    """The fields of ``vllm bench throughput``, and medha's, of passes over the requests of a trace."""
    timing, number = timing_of(seconds), len(trace)
    inputs, outputs = int(trace.prompt_tokens.sum()), int(trace.output_tokens.sum())
    rates = {"requests": number, "tokens": inputs + outputs, "output_tokens": outputs}
    return {
        "elapsed_time": timing["median_s"],
        "num_requests": number,
        "total_num_tokens": inputs + outputs,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        **{f"{name}_per_second": amount / timing["median_s"] for name, amount in rates.items()},
        "elapsed_times": list(seconds),
        "timing": timing,
    }


def host_fields(steps: Sequence[NotedStep]) -> Report:
    """Host seconds of steps: over all, and over those of the largest batch."""
    largest = max(step.num_rows for step in steps)
    return {
        "timing": timing_of([step.host_s for step in steps]),
        "largest_batch": largest,
        "at_largest": timing_of([step.host_s for step in steps if step.num_rows == largest]),
    }


_THROUGHPUT_FIELDS = """
    num_requests total_input_tokens total_output_tokens timing requests_per_second tokens_per_second
    output_tokens_per_second host
"""
_THROUGHPUT_NOTES = (
    "all requests at once",
    "host: a step less the runner's compute: scheduler, engine, and noting the tokens here; of all passes that count",
)
_TAKES = SUBJECT, SCHEDULING, SERVING, MEMORY, PARALLEL
_THROUGHPUT: Shows = dict.fromkeys(_THROUGHPUT_FIELDS.split(), ())
verb("throughput", ThroughputOptions, throughput, _THROUGHPUT, _THROUGHPUT_NOTES, *_TAKES)
