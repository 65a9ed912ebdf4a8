"""Decodes under load: time per output token with and without long requests (v5 section 6.2, figure 10; v4 figure 16).

The papers' "TPOT" and "decode latency" are taken as the mean time between the tokens of a request, over the requests
that finished in the window; the time between two tokens (TBT), over all tokens, is given beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from examples.reproduce.load import (
    LOONGSERVE,
    MEDHA,
    MIX,
    RATES_QPS,
    SARATHI_512,
    SARATHI_2048,
    SHORT,
    Load,
    System,
    curve,
    fixed_batch_s,
    ratio_says,
    serve,
    told,
    ttft_quantile,
    window_s,
)
from examples.reproduce.plotting import COLORS, MARKERS, PAPER, finish, plain_ticks
from examples.reproduce.result import Answer, FigureResult, FigureSpec, Options
from examples.reproduce.served import Served, quantile_s

SYSTEMS: tuple[System, ...] = (MEDHA, LOONGSERVE, SARATHI_512, SARATHI_2048)
SARATHI = (SARATHI_512, SARATHI_2048)
TOP = RATES_QPS[-1]
COMPARABLE = 1.15
"""A TPOT at most so many times another is comparable."""
_TICKS_MS = (5, 10, 20, 50, 100, 200, 500, 1000)
_CASES = (("no long requests", SHORT, TOP), ("5 % long", MIX, 0.75))


def run(options: Options) -> FigureResult:
    """TPOT of all systems, as :mod:`examples.reproduce.figures.capacity` plays them."""
    plays = {
        case: {system.label: serve(system, Load(lengths, qps, window_s(options), options.seed)) for system in SYSTEMS}
        for case, lengths, qps in _CASES
    }
    numbers = {
        "qps": {case: qps for case, _, qps in _CASES},
        "told": {case: {name: told(one) for name, one in runs.items()} for case, runs in plays.items()},
        "tpot_curve_s": {
            case: {name: curve(one.served.tpot_s) for name, one in runs.items()} for case, runs in plays.items()
        },
    }
    answers = {"tpot-5": _without_long(options), "sarathi-1s": _sarathi(options), **_with_long(options)}
    return FigureResult(numbers, answers)


def _served(system: System, lengths: str, qps: float, options: Options) -> Served:
    return serve(system, Load(lengths, qps, window_s(options), options.seed)).served


def _without_long(options: Options) -> Answer:
    ours, theirs = (_served(system, SHORT, TOP, options) for system in (MEDHA, LOONGSERVE))
    median_s, ours_s = quantile_s(theirs.tpot_s, 0.5), quantile_s(ours.tpot_s, 0.5)
    others = [
        f"{name} {1e3 * a:.3g} and {1e3 * b:.3g} ms"
        for name, a, b in (
            ("P90 TPOT", quantile_s(theirs.tpot_s, 0.9), quantile_s(ours.tpot_s, 0.9)),
            ("P99 TBT", theirs.gaps.quantile_s(0.99), ours.gaps.quantile_s(0.99)),
        )
    ]
    batch_s = fixed_batch_s()
    return Answer(
        median_s / ours_s,
        f"Median TPOT at {TOP:g} QPS: LoongServe {1e3 * median_s:.3g} ms, Medha {1e3 * ours_s:.3g} ms; "
        f"{', '.join(others)}. Neither has a queue. A decode of ours waits for three batches, and one takes "
        f"{1e3 * batch_s:.1f} ms however small, more than half of it the host's step and all-reduces of 8 ranks.",
    )


def _with_long(options: Options) -> dict[str, Answer]:
    times, tpots, parts = [], [], []
    for qps in RATES_QPS:
        ours, theirs = (_served(system, MIX, qps, options) for system in (MEDHA, LOONGSERVE))
        over, under = ttft_quantile(theirs, 0.5), ttft_quantile(ours, 0.5)
        times.append(over.seconds / under.seconds)
        tpots.append(quantile_s(theirs.tpot_s, 0.5) / quantile_s(ours.tpot_s, 0.5))
        parts.append(f"{qps:g} QPS: TTFT {ratio_says(over, under)}{times[-1]:.3g} times, TPOT {tpots[-1]:.2g} times")
    listed = f"LoongServe's medians over Medha's: {'; '.join(parts)}."
    why = "Medha's is three batches of 20 ms, while LoongServe decodes on instances that do not prefill."
    return {
        "ttft-order": Answer(
            float(np.median(times)), f"{listed} The answer is the median of these. TPOT is not comparable: {why}"
        ),
        "tpot-comparable": Answer(
            float(np.mean([tpot >= 1 / COMPARABLE for tpot in tpots])),
            f"Share of four rates with at most {COMPARABLE:g} times LoongServe's median TPOT. {listed} {why}",
        ),
    }


def _sarathi(options: Options) -> Answer:
    most_s, where, tbt_s = 0.0, "", 0.0
    for system in SARATHI:
        for qps in RATES_QPS:
            served = _served(system, MIX, qps, options)
            tbt_s = max(tbt_s, served.gaps.quantile_s(0.99))
            if (slowest_s := quantile_s(served.tpot_s, 1.0)) > most_s:
                most_s, where = slowest_s, f"{system.label} at {qps:g} QPS"
    return Answer(
        most_s,
        f"The slowest request's mean, with long requests: {where}. P99 TBT is at most {1e3 * tbt_s:.0f} ms. A "
        "decode waits for the chunks of two batches in flight, and one of 2,048 tokens takes the longer the more of "
        "its prompt lies before it.",
    )


def draw(numbers: Mapping[str, Any], figure: Any) -> None:
    """TPOT distributions without and with long requests, and TTFT against TPOT."""
    *curves, both = figure.subplots(1, 3)
    shares = np.linspace(0, 100, 101)
    for axes, (case, rows) in zip(curves, numbers["tpot_curve_s"].items(), strict=True):
        for index, (name, values) in enumerate(rows.items()):
            known = [(1e3 * value, share) for value, share in zip(values, shares, strict=True) if value is not None]
            axes.plot(*zip(*known, strict=True) if known else ([], []), color=COLORS[index], label=name)
        axes.set_xscale("log")
        values_ms = [1e3 * value for values in rows.values() for value in values if value is not None]
        plain_ticks(axes.xaxis, [tick for tick in _TICKS_MS if min(values_ms) / 2 < tick < 2 * max(values_ms)])
        axes.set_xlabel("TPOT of a finished request, ms")
        finish(axes, title=f"{case}, {numbers['qps'][case]:g} QPS", ylabel="% of finished requests")
    case = _CASES[1][0]
    for index, (name, one) in enumerate(numbers["told"][case].items()):
        tpot_s, ttft_s = one["tpot_s"][0], one["ttft_at_least_s"][0]
        if tpot_s is None:
            continue
        hollow = one["ttft_s"]["all"][0] is None
        face = "white" if hollow else COLORS[index]
        style = {"color": COLORS[index], "markerfacecolor": face, "markersize": 9, "linestyle": "", "label": name}
        both.plot([1e3 * tpot_s], [ttft_s], marker=MARKERS[index], **style)
    both.set(xscale="log", yscale="log", xlabel="median TPOT, ms")
    plain_ticks(both.xaxis, _TICKS_MS)
    both.margins(0.25)
    both.annotate("better", (0.03, 0.03), xycoords="axes fraction", color=PAPER, fontsize=9)
    finish(
        both,
        title=f"{case}, {numbers['qps'][case]:g} QPS (hollow: a lower bound)",
        ylabel="median TTFT, s",
        legend=False,
    )
    both.legend(fontsize=8, frameon=False, loc="lower right")


FIGURE = FigureSpec("decode-under-load", "Decode latency under load, 8B on 16 A100s", run, draw)
