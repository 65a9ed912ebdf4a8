"""Decodes under load: time per output token with and without long requests (v5 section 6.2, figure 10; v4 figure 16).

The papers' "TPOT" and "decode latency" are taken as the mean time between the tokens of a request, over the requests
that finished in the window; the time between two tokens (TBT), over all tokens, is given beside it.
"""

from __future__ import annotations

import math

import numpy as np

from examples.reproduce.load import MIX, RATES_QPS, SHORT, System, curve, quantile_s, run_of
from examples.reproduce.plotting import COLORS, MARKERS, Line, Panel, shares_below
from examples.reproduce.result import Answer, FigureResult, Options, figure
from examples.reproduce.systems import LOONGSERVE, MEDHA, MEDHA_TOKEN, SARATHI_512, SARATHI_2048, fixed_batch_s

SYSTEMS: tuple[System, ...] = (MEDHA, LOONGSERVE, SARATHI_512, SARATHI_2048)
SARATHI = (SARATHI_512, SARATHI_2048)
TOP = RATES_QPS[-1]
COMPARABLE = 1.15
"""A TPOT at most so many times another is comparable."""
_CASES = (("no long requests", SHORT, TOP), ("5 % long", MIX, 0.75))


@figure("decode-under-load", "Decode latency under load, 8B on 16 A100s")
def run(options: Options) -> FigureResult:
    """TPOT of all systems, as :mod:`examples.reproduce.figures.capacity` plays them."""
    panels = []
    for case, lengths, qps in _CASES:
        runs = {system.label: run_of(system, lengths, qps, options) for system in SYSTEMS}
        curves = shares_below({name: curve(served.tpot_s) for name, served in runs.items()}, scale=1e3)
        panels.append(
            Panel(f"{case}, {qps:g} QPS", "TPOT of a finished request, ms", "% of finished requests", curves, log="x")
        )
    medians = {name: (quantile_s(served.tpot_s, 0.5), served.ttft_quantile(0.5)) for name, served in runs.items()}
    points = [
        Line(
            name,
            [1e3 * tpot_s],
            [ttft.seconds],
            {"color": COLORS[index], "marker": MARKERS[index], "markerfacecolor": "white" if ttft.is_least else None},
        )
        for index, (name, (tpot_s, ttft)) in enumerate(medians.items())
        if not math.isnan(tpot_s)
    ]
    title = f"{case}, {qps:g} QPS (hollow: a lower bound)"
    panels.append(Panel(title, "median TPOT, ms", "median TTFT, s", points, log="xy"))
    answers = {"tpot-5": _without_long(options), "sarathi-1s": _sarathi(options), **_with_long(options)}
    return FigureResult(panels, answers)


def _without_long(options: Options) -> Answer:
    runs = ours, theirs = [run_of(system, SHORT, TOP, options) for system in (MEDHA, LOONGSERVE)]
    p50, p90 = ([1e3 * quantile_s(run.tpot_s, share) for run in runs] for share in (0.5, 0.9))
    tbt = [1e3 * run.gaps.quantile_s(0.99) for run in runs]
    ratio = quantile_s(theirs.tpot_s, 0.5) / quantile_s(ours.tpot_s, 0.5)
    return Answer(ratio, qps=TOP, p50=p50, p90=p90, tbt=tbt, batch_ms=1e3 * fixed_batch_s())


def _with_long(options: Options) -> dict[str, Answer]:
    times, tpots, parts = [], [], []
    for qps in RATES_QPS:
        ours, theirs = (run_of(system, MIX, qps, options) for system in (MEDHA, LOONGSERVE))
        over, under = theirs.ttft_quantile(0.5), ours.ttft_quantile(0.5)
        times.append(over.seconds / under.seconds)
        tpots.append(quantile_s(theirs.tpot_s, 0.5) / quantile_s(ours.tpot_s, 0.5))
        parts.append(f"{qps:g} QPS: TTFT {over.ratio_says(under)}{times[-1]:.3g} times, TPOT {tpots[-1]:.2g} times")
    listed, comparable = "; ".join(parts), [tpot >= 1 / COMPARABLE for tpot in tpots]
    return {
        "ttft-order": Answer(float(np.median(times)), listed=listed),
        "tpot-comparable": Answer(comparable, listed=listed, comparable=COMPARABLE, bound=_token_bound(options)),
    }


def _token_bound(options: Options) -> str:
    """What changes where 20 ms bound the time per output token, three batches, in place of that of a batch."""
    parts = []
    for qps in (_CASES[1][2], TOP):
        runs = [run_of(system, MIX, qps, options) for system in (MEDHA, MEDHA_TOKEN, LOONGSERVE)]
        tpots = ", ".join(f"{1e3 * quantile_s(one.tpot_s, 0.5):.3g}" for one in runs)
        shorts = ", ".join(str(one.ttft_quantile(0.9, ~one.is_long)) for one in runs)
        ends = ", ".join(f"{int(one.is_finished[one.is_long].sum())}" for one in runs)
        parts.append(f"{qps:g} QPS median TPOT {tpots} ms, P90 TTFT of short requests {shorts}, long finished {ends}")
    return "; ".join(parts)


def _sarathi(options: Options) -> Answer:
    runs = [
        (f"{system.label} at {qps:g} QPS", run_of(system, MIX, qps, options)) for system in SARATHI for qps in RATES_QPS
    ]
    tbt_ms = max(1e3 * served.gaps.quantile_s(0.99) for _, served in runs)
    slowest = [(quantile_s(served.tpot_s, 1.0), where) for where, served in runs]
    most_s, where = max((one for one in slowest if one[0] > 0), key=lambda one: one[0], default=(0.0, ""))
    return Answer(most_s, where=where, tbt_ms=tbt_ms)
