"""Static against adaptive chunks: v5 section 3.2 and figure 4, v4 figure 6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from examples.reproduce.plotting import COLORS, finish, plain_ticks, token_label
from examples.reproduce.result import Answer, FigureResult, FigureSpec, Options
from examples.reproduce.timing import MODELS, M, chunk_seconds, h100, stage_predictors
from medha.config import ParallelConfig
from medha.cost.predictor import Predictor, Work
from medha.cost.roofline import Floats

SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_DECODES = (Work(1, 1024, True),) * 8
_LEAST = 32
_MOST = 8192


def adaptive(predictor: Predictor, tokens: int, budget_s: float) -> tuple[Floats, Floats]:
    """Chunks as the packer cuts them, beside the decodes: the largest within the budget, at least 32 tokens.

    Returns:
        Seconds of each batch, and its chunk.
    """
    tick = predictor.tick(_DECODES)
    seconds, sizes, done = [], [], 0
    while done < tokens:
        chunk = max(tick.largest_chunk(done, budget_s, min(_MOST, tokens - done), 16), min(_LEAST, tokens - done))
        seconds.append(tick.with_chunk(chunk, done))
        sizes.append(chunk)
        done += chunk
    return np.array(seconds), np.array(sizes, dtype=np.float64)


def run(options: Options) -> FigureResult:
    """1M tokens, 8B on 8 H100s, 8 short decodes in every batch; ``quick`` changes nothing."""
    tokens = M
    predictor = stage_predictors(h100(), MODELS["Llama-3 8B"], ParallelConfig(tp=8))[0]
    static: dict[str, Any] = {"chunk": list(SIZES), "prefill_s": [], "worst_s": [], "p50_s": []}
    fitted: dict[str, Any] = {"budget_s": [], "prefill_s": [], "worst_s": [], "p50_s": []}
    for size in SIZES:
        seconds = chunk_seconds([predictor], tokens, size, decodes=_DECODES)[0]
        _note(static, seconds)
        budget_s = float(seconds.max())
        fitted["budget_s"].append(budget_s)
        _note(fitted, adaptive(predictor, tokens, budget_s)[0])
    seconds, sizes = adaptive(predictor, tokens, static["worst_s"][SIZES.index(512)])
    thin = max(1, len(sizes) // 200)
    numbers = {
        "tokens": tokens,
        "static": static,
        "adaptive": fitted,
        "example": {"position": (np.cumsum(sizes) - sizes)[::thin].tolist(), "chunk": sizes[::thin].tolist()},
    }
    gains = [s / a for s, a in zip(static["prefill_s"], fitted["prefill_s"], strict=True)]
    numbers["prefill_static_over_adaptive"] = gains
    by_median = _gains_at_equal_median(static, fitted)
    numbers["prefill_static_over_adaptive_at_equal_median"] = by_median
    sentence = (
        f"For each static size, adaptive chunks under its longest batch as the budget: prefill {min(gains):.2f} to "
        f"{max(gains):.2f} times as fast, {token_label(tokens)} tokens, derived H100 spec; at equal median latency "
        f"{min(by_median):.2f} to {max(by_median):.2f} times. The gain is for small chunks and the longest latency."
    )
    share = float(np.mean([gain >= 1 - 1e-9 for gain in (*gains, *by_median)]))
    return FigureResult(numbers, {"adaptive-pareto": Answer(share, sentence)})


def _gains_at_equal_median(static: Mapping[str, Any], fitted: Mapping[str, Any]) -> list[float]:
    """Prefill of static over adaptive chunks, which are interpolated to the median latency of each static size."""
    at, prefill_s = (np.log(fitted[name]) for name in ("p50_s", "prefill_s"))
    order = np.argsort(at)
    pairs = zip(np.log(static["p50_s"]), static["prefill_s"], strict=True)
    inside = [(x, y) for x, y in pairs if at.min() <= x <= at.max()]
    return [float(y / np.exp(np.interp(x, at[order], prefill_s[order]))) for x, y in inside]


def _note(rows: dict[str, Any], seconds: Floats) -> None:
    rows["prefill_s"].append(float(seconds.sum()))
    rows["worst_s"].append(float(seconds.max()))
    rows["p50_s"].append(float(np.median(seconds)))


def draw(numbers: Mapping[str, Any], figure: Any) -> None:
    """Left: the frontier; right: how the chunk shrinks."""
    left, right = figure.subplots(1, 2)
    for index, name in enumerate(("static", "adaptive")):
        rows = numbers[name]
        left.plot(
            [1e3 * s for s in rows["worst_s"]], rows["prefill_s"], "os"[index] + "-", color=COLORS[index], label=name
        )
    for size, x, y in zip(SIZES, numbers["static"]["worst_s"], numbers["static"]["prefill_s"], strict=True):
        left.annotate(str(size), (1e3 * x, y), textcoords="offset points", xytext=(5, 5), fontsize=8)
    left.set(xscale="log", yscale="log", xlabel="longest decode latency, ms")
    plain_ticks(left.xaxis, (10, 20, 50, 100, 200, 500))
    plain_ticks(left.yaxis, (10, 20, 50, 100, 200, 400))
    left.set_xlim(12, 800)
    left.set_ylim(0.85 * min(numbers["adaptive"]["prefill_s"]), 1.25 * max(numbers["static"]["prefill_s"]))
    title = f"{token_label(numbers['tokens'])} prompt beside 8 decodes, Llama-3 8B, 8 H100s"
    finish(left, title=title, ylabel="prefill, s")
    done = [position / M for position in numbers["example"]["position"]]
    right.step(done, numbers["example"]["chunk"], color=COLORS[1], where="post", label="adaptive")
    right.axhline(512, color=COLORS[0], linestyle="--", label="static, 512")
    right.set(yscale="log", xlabel="tokens done, M (2^20)")
    plain_ticks(right.yaxis, (128, 256, 512, 1024, 2048, 4096, 8192))
    finish(right, title="Chunk at the same longest latency as static 512", ylabel="chunk, tokens")


FIGURES = (FigureSpec("adaptive-chunking", "Static against adaptive chunks (v5 fig. 4)", run, draw),)
