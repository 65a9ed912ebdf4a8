"""``medha bench …``: the benchmarks as commands. Heavy imports stay inside them.

A command makes the options of its benchmark, has it measured on every rank, and hands the report of rank 0 to the one
renderer (:mod:`medha.cli.table`), less what is in the file alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medha.cli.command import FAILED_REQUESTS, make_app
from medha.cli.options import MEMORY, MODEL, PARALLEL, SCHEDULING, SERVING, OutputJson, but, engine_options, pick, takes
from medha.cli.report import DEFINITIONS, STDOUT, check_writable, progress, write_report
from medha.config import EngineConfig, parse_size
from medha.errors import ConfigError
from medha.parallel.launch import is_first_rank

if TYPE_CHECKING:
    from medha.bench.harness import Subject

app = make_app(help="Measure on this machine. TTFT, TPOT and the other terms: medha bench serve --help.")
micro = make_app(help="Measure one part alone: attention, a decode step, a scheduling decision, sampling.")
app.add_typer(micro, name="micro")

_load = partial(typer.Option, rich_help_panel="Load")
_Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Hugging Face folder or hub id; else a random Llama.", rich_help_panel="Model"),
]
Warmup = Annotated[int, typer.Option(min=0, help="Runs that do not count.")]
Runs = Annotated[int, typer.Option(min=1, help="Runs that count; the median is reported.")]
Lengths = Annotated[str, typer.Option(help="Tokens, comma separated.")]

SUBJECT = {"model": (_Model, None), **but(MODEL, "max_model_len")}
"""What is measured; its longest request follows from the benchmark."""
ALONE = {name: SUBJECT[name] for name in ("model", "hf_overrides", "device", "num_threads")}
SERVED = (SUBJECT, SCHEDULING, SERVING, MEMORY, PARALLEL)
WORKLOAD: Mapping[str, tuple[Any, Any]] = {
    "num_prompts": (
        Annotated[int | None, _load(min=1, help="Requests; of a trace the first ones.", show_default="100, or all")],
        None,
    ),
    "input_len": (Annotated[int, _load(min=1, help="Prompt tokens of each.")], 1024),
    "output_len": (Annotated[int, _load(min=1, help="Output tokens of each.")], 128),
    "lengths": (Annotated[str | None, _load(help="Draw both from a distribution, as medha trace synth.")], None),
    "dataset_path": (Annotated[Path | None, _load("--dataset-path", "--trace", help="Trace file of requests.")], None),
}
"""Which requests there are."""


@app.callback()
def bench() -> None:
    """Measure on this machine."""


@app.command()
@takes(SUBJECT, SCHEDULING, MEMORY, PARALLEL)
def latency(
    input_len: Annotated[
        str, typer.Option("--input-len", "--prompt-lens", help="Prompt lengths in tokens, comma separated.")
    ] = "128,1024,4096",
    output_len: Annotated[int, typer.Option(min=1, help="Tokens that each request generates.")] = 16,
    whole: Annotated[
        bool, typer.Option("--whole", help="Also read each prompt as one chunk: the price of chunks, and MFU.")
    ] = False,
    num_iters_warmup: Warmup = 1,
    num_iters: Runs = 5,
    output_json: OutputJson = None,
    **given: Any,
) -> int:
    """One request at a time, over prompt lengths: time to the first token, between tokens, end to end.

    TTFT: arrival to first token, queueing included. TPOT: (last - first token) / (tokens - 1). Under torchrun, or with
    --tp, --spp or --kvp alone, the engine runs on several ranks.
    """
    from medha.bench import latency as benchmark

    subject = _subject(given)
    options = benchmark.LatencyOptions(
        subject=subject,
        input_lens=subject.fitting("input_len", parse_lengths("input_len", input_len), more=output_len),
        output_len=output_len,
        whole=whole,
        warmup=num_iters_warmup,
        runs=num_iters,
        seed=given["seed"],
    )
    with _running("serving", benchmark.num_runs(options), output_json) as advance:
        report = benchmark.latency(options, on_run=advance)
    columns = ("input_len", "way", "num_chunks", "ttft", "e2el", "tpot", "mfu", "ratio")
    notes = [f"{_runs(options)}, one request at a time, in turn", terms("TTFT", "TPOT", "E2EL")]
    if whole:
        notes.append(
            "MFU: useful operations over TTFT, of the matrix product's rate; ratio: TTFT to the whole prompt's"
        )
    return _end(report, output_json, notes, ("matrix_product",) * whole, {"results": columns[: 8 if whole else 6]})


@app.command()
@takes(WORKLOAD, *SERVED)
def throughput(
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Passes over all requests that do not count.")] = 1,
    num_iters: Annotated[int, typer.Option(min=1, help="Passes that count; the median is reported.")] = 3,
    output_json: OutputJson = None,
    **given: Any,
) -> int:
    """A number of requests, all there from the start: requests and tokens a second; on one rank or several."""
    from medha.bench import throughput as benchmark
    from medha.bench.load import Workload

    workload = Workload(**{name: given[name] for name in WORKLOAD}, seed=given["seed"])
    options = benchmark.ThroughputOptions(_subject(given), workload, num_iters_warmup, num_iters)
    trace = workload.trace()
    with _running("serving", (num_iters_warmup + num_iters) * len(trace), output_json) as advance:
        report = benchmark.throughput(options, trace, on_end=advance)
    if report is None:
        return 0
    rates = ("requests_per_second", "tokens_per_second", "output_tokens_per_second")
    columns = ("num_requests", "total_input_tokens", "total_output_tokens", "timing", *rates)
    host = report["host"]
    rows = [
        {"batch": "all", "timing": host["timing"]},
        {"batch": f"largest, {host['largest_batch']:,} rows", "timing": host["at_largest"]},
    ]
    notes = [
        f"all requests at once; {_runs(options)} passes",
        "host: a step less the runner's compute: scheduler, engine, and noting the tokens here; over the steps of all "
        "passes that count",
    ]
    tables = {"passes": columns, "host_of_a_step": ("batch", "timing")}
    return _end(report, output_json, notes, (), tables, {"passes": [report], "host_of_a_step": rows})


@app.command()
@takes(WORKLOAD, *SERVED)
def serve(
    more_goodput: Annotated[
        list[str] | None, typer.Argument(metavar="KEY:MS", help="Further values of --goodput.", show_default=False)
    ] = None,
    preset: Annotated[
        str | None, _load(help="convoy: short requests while long prompts are read, under six schedulers.")
    ] = None,
    long_len: Annotated[int, _load(min=1, help="Of the preset: tokens of each of four long prompts.")] = 32768,
    load: Annotated[float, _load(help="Of the preset: part of the measured capacity that the stream takes.")] = 0.75,
    plot: Annotated[Path | None, _load(help="Of the preset: draw TTFT here; needs matplotlib.")] = None,
    request_rate: Annotated[
        float | None,
        _load(help="Requests a second on average, inf for all at once.", show_default="a trace's own, or inf"),
    ] = None,
    burstiness: Annotated[float, _load(help="Of the gaps: 1 is Poisson, less is burstier.")] = 1.0,
    max_concurrency: Annotated[
        int | None, _load(min=1, help="Requests at once; others arrive as one ends.", show_default=False)
    ] = None,
    num_warmups: Annotated[int, _load(min=0, help="Requests served before, which do not count.")] = 1,
    probe_request_rate: Annotated[
        float, _load(help="Small requests a second that measure how the load stalls others; 0 is none.")
    ] = 0.0,
    probe_input_len: Annotated[int, _load(min=1, help="Prompt tokens of a probe.")] = 16,
    probe_output_len: Annotated[int, _load(min=1, help="Output tokens of a probe.")] = 1,
    goodput: Annotated[
        list[str] | None,
        typer.Option(help="Objectives in ms, as ttft:100 tpot:50 e2el:900; the scheduler goes by the first two."),
    ] = None,
    percentile_metrics: Annotated[str, typer.Option(help="Which of these to report.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles of them, comma separated.")] = "99",
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="Report one value a request too.")] = False,
    label: Annotated[str | None, typer.Option(help="Copied into the report.", show_default=False)] = None,
    output_json: OutputJson = None,
    **given: Any,
) -> int:
    """Requests arrive at a live engine: TTFT, TPOT, ITL, E2EL, goodput; on one rank or several.

    TTFT: arrival to first token, queueing included. TPOT: (last - first token) / (tokens - 1). ITL: gap between
    successive tokens. E2EL: arrival to last token. Goodput: completed requests a second that met every objective;
    SLO attainment: their share of the requests with one. Exit code 3: some requests failed.
    """
    from medha.bench import serve as benchmark
    from medha.bench.load import Workload
    from medha.workload.metrics import Goodput, parse_metrics, parse_percentiles

    if preset is not None:
        return _convoy(preset, given, long_len, load, plot, output_json)
    goals = Goodput.parse([*(goodput or ()), *(more_goodput or ())])
    own = {name: given[name] for name in WORKLOAD}
    options = benchmark.ServeOptions(
        subject=_subject(given, has_tpot=goals.tpot_s is not None),
        workload=Workload(**own, seed=given["seed"], request_rate=request_rate, burstiness=burstiness),
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
    trace = options.workload.trace()
    with _running("serving", len(trace), output_json) as advance:
        report = benchmark.serve(options, trace, on_end=advance)
    if report is None:
        return 0
    names = ("mean", "median", "std", *(f"p{percent:g}" for percent in options.percentiles))
    latencies = [
        {"": metric.upper(), **{f"{name}_ms": report[f"{name}_{metric}_ms"] for name in names}}
        for metric in options.metrics
    ]
    figures = ["completed", "failed", "duration_s", "request_rate", "burstiness", "max_concurrent_requests"]
    figures += ["request_throughput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s"]
    figures += ["request_goodput", "slo_attainment"]
    figures += [name for name in report if name.startswith("probe_")] if probe_request_rate else []
    notes = [
        f"one run after {report['warmup']} warm-up requests; error: of predicted step times, as a share",
        terms("TTFT", "TPOT", "ITL", "E2EL", "goodput", "SLO attainment"),
    ]
    tables: dict[str, Sequence[str]] = {"latencies": list(latencies[0]), "ttft_by_length": []}
    _end(
        report,
        output_json,
        notes,
        (*figures, "prediction_error"),
        tables,
        {"latencies": latencies, "duration_s": report["duration"]},
    )
    return FAILED_REQUESTS if report["failed"] else 0


def _convoy(
    preset: str, given: Mapping[str, Any], long_len: int, load: float, plot: Path | None, output_json: Path | None
) -> int:
    """``serve --preset convoy``."""
    from medha.bench.serve import CONVOY_MODEL, ConvoyOptions, convoy, plot_convoy

    if preset != "convoy":
        raise ConfigError(f"preset={preset!r}; accepted: convoy")
    if is_first_rank():
        check_writable(plot)
    subject = _subject(given, says=False)
    if subject.model is None:
        subject = replace(subject, hf_overrides=CONVOY_MODEL | dict(subject.hf_overrides or {}))
    default = ConvoyOptions()
    options = replace(
        default,
        subject=subject,
        num_short=given["num_prompts"] or default.num_short,
        long_len=long_len,
        load=load,
        t_target_s=given["t_target_s"] or default.t_target_s,
        seed=given["seed"],
    )
    total = (1 + len(options.systems)) * (options.num_long + options.num_short)
    with _running("serving", total, output_json) as advance:
        report = convoy(options, on_end=advance)
    if report is None:
        return 0
    rows = [
        {
            "scheduler": one["system"],
            **{f"short {name}": one["short"][name] for name in ("median_ttft_ms", "p90_ttft_ms", "p99_ttft_ms")},
            "short in SLO_share": one["short"]["slo_attainment"],
            **{f"long {name}": one["long"][name] for name in ("mean_ttft_ms", "p99_ttft_ms")},
            "short p99_tpot_ms": one["short"]["p99_tpot_ms"],
            "span_s": one["duration"],
        }
        for one in report["systems"]
    ]
    low, high = options.short_lens
    notes = [
        f"{options.num_long} prompts of {long_len:,} tokens queued at 0 s, {options.num_short} of {low} to {high} "
        f"(Poisson) within {report['span_s']:.1f} s; {options.output_len} output tokens each; seed {options.seed}",
        f"capacity: the whole mix at once takes {report['capacity_s']:.1f} s under LARS+sharing; load {load:g}; "
        f"batches of {options.t_target_s:g} s; SLO: a TTFT of {options.short_ttft_s:g} s",
        terms("TTFT", "TPOT"),
    ]
    _end(report, output_json, notes, (), {"schedulers": list(rows[0])}, {"schedulers": rows})
    if plot is not None:
        plot_convoy(report, plot)
    return FAILED_REQUESTS if any(one["failed"] for one in report["systems"]) else 0


@app.command()
@takes({name: SUBJECT[name] for name in ("model", "hf_overrides")})
def compare(
    peer: Annotated[str, typer.Option(help="transformers or vllm.")] = "transformers",
    peer_python: Annotated[
        str,
        typer.Option(help="Interpreter that has the peer; vLLM's is that of a venv of its own.", show_default="this"),
    ] = sys.executable,
    input_len: Annotated[
        str, typer.Option("--input-len", "--prompt-lens", help="Prompts to read, in tokens; none leaves them out.")
    ] = "2048,16384",
    batch_size: Annotated[int, typer.Option(min=0, help="Requests that decode together; 0 leaves them out.")] = 16,
    output_len: Annotated[
        int, typer.Option("--output-len", "--decode-len", min=2, help="Tokens that each of them decodes.")
    ] = 32,
    num_prompts: Annotated[
        int,
        typer.Option("--num-prompts", "--num-mixed", min=0, help="Mixed requests, all there at once; 0 is none."),
    ] = 200,
    lengths: Annotated[
        str,
        typer.Option("--lengths", "--mixed-lengths", help="Their tokens: a distribution, as medha trace synth."),
    ] = "uniform:32-1024,4-128",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    num_threads: Annotated[
        int, typer.Option(min=1, help="CPU threads, the same for both.", envvar="OMP_NUM_THREADS")
    ] = 2,
    t_target_s: Annotated[float, typer.Option("--t-target-s", help="Seconds that a batch of medha's may take.")] = 1.0,
    enable_prefix_caching: Annotated[
        bool, typer.Option("--enable-prefix-caching", help="Of vLLM; medha and transformers have none.")
    ] = False,
    num_iters_warmup: Warmup = 1,
    num_iters: Runs = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, prompts and weights.")] = 0,
    output_json: OutputJson = None,
    **given: Any,
) -> int:
    """The same weights and prompts through medha and through another engine at its best; ratios of medians.

    A ratio above 1 means that medha is faster. Exit code 3: tokens differ that rounding cannot be blamed for.
    """
    from medha.bench import compare as benchmark
    from medha.bench.load import Workload

    mixed = Workload(lengths=lengths, num_prompts=num_prompts, seed=seed) if num_prompts else None
    options = benchmark.CompareOptions(
        subject=_subject(given, says=False),
        peer=peer,
        peer_python=peer_python,
        input_lens=() if input_len == "none" else parse_lengths("input_len", input_len),
        batch_size=batch_size,
        output_len=output_len,
        mixed=mixed,
        dtype=dtype,
        num_threads=num_threads,
        t_target_s=t_target_s,
        enable_prefix_caching=enable_prefix_caching,
        warmup=num_iters_warmup,
        runs=num_iters,
        seed=seed,
    )
    with _running("comparing", None, output_json) as advance:
        report = benchmark.compare(options, on_run=advance)
    notes = [
        f"{_runs(options)}, interleaved, the idle side stopped; {num_threads} threads, {dtype}",
        "equal: requests of which every token is the same; in 16 bits or with padding another order of sums may turn a "
        "tie",
    ]
    columns = ("name", "way", "medha", "peer", "ratio", "num_requests", "num_equal")
    _end(report, output_json, notes, (), {"results": columns})
    wrong = any(one["is_exact"] and one["num_equal"] < one["num_requests"] for one in report["results"])
    return FAILED_REQUESTS if wrong else 0


@app.command()
@takes(pick("dtype", "device", "attention_backend"), {"hf_overrides": SUBJECT["hf_overrides"]})
def scaling(
    mode: Annotated[str, typer.Option(help="prefill of a prompt, or one step over a long context: decode, chunk.")] = (
        "prefill"
    ),
    layouts: Annotated[
        str | None,
        typer.Option(help="Compared with one rank, comma separated, as kvp2spp2; by default spp2, kvp2 for a step."),
    ] = None,
    input_len: Annotated[
        str | None,
        typer.Option(
            "--input-len",
            "--prompt-len",
            "--context",
            help="Tokens of the prompt, or in the KV cache before a step, comma separated.",
            show_default="16384, 65536 for a step",
        ),
    ] = None,
    chunk_size: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens a batch.", show_default="512, 64 for a step")
    ] = None,
    num_iters_warmup: Warmup = 1,
    num_iters: Annotated[int, typer.Option(min=1, help="Counted runs, or turns of 10 steps; for the median.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of prompts and weights.")] = 0,
    output_json: OutputJson = None,
    **given: Any,
) -> int:
    """Several ranks against one, one thread a rank; starts its processes itself, without torchrun."""
    from medha.bench import scaling as benchmark

    is_prefill = mode == "prefill"
    options = benchmark.ScalingOptions(
        subject=_subject(given, says=False),
        mode=mode,
        lengths=parse_lengths("input_len", input_len or ("16384" if is_prefill else "65536")),
        layouts=tuple((layouts or ("spp2" if is_prefill else "kvp2")).split(",")),
        chunk_size=chunk_size or (512 if is_prefill else 64),
        warmup=num_iters_warmup,
        runs=num_iters,
        seed=seed,
    )
    with _running("stepping", options.num_runs, output_json) as advance:
        report = benchmark.scaling(options, on_run=advance)
    for line in report["results"]:
        line |= {name: value for name, value in line.get("usage", {}).items() if name != "busy_s"}
    columns = (
        "length",
        "layout",
        "timing",
        "ratio",
        "bubble",
        "transfer_wait_s",
        "control_wait_s",
        "num_late_messages",
    )
    notes = [f"{_runs(options)}, interleaved; 1 thread a rank; ratio: one rank's time over a layout's"]
    if not is_prefill:
        notes.append("KV cache of random numbers; turns of 10 steps; busy and merge of each rank are in the report")
    return _end(report, output_json, notes, (), {"results": columns})


@app.command()
@takes(SUBJECT, pick("profile"))
def accuracy(
    num_rounds: Annotated[int, typer.Option(min=1, help="Counted rounds of the mix.")] = 3,
    long_len: Annotated[int, typer.Option(min=1, help="Tokens of the long prompt of a round.")] = 16384,
    t_target_s: Annotated[float, typer.Option("--t-target-s", help="Seconds that a step may take.")] = 0.25,
    output_json: OutputJson = None,
    **given: Any,
) -> int:
    """Predicted against real step times of the engine, beside the machine's own repeatability; one process.

    Without --profile, what steps cost is measured first.
    """
    from medha.bench import accuracy as benchmark

    options = benchmark.AccuracyOptions(
        subject=_subject(given, says=False), num_rounds=num_rounds, long_len=long_len, t_target_s=t_target_s,
        seed=given["seed"],
    )  # fmt: skip
    with _running("stepping", 100, output_json) as advance:
        done = 0

        def on_progress(share: float) -> None:
            nonlocal done
            for _ in range(done, int(100 * share)):
                advance()
                done += 1

        report = benchmark.accuracy(options, on_progress=on_progress)
    notes = [
        f"within: steps within {benchmark.TOLERANCE:.0%} of their prediction, made before dispatch; repeatability: "
        "identical steps within that of the median of their other runs; near: of those nearest in time; ratio: to "
        "the larger; KV: the longest in a step",
        f"steps of {t_target_s:g} s, seed {options.seed}, {num_rounds} rounds after one that does not count",
    ]
    return _end(report, output_json, notes, ("factors",), {"lines": [], "chunks": []})


@micro.command()
@takes(ALONE)
def attention(
    chunk_size: Annotated[str, typer.Option(help="Query tokens of a chunk, comma separated.")] = (
        "32,64,128,256,512,1024"
    ),
    kv_lens: Annotated[
        str, typer.Option(help="Keys that the last query sees, the chunk's own included, comma separated.")
    ] = "4096,16384,65536",
    dtype: Annotated[str, typer.Option(help="Comma separated.")] = "float32,bfloat16",
    num_iters_warmup: Warmup = 1,
    num_iters: Runs = 3,
    output_json: OutputJson = None,
    **given: Any,
) -> int:
    """Attention of one layer, chunks over KV lengths: its rate, against the matrix products of this machine."""
    from medha.bench import attention as benchmark

    options = benchmark.AttentionOptions(
        subject=_subject(given, says=False),
        chunks=parse_lengths("chunk_size", chunk_size),
        kv_lens=parse_lengths("kv_lens", kv_lens),
        dtypes=tuple(name.strip() for name in dtype.split(",")),
        warmup=num_iters_warmup,
        runs=num_iters,
    )
    with _running("attending", options.num_runs, output_json) as advance:
        report = benchmark.attention(options, on_run=advance)
    notes = [
        f"one layer; {_runs(options)}, in turn; share: of the matrix product's rate; operations: those under the "
        "causal mask; overhead: seconds for each of them against the largest chunk over the same KV cache, less 1",
    ]
    columns = ("dtype", "kv_len", "chunk", "timing", "flops_per_s", "share", "overhead")
    return _end(report, output_json, notes, (), {"results": columns})


@micro.command()
@takes(SUBJECT, PARALLEL)
def decode(
    batch_size: Annotated[str, typer.Option(help="Requests that decode together, comma separated.")] = "1,4,16",
    input_len: Annotated[
        str, typer.Option("--input-len", "--context", help="Tokens of each in the KV cache, comma separated.")
    ] = "1024,8192",
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Steps of each that do not count.")] = 2,
    num_iters: Annotated[int, typer.Option(min=1, help="Steps that count; the median is reported.")] = 10,
    output_json: OutputJson = None,
    **given: Any,
) -> int:
    """A step of decodes, batch sizes over contexts: its time, and the share of the memory's rate (MBU)."""
    from medha.bench import decode as benchmark

    subject = _subject(given, says=False)
    options = benchmark.DecodeOptions(
        subject=subject,
        batch_sizes=parse_lengths("batch_size", batch_size),
        contexts=subject.fitting("input_len", parse_lengths("input_len", input_len), more=1),
        warmup=num_iters_warmup,
        runs=num_iters,
    )
    with _running("decoding", options.num_runs, output_json) as advance:
        report = benchmark.decode(options, on_run=advance)
    notes = [
        f"timed: {benchmark.TIMED}; MBU: bytes that a step has to read (weights and KV) over its time, of the memory's "
        "rate",
        f"{_runs(options)}, in turn; KV cache of random numbers",
    ]
    columns = ("context", "batch_size", "timing", "weight_bytes", "kv_bytes", "mbu", "tokens_per_s")
    return _end(report, output_json, notes, ("memory_read",), {"results": columns})


