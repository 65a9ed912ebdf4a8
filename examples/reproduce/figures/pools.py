"""A pool reserved for short requests: long requests that are completed (v5 section 6.5, figure 14; v4 figure 23).

Setup: :mod:`examples.reproduce.load`; two of eight instances of LoongServe are kept for short requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from examples.reproduce.load import (
    LOONGSERVE,
    LOONGSERVE_RESERVED,
    MEDHA,
    MIX,
    RATES_QPS,
    Bounded,
    Load,
    Run,
    System,
    is_long,
    serve,
    told,
    ttft_quantile,
    window_s,
)
from examples.reproduce.plotting import finish, lines, plain_ticks
from examples.reproduce.result import Answer, FigureResult, FigureSpec, Options
from examples.reproduce.served import Served, quantile_s

SYSTEMS: tuple[System, ...] = (MEDHA, LOONGSERVE, LOONGSERVE_RESERVED)


def num_long_finished(served: Served) -> int:
    """Long requests that got their last token."""
    return int(served.is_finished[is_long(served.trace)].sum())


def run(options: Options) -> FigureResult:
    """Three systems at the papers' rates, 5 % long requests."""
    runs = {
        system.label: [serve(system, Load(MIX, qps, window_s(options), options.seed)) for qps in RATES_QPS]
        for system in SYSTEMS
    }
    ends = {name: [num_long_finished(one.served) for one in row] for name, row in runs.items()}
    asked = [int(is_long(one.served.trace).sum()) for one in runs[MEDHA.label]]
    numbers = {
        "qps": list(RATES_QPS),
        "long_requests": asked,
        "long_finished": ends,
        "told": {name: [told(one) for one in row] for name, row in runs.items()},
    }
    answers = {
        "pool-20": _fewer(ends, MEDHA.label, asked, runs),
        "pool-10": _fewer(ends, LOONGSERVE.label, asked, runs),
        "pools-medha-first": _first(ends, runs),
        **_tpot(runs),
    }
    return FigureResult(numbers, answers)


def _first(ends: Mapping[str, list[int]], runs: Mapping[str, Sequence[Run]]) -> Answer:
    """Whether Medha finishes the most long requests, and short ones wait least."""
    most = [ours >= max(theirs) for ours, *theirs in zip(*ends.values(), strict=True)]
    waits_s = [[_short_p90(run).seconds for run in row] for row in zip(*runs.values(), strict=True)]
    least = [ours <= min(theirs) for ours, *theirs in waits_s]
    listed = "; ".join(
        f"{qps:g} QPS {' and '.join(map(str, row))}, {' and '.join(f'{wait_s:.3g}' for wait_s in waits)} s"
        for qps, row, waits in zip(RATES_QPS, zip(*ends.values(), strict=True), waits_s, strict=True)
    )
    return Answer(
        float(np.mean([*most, *least])),
        f"Long requests finished and P90 TTFT of short ones at four rates, {', '.join(ends)}: {listed}. Medha finishes "
        f"the most at {sum(most)} of them and has the least wait at {sum(least)}.",
    )


def _tpot(runs: Mapping[str, Sequence[Run]]) -> dict[str, Answer]:
    medians_s = {name: [quantile_s(run.served.tpot_s, 0.5) for run in row] for name, row in runs.items()}
    listed = "; ".join(f"{name} {', '.join(f'{1e3 * s:.3g}' for s in row)} ms" for name, row in medians_s.items())
    ours, shared, reserved = medians_s.values()
    least = [own <= min(theirs) for own, *theirs in zip(ours, shared, reserved, strict=True)]
    lower = [with_pool < without for with_pool, without in zip(reserved, shared, strict=True)]
    sentence = f"Median TPOT at {', '.join(f'{qps:g}' for qps in RATES_QPS)} QPS: {listed}."
    why = "A decode of ours waits for three batches of 20 ms; LoongServe's instances that decode do not prefill."
    return {
        "pools-tpot": Answer(float(np.mean(least)), f"{sentence} {why}"),
        "pool-tpot-lower": Answer(float(np.mean(lower)), sentence),
    }


def _fewer(ends: Mapping[str, list[int]], than: str, asked: list[int], runs: Mapping[str, Sequence[Run]]) -> Answer:
    fewer = [
        100 * (1 - ours / max(base, 1)) for ours, base in zip(ends[LOONGSERVE_RESERVED.label], ends[than], strict=True)
    ]
    worst = int(np.argmax(fewer))
    listed = "; ".join(
        f"{qps:g} QPS {reserved} against {base} of {number}"
        for qps, reserved, base, number in zip(
            RATES_QPS, ends[LOONGSERVE_RESERVED.label], ends[than], asked, strict=True
        )
    )
    return Answer(
        fewer[worst],
        f"Long requests finished in the window, LoongServe with a reserved pool against {than}: {listed}. The answer "
        f"is the most over the rates, at {RATES_QPS[worst]:g} QPS, where P90 TTFT of short requests is "
        f"{_short_p90(runs[LOONGSERVE_RESERVED.label][worst])} with the pool and {_short_p90(runs[than][worst])} on "
        f"{than}.",
    )


def _short_p90(run: Run) -> Bounded:
    return ttft_quantile(run.served, 0.9, among=~is_long(run.served.trace))


def draw(numbers: Mapping[str, Any], figure: Any) -> None:
    """Long requests completed, and TTFT of the short ones, by rate."""
    left, right = figure.subplots(1, 2)
    qps, ends = numbers["qps"], numbers["long_finished"]
    asked = [max(number, 1) for number in numbers["long_requests"]]
    shares = {name: [done / number for done, number in zip(row, asked, strict=True)] for name, row in ends.items()}
    lines(left, qps, shares, scale=100)
    lines(right, qps, {name: [one["ttft_s"]["short"][1] for one in row] for name, row in numbers["told"].items()})
    left.set_ylim(0, 105)
    right.set_yscale("log")
    for axes in (left, right):
        plain_ticks(axes.xaxis, qps)
        axes.set_xlim(0, 2)
        axes.set_xlabel("load, QPS")
    finish(left, title="Long requests, 5 % of all", ylabel="% finished in the window")
    finish(right, title="Short requests (none drawn: not in the window)", ylabel="P90 TTFT, s", legend=False)


FIGURE = FigureSpec("pools", "A reserved pool for short requests against Medha, 8B on 16 A100s", run, draw)
