"""A pool reserved for short requests: long requests that are completed (v5 section 6.5, figure 14; v4 figure 23).

Setup: :mod:`examples.reproduce.load`; two of eight instances of LoongServe are kept for short requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from examples.reproduce.load import MIX, RATES_QPS, Bounded, Served, System, quantile_s, runs_of
from examples.reproduce.plotting import Panel, lines
from examples.reproduce.result import Answer, FigureResult, Options, figure
from examples.reproduce.systems import LOONGSERVE, LOONGSERVE_RESERVED, MEDHA

SYSTEMS: tuple[System, ...] = (MEDHA, LOONGSERVE, LOONGSERVE_RESERVED)


@figure("pools", "A reserved pool for short requests against Medha, 8B on 16 A100s")
def run(options: Options) -> FigureResult:
    """Three systems at the papers' rates, 5 % long requests."""
    runs = runs_of(SYSTEMS, MIX, options)
    ends = {name: [int(one.is_finished[one.is_long].sum()) for one in row] for name, row in runs.items()}
    asked = [int(one.is_long.sum()) for one in runs[MEDHA.label]]
    shares = {name: [done / max(n, 1) for done, n in zip(row, asked, strict=True)] for name, row in ends.items()}
    waits = {name: [_short_p90(one) for one in row] for name, row in runs.items()}
    known = {name: [None if wait.is_least else wait.seconds for wait in row] for name, row in waits.items()}
    panels = [
        Panel(
            "Long requests, 5 % of all", "load, QPS", "% finished in the window", lines(RATES_QPS, shares, scale=100)
        ),
        Panel(
            "Short requests (none drawn: not in the window)",
            "load, QPS",
            "P90 TTFT, s",
            lines(RATES_QPS, known),
            log="y",
        ),
    ]
    answers = {
        "pool-20": _fewer(ends, MEDHA.label, asked, runs),
        "pool-10": _fewer(ends, LOONGSERVE.label, asked, runs),
        "pools-medha-first": _first(ends, runs),
        **_tpot(runs),
    }
    return FigureResult(panels, answers)


def _first(ends: Mapping[str, list[int]], runs: Mapping[str, Sequence[Served]]) -> Answer:
    """Whether Medha finishes the most long requests, and short ones wait least."""
    most = [ours >= max(theirs) for ours, *theirs in zip(*ends.values(), strict=True)]
    waits_s = [[_short_p90(run).seconds for run in row] for row in zip(*runs.values(), strict=True)]
    least = [ours <= min(theirs) for ours, *theirs in waits_s]
    listed = "; ".join(
        f"{qps:g} QPS {' and '.join(map(str, row))}, {' and '.join(f'{wait_s:.3g}' for wait_s in waits)} s"
        for qps, row, waits in zip(RATES_QPS, zip(*ends.values(), strict=True), waits_s, strict=True)
    )
    return Answer([*most, *least], systems=", ".join(ends), listed=listed, most=sum(most), least=sum(least))


def _tpot(runs: Mapping[str, Sequence[Served]]) -> dict[str, Answer]:
    medians_s = {name: [quantile_s(run.tpot_s, 0.5) for run in row] for name, row in runs.items()}
    listed = "; ".join(f"{name} {', '.join(f'{1e3 * s:.3g}' for s in row)} ms" for name, row in medians_s.items())
    ours, shared, reserved = medians_s.values()
    least = [own <= min(theirs) for own, *theirs in zip(ours, shared, reserved, strict=True)]
    lower = [with_pool < without for with_pool, without in zip(reserved, shared, strict=True)]
    rates = ", ".join(f"{qps:g}" for qps in RATES_QPS)
    cases = {"pools-tpot": least, "pool-tpot-lower": lower}
    return {name: Answer(holds, rates=rates, listed=listed) for name, holds in cases.items()}


def _fewer(ends: Mapping[str, list[int]], than: str, asked: list[int], runs: Mapping[str, Sequence[Served]]) -> Answer:
    rows = list(zip(RATES_QPS, ends[LOONGSERVE_RESERVED.label], ends[than], asked, strict=True))
    fewer = [100 * (1 - reserved / max(base, 1)) for _, reserved, base, _ in rows]
    worst = int(np.argmax(fewer))
    listed = "; ".join(f"{qps:g} QPS {reserved} against {base} of {number}" for qps, reserved, base, number in rows)
    waits = [_short_p90(runs[name][worst]) for name in (LOONGSERVE_RESERVED.label, than)]
    return Answer(fewer[worst], than=than, listed=listed, worst=RATES_QPS[worst], waits=waits)


def _short_p90(run: Served) -> Bounded:
    return run.ttft_quantile(0.9, ~run.is_long)