@micro.command()
@takes(ALONE)
def sampling(
    batch_size: Annotated[str, typer.Option(help="Rows of logits, comma separated.")] = "1,16,64",
    num_iters_warmup: Warmup = 2,
    num_iters: Runs = 10,
    output_json: OutputJson = None,
    **given: Any,
) -> int:
    """From random logits to tokens on the host, over batch sizes and ways of drawing."""
    from medha.bench import decode as benchmark

    sizes = parse_lengths("batch_size", batch_size)
    options = benchmark.SamplingOptions(_subject(given, says=False), sizes, num_iters_warmup, num_iters)
    with _running("drawing", options.num_runs, output_json) as advance:
        report = benchmark.sampling(options, on_run=advance)
    return _end(report, output_json, [f"{_runs(options)}, in turn"], ("vocab_size",), {"results": []})


@micro.command()
def scheduler(
    num_waiting: Annotated[str, typer.Option(help="Requests that wait, comma separated; each is measured.")] = (
        "1000,10000,100000"
    ),
    policy: Annotated[list[str] | None, typer.Option(help="May be repeated; lars by default.")] = None,
    num_running: Annotated[int, typer.Option(min=1, help="Requests that decode.")] = 256,
    num_prefills: Annotated[int, typer.Option(min=2, help="Places for prefills under way beside them.")] = 16,
    num_kv_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks of 256 tokens.", show_default="enough for everybody")
    ] = None,
    num_iters_warmup: Annotated[int, typer.Option(min=0)] = 50,
    num_iters: Annotated[int, typer.Option(min=1, help="Counted decisions.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, arrivals, objectives and classes.")] = 0,
    output_json: OutputJson = None,
) -> int:
    """Time of one scheduling decision as the queue grows; no model runs."""
    from medha.bench import decisions as benchmark

    options = benchmark.DecisionOptions(
        waiting=parse_lengths("num_waiting", num_waiting),
        policies=tuple(policy or ["lars"]),
        num_decoding=num_running,
        num_prefilling=num_prefills,
        num_decisions=num_iters,
        warmup=num_iters_warmup,
        num_blocks=num_kv_blocks,
        seed=seed,
    )
    with _running("deciding", len(options.waiting) * len(options.policies), output_json) as advance:
        report = benchmark.bench_decisions(options, on_run=advance)
    rows = [
        {name: line[name] for name in ("policy", "waiting", "decoding", "limit_ms")} | {"call": call, **line[call]}
        for line in report["results"]
        for call in ("schedule", "complete", "both")
    ]
    columns = ("policy", "waiting", "call", "median_ms", "p90_ms", "p99_ms", "max_ms", "limit_ms")
    notes = [f"{num_iters_warmup} decisions of warm-up, {num_iters} counted; limit: of both calls' P99"]
    return _end(report, output_json, notes, (), {"decisions": columns, "growth": []}, {"decisions": rows})


