"""MFU of prefills and MBU of decodes: v5 appendix B.4, figures 15 and 16; v4 section 5.5, figures 19 and 20."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from examples.reproduce.figures.stages import STAGES, layout
from examples.reproduce.flops import kv_bytes, prefill_flops, weight_bytes
from examples.reproduce.plotting import PAPER, finish, lines, log_axis, token_axis, token_label
from examples.reproduce.result import Answer, FigureResult, FigureSpec, Options
from examples.reproduce.timing import MODELS, M, decode_s, fits, h100, simulate, stage_predictors
from medha.config import ParallelConfig

_GROUPS = (1, 2, 4)


def run_mfu(options: Options) -> FigureResult:
    """Causal FLOPs of a prefill over what the GPUs could do meanwhile; ``quick`` takes 1M and 10M alone."""
    lengths = [M, 10 * M] if options.quick else [M, 2 * M, 4 * M, 10 * M]
    spec = h100()
    rows: list[dict[str, Any]] = []
    for name, model in MODELS.items():
        for spp in STAGES:
            for n in lengths:
                could = simulate(spec, model, layout(spp), n).ttft_s * layout(spp).world_size * spec.peak_flops_per_s
                rows.append(
                    {
                        "model": name,
                        "gpus": layout(spp).world_size,
                        "tokens": n,
                        "mfu": prefill_flops(model, n) / could,
                        "mfu_not_causal": prefill_flops(model, n, causal=False) / could,
                        "fits": fits(spec, model, layout(spp), n),
                    }
                )
    large = [row for row in rows if row["model"] == "Llama-3 70B" and row["fits"]]
    mfus = [row["mfu"] for row in large]
    widest = [row["mfu"] for row in large if row["gpus"] == 128]
    by_layout = [
        [row["mfu"] for row in large if row["gpus"] == gpus] for gpus in sorted({row["gpus"] for row in large})
    ]
    rises = [b >= a for values in by_layout for a, b in pairwise(values)]
    share = spec.attention.flops_per_s / spec.peak_flops_per_s
    why = (
        f"Set by the spec: attention at {100 * share:.0f} % of the peak, derived from A100 kernels, so this shows "
        "how little the layout loses rather than what a kernel reaches. FLOPs are those of the causal mask; without "
        "it MFU doubles."
    )
    answers = {
        "mfu-70b": Answer((100 * min(mfus), 100 * max(mfus)), why),
        "mfu-128": Answer(
            100 * min(widest),
            f"The least, at 1M tokens, where the pipeline takes long to fill; {100 * max(widest):.0f} % at 10M. {why}",
        ),
        "mfu-rises": Answer(float(np.mean(rises)), "70B, every layout that fits, each length against the next."),
    }
    return FigureResult({"rows": rows}, answers)


def draw_mfu(numbers: Mapping[str, Any], figure: Any) -> None:
    """MFU over GPUs (v5 figure 15)."""
    for index, (axes, name) in enumerate(zip(figure.subplots(1, 2, sharey=True), MODELS, strict=True)):
        mine = [row for row in numbers["rows"] if row["model"] == name and row["fits"]]
        rows = {
            f"{token_label(tokens)} tokens": {row["gpus"]: row["mfu"] for row in mine if row["tokens"] == tokens}
            for tokens in sorted({row["tokens"] for row in mine})
        }
        gpus = [8 * s for s in STAGES]
        lines(axes, gpus, {name: [row.get(at) for at in gpus] for name, row in rows.items()}, scale=100)
        axes.axhspan(50, 60, color="#E8E8E8", zorder=0, label="50 to 60 % (70B, v5 B.4)" if index else None)
        axes.set_ylim(0, 70)
        log_axis(axes, gpus, label="H100s (TP 8)")
        finish(axes, title=f"{name}, 4K chunks", ylabel="" if index else "MFU, causal FLOPs, %")


def run_mbu(options: Options) -> FigureResult:
    """Bytes that a decode must read over what the memories could deliver meanwhile; ``quick`` changes nothing."""
    lengths = [M, 2 * M, 4 * M, 10 * M]
    spec = h100()
    rows: list[dict[str, Any]] = []
    for name, model in MODELS.items():
        for kvp in _GROUPS:
            parallel = ParallelConfig(tp=8, kvp=kvp)
            stages = stage_predictors(spec, model, parallel)
            for n in lengths:
                read = weight_bytes(model) / parallel.tp + kv_bytes(model, n) / (parallel.tp * kvp)
                mbu = read / (decode_s(stages, n, kvp=kvp) * spec.hbm_bytes_per_s)
                rows.append({"model": name, "kvp": kvp, "tokens": n, "mbu": mbu})
    best = max(row["mbu"] for row in rows)
    reached = spec.attention.bytes_per_s / spec.hbm_bytes_per_s
    at = max(rows, key=lambda row: row["mbu"])
    sentence = (
        f"Highest with KVP {at['kvp']}, {at['model']}; more groups lower it. The spec lets attention read at "
        f"{100 * reached:.0f} % of the published bandwidth, by ratio from the A100, which bounds it; the public H100 "
        "decodes reach 90 to 93 %."
    )
    return FigureResult({"rows": rows}, {"mbu-92": Answer(100 * best, sentence)})


def draw_mbu(numbers: Mapping[str, Any], figure: Any) -> None:
    """MBU over the context (v5 figure 16)."""
    for index, (axes, name) in enumerate(zip(figure.subplots(1, 2, sharey=True), MODELS, strict=True)):
        mine = [row for row in numbers["rows"] if row["model"] == name]
        lengths = sorted({row["tokens"] for row in mine})
        rows = {f"KVP {kvp}": [row["mbu"] for row in mine if row["kvp"] == kvp] for kvp in _GROUPS}
        lines(axes, lengths, rows, scale=100)
        axes.axhline(92, color=PAPER, linestyle=":", label="92 % (v5 B.4)")
        axes.set_ylim(0, 100)
        token_axis(axes, lengths, label="context, tokens")
        finish(axes, title=f"{name}, TP 8, one stage", ylabel="" if index else "MBU, %")


FIGURES = (
    FigureSpec("mfu", "Model FLOPs utilization of prefills (v5 fig. 15)", run_mfu, draw_mfu),
    FigureSpec("mbu", "Model bandwidth utilization of decodes (v5 fig. 16)", run_mbu, draw_mbu),
)
