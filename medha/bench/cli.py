"""``medha bench …``: the benchmarks as commands. Heavy imports stay inside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from medha.bench import verbs
from medha.bench.arguments import parse_lengths as _lengths
from medha.bench.arguments import parse_overrides as _overrides
from medha.cli.command import make_app
from medha.errors import ConfigError

app = make_app(help="Measure on this machine.")
_OVERRIDES = "Fields of the random Llama's config.json as JSON, for example '{\"hidden_size\": 64}'."


@app.callback()
def bench() -> None:
    """Measure on this machine."""


for _verb in (verbs.latency, verbs.throughput, verbs.serve, verbs.attention, verbs.decode, verbs.prefill):
    app.command()(_verb)


@app.command()
def compare(
    prompt_lens: Annotated[
        str, typer.Option(help="Prompts that are read, in tokens, comma separated; none leaves them out.")
    ] = "2048,16384",
    batch_size: Annotated[int, typer.Option(min=0, help="Requests that decode together; 0 leaves them out.")] = 16,
    decode_len: Annotated[int, typer.Option(min=2, help="Tokens that each of them decodes.")] = 32,
    num_mixed: Annotated[
        int, typer.Option(min=0, help="Requests of different lengths, all there at once; 0 leaves them out.")
    ] = 200,
    mixed_lengths: Annotated[
        str, typer.Option(help="Their prompt and output tokens: a distribution, as medha trace synth.")
    ] = "uniform:32-1024,4-128",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or both, comma separated.")] = "float32",
    num_threads: Annotated[
        int, typer.Option(min=1, help="CPU threads, the same for both.", envvar="OMP_NUM_THREADS")
    ] = 2,
    t_target_s: Annotated[float, typer.Option("--t-target-s", help="Seconds that a batch of medha's may take.")] = 1.0,
    num_iters_warmup: Annotated[int, typer.Option(min=0)] = 1,
    num_iters: Annotated[int, typer.Option(min=1, help="Counted runs; the median is reported.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of lengths, prompts and weights.")] = 0,
    hf_overrides: Annotated[str | None, typer.Option(help=_OVERRIDES, show_default=False)] = None,
    output_json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
) -> int:
    """The same weights and prompts through medha and through transformers at its best; ratios of medians."""
    from medha.bench.compare import CompareOptions, run_and_print
    from medha.bench.workloads import Workload

    options = CompareOptions(
        prompt_lens=() if prompt_lens == "none" else _lengths("prompt_lens", prompt_lens),
        decode_batch=batch_size,
        decode_tokens=decode_len,
        mixed=Workload(lengths=mixed_lengths, num_prompts=num_mixed, seed=seed) if num_mixed else None,
        dtypes=tuple(name.strip() for name in dtype.split(",")),
        num_threads=num_threads,
        t_target_s=t_target_s,
        warmup=num_iters_warmup,
        runs=num_iters,
        seed=seed,
        hf_overrides=_overrides(hf_overrides),
    )
    return run_and_print(options, output_json)


@app.command()
def scaling(
    mode: Annotated[str, typer.Option(help="prefill of a prompt, or one step over a long context: decode, chunk.")] = (
        "prefill"
    ),
    layouts: Annotated[
        str | None,
        typer.Option(help="Compared with one rank, comma separated, as kvp2spp2; by default spp2, kvp2 for a step."),
    ] = None,
    prompt_len: Annotated[int, typer.Option(min=1, help="Prompt of a prefill in tokens.")] = 16384,
    context: Annotated[str, typer.Option(help="Tokens in the KV cache before a step, comma separated.")] = "65536",
    chunk_size: Annotated[
        int | None, typer.Option(min=1, help="Prompt tokens a batch; by default 512, 64 for a step.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    num_iters_warmup: Annotated[int, typer.Option(min=0)] = 1,
    num_iters: Annotated[int, typer.Option(min=1, help="Counted runs, or turns of 10 steps; for the median.")] = 3,
    hf_overrides: Annotated[str | None, typer.Option(help=_OVERRIDES, show_default=False)] = None,
    output_json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
) -> int:
    """Several ranks against one, one thread a rank; starts its processes itself, without torchrun."""
    from medha.bench import scaling, steps

    common: dict[str, Any] = {
        "hf_overrides": _overrides(hf_overrides),
        "dtype": dtype,
        "warmup": num_iters_warmup,
        "runs": num_iters,
    }
    if layouts is not None:
        common["layouts"] = tuple(layouts.split(","))
    if mode == "prefill":
        options = scaling.ScalingOptions(prompt_len=prompt_len, chunk_size=chunk_size or 512, **common)
        return scaling.run_and_print(options, output_json)
    if mode not in ("decode", "chunk"):
        raise ConfigError(f"mode={mode!r}; accepted: prefill, decode, chunk")
    q_len = None if mode == "decode" else chunk_size or 64
    step_options = steps.StepOptions(q_len, _lengths("context", context), **common)
    return steps.run_and_print(step_options, output_json)


@app.command()
def convoy(
    quick: Annotated[
        bool, typer.Option("--quick", help="8K prompts and 100 short ones: within three minutes.")
    ] = False,
    num_short: Annotated[int | None, typer.Option(min=1, help="Short requests.", show_default="200")] = None,
    long_len: Annotated[
        int | None, typer.Option(min=501, help="Tokens of each of four long prompts.", show_default="32768")
    ] = None,
    load: Annotated[float, typer.Option(help="Part of the measured capacity that the stream takes.")] = 0.75,
    t_target_s: Annotated[float, typer.Option("--t-target-s", help="Seconds that a batch may take.")] = 0.25,
    depth: Annotated[int, typer.Option(min=1, help="Batches in flight at most, over two stages.")] = 2,
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths, prompts and weights.")] = 0,
    hf_overrides: Annotated[str | None, typer.Option(help=_OVERRIDES, show_default=False)] = None,
    output_json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw TTFT over time here; needs matplotlib.")] = None,
) -> int:
    """Short requests while long prompts are read, under six schedulers; starts its processes itself."""
    from medha.bench.convoy import ConvoyOptions
    from medha.bench.convoy_print import run_and_print

    default = ConvoyOptions.quick() if quick else ConvoyOptions()
    options = replace(
        default,
        num_short=num_short or default.num_short,
        long_len=long_len or default.long_len,
        load=load,
        t_target_s=t_target_s,
        depth=depth,
        seed=seed,
        shape=_overrides(hf_overrides),
    )
    return run_and_print(options, output_json, plot)


@app.command()
def accuracy(
    profile: Annotated[str | None, typer.Option(help="File that medha profile wrote; else measured first.")] = None,
    num_rounds: Annotated[int, typer.Option(min=1, help="Counted rounds of the mix.")] = 3,
    long_len: Annotated[int, typer.Option(min=1, help="Tokens of the long prompt of a round.")] = 16384,
    t_target_s: Annotated[float, typer.Option("--t-target-s", help="Seconds that a step may take.")] = 0.25,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    num_threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    seed: Annotated[int, typer.Option(help="Of lengths, arrivals, prompts and weights.")] = 0,
    hf_overrides: Annotated[str | None, typer.Option(help=_OVERRIDES, show_default=False)] = None,
    output_json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
) -> int:
    """Predicted against real step times of the engine, beside the machine's own repeatability; one process."""
    from medha.bench.accuracy import AccuracyOptions, run_and_print

    options = AccuracyOptions(
        hf_overrides=_overrides(hf_overrides),
        dtype=dtype,
        num_threads=num_threads,
        profile=profile,
        num_rounds=num_rounds,
        long_len=long_len,
        t_target_s=t_target_s,
        seed=seed,
    )
    return run_and_print(options, output_json)


@app.command()
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
    output_json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
) -> int:
    """Time of one scheduling decision as the queue grows; no model runs."""
    from medha.bench.decisions import DecisionOptions, run_and_print

    options = DecisionOptions(
        waiting=_lengths("num_waiting", num_waiting),
        policies=tuple(policy or ["lars"]),
        num_decoding=num_running,
        num_prefilling=num_prefills,
        num_decisions=num_iters,
        warmup=num_iters_warmup,
        num_blocks=num_kv_blocks,
        seed=seed,
    )
    return run_and_print(options, output_json)