def parse_lengths(name: str, text: str) -> tuple[int, ...]:
    """``2048,16K`` as integers.

    Raises:
        ConfigError: not a list of positive integers.
    """
    parts = text.replace("_", "").split(",")
    with suppress(ConfigError):
        if all(part.strip().isdecimal() or part.strip()[-1:].isalpha() for part in parts):
            return tuple(parse_size(part) for part in parts)
    raise ConfigError(f"{name}={text!r}; accepted: positive integers such as 2048 or 16K, comma separated")


def terms(*names: str) -> str:
    """What some of the terms mean, for below a table."""
    return "; ".join(f"{name}: {DEFINITIONS[name]}" for name in names)


def _subject(given: Mapping[str, Any], *, has_tpot: bool = False, says: bool = True) -> Subject:
    """The model and engine that the options of a command ask for; what it does not take has its default.

    Args:
        given: its options.
        has_tpot: whether requests may have a TPOT objective; those of a trace may.
        says: whether to say on stderr what a batch may hold.
    """
    from medha.bench.harness import Subject

    engine = engine_options(given)
    model, overrides = (engine.pop(name, None) for name in ("model", "hf_overrides"))
    subject = Subject(model or given.get("model"), overrides, engine)
    if says and is_first_rank():
        scheduler = EngineConfig.from_flat("-", **engine).scheduler
        has_tpot = has_tpot or given.get("dataset_path") is not None
        print("medha:", scheduler.budget_text(has_tpot=has_tpot), file=sys.stderr)
    return subject


