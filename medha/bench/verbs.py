"""``medha bench latency``, ``throughput``, ``serve``, ``attention``, ``decode`` and ``prefill`` as commands.

Each runs in one process, on the CPU or, where torch finds one, on a GPU. Heavy imports stay inside the commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medha.bench.arguments import parse_lengths, parse_overrides
from medha.config import SCHEDULERS, EngineConfig

if TYPE_CHECKING:
    from medha.bench.local import Subject
    from medha.bench.workloads import Workload

_DEFAULT = EngineConfig("-").scheduler
_model_option = partial(typer.Option, rich_help_panel="Model")
_load_option = partial(typer.Option, rich_help_panel="Load")
_scheduling_option = partial(typer.Option, rich_help_panel="Scheduling")

# Which parameters of a command are the engine's, by the name that they have there too.
_ENGINE = (
    "dtype", "device", "load_format", "num_threads", "seed", "scheduler", "policy", "chunk_size", "max_batch_tokens",
    "max_num_seqs", "t_target_s", "quantum_s", "rho_max", "long_threshold", "late_share", "patience_s", "admission",
    "overcommit", "profile", "block_size", "num_kv_blocks",
)  # fmt: skip

Model = Annotated[
    str | None, _model_option("--model", "-m", help="Hugging Face folder or hub id; else a random Llama.")
]
HfOverrides = Annotated[
    str | None, _model_option(help="JSON object merged over config.json, as '{\"hidden_size\": 64}'.")
]
Dtype = Annotated[str, _model_option(help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, _model_option(help="auto, cpu, cuda or cuda:N.")]
NumThreads = Annotated[int | None, _model_option(min=1, help="CPU threads; else torch's choice.")]
LoadFormat = Annotated[
    str | None, _model_option(help="auto, safetensors or dummy (random weights).", show_default="auto")
]
Seed = Annotated[int, typer.Option(min=0, help="Of prompts, lengths, arrivals and dummy weights.")]
Warmup = Annotated[int, typer.Option(min=0, help="Runs that do not count.")]
Runs = Annotated[int, typer.Option(min=1, help="Runs that count; the median is reported.")]
OutputJson = Annotated[Path | None, typer.Option(help="Write the report here.", show_default=False)]

NumPrompts = Annotated[
    int | None, _load_option(min=1, help="Requests; of a trace the first ones.", show_default="100, or all of a trace")
]
InputLen = Annotated[int, _load_option(min=1, help="Prompt tokens of each.")]
OutputLen = Annotated[int, _load_option(min=1, help="Output tokens of each.")]
Lengths = Annotated[
    str | None, _load_option(help="Draw both from a distribution, as medha trace synth.", show_default=False)
]
DatasetPath = Annotated[
    Path | None, _load_option("--dataset-path", "--trace", help="Trace file of requests.", show_default=False)
]

Scheduler = Annotated[str, _scheduling_option(help=f"One of {', '.join(SCHEDULERS)}.")]
Policy = Annotated[str, _scheduling_option(help="As medha generate.")]
ChunkSize = Annotated[int | None, _scheduling_option(help="Most tokens of a prompt in a step.")]
MaxBatchTokens = Annotated[int, _scheduling_option(help="Most tokens of a step.")]
MaxNumSeqs = Annotated[int, _scheduling_option(help="Most requests at once.")]
TTargetS = Annotated[
    float | None, _scheduling_option("--t-target-s", help="Seconds a step may take; else from the decodes' TPOT.")
]
QuantumS = Annotated[float, _scheduling_option("--quantum-s", help="The same where no decode has a TPOT objective.")]
RhoMax = Annotated[float, _scheduling_option(help="Most that a long prefill yields of a step.")]
LongThreshold = Annotated[int, _scheduling_option(help="Prompt tokens from which a prefill is long.")]
LateShare = Annotated[float, _scheduling_option(help="Share of a step for prefills that are late.")]
PatienceS = Annotated[
    float, _scheduling_option("--patience-s", help="Seconds after which a prefill counts as passed over.")
]
Admission = Annotated[str, _scheduling_option(help="Who cannot be in time: all, refuse, relegate.")]
Overcommit = Annotated[bool, _scheduling_option("--overcommit", help="Take KV memory that others may come to need.")]
Profile = Annotated[str | None, _scheduling_option(help="File that medha profile wrote.", show_default=False)]
BlockSize = Annotated[int, _scheduling_option(help="Tokens of a KV block.")]
NumKvBlocks = Annotated[int | None, _scheduling_option(help="Blocks of the KV pool.", show_default=False)]


def latency(
    context: typer.Context,
    input_len: Annotated[
        str, typer.Option("--input-len", "--prompt-lens", help="Prompt lengths in tokens, comma separated.")
    ] = "128,1024,4096",
    output_len: Annotated[int, typer.Option(min=1, help="Tokens that each request generates.")] = 16,
    num_iters_warmup: Warmup = 1,
    num_iters: Runs = 5,
    seed: Seed = 0,
    output_json: OutputJson = None,
    model: Model = None,
    hf_overrides: HfOverrides = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    num_threads: NumThreads = None,
    load_format: LoadFormat = None,
    scheduler: Scheduler = _DEFAULT.scheduler,
    policy: Policy = str(_DEFAULT.policy),
    chunk_size: ChunkSize = None,
    max_batch_tokens: MaxBatchTokens = _DEFAULT.max_batch_tokens,
    t_target_s: TTargetS = None,
    quantum_s: QuantumS = _DEFAULT.quantum_s,
    profile: Profile = None,
) -> int:
    """One request at a time, over prompt lengths: time to the first token, between tokens, end to end.

    TTFT: arrival to first token, queueing included. TPOT: (last - first token) / (tokens - 1).
    """
    from medha.bench.latency import LatencyOptions, run_and_print

    options = LatencyOptions(
        subject=_subject(context.params),
        input_lens=parse_lengths("input_len", input_len),
        output_len=output_len,
        warmup=num_iters_warmup,
        runs=num_iters,
        seed=seed,
    )
    return run_and_print(options, output_json)


def throughput(
    context: typer.Context,
    num_prompts: NumPrompts = None,
    input_len: InputLen = 1024,
    output_len: OutputLen = 128,
    lengths: Lengths = None,
    dataset_path: DatasetPath = None,
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Passes over all requests that do not count.")] = 1,
    num_iters: Annotated[int, typer.Option(min=1, help="Passes that count; the median is reported.")] = 3,
    seed: Seed = 0,
    output_json: OutputJson = None,
    model: Model = None,
    hf_overrides: HfOverrides = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    num_threads: NumThreads = None,
    load_format: LoadFormat = None,
    scheduler: Scheduler = _DEFAULT.scheduler,
    policy: Policy = str(_DEFAULT.policy),
    chunk_size: ChunkSize = None,
    max_batch_tokens: MaxBatchTokens = _DEFAULT.max_batch_tokens,
    max_num_seqs: MaxNumSeqs = _DEFAULT.max_num_seqs,
    t_target_s: TTargetS = None,
    quantum_s: QuantumS = _DEFAULT.quantum_s,
    overcommit: Overcommit = False,
    profile: Profile = None,
    block_size: BlockSize = 256,
    num_kv_blocks: NumKvBlocks = None,
) -> int:
    """A number of requests, all there from the start: requests and tokens a second."""
    from medha.bench.throughput import ThroughputOptions, run_and_print

    options = ThroughputOptions(
        _subject(context.params), _workload(context.params), warmup=num_iters_warmup, runs=num_iters
    )
    return run_and_print(options, output_json)


def serve(
    context: typer.Context,
    more_goodput: Annotated[
        list[str] | None, typer.Argument(metavar="KEY:MS", help="Further values of --goodput.", show_default=False)
    ] = None,
    num_prompts: NumPrompts = None,
    input_len: InputLen = 1024,
    output_len: OutputLen = 128,
    lengths: Lengths = None,
    dataset_path: DatasetPath = None,
    request_rate: Annotated[
        float | None,
        _load_option(help="Requests a second on average, inf for all at once.", show_default="a trace's own, or inf"),
    ] = None,
    burstiness: Annotated[float, _load_option(help="Of the gaps: 1 is Poisson, less is burstier.")] = 1.0,
    max_concurrency: Annotated[
        int | None, _load_option(min=1, help="Requests at once; others arrive as one ends.", show_default=False)
    ] = None,
    num_warmups: Annotated[int, _load_option(min=0, help="Requests served before, which do not count.")] = 1,
    probe_request_rate: Annotated[
        float, _load_option(help="Small requests a second that measure how the load stalls others; 0 is none.")
    ] = 0.0,
    probe_input_len: Annotated[int, _load_option(min=1, help="Prompt tokens of a probe.")] = 16,
    probe_output_len: Annotated[int, _load_option(min=1, help="Output tokens of a probe.")] = 1,
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
    model: Model = None,
    hf_overrides: HfOverrides = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    num_threads: NumThreads = None,
    load_format: LoadFormat = None,
    scheduler: Scheduler = _DEFAULT.scheduler,
    policy: Policy = str(_DEFAULT.policy),
    chunk_size: ChunkSize = None,
    max_batch_tokens: MaxBatchTokens = _DEFAULT.max_batch_tokens,
    max_num_seqs: MaxNumSeqs = _DEFAULT.max_num_seqs,
    t_target_s: TTargetS = None,
    quantum_s: QuantumS = _DEFAULT.quantum_s,
    rho_max: RhoMax = _DEFAULT.rho_max,
    long_threshold: LongThreshold = _DEFAULT.long_threshold,
    late_share: LateShare = _DEFAULT.late_share,
    patience_s: PatienceS = _DEFAULT.patience_s,
    admission: Admission = _DEFAULT.admission,
    overcommit: Overcommit = False,
    profile: Profile = None,
    block_size: BlockSize = 256,
    num_kv_blocks: NumKvBlocks = None,
) -> int:
    """Requests arrive at a live engine in this process: TTFT, TPOT, ITL, goodput, and what probes see of it.

    TTFT: arrival to first token, queueing included. TPOT: (last - first token) / (tokens - 1). ITL: gap between
    tokens. E2EL: arrival to last token. Goodput: completed requests a second that met every objective; SLO attainment:
    their share of the requests with one. Exit code 3: some requests failed.
    """
    from medha.bench.serve import ServeOptions, run_and_print
    from medha.bench.serve_figures import Goodput, parse_metrics, parse_percentiles

    options = ServeOptions(
        subject=_subject(context.params),
        workload=_workload(context.params),
        max_concurrency=max_concurrency,
        goodput=Goodput.parse([*(goodput or ()), *(more_goodput or ())]),
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
    dtype: Annotated[str, _model_option(help="Comma separated.")] = "float32,bfloat16",
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
    from medha.bench.local import Subject

    options = AttentionOptions(
        subject=Subject(model, parse_overrides(hf_overrides), {"device": device, "num_threads": num_threads}),
        chunks=parse_lengths("chunk_size", chunk_size),
        kv_lens=parse_lengths("kv_lens", kv_lens),
        dtypes=tuple(name.strip() for name in dtype.split(",")),
        warmup=num_iters_warmup,
        runs=num_iters,
    )
    return run_and_print(options, output_json)


def decode(
    context: typer.Context,
    batch_size: Annotated[str, typer.Option(help="Requests that decode together, comma separated.")] = "1,4,16",
    context_lens: Annotated[
        str, typer.Option("--context", help="Tokens of each in the KV cache, comma separated.")
    ] = "1024,8192",
    num_iters_warmup: Annotated[int, typer.Option(min=0, help="Steps of each that do not count.")] = 2,
    num_iters: Annotated[int, typer.Option(min=1, help="Steps that count; the median is reported.")] = 10,
    output_json: OutputJson = None,
    model: Model = None,
    hf_overrides: HfOverrides = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    num_threads: NumThreads = None,
    load_format: LoadFormat = None,
) -> int:
    """A step of decodes, batch sizes over contexts: its time, and the share of the memory's rate (MBU)."""
    from medha.bench.decode import DecodeOptions, run_and_print

    options = DecodeOptions(
        subject=_subject(context.params),
        batch_sizes=parse_lengths("batch_size", batch_size),
        contexts=parse_lengths("context", context_lens),
        warmup=num_iters_warmup,
        runs=num_iters,
    )
    return run_and_print(options, output_json)


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
    model: Model = None,
    hf_overrides: HfOverrides = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    num_threads: NumThreads = None,
    load_format: LoadFormat = None,
) -> int:
    """Prompts read whole and in adaptive chunks: TTFT, and the share of the matrix products' rate (MFU)."""
    from medha.bench.local import Subject
    from medha.bench.prefill import PrefillOptions, run_and_print

    engine = {"dtype": dtype, "device": device, "num_threads": num_threads, "load_format": load_format, "seed": seed}
    options = PrefillOptions(
        subject=Subject(model, parse_overrides(hf_overrides), engine),
        prompt_lens=parse_lengths("prompt_lens", prompt_lens),
        t_target_s=t_target_s,
        max_batch_tokens=max_batch_tokens,
        warmup=num_iters_warmup,
        runs=num_iters,
        seed=seed,
    )
    return run_and_print(options, output_json)


def _subject(given: Mapping[str, Any]) -> Subject:
    """The model and engine that the parameters of a command ask for."""
    from medha.bench.local import Subject

    engine = {name: given[name] for name in _ENGINE if given.get(name) is not None}
    return Subject(given["model"], parse_overrides(given["hf_overrides"]), engine)


def _workload(given: Mapping[str, Any]) -> Workload:
    """The requests that they ask for."""
    from medha.bench.workloads import Workload

    names = ("dataset_path", "lengths", "input_len", "output_len", "num_prompts", "request_rate", "burstiness", "seed")
    return Workload(**{name: given[name] for name in names if given.get(name) is not None})
