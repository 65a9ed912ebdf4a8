"""``medha bench …``: the benchmarks as commands. Heavy imports stay inside them.

A command makes the options of its benchmark, has it measured on every rank, and hands a part of rank 0's report to the
one renderer (:mod:`medha.cli.table`); all of it is in the file. This file is as long as the options that users have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medha.cli.command import FAILED_REQUESTS, make_app
from medha.cli.options import (
    MEMORY,
    MODEL,
    PARALLEL,
    SCHEDULING,
    SERVING,
    Group,
    OutputJson,
    but,
    engine_options,
    parse_lengths,
    pick,
    takes,
)
from medha.cli.report import STDOUT, check_writable, progress, write_report
from medha.config import EngineConfig
from medha.errors import ConfigError
from medha.parallel.launch import is_first_rank

if TYPE_CHECKING:
    from medha.bench.harness import Report, Shown, Subject

Advance = Callable[[], None]
app = make_app(help="Measure on this machine. TTFT, TPOT and the other terms: medha bench serve --help.")
micro = make_app(help="Measure one part alone: attention, a decode step, a scheduling decision, sampling.")
app.add_typer(micro, name="micro")


def _option(help: str, *flags: str, least: float | None = None, panel: str | None = None, shown: Any = True) -> Any:
    return typer.Option(*flags, help=help, min=least, rich_help_panel=panel, show_default=shown)


_load = partial(_option, panel="Load")


def rounds(warmup: int, runs: int, what: str = "Runs") -> Group:
    """How often something is measured, and where the report goes."""
    return {
        "num_iters_warmup": (Annotated[int, _option(f"{what} that do not count.", least=0)], warmup),
        "num_iters": (Annotated[int, _option(f"{what} that count; the median is reported.", least=1)], runs),
        "output_json": (OutputJson, None),
    }


SUBJECT: Group = {
    "model": (Annotated[str | None, _option("Folder, hub id; else random.", "--model", "-m", panel="Model")], None),
    **but(MODEL, "model", "max_model_len"),
}  # fmt: skip
"""What is measured; its longest request follows from the benchmark."""
ALONE = {name: SUBJECT[name] for name in ("model", "hf_overrides", "device", "num_threads")}
WORKLOAD: Group = {
    "num_prompts": (Annotated[int | None, _load("Requests; of a trace the first.", least=1, shown="100")], None),
    "input_len": (Annotated[int, _load("Prompt tokens of each.", least=1)], 1024),
    "output_len": (Annotated[int, _load("Output tokens of each.", least=1)], 128),
    "lengths": (Annotated[str | None, _load("Draw both from a distribution, as medha trace synth.")], None),
    "dataset_path": (Annotated[Path | None, _load("Trace file of requests.", "--dataset-path", "--trace")], None),
}  # fmt: skip
"""Which requests there are."""


@app.callback()
def bench() -> None:
    """Measure on this machine."""


@app.command()
@takes(rounds(1, 5), SUBJECT, SCHEDULING, MEMORY, PARALLEL)
def latency(
    input_len: Annotated[str, _option("Prompt tokens, comma separated.", "--input-len", "--prompt-lens")] = (
        "128,1024,4096"
    ),
    output_len: Annotated[int, _option("Tokens that each request generates.", least=1)] = 16,
    whole: Annotated[bool, _option("Also read each prompt as one chunk: the price of chunks; MFU.", "--whole")] = False,
    **given: Any,
) -> int:
    """One request at a time, over prompt lengths: time to the first token, between tokens, end to end.

    TTFT: arrival to first token, queueing included. TPOT: (last - first token) / (tokens - 1). Under torchrun, or with
    --tp, --spp or --kvp alone, the engine runs on several ranks.
    """
    from medha.bench import latency as benchmark

    subject = _subject(given, says=True)
    lengths = subject.fitting("input_len", parse_lengths("input_len", input_len), more=output_len)
    options = benchmark.LatencyOptions(subject, lengths, output_len, whole, **_rounds(given), seed=given["seed"])

    return _run(given, "serving", benchmark.num_runs(options), partial(benchmark.latency, options), benchmark.shown)


@app.command()
@takes(rounds(1, 3, "Passes over all requests"), WORKLOAD, SUBJECT, SCHEDULING, SERVING, MEMORY, PARALLEL)
def throughput(**given: Any) -> int:
    """A number of requests, all there from the start: requests and tokens a second; on one rank or several."""
    from medha.bench import throughput as benchmark
    from medha.bench.load import Workload

    workload = Workload(**{name: given[name] for name in WORKLOAD}, seed=given["seed"])
    options = benchmark.ThroughputOptions(_subject(given, says=True), workload, **_rounds(given))
    trace = workload.trace()

    total = (options.warmup + options.runs) * len(trace)
    return _run(given, "serving", total, partial(benchmark.throughput, options, trace), benchmark.shown)


@app.command()
@takes({"output_json": (OutputJson, None)}, WORKLOAD, SUBJECT, SCHEDULING, SERVING, MEMORY, PARALLEL)
def serve(
    more_goodput: Annotated[
        list[str] | None, typer.Argument(metavar="KEY:MS", help="Further values of --goodput.", show_default=False)
    ] = None,
    preset: Annotated[str | None, _load("convoy: short requests beside long prompts, under six schedulers.")] = None,
    long_len: Annotated[int, _load("Of the preset: tokens of each of four long prompts.", least=1)] = 32768,
    load: Annotated[float, _load("Of the preset: part of the measured capacity that the stream takes.")] = 0.75,
    plot: Annotated[Path | None, _load("Of the preset: draw TTFTs here; needs matplotlib.")] = None,
    request_rate: Annotated[float | None, _load("Requests a second, or inf.", shown="a trace's own, or inf")] = None,
    burstiness: Annotated[float, _load("Of the gaps: 1 is Poisson, less is burstier.")] = 1.0,
    max_concurrency: Annotated[int | None, _load("Requests at once; others arrive as one ends.", least=1)] = None,
    num_warmups: Annotated[int, _load("Requests served before, which do not count.", least=0)] = 1,
    probe_request_rate: Annotated[float, _load("Small requests a second that the load stalls; 0 is none.")] = 0.0,
    probe_input_len: Annotated[int, _load("Prompt tokens of a probe.", least=1)] = 16,
    probe_output_len: Annotated[int, _load("Output tokens of a probe.", least=1)] = 1,
    goodput: Annotated[
        list[str] | None, _option("Objectives in ms, as ttft:100 tpot:50 e2el:900; the first two are the scheduler's.")
    ] = None,
    percentile_metrics: Annotated[str, _option("Which of these to report.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, _option("Percentiles of them, comma separated.")] = "99",
    save_detailed: Annotated[bool, _option("Report one value a request too.", "--save-detailed")] = False,
    label: Annotated[str | None, _option("Copied into the report.")] = None,
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
        return _convoy(preset, given, long_len, load, plot)
    goals = Goodput.parse([*(goodput or ()), *(more_goodput or ())])
    asked = {name: given[name] for name in WORKLOAD} | {"seed": given["seed"]}
    options = benchmark.ServeOptions(
        subject=_subject(given, says=True, has_tpot=goals.tpot_s is not None),
        workload=Workload(**asked, request_rate=request_rate, burstiness=burstiness),
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

    return _run(given, "serving", len(trace), partial(benchmark.serve, options, trace), benchmark.shown)


def _convoy(preset: str, given: Mapping[str, Any], long_len: int, load: float, plot: Path | None) -> int:
    """``serve --preset convoy``."""
    from medha.bench import serve as benchmark

    if preset != "convoy":
        raise ConfigError(f"preset={preset!r}; accepted: convoy")
    if is_first_rank():
        check_writable(plot)
    subject, default = _subject(given), benchmark.ConvoyOptions()
    if subject.model is None:
        subject = replace(subject, hf_overrides=benchmark.CONVOY_MODEL | dict(subject.hf_overrides or {}))
    options = replace(
        default,
        subject=subject,
        num_short=given["num_prompts"] or default.num_short,
        long_len=long_len,
        load=load,
        t_target_s=given["t_target_s"] or default.t_target_s,
        seed=given["seed"],
    )

    def measure(*, on_run: Advance) -> Report | None:
        report = benchmark.convoy(options, on_run=on_run)
        if report is not None and plot is not None:
            benchmark.plot_convoy(report, plot)
        return report

    return _run(
        given,
        "serving",
        (1 + len(options.systems)) * (options.num_long + options.num_short),
        measure,
        benchmark.convoy_shown,
    )


@app.command()
@takes(rounds(1, 3), {name: SUBJECT[name] for name in ("model", "hf_overrides")})
def compare(
    peer: Annotated[str, _option("transformers or vllm.")] = "transformers",
    peer_python: Annotated[
        str, _option("Interpreter that has the peer; vLLM's is that of a venv of its own.", shown="this one")
    ] = sys.executable,
    input_len: Annotated[str, _option("Prompts to read, in tokens, or none.", "--input-len", "--prompt-lens")] = (
        "2048,16384"
    ),
    batch_size: Annotated[int, _option("Requests that decode together; 0 leaves them out.", least=0)] = 16,
    output_len: Annotated[int, _option("Tokens that each decodes.", "--output-len", "--decode-len", least=2)] = 32,
    num_prompts: Annotated[
        int, _option("Mixed requests, all there at once; 0 is none.", "--num-prompts", "--num-mixed", least=0)
    ] = 200,
    lengths: Annotated[str, _option("Of these, as medha trace synth.", "--lengths", "--mixed-lengths")] = (
        "uniform:32-1024,4-128"
    ),
    dtype: Annotated[str, _option("float32, bfloat16 or float16.")] = "float32",
    num_threads: Annotated[
        int, typer.Option(min=1, help="CPU threads, the same for both.", envvar="OMP_NUM_THREADS")
    ] = 2,
    enable_prefix_caching: Annotated[
        bool, _option("Of vLLM; medha and transformers have none.", "--enable-prefix-caching")
    ] = False,
    seed: Annotated[int, _option("Of lengths, prompts and weights.", least=0)] = 0,
    **given: Any,
) -> int:
    """The same weights and prompts through medha and through another engine at its best; ratios of medians.

    A ratio above 1 means that medha is faster. Exit code 3: tokens differ that rounding cannot be blamed for.
    """
    from medha.bench import compare as benchmark
    from medha.bench.load import Workload

    options = benchmark.CompareOptions(
        subject=_subject(given),
        peer=peer,
        peer_python=peer_python,
        input_lens=() if input_len == "none" else parse_lengths("input_len", input_len),
        batch_size=batch_size,
        output_len=output_len,
        mixed=Workload(lengths=lengths, num_prompts=num_prompts, seed=seed) if num_prompts else None,
        dtype=dtype,
        num_threads=num_threads,
        enable_prefix_caching=enable_prefix_caching,
        seed=seed,
        **_rounds(given),
    )

    return _run(given, "comparing", None, partial(benchmark.compare, options), benchmark.shown)


@app.command()
@takes(rounds(1, 3, "Prompts, or turns of 10 steps,"), pick("dtype", "device", "attention_backend", "hf_overrides"))
def scaling(
    mode: Annotated[str, _option("prefill of a prompt, or one step over a long context: decode, chunk.")] = "prefill",
    layouts: Annotated[
        str | None, _option("Compared with one rank, as kvp2spp2, comma separated.", shown="spp2, kvp2 for a step")
    ] = None,
    input_len: Annotated[
        str | None,
        _option(
            "Tokens of the prompt, or in the KV cache before a step, comma separated.",
            "--input-len", "--prompt-len", "--context", shown="16384, 65536 for a step",
        ),
    ] = None,
    chunk_size: Annotated[int | None, _option("Prompt tokens a batch.", least=1, shown="512, 64 for a step")] = None,
    seed: Annotated[int, _option("Of prompts and weights.", least=0)] = 0,
    **given: Any,
) -> int:  # fmt: skip
    """Several ranks against one, one thread a rank; starts its processes itself, without torchrun."""
    from medha.bench import scaling as benchmark

    is_prefill = mode == "prefill"
    options = benchmark.ScalingOptions(
        subject=_subject(given),
        mode=mode,
        lengths=parse_lengths("input_len", input_len or ("16384" if is_prefill else "65536")),
        layouts=tuple((layouts or ("spp2" if is_prefill else "kvp2")).split(",")),
        chunk_size=chunk_size or (512 if is_prefill else 64),
        seed=seed,
        **_rounds(given),
    )

    return _run(given, "measuring", options.num_runs, partial(benchmark.scaling, options), benchmark.shown)


@app.command()
@takes({"output_json": (OutputJson, None)}, SUBJECT, pick("profile"))
def accuracy(
    num_rounds: Annotated[int, _option("Counted rounds of the mix.", least=1)] = 3,
    long_len: Annotated[int, _option("Tokens of the long prompt of a round.", least=1)] = 16384,
    t_target_s: Annotated[float, _option("Seconds that a step may take.", "--t-target-s")] = 0.25,
    **given: Any,
) -> int:
    """Predicted against real step times of the engine, beside the machine's own repeatability; one process.

    Without --profile, what steps cost is measured first.
    """
    from medha.bench import accuracy as benchmark

    options = benchmark.AccuracyOptions(
        subject=_subject(given), num_rounds=num_rounds, long_len=long_len, t_target_s=t_target_s, seed=given["seed"]
    )

    def measure(*, on_run: Advance) -> Report:
        done = 0

        def on_progress(share: float) -> None:
            nonlocal done
            for _ in range(done, int(100 * share)):
                on_run()
                done += 1

        return benchmark.accuracy(options, on_progress=on_progress)

    return _run(given, "stepping", 100, measure, benchmark.shown)


@micro.command()
@takes(rounds(1, 3), ALONE)
def attention(
    chunk_size: Annotated[str, _option("Query tokens of a chunk, comma separated.")] = "32,64,128,256,512,1024",
    kv_lens: Annotated[str, _option("Keys that the last query sees, the chunk's own included.")] = "4096,16384,65536",
    dtype: Annotated[str, _option("Comma separated.")] = "float32,bfloat16",
    **given: Any,
) -> int:
    """Attention of one layer, chunks over KV lengths: its rate, against the matrix products of this machine."""
    from medha.bench import attention as benchmark

    options = benchmark.AttentionOptions(
        subject=_subject(given),
        chunks=parse_lengths("chunk_size", chunk_size),
        kv_lens=parse_lengths("kv_lens", kv_lens),
        dtypes=tuple(name.strip() for name in dtype.split(",")),
        **_rounds(given),
    )

    return _run(given, "attending", options.num_runs, partial(benchmark.attention, options), benchmark.shown)


@micro.command()
@takes(rounds(2, 10, "Steps"), SUBJECT, PARALLEL)
def decode(
    batch_size: Annotated[str, _option("Requests that decode together, comma separated.")] = "1,4,16",
    input_len: Annotated[str, _option("Tokens of each in the KV cache.", "--input-len", "--context")] = "1024,8192",
    **given: Any,
) -> int:
    """A step of decodes, batch sizes over contexts: its time, and the share of the memory's rate (MBU)."""
    from medha.bench import decode as benchmark

    subject, sizes = _subject(given), parse_lengths("batch_size", batch_size)
    contexts = subject.fitting("input_len", parse_lengths("input_len", input_len), more=1)
    options = benchmark.DecodeOptions(subject, sizes, contexts, **_rounds(given))

    return _run(given, "decoding", options.num_runs, partial(benchmark.decode, options), benchmark.shown)


