"""``medha profile``: measures this machine, model and layout, and writes what ``--profile`` reads.

Every rank builds its part of the model as an engine would, so the key of the file is what an engine computes. Rank 0
runs the steps and writes the file. What is measured, and what is made of it: :mod:`medha.profile.calibrate`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medha.cli.command import start_logging
from medha.config import EngineConfig
from medha.parallel.launch import is_first_rank

if TYPE_CHECKING:
    from medha.cost.coefficients import Coefficients

_MAX_KV = 131072


def profile(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face folder or hub id.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("medha-profile.json"),
    tp: Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks.")] = 1,
    spp: Annotated[int, typer.Option("--spp", help="Stream-pipeline stages.")] = 1,
    kvp: Annotated[int, typer.Option("--kvp", help="KV-parallel groups.")] = 1,
    num_threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto or cpu.")] = "auto",
    load_format: Annotated[
        str, typer.Option(help="dummy (random weights: their values do not matter), auto or safetensors.")
    ] = "dummy",
    attention_backend: Annotated[str, typer.Option(help="As medha generate.")] = "auto",
    block_size: Annotated[int, typer.Option(help="Tokens of a KV block.")] = 256,
    hf_overrides: Annotated[str | None, typer.Option(help="JSON object merged over config.json.")] = None,
    max_kv: Annotated[
        int | None,
        typer.Option(help=f"Longest KV cache; by default {_MAX_KV:,}, or what model and memory allow."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats: about a minute.")] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.", envvar="MEDHA_LOG_LEVEL")] = "info",
) -> int:
    """Measure what steps cost here; medha generate --profile FILE predicts with it. With several ranks: by torchrun."""
    from medha.models.hf_config import parse_hf_overrides

    start_logging(log_level)
    config = EngineConfig.from_flat(
        model,
        dtype=dtype,
        device=device,
        load_format=load_format,
        attention_backend=attention_backend,
        num_threads=num_threads,
        block_size=block_size,
        hf_overrides=None if hf_overrides is None else parse_hf_overrides(hf_overrides),
        tp=tp,
        spp=spp,
        kvp=kvp,
        max_num_seqs=2,  # bounds the pool: a long row and a batch beside it
    )
    return run_and_write(config, output, max_kv=max_kv, quick=quick)


def run_and_write(config: EngineConfig, output: Path, *, max_kv: int | None = None, quick: bool = False) -> int:
    """Measure with a progress bar on stderr, write the file and say what was found; every rank calls it; returns 0.

    Raises:
        ConfigError: the file cannot be written, the device cannot be measured, or ``max_kv`` is too long.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from medha.cli.report import check_writable, machine_line
    from medha.cli.table import counted, report_console
    from medha.profile.calibrate import QUICK, Effort
    from medha.profile.measure import measure

    check_writable(output if is_first_rank() else None)
    load = os.getloadavg()[0]
    columns = TextColumn("measuring"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not is_first_rank()) as bar:
        task = bar.add_task("", total=1.0)
        found = measure(
            config,
            QUICK if quick else Effort(),
            max_kv=max_kv,
            on_progress=lambda done: bar.update(task, completed=done),
        )
    if found is None:
        return 0
    partial = output.with_name(output.name + ".partial")
    partial.write_text(found.to_json())
    partial.replace(output)
    console = report_console()
    console.print(f"{output}: {found.key.model}, {found.key.dtype}, {found.key.layout}", highlight=False)
    console.print(_summary(found), highlight=False)
    console.print(
        f"{machine_line()}; {counted(found.key.num_threads, 'thread')}, "
        f"load {load:.1f} before and {os.getloadavg()[0]:.1f} after",
        highlight=False,
    )
    return 0


def _summary(found: Coefficients) -> str:
    """What some steps are predicted to take, in words."""
    from medha.cost.predictor import Predictor, Work

    predict = Predictor(found).predict
    steps = {
        "a decode behind 1K": [Work(1, 1024, True)],
        "16 decodes behind 1K": [Work(1, 1024, True)] * 16,
        "a first chunk of 256": [Work(256, 0, False)],
        "one behind 64K": [Work(256, 65536, False)],
    }
    return "; ".join(f"{name}: {predict(rows) * 1e3:,.1f} ms" for name, rows in steps.items())
