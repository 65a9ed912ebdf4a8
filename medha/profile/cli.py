"""``medha profile``: measures this machine, model and layout, and writes what ``--profile`` reads.

Every rank builds its part of the model as an engine would, so the key of the file is what an engine computes. Rank 0
runs the steps and writes the file. What is measured, and what is made of it: :mod:`medha.profile.calibrate`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from medha.cli.command import start_logging
from medha.cli.options import LogLevel, but, engine_options, pick, takes
from medha.config import EngineConfig
from medha.parallel.launch import is_first_rank

_MODEL_OPTIONS = pick("hf_overrides", "dtype", "device", "load_format", "attention_backend", "num_threads")
_MAX_KV_SHOWN = "131,072, or what model and memory allow"


@takes(but(_MODEL_OPTIONS, load_format="dummy"), pick("tp", "spp", "kvp", "block_size"))
def profile(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face folder or hub id.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("medha-profile.json"),
    max_kv: Annotated[int | None, typer.Option(help="Longest KV cache.", show_default=_MAX_KV_SHOWN)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repeats: about a minute.")] = False,
    log_level: LogLevel = "info",
    **given: Any,
) -> int:
    """Measure what steps cost here; medha generate --profile FILE predicts with it. With several ranks: by torchrun."""
    from medha.cli.report import check_writable, deliver, progress, stamp
    from medha.profile.calibrate import QUICK, Effort, measure, predicted

    start_logging(log_level)
    # max_num_seqs bounds the pool: a long row and a batch beside it
    config = EngineConfig.from_flat(model, **engine_options(given), max_num_seqs=2)
    check_writable(output)
    load, effort = os.getloadavg()[0], QUICK if quick else Effort()
    if not is_first_rank():
        measure(config, effort, max_kv=max_kv)
        return 0
    with progress("measuring", 100) as advance:  # percent
        measured = measure(config, effort, max_kv=max_kv, on_progress=lambda share: advance(100 * share))
    assert measured is not None, "rank 0 has what was measured"
    found, longest = measured
    report = {
        "title": f"{output}: {found.key.model}, {found.key.dtype}, {found.key.layout}",
        "steps": predicted(found, longest),
        "threads": found.key.num_threads,
        "load": {"before": load, "after": os.getloadavg()[0]},
        "environment": stamp(),
    }
    deliver(json.loads(found.to_json()), output, shown=report)
    return 0
