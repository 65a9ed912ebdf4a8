"""``medha bench latency``, ``throughput``, ``serve``, ``attention``, ``decode`` and ``prefill`` as commands.

Each runs in one process, on the CPU or, where torch finds one, on a GPU. What several take is in
:mod:`medha.bench.options`. Heavy imports stay inside the commands.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from medha.bench.arguments import parse_lengths, parse_overrides
from medha.bench.options import (
    MEMORY,
    MODEL,
    SCHEDULING,
    SERVING,
    WORKLOAD,
    Device,
    HfOverrides,
    Model,
    NumThreads,
    OutputJson,
    Runs,
    Seed,
    Warmup,
    load_option,
    model_option,
    subject_of,
    takes,
    workload_of,
)


@takes(MODEL, SCHEDULING)
def latency(
    input_len: Annotated[
        str, typer.Option("--input-len", "--prompt-lens", help="Prompt lengths in tokens, comma separated.")
    ] = "128,1024,4096",
    output_len: Annotated[int, typer.Option(min=1, help="Tokens that each request generates.")] = 16,
    num_iters_warmup: Warmup = 1,
    num_iters: Runs = 5,
    seed: Seed = 0,
    output_json: OutputJson = None,
    **given: Any,
) -> int:
    """One request at a time, over prompt lengths: time to the first token, between tokens, end to end.

    TTFT: arrival to first token, queueing included. TPOT: (last - first token) / (tokens - 1).
    """
    from medha.bench.harness import fitting
    from medha.bench.latency import LatencyOptions, run_and_print

    subject = subject_of(given, seed=seed)
    options = LatencyOptions(
        subject=subject,
        input_lens=fitting(subject, "input_len", parse_lengths("input_len", input_len), more=output_len),
        output_len=output_len,
        warmup=num_iters_warmup,
        runs=num_iters,
        seed=seed,
    )
    return run_and_print(options, output_json)


@takes(WORKLOAD, MODEL, SCHEDULING, SERVING, MEMORY)
def throughput(
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Passes over all requests that do not count.")] = 1,
    num_iters: Annotated[int, typer.Option(min=1, help="Passes that count; the median is reported.")] = 3,
    seed: Seed = 0,
    output_json: OutputJson = None,
    **given: Any,
) -> int:
    """A number of requests, all there from the start: requests and tokens a second."""
    from medha.bench.throughput import ThroughputOptions, run_and_print

    options = ThroughputOptions(
        subject=subject_of(given, seed=seed),
        workload=workload_of(given, seed=seed),
        warmup=num_iters_warmup,
        runs=num_iters,
    )
    return run_and_print(options, output_json)


@takes(WORKLOAD, MODEL, SCHEDULING, SERVING, MEMORY)
def serve(
    more_goodput: Annotated[
        list[str] | None, typer.Argument(metavar="KEY:MS", help="Further values of --goodput.", show_default=False)
    ] = None,
    request_rate: Annotated[
        float | None,
        load_option(help="Requests a second on average, inf for all at once.", show_default="a trace's own, or inf"),
    ] = None,
    burstiness: Annotated[float, load_option(help="Of the gaps: 1 is Poisson, less is burstier.")] = 1.0,
    max_concurrency: Annotated[
        int | None, load_option(min=1, help="Requests at once; others arrive as one ends.", show_default=False)
    ] = None,
    num_warmups: Annotated[int, load_option(min=0, help="Requests served before, which do not count.")] = 1,
    probe_request_rate: Annotated[
        float, load_option(help="Small requests a second that measure how the load stalls others; 0 is none.")
    ] = 0.0,
    probe_input_len: Annotated[int, load_option(min=1, help="Prompt tokens of a probe.")] = 16,
    probe_output_len: Annotated[int, load_option(min=1, help="Output tokens of a probe.")] = 1,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Objectives in ms, as ttft:100 tpot:50 e2el:900; the scheduler goes by the first two."),
    ] = None,
    percentile_metrics: Annotated[str, typer.Option(help="Which of these to report.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles of them, comma separated.")] = "99",
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="Report each request, in seconds.")] = False,
    label: Annotated[str | None, typer.Option(help="Copied into the report.", show_default=False)] = None,
    seed: Seed = 0,
    output_json: OutputJson = None,
    **given: Any,
) -> int:
    """Requests arrive at a live engine in this process: TTFT, TPOT, ITL, goodput, and what probes see of it.

    TTFT: arrival to first token, queueing included. TPOT: (last - first token) / (tokens - 1). ITL: gap between
    tokens. E2EL: arrival to last token. Goodput: completed requests a second that met every objective; SLO attainment:
    their share of the requests with one. Exit code 3: some requests failed.
    """
    from medha.bench.serve import ServeOptions, run_and_print
    from medha.workload.metrics import Goodput, parse_metrics, parse_percentiles

    goals = Goodput.parse([*(goodput or ()), *(more_goodput or ())])
    options = ServeOptions(
        subject=subject_of(given, seed=seed, has_tpot=goals.tpot_s is not None),
        workload=workload_of(given, seed=seed, request_rate=request_rate, burstiness=burstiness),
        max_concurrency=max_concurrency,
        goodput=goals,
        metrics=parse_metrics(percentile_metrics),
        percentiles=parse_percentiles(metric_percentiles),
        probe_request_rate=probe_request_rate,
        probe_input_len=probe_input_len,
        probe_output_len=probe_output_len,
        num_warmups=num_warmups,
        save_detailed=save_detailed,
        label=label,
    )
    return run_and_print(options, output_json)


def attention(
    chunk_size: Annotated[str, typer.Option(help="Query tokens of a chunk, comma separated.")] = (
        "32,64,128,256,512,1024"
    ),
    kv_lens: Annotated[
        str, typer.Option(help="Keys that the last query sees, the chunk's own included, comma separated.")
    ] = "4096,16384,65536",
    dtype: Annotated[str, model_option(help="Comma separated.")] = "float32,bfloat16",
    num_iters_warmup: Warmup = 1,
    num_iters: Runs = 3,
    output_json: OutputJson = None,
    model: Model = None,
    hf_overrides: HfOverrides = None,
    device: Device = "auto",
    num_threads: NumThreads = None,
) -> int:
    """Attention of one layer, chunks over KV lengths: its rate, against the matrix products of this machine."""
    from medha.bench.attention import AttentionOptions, run_and_print
    from medha.bench.harness import Subject

    options = AttentionOptions(
        subject=Subject(model, parse_overrides(hf_overrides), {"device": device, "num_threads": num_threads}),
        chunks=parse_lengths("chunk_size", chunk_size),
        kv_lens=parse_lengths("kv_lens", kv_lens),
        dtypes=tuple(name.strip() for name in dtype.split(",")),
        warmup=num_iters_warmup,
        runs=num_iters,
    )
    return run_and_print(options, output_json)


@takes(MODEL)
def decode(
    batch_size: Annotated[str, typer.Option(help="Requests that decode together, comma separated.")] = "1,4,16",
    context_lens: Annotated[
        str, typer.Option("--context", help="Tokens of each in the KV cache, comma separated.")
    ] = "1024,8192",
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Steps of each that do not count.")] = 2,
    num_iters: Annotated[int, typer.Option(min=1, help="Steps that count; the median is reported.")] = 10,
    output_json: OutputJson = None,
    **given: Any,
) -> int:
    """A step of decodes, batch sizes over contexts: its time, and the share of the memory's rate (MBU)."""
    from medha.bench.decode import DecodeOptions, run_and_print
    from medha.bench.harness import fitting

    subject = subject_of(given)
    options = DecodeOptions(
        subject=subject,
        batch_sizes=parse_lengths("batch_size", batch_size),
        contexts=fitting(subject, "context", parse_lengths("context", context_lens), more=1),
        warmup=num_iters_warmup,
        runs=num_iters,
    )
    return run_and_print(options, output_json)


@takes(MODEL)
def prefill(
    prompt_lens: Annotated[
        str, typer.Option("--prompt-lens", "--input-len", help="Prompt lengths in tokens, comma separated.")
    ] = "512,2048,8192",
    t_target_s: Annotated[
        float, typer.Option("--t-target-s", help="Seconds that a batch may take with adaptive chunks.")
    ] = 0.25,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the largest of these chunks.")] = 2048,
    num_iters_warmup: Warmup = 1,
    num_iters: Runs = 3,
    seed: Seed = 0,
    output_json: OutputJson = None,
    **given: Any,
) -> int:
    """Prompts read whole and in adaptive chunks: TTFT, and the share of the matrix products' rate (MFU)."""
    from medha.bench.harness import fitting
    from medha.bench.prefill import PrefillOptions, run_and_print

    subject = subject_of(given, seed=seed)
    options = PrefillOptions(
        subject=subject,
        prompt_lens=fitting(subject, "prompt_lens", parse_lengths("prompt_lens", prompt_lens), more=1),
        t_target_s=t_target_s,
        max_batch_tokens=max_batch_tokens,
        warmup=num_iters_warmup,
        runs=num_iters,
        seed=seed,
    )
    return run_and_print(options, output_json)
