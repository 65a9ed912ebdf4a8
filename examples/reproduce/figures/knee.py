"""The knee of the classical schedulers: TTFT and TPOT over the tokens of a batch, 8B on one A100, short requests.

The trade-off that v5 section 3.2 and figure 4a start from: small batches delay prefills, large ones delay decodes. No
claim depends on it. ``token-budget`` has a target of 100 ms beside its bound on tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from examples.reproduce.load import SHORT, Engine, Load, serve, told
from examples.reproduce.plotting import COLORS, MARKERS, finish, token_axis
from examples.reproduce.result import FigureResult, FigureSpec, Options
from medha.config import ParallelConfig, SchedulerConfig

QPS = 2.0
TARGET_S = 0.1
SCHEDULERS = ("sarathi", "token-budget")
BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)


def engine(scheduler: str, tokens: int) -> Engine:
    """A replica on one A100 with so many tokens a batch."""
    config = SchedulerConfig(scheduler=scheduler, max_batch_tokens=tokens, chunk_size=tokens, t_target_s=TARGET_S)
    return Engine(f"{scheduler} {tokens}", config, parallel=ParallelConfig(), max_model_len=8192)


def run(options: Options) -> FigureResult:
    """Both schedulers over their budget; ``quick`` takes every other one, and 2 minutes instead of 10."""
    budgets = BUDGETS[::2] if options.quick else BUDGETS
    load = Load(SHORT, QPS, 120.0 if options.quick else 600.0, options.seed)
    rows = {name: [told(serve(engine(name, tokens), load)) for tokens in budgets] for name in SCHEDULERS}
    return FigureResult({"qps": QPS, "window_s": load.window_s, "budgets": list(budgets), "told": rows})


def draw(numbers: Mapping[str, Any], figure: Any) -> None:
    """TTFT and time between tokens over the budget."""
    left, right = figure.subplots(1, 2)
    for index, (name, row) in enumerate(numbers["told"].items()):
        for at, line, share in ((0, "-", "P50"), (1, ":", "P90")):
            style = {"color": COLORS[index], "marker": MARKERS[index], "linestyle": line, "label": f"{name}, {share}"}
            left.plot(numbers["budgets"], [one["ttft_at_least_s"][at] for one in row], **style)
            tpot_ms = [None if one["tpot_s"][at] is None else 1e3 * one["tpot_s"][at] for one in row]
            known = [(x, y) for x, y in zip(numbers["budgets"], tpot_ms, strict=True) if y is not None]
            right.plot(*zip(*known, strict=True) if known else ([], []), **style)
    for axes in (left, right):
        token_axis(axes, numbers["budgets"], label="token budget of a batch")
    left.set_yscale("log")
    right.set_ylim(bottom=0)
    finish(left, title=f"Time to first token, {numbers['qps']:g} QPS", ylabel="TTFT, s")
    finish(right, title="Time per output token of a request", ylabel="TPOT, ms", legend=False)


FIGURE = FigureSpec("knee", "Classical schedulers over their token budget: TTFT and TPOT, 8B on one A100", run, draw)