@micro.command()
@takes(rounds(2, 10), ALONE)
def sampling(batch_size: Annotated[str, _option("Rows of logits, comma separated.")] = "1,16,64", **given: Any) -> int:
    """From random logits to tokens on the host, over batch sizes and ways of drawing."""
    from medha.bench import decode as benchmark

    options = benchmark.SamplingOptions(_subject(given), parse_lengths("batch_size", batch_size), **_rounds(given))

    return _run(given, "drawing", options.num_runs, partial(benchmark.sampling, options), benchmark.sampling_shown)


@micro.command()
@takes(rounds(50, 500, "Decisions"))
def scheduler(
    num_waiting: Annotated[
        str, _option("Requests that wait, comma separated; each is measured.")
    ] = "1000,10000,100000",
    policy: Annotated[list[str] | None, _option("May be repeated; lars by default.")] = None,
    num_running: Annotated[int, _option("Requests that decode.", least=1)] = 256,
    num_prefills: Annotated[int, _option("Places for prefills under way beside them.", least=2)] = 16,
    num_kv_blocks: Annotated[int | None, _option("KV blocks of 256 tokens.", least=1, shown="enough for all")] = None,
    seed: Annotated[int, _option("Of lengths, arrivals, objectives and classes.", least=0)] = 0,
    **given: Any,
) -> int:
    """Time of one scheduling decision as the queue grows; no model runs."""
    from medha.bench import decisions as benchmark

    options = benchmark.DecisionOptions(
        waiting=parse_lengths("num_waiting", num_waiting),
        policies=tuple(policy or ["lars"]),
        num_decoding=num_running,
        num_prefilling=num_prefills,
        num_decisions=given["num_iters"],
        warmup=given["num_iters_warmup"],
        num_blocks=num_kv_blocks,
        seed=seed,
    )

    total = len(options.waiting) * len(options.policies)
    return _run(given, "deciding", total, partial(benchmark.bench_decisions, options), benchmark.shown)


