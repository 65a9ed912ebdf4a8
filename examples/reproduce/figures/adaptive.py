"""Static against adaptive chunks: v5 section 3.2 and figure 4, v4 figure 6."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from examples.reproduce.plotting import Panel, paths, token_label
from examples.reproduce.result import Answer, FigureResult, Options, figure
from examples.reproduce.timing import H100, LLAMA_8B, M, chunk_seconds, stage_predictors
from medha.config import ParallelConfig
from medha.cost.coefficients import Floats
from medha.cost.predictor import Predictor, Work

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


@figure("adaptive-chunking", "Static against adaptive chunks (v5 fig. 4)")
def run(options: Options) -> FigureResult:
    """1M tokens, 8B on 8 H100s, 8 short decodes in every batch; ``quick`` changes nothing."""
    tokens = M
    predictor = stage_predictors(H100, LLAMA_8B, ParallelConfig(tp=8))[0]
    static, fitted = (defaultdict[str, list[float]](list) for _ in range(2))
    for size in SIZES:
        seconds = chunk_seconds([predictor], tokens, size, decodes=_DECODES)[0]
        _note(static, seconds)
        _note(fitted, adaptive(predictor, tokens, float(seconds.max()))[0])
    rows = {"static": static, "adaptive": fitted}
    panel = Panel(
        f"{token_label(tokens)} prompt beside 8 decodes, Llama-3 8B, 8 H100s",
        "longest decode latency, ms",
        "prefill, s",
        paths({name: ([1e3 * s for s in one["worst_s"]], one["prefill_s"]) for name, one in rows.items()}),
        notes=[(1e3 * x, y, str(c)) for c, x, y in zip(SIZES, static["worst_s"], static["prefill_s"], strict=True)],
        log="xy",
    )
    gains = [s / a for s, a in zip(static["prefill_s"], fitted["prefill_s"], strict=True)]
    by_median = _gains_at_equal_median(static, fitted)
    no_worse = [gain >= 1 - 1e-9 for gain in (*gains, *by_median)]
    spans = {"least": min(gains), "most": max(gains), "low": min(by_median), "high": max(by_median)}
    return FigureResult([panel], {"adaptive-pareto": Answer(no_worse, tokens=token_label(tokens), **spans)})


def _gains_at_equal_median(static: Mapping[str, list[float]], fitted: Mapping[str, list[float]]) -> list[float]:
    """Prefill of static over adaptive chunks, which are interpolated to the median latency of each static size."""
    at, prefill_s = (np.log(fitted[name]) for name in ("p50_s", "prefill_s"))
    order = np.argsort(at)
    pairs = zip(np.log(static["p50_s"]), static["prefill_s"], strict=True)
    inside = [(x, y) for x, y in pairs if at.min() <= x <= at.max()]
    return [float(y / np.exp(np.interp(x, at[order], prefill_s[order]))) for x, y in inside]


def _note(rows: Mapping[str, list[float]], seconds: Floats) -> None:
    rows["prefill_s"].append(float(seconds.sum()))
    rows["worst_s"].append(float(seconds.max()))
    rows["p50_s"].append(float(np.median(seconds)))
