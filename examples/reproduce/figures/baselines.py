"""The baselines against what their own authors published, before they enter a comparison. No claim depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from examples.reproduce.baselines import loongserve_figures
from examples.reproduce.baselines.context_parallel import ContextParallel, prefill_s
from examples.reproduce.plotting import PAPER, finish, lines, plain_ticks, token_axis
from examples.reproduce.result import FigureResult, FigureSpec, Options
from examples.reproduce.served import finite
from examples.reproduce.timing import MODELS, a100
from medha.cost.hardware import LinkRates

TETRIS_TOKENS = tuple(1024 * k for k in (4, 8, 16, 32, 64, 128, 256))
TETRIS_S: Mapping[int, tuple[float | None, ...]] = {
    1: (0.28, 0.57, 1.29, 3.22, 9.05, 29.20, None),
    2: (0.16, 0.31, 0.69, 1.67, 4.61, 14.30, 50.07),
    4: (0.13, 0.20, 0.39, 0.92, 2.43, 7.32, 24.77),
    8: (0.21, 0.24, 0.31, 0.58, 1.37, 3.96, 12.81),
    16: (0.39, 0.43, 0.46, 0.53, 0.96, 2.31, 7.02),
}
"""Tetris (chunkwise dynamic sequence parallelism), Table 1: prefill seconds of Llama-3 8B on A100 80GB, TP 1, by ranks
of the ring and prompt; 256K tokens do not fit on one. K is 1024. Nodes of eight, 200 Gbit/s of InfiniBand a GPU."""
# The testbed's links at the share of the published rate that the H100 spec has (36 of 50 GB/s), not fitted.
_BETWEEN_NODES = LinkRates(alpha_s=29e-6, bytes_per_s=0.72 * 25e9)


def ring_s(ranks: int, tokens: int) -> float:
    """Our prefill seconds for a cell of Tetris's table."""
    link = _BETWEEN_NODES if ranks > 8 else None
    return prefill_s(ContextParallel(a100(), MODELS["Llama-3 8B"], cp=ranks, link=link), tokens)


def run(options: Options) -> FigureResult:
    """Both; ``quick`` plays fewer requests for LoongServe."""
    loongserve = loongserve_figures.own_figures(num_requests=100 if options.quick else 400, seed=options.seed)
    numbers = {
        "loongserve": {
            "rates_qps": list(loongserve.rates),
            "token_s": {name: [one.token_s for one in points] for name, points in loongserve.points.items()},
            "attained": {name: [one.attained for one in points] for name, points in loongserve.points.items()},
            "limit_s": loongserve_figures.LIMIT * loongserve.light.token_s,
            "token_qps": {name: finite(loongserve.token_qps(name)) for name in loongserve.points},
            "attained_qps": {name: finite(loongserve.attained_qps(name)) for name in loongserve.points},
        },
        "context_parallel": {
            "tokens": list(TETRIS_TOKENS),
            "published_s": {str(ranks): list(row) for ranks, row in TETRIS_S.items()},
            "ours_s": {str(ranks): [ring_s(ranks, tokens) for tokens in TETRIS_TOKENS] for ranks in TETRIS_S},
        },
    }
    return FigureResult(numbers)


def draw(numbers: Mapping[str, Any], figure: Any) -> None:
    """A panel each: share of requests in time, goodput, ratio of prefill seconds."""
    left, right = figure.subplots(1, 2)
    lines(left, numbers["loongserve"]["rates_qps"], numbers["loongserve"]["attained"], scale=100)
    left.axhline(100 * loongserve_figures.ATTAINED, color=PAPER, linestyle=":")
    left.set(xlabel="load, QPS", ylim=(0, 105))
    finish(left, title="LoongServe's mixed load, 7B on 8 A100s", ylabel="requests within its limits, %")

    table = numbers["context_parallel"]
    ratios = {
        f"{ranks} rank{'s' if ranks != '1' else ''}": [
            theirs and ours / theirs for ours, theirs in zip(table["ours_s"][ranks], row, strict=True)
        ]
        for ranks, row in table["published_s"].items()
    }
    lines(right, table["tokens"], ratios)
    right.axhspan(0.85, 1.15, color=PAPER, alpha=0.15)
    right.set_yscale("log")
    plain_ticks(right.yaxis, (0.7, 0.85, 1, 1.15, 1.4))
    right.set_ylim(0.7, 1.4)
    token_axis(right, table["tokens"], label="prompt, tokens")
    finish(right, title="Tetris's Table 1, ring of A100s, 8B", ylabel="our prefill seconds over the published")


FIGURES = (FigureSpec("baselines", "The baselines against figures of their own authors", run, draw),)
