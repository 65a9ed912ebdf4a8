"""KV-cache parallelism: decodes, growth with the context, and the trade-off of TTFT against TPOT.

v5 section 3.3 and appendix B.2, B.3, figures 6, 7, 19 and 20; v4 sections 3.4 and 3.5, figures 11 and 13.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np

from examples.reproduce.plotting import COLORS, MARKERS, PAPER, finish, lines, token_label
from examples.reproduce.result import Answer, FigureResult, FigureSpec, Options
from examples.reproduce.timing import (
    MODELS,
    M,
    chunk_seconds,
    decode_s,
    h100,
    pipeline_ends,
    simulate,
    stage_predictors,
)
from medha.config import ParallelConfig
from medha.cost.predictor import Work
from medha.sim.pipeline import Segment

GROUPS = (1, 2, 4)
_STAGES = {"Llama-3 8B": 4, "Llama-3 70B": 8}
_8B = MODELS["Llama-3 8B"]
_DERIVED = "The H100 spec is derived, not measured."

# ---------------------------------------------------------------------------------------------------------------------
# Decodes


def run_decode(options: Options) -> FigureResult:
    """TPOT of one request by length and groups, TP 8; ``quick`` changes nothing."""
    lengths = [M, 2 * M, 4 * M, 10 * M]
    tpot_s: dict[str, dict[str, list[float]]] = {}
    for name, spp in _STAGES.items():
        stages = {p: stage_predictors(h100(), MODELS[name], ParallelConfig(tp=8, spp=spp, kvp=p)) for p in GROUPS}
        tpot_s[name] = {str(n): [decode_s(stages[p], n, kvp=p) for p in GROUPS] for n in lengths}
    at_4m, at_10m = (tpot_s["Llama-3 8B"][str(n)] for n in (4 * M, 10 * M))
    numbers = {"lengths": lengths, "groups": list(GROUPS), "stages": _STAGES, "tpot_s": tpot_s}
    longer = [
        rows[str(4 * M)][0] / rows[str(4 * M)][i] < rows[str(10 * M)][0] / rows[str(10 * M)][i]
        for rows in tpot_s.values()
        for i in (1, 2)
    ]
    part = "More of a decode than in the paper is reading keys, which is what is divided."
    answers = {
        "kvp-4m": Answer(at_4m[0] / at_4m[2], f"{1e3 * at_4m[0]:.0f} to {1e3 * at_4m[2]:.0f} ms. {part} {_DERIVED}"),
        "kvp-10m": Answer(
            at_10m[0] / at_10m[2], f"{1e3 * at_10m[0]:.0f} to {1e3 * at_10m[2]:.0f} ms. {part} {_DERIVED}"
        ),
        "kvp-10m-2": Answer(
            100 * (1 - at_10m[1] / at_10m[0]), f"{1e3 * at_10m[0]:.0f} to {1e3 * at_10m[1]:.0f} ms. {_DERIVED}"
        ),
        "kvp-10m-4-v5": Answer(
            100 * (1 - at_10m[2] / at_10m[0]),
            f"{1e3 * at_10m[0]:.0f} to {1e3 * at_10m[2]:.0f} ms; 40 % is what degree 2 gives. {_DERIVED}",
        ),
        "kvp-30-tokens": Answer(1 / at_10m[1], f"{1e3 * at_10m[1]:.1f} ms a token with 2 groups. {_DERIVED}"),
        "kvp-longer-gains-more": Answer(float(np.mean(longer)), "Both models, 2 and 4 groups, 10M against 4M."),
    }
    return FigureResult(numbers, answers)


def draw_decode(numbers: Mapping[str, Any], figure: Any) -> None:
    """TPOT by groups (v5 figure 19)."""
    for index, (axes, (name, rows)) in enumerate(zip(figure.subplots(1, 2), numbers["tpot_s"].items(), strict=True)):
        width = 0.8 / len(numbers["groups"])
        for row, degree in enumerate(numbers["groups"]):
            at = [i + (row - 1) * width for i in range(len(rows))]
            bars = axes.bar(
                at, [1e3 * seconds[row] for seconds in rows.values()], width, color=COLORS[row], label=f"KVP {degree}"
            )
            axes.bar_label(bars, fmt="%.0f", fontsize=7)
        axes.set_xticks(range(len(rows)), [token_label(int(n)) for n in rows])
        axes.set_xlabel("context, tokens")
        axes.axhline(1e3 / 30, color=PAPER, linestyle=":", label="30 tokens a second")
        finish(axes, title=f"{name}, TP 8, SPP {numbers['stages'][name]}", ylabel="" if index else "TPOT, ms")


# ---------------------------------------------------------------------------------------------------------------------
# Growth


def run_growth(options: Options) -> FigureResult:
    """A 2M prompt that gains groups as it grows, through scheduler and pipeline; ``quick`` takes larger chunks."""
    chunk = 2048 if options.quick else 512
    tokens, kvp, spp = 2 * M, 4, 4
    segments: dict[int, list[Segment]] = defaultdict(list)
    parallel = ParallelConfig(tp=8, spp=spp, kvp=kvp)
    simulate(h100(), _8B, parallel, tokens, chunk=chunk, on_segment=lambda one: segments[one.batch_id].append(one))
    widths, seconds = [], []
    for batch in sorted(segments):
        first = [one for one in segments[batch] if one.stage == 0]
        widths.append(len({one.group for one in segments[batch]}))
        seconds.append(max(one.end_s - one.start_s for one in first))
    plain = chunk_seconds(stage_predictors(h100(), _8B, ParallelConfig(tp=8, spp=spp)), tokens, chunk)[0]
    assert len(widths) == len(plain), "shards are whole chunks"
    thin = max(1, len(widths) // 256)
    before_growth = max(s for s, w in zip(seconds, widths, strict=True) if w == 1)
    level = max(seconds) / before_growth
    numbers = {
        "chunk": chunk,
        "tokens_done": [(i + 1) * chunk for i in range(len(plain))][::thin],
        "servers": [w * spp for w in widths][::thin],
        "iteration_s": seconds[::thin],
        "iteration_s_one_group": plain.tolist()[::thin],
        "longest_over_longest_on_one_group": level,
        "one_group_over_first_quarter": float(plain[-1] / before_growth),
    }
    answers = {
        "kvp-growth": Answer((float(min(widths) * spp), float(max(widths) * spp)), "A server is 8 H100s, a stage."),
        "kvp-level": Answer(
            level,
            f"Longest iteration over the longest on one group, chunks of {chunk}; without KVP it would be "
            f"{plain[-1] / before_growth:.1f} times. Level taken as within 15 %.",
        ),
    }
    return FigureResult(numbers, answers)


def draw_growth(numbers: Mapping[str, Any], figure: Any) -> None:
    """Servers and iteration time over the context (v5 figure 6)."""
    left, right = figure.subplots(1, 2)
    done = [tokens / M for tokens in numbers["tokens_done"]]
    left.step(done, numbers["servers"], where="post", color=COLORS[0])
    left.set(ylim=(0, 18), yticks=(4, 8, 12, 16), xlabel="tokens done, M (2^20)")
    finish(left, title="2M prompt, Llama-3 8B, TP 8, SPP 4, KVP up to 4", ylabel="servers of 8 H100s", legend=False)
    seconds = {"growing groups": numbers["iteration_s"], "one group": numbers["iteration_s_one_group"]}
    lines(right, done, seconds, scale=1e3, marker="")
    right.set(xlabel="tokens done, M (2^20)")
    right.set_ylim(bottom=0)
    finish(right, title=f"chunks of {numbers['chunk']}", ylabel="time of a stage for a chunk, ms")


# ---------------------------------------------------------------------------------------------------------------------
# TTFT against TBT


def run_trade_off(options: Options) -> FigureResult:
    """TTFT and P95 TBT of decodes beside it, 8B, TP 4, SPP 4, by chunk, groups and length; ``quick`` leaves 2M out."""
    lengths = [M, 4 * M] if options.quick else [M, 2 * M, 4 * M]
    chunks = (32, 64, 128, 256)
    rows = []
    for kvp in GROUPS:
        stages = stage_predictors(h100(), _8B, ParallelConfig(tp=4, spp=4, kvp=kvp))
        for tokens in lengths:
            rows += [_point(stages, tokens, chunk, kvp) for chunk in chunks]
    found = {(row["tokens"], row["chunk"], row["kvp"]): row for row in rows}
    p95 = found[4 * M, 128, 1]["tbt_p95_s"]

    def better(which: str, n: int, c: int, p: int, than: tuple[int, int]) -> bool:
        return bool(found[n, c, p][which] < found[(n, *than)][which])

    def lowers_both(n: int, c: int, p: int) -> bool:
        """Doubling the groups to p."""
        return better("ttft_s", n, c, p, (c, p // 2)) and better("tbt_p95_s", n, c, p, (c, p // 2))

    both = [lowers_both(n, c, p) for n in lengths for c in chunks for p in GROUPS[1:]]
    small = [not lowers_both(lengths[0], c, p) for c in chunks[:2] for p in GROUPS[1:]]
    larger = [
        better("ttft_s", n, 2 * c, p, (c, p)) and better("tbt_p95_s", n, c, p, (2 * c, p))
        for n, c, p in itertools.product(lengths, chunks[:-1], GROUPS)
    ]
    answers = {
        "kvp-crossover": Answer(
            float(np.mean(small)),
            f"Share of {len(small)} doublings of the groups, chunks of {chunks[0]} and {chunks[1]} of "
            f"{token_label(lengths[0])}, that do not lower both; our merges cost too little for a crossover.",
        ),
        "tbt-4m-128": Answer(
            1e3 * p95,
            "One group; a decode passes all four stages, each behind a chunk, and the P95 lies near the end of the "
            f"prompt. {_DERIVED}",
        ),
        "kvp-improves-both": Answer(
            100 * float(np.mean(both)),
            f"Doubling the groups, {len(both)} cases of {', '.join(token_label(n) for n in lengths)}; merges between "
            "nodes are in it.",
        ),
        "chunk-trade-off": Answer(float(np.mean(larger)), f"Doubling the chunk, {len(larger)} cases."),
    }
    return FigureResult({"rows": rows}, answers)


def _point(stages: list[Any], tokens: int, chunk: int, kvp: int) -> dict[str, Any]:
    seconds = chunk_seconds(stages, tokens, chunk, kvp=kvp, decodes=(Work(1, 1024, True),))
    return {
        "tokens": tokens,
        "chunk": chunk,
        "kvp": kvp,
        "ttft_s": float(pipeline_ends(seconds)[-1]),
        "tbt_p95_s": float(np.percentile(seconds.sum(axis=0), 95)),
    }


def draw_trade_off(numbers: Mapping[str, Any], figure: Any) -> None:
    """One panel a length; a line is a KVP degree, its points are chunks of 32 to 256 (v5 figure 20)."""
    lengths = sorted({row["tokens"] for row in numbers["rows"]})
    for index, (axes, tokens) in enumerate(zip(np.atleast_1d(figure.subplots(1, len(lengths))), lengths, strict=True)):
        for line, kvp in enumerate(GROUPS):
            some = [row for row in numbers["rows"] if row["tokens"] == tokens and row["kvp"] == kvp]
            x, y = [row["ttft_s"] for row in some], [1e3 * row["tbt_p95_s"] for row in some]
            lines(axes, x, {f"KVP {kvp}": y}, marker=MARKERS[line], color=COLORS[line])
            for row, at in zip(some if kvp == 1 else (), zip(x, y, strict=True), strict=False):
                axes.annotate(str(row["chunk"]), at, textcoords="offset points", xytext=(5, 4), fontsize=8)
        axes.set(xlabel="TTFT, s")
        axes.set_ylim(bottom=0)
        finish(axes, title=f"{token_label(tokens)}, Llama-3 8B, TP 4, SPP 4", ylabel="" if index else "P95 TBT, ms")


FIGURES = (
    FigureSpec("kvp-decode", "Decodes over KVP groups (v5 figs. 7a and 19)", run_decode, draw_decode),
    FigureSpec("kvp-growth", "Groups and iteration time as a 2M prompt grows (v5 fig. 6)", run_growth, draw_growth),
    FigureSpec("kvp-trade-off", "TTFT against TBT by chunk and groups (v5 fig. 20)", run_trade_off, draw_trade_off),
)
