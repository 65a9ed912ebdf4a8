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
        prompt_lens=_lengths(prompt_lens),
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
    layouts: Annotated[str, typer.Option(help="Compared with one rank, comma separated: spp2, tp2, tp2spp2.")] = "spp2",
    prompt_len: Annotated[int, typer.Option(min=1, help="Prompt in tokens.")] = 16384,
    chunk_size: Annotated[int, typer.Option(min=1, help="Prompt tokens a batch.")] = 512,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    num_iters_warmup: Annotated[int, typer.Option(min=0)] = 1,
    num_iters: Annotated[int, typer.Option(min=1, help="Counted runs; the median is reported.")] = 3,
    hf_overrides: Annotated[str | None, typer.Option(help=_OVERRIDES, show_default=False)] = None,
    output_json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
) -> int:
    """Prefill on several ranks against one, one thread a rank; starts its processes itself, without torchrun."""
    from medha.bench.scaling import ScalingOptions, run_and_print

    options = ScalingOptions(
        layouts=tuple(layouts.split(",")),
        prompt_len=prompt_len,
        chunk_size=chunk_size,
        hf_overrides=_overrides(hf_overrides),
        dtype=dtype,
        warmup=num_iters_warmup,
        runs=num_iters,
    )
    return run_and_print(options, output_json)


@app.command()
def needle(
    tokens: Annotated[str, typer.Option(help="Document lengths, comma separated.")] = "131072",
    depth: Annotated[list[float] | None, typer.Option(min=0.0, max=1.0, help="May be repeated.")] = None,
    output_json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
) -> int:
    """Find a fact hidden in a long document, with time and peak memory."""
    from medha.bench.needle import run_and_print

    return run_and_print(_lengths(tokens), tuple(depth or [0.1]), output_json)


def _overrides(text: str | None) -> dict[str, Any] | None:
    """Fields of ``config.json`` given as JSON."""
    from medha.models.hf_config import parse_hf_overrides

    return None if text is None else parse_hf_overrides(text)


def _lengths(text: str) -> tuple[int, ...]:
    """``2048,16384`` as integers.

    Raises:
        ConfigError: not a list of positive integers.
    """
    parts = text.replace("_", "").split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"prompt_lens={text!r}; accepted: positive integers, comma separated")
    return tuple(int(part) for part in parts)