def _subject(given: Mapping[str, Any], *, says: bool = False, has_tpot: bool = False) -> Subject:
    """The model and engine that the options of a command ask for; what it does not take has its default.

    Args:
        given: its options.
        says: whether to say on stderr what a batch may hold.
        has_tpot: whether requests may have a TPOT objective; those of a trace may.
    """
    from medha.bench.harness import Subject

    engine = engine_options(given)
    model, overrides = engine.pop("model", None), engine.pop("hf_overrides", None)
    subject = Subject(model or given.get("model"), overrides, engine)
    if says and is_first_rank():
        has_tpot = has_tpot or given.get("dataset_path") is not None
        words = EngineConfig.from_flat("-", **engine).scheduler.budget_text(has_tpot=has_tpot)
        print("medha:", words, file=sys.stderr)
    return subject


def _rounds(given: Mapping[str, Any]) -> dict[str, int]:
    return {"warmup": given["num_iters_warmup"], "runs": given["num_iters"]}


def _run(
    given: Mapping[str, Any],
    what: str,
    total: int | None,
    measure: Callable[..., Report | None],
    shown: Callable[[Report], Shown],
) -> int:
    """Measure on this rank; rank 0 has a progress bar on stderr, writes the report and prints a part of it.

    Args:
        given: options of the command; that the report can be written is found out before.
        what: is done, and ``total`` is how often.
        measure: does it; ``on_run`` is what advances the bar.
        shown: what to print of the report.

    Returns:
        0, or 3 where requests have failed, or tokens are wrong.
    """
    output_json = given["output_json"]
    check_writable(output_json)
    if not is_first_rank():
        measure(on_run=lambda: None)
        return 0
    with progress(what, total) as advance:
        report = measure(on_run=advance)
    assert report is not None, "rank 0 has the report"
    write_report(output_json, report)
    if output_json != STDOUT:
        from medha.cli.table import print_report

        entries, notes = shown(report)
        where = [str(report[name]) for name in ("dtype", "device") if name in report]
        if report.get("num_ranks", 1) > 1:
            where.append(f"{report['num_ranks']} ranks")
        before, after = report["load_before_after"]
        lines = [*notes, f"load average {before:.1f} before, {after:.1f} after"]
        title = "; ".join([str(report.get("title", report["benchmark"])), *where])
        print_report({**entries, "notes": lines, "environment": report["environment"]}, title=title)
    return FAILED_REQUESTS if report.get("failed") or report.get("num_wrong") else 0