def _runs(options: Any) -> str:
    return f"median of {options.runs} after {options.warmup} warm-up"


@contextmanager
def _running(what: str, total: int | None, output_json: Path | None) -> Iterator[Callable[[], None]]:
    """A progress bar on rank 0 while this is open; that the report can be written is found out before."""
    if not is_first_rank():
        yield lambda: None
        return
    check_writable(output_json)
    with progress(what, total) as advance:  # type: ignore[arg-type]
        yield advance


def _end(
    report: Mapping[str, Any] | None,
    output_json: Path | None,
    notes: Sequence[str],
    figures: Sequence[str] = (),
    tables: Mapping[str, Sequence[str]] | None = None,
    more: Mapping[str, Any] | None = None,
) -> int:
    """Write a report and print a part of it; returns 0.

    Args:
        report: None on a rank that has none.
        output_json: where to write it; ``-`` is stdout, and nothing is printed.
        notes: lines below.
        figures: its entries to print.
        tables: its lists of rows to print, with the columns of each; none is all.
        more: entries to print that it has in another form.
    """
    if report is None:
        return 0
    from medha.cli.table import print_report

    write_report(output_json, report)
    if output_json != STDOUT:
        entries = {**report, **(more or {})}
        shown = {name: entries[name] for name in figures}
        for name, columns in (tables or {}).items():
            shown[name] = [{key: row[key] for key in (columns or row) if key in row} for row in entries[name]]
        where = [str(report[name]) for name in ("dtype", "device") if name in report]
        if report.get("num_ranks", 1) > 1:
            where.append(f"{report['num_ranks']} ranks")
        before, after = report["load_before_after"]
        lines = [*notes, f"load average {before:.1f} before, {after:.1f} after"]
        title = "; ".join([report.get("title", report["benchmark"]), *where])
        print_report(shown | {"notes": lines, "environment": report["environment"]}, title=title)
    return 0
