"""``medha bench …``: the benchmarks as commands. Heavy imports stay inside them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from medha.command import make_app
from medha.errors import ConfigError

app = make_app(help="Measure on this machine.")
_OVERRIDES = "Fields of the random Llama's config.json as JSON, for example '{\"hidden_size\": 64}'."


@app.callback()
def bench() -> None:
    """Measure on this machine."""


@app.command()
def compare(
    prompt_lens: Annotated[str, typer.Option(help="Prefill lengths in tokens, comma separated.")] = "2048,16384",
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that decode together.")] = 16,
    decode_len: Annotated[int, typer.Option(min=2, help="Tokens that each of them decodes.")] = 32,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    num_threads: Annotated[int, typer.Option(min=1, help="CPU threads, the same for both.")] = 2,
    num_iters_warmup: Annotated[int, typer.Option(min=0)] = 1,
    num_iters: Annotated[int, typer.Option(min=1, help="Counted runs; the median is reported.")] = 3,
    hf_overrides: Annotated[str | None, typer.Option(help=_OVERRIDES, show_default=False)] = None,
    output_json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
) -> int:
    """The same weights and prompts through medha and through transformers at its best; ratios of medians."""
    from medha.bench.compare import CompareOptions, run_and_print

    options = CompareOptions(
        prompt_lens=_lengths("prompt_lens", prompt_lens),
        decode_batch=batch_size,
        decode_tokens=decode_len,
        dtype=dtype,
        num_threads=num_threads,
        warmup=num_iters_warmup,
        runs=num_iters,
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
def needle(
    tokens: Annotated[str, typer.Option(help="Document lengths, comma separated.")] = "131072",
    depth: Annotated[list[float] | None, typer.Option(min=0.0, max=1.0, help="May be repeated.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks.")] = 1,
    spp: Annotated[int, typer.Option(min=1, help="Pipeline stages, at most 2.")] = 1,
    kvp: Annotated[int, typer.Option(min=1, help="KV-cache-parallel groups.")] = 1,
    output_json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
) -> int:
    """Find a fact hidden in a long document, with time and memory; starts its processes itself, without torchrun."""
    from medha.bench.needle import run_and_print
    from medha.config import ParallelConfig

    layout = ParallelConfig(tp=tp, spp=spp, kvp=kvp)
    return run_and_print(_lengths("tokens", tokens), tuple(depth or [0.1]), layout, output_json)


def _overrides(text: str | None) -> dict[str, Any] | None:
    """Fields of ``config.json`` given as JSON."""
    from medha.models.hf_config import parse_hf_overrides

    return None if text is None else parse_hf_overrides(text)


def _lengths(name: str, text: str) -> tuple[int, ...]:
    """``2048,16384`` as integers.

    Raises:
        ConfigError: not a list of positive integers.
    """
    parts = text.replace("_", "").split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{name}={text!r}; accepted: positive integers, comma separated")
    return tuple(int(part) for part in parts)
