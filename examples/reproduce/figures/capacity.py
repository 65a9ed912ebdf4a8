"""Capacity under load: TTFT by rate with and without long requests, over time, and who is in the system.

v5 sections 1, 2.5, 6.2 and 6.4, figures 1 and 9; v4 section 5.2, figures 1, 15 and 21. Setup:
:mod:`examples.reproduce.load`.

*Effective capacity*, which the papers do not define, is here the highest rate tested at which, and at all lower ones,
90 % of the short requests have their first token within 10 s (what v5 section 6.4 promises of Medha) and 90 % of all
that arrived in the first half of the window finish within it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    WHOLE,
    Bounded,
    System,
    finished_share,
    is_early,
    is_long,
    num_active,
    ratio_says,
    run_of,
    runs_of,
    stretches_s,
    told_of,
    ttft_quantile,
    window_s,
)
from examples.reproduce.plotting import COLORS, MARKERS, PAPER, finish, lines, plain_ticks
from examples.reproduce.result import Answer, FigureResult, FigureSpec, Options
from examples.reproduce.served import Served

BASELINES: tuple[System, ...] = (LOONGSERVE, SARATHI_512, SARATHI_2048, WHOLE)
SYSTEMS: tuple[System, ...] = (MEDHA, *BASELINES)
LOW_QPS = (0.02, 0.05, 0.1, 0.15, 0.2)
"""Below the papers' rates, where the baselines' capacity is."""
SLO_S = 10.0
ENOUGH = 0.9
ALIKE, BEHIND = 3.0, 2.0
"""Medians within such a factor of each other are alike; who has so many times the P90 is behind."""
ONE_PERCENT = 0.01
_RATE = 0.75
_DEFINITION = (
    f"Effective capacity: the highest rate up to which {ENOUGH:.0%} of the short requests have TTFT within {SLO_S:g} s "
    f"and {ENOUGH:.0%} of all that came in the first half of the window finish within it."
)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Queries a second that a system sustains.

    Attributes:
        qps: highest rate that it was seen to sustain; 0 if none.
        fails_at_qps: lowest rate that it does not; None if none was found.
    """

    qps: float
    fails_at_qps: float | None

    @property
    def says(self) -> str:
        """In words."""
        if self.fails_at_qps is None:
            return f"{self.qps:g} QPS, the highest tested, or more"
        return (
            f"{self.qps:g} QPS and fails at {self.fails_at_qps:g}" if self.qps else f"below {self.fails_at_qps:g} QPS"
        )


def sustains(served: Served, stop_s: float) -> bool:
    """Whether a play was within the effective capacity (see the module)."""
    trace = served.trace
    short = ~is_long(trace) & (trace.arrival_s <= stop_s - SLO_S)  # the others had not the time to be late
    within = float(np.mean(served.ttft_s[short] <= SLO_S)) if short.any() else 1.0
    return within >= ENOUGH and not finished_share(served, among=is_early(trace, stop_s)) < ENOUGH


def capacity(system: System, rates_qps: Sequence[float], options: Options) -> Capacity:
    """The effective capacity with 5 % long requests, of rising rates, up to the first that is too high."""
    held = 0.0
    for qps in rates_qps:
        if not sustains(_served(system, MIX, qps, options), window_s(options)):
            return Capacity(held, qps)
        held = qps
    return Capacity(held, None)


def run(options: Options) -> FigureResult:
    """All systems at the papers' rates; ``quick`` plays 5 minutes instead of 60, and fewer low rates."""
    low_qps = LOW_QPS[1::2] if options.quick else LOW_QPS
    rows = {
        name: told_of(runs_of(SYSTEMS, lengths, RATES_QPS, options))
        for name, lengths in (("none", SHORT), ("5 %", MIX))
    }
    capacities = {
        system.label: capacity(system, RATES_QPS if system is MEDHA else (*low_qps, *RATES_QPS), options)
        for system in SYSTEMS
    }
    answers = {
        "capacity-5": _capacity_answer(capacities),
        **_ttft(options),
        **_sensitivity(options),
        "short-alike": _short_alike(options),
        "truncated-60min": _truncated(options),
    }
    numbers = {
        "window_s": window_s(options),
        "definition": _DEFINITION,
        "qps": list(RATES_QPS),
        "long": rows,
        "capacity_qps": {name: [found.qps, found.fails_at_qps] for name, found in capacities.items()},
        "over_time": _over_time(options),
    }
    return FigureResult(numbers, answers)


def _served(system: System, lengths: str, qps: float, options: Options, long_share: float | None = None) -> Served:
    return run_of(system, lengths, qps, options, long_share).served


def _capacity_answer(capacities: Mapping[str, Capacity]) -> Answer:
    ours = capacities[MEDHA.label]
    best = max(BASELINES, key=lambda system: (capacities[system.label].qps, capacities[system.label].fails_at_qps or 0))
    theirs = capacities[best.label]
    listed = "; ".join(f"{name}: {found.says}" for name, found in capacities.items())
    base_qps = theirs.qps or theirs.fails_at_qps or math.nan
    return Answer(
        ours.qps / base_qps,
        f"{_DEFINITION} {listed}. The best of the others is divided by, where it holds "
        "at no rate tested the lowest. The paper tests no rate below 0.25, so that it cannot find more than 7 times.",
    )


def _ttft(options: Options) -> dict[str, Answer]:
    ours, theirs = (_served(system, MIX, _RATE, options) for system in (MEDHA, LOONGSERVE))
    quantiles = {share: (ttft_quantile(theirs, share), ttft_quantile(ours, share)) for share in (0.5, 0.9, 0.99)}
    (median, ours_median), (p90, ours_p90), (p99, ours_p99) = quantiles.values()
    slow = stretches_s(theirs.trace.arrival_s, theirs.ttft_s > SLO_S)
    ours_slow = stretches_s(ours.trace.arrival_s, ~is_long(ours.trace) & (ours.ttft_s > SLO_S))
    median_s = f"LoongServe {median}, Medha {ours_median}"
    overload = _overload(theirs, window_s(options))
    return {
        "ttft-median-30": Answer(
            median.seconds / ours_median.seconds, f"{_sign(median, ours_median)}{median_s} at {_RATE:g} QPS. {overload}"
        ),
        "ttft-tail-174": Answer(
            p90.seconds / ours_p90.seconds,
            f"{_sign(p90, ours_p90)}P90: LoongServe {p90}, Medha {ours_p90}; P99, among the long ones: "
            f"{p99} and {ours_p99}. {overload}",
        ),
        "median-30-percent": Answer(
            100 * (1 - ours_median.seconds / median.seconds),
            f"{median_s} at {_RATE:g} QPS: we get the times of v4's introduction and not the percent of its abstract.",
        ),
        "p90-10s": Answer(
            ours_p90.seconds,
            f"{'A lower bound. ' if ours_p90.is_least else ''}At {_RATE:g} QPS; all requests, the long ones included.",
        ),
        "spikes-100s": Answer(
            max(slow, default=0.0),
            f"At {_RATE:g} QPS the longest of {len(slow)} stretches of arrivals that all wait more than {SLO_S:g} s "
            f"for LoongServe's first token; Medha has {len(ours_slow)} of short requests.",
        ),
    }


def _sign(over: Bounded, under: Bounded) -> str:
    words = ratio_says(over, under)
    return f"The ratio is {words.strip()} this. " if words else ""


def _overload(theirs: Served, stop_s: float) -> str:
    """What the first half of the arrivals came to, which tells whether the queue grows without end."""
    share = finished_share(theirs, among=is_early(theirs.trace, stop_s))
    grows = (
        "its queue does not grow without end, which would give any ratio"
        if share >= ENOUGH
        else "its queue grows, and the ratio with the window"
    )
    return f"Of what came in the first half of the window our LoongServe finishes {share:.0%}: {grows}."


def _sensitivity(options: Options) -> dict[str, Answer]:
    none, one, five = (
        _served(LOONGSERVE, *load)
        for load in ((SHORT, _RATE, options), (MIX, _RATE, options, ONE_PERCENT), (MIX, _RATE, options))
    )
    parts = []
    for share in (0.5, 0.9):
        base, with_one, with_five = (ttft_quantile(served, share) for served in (none, one, five))
        parts.append(f"P{100 * share:.0f}: {base} without, {with_one} with 1 %, {with_five} with 5 %")
    base, with_one = (ttft_quantile(served, 0.9) for served in (none, one))
    return {
        "long-1-percent": Answer(
            with_one.seconds / base.seconds,
            f"{_sign(with_one, base)}P90 at {_RATE:g} QPS; the paper names no quantile. {'; '.join(parts)}.",
        )
    }


def _short_alike(options: Options) -> Answer:
    low, top = RATES_QPS[0], RATES_QPS[-1]
    medians = {system.label: ttft_quantile(_served(system, SHORT, low, options), 0.5).seconds for system in SYSTEMS}
    p90 = {system.label: ttft_quantile(_served(system, SHORT, top, options), 0.9).seconds for system in SYSTEMS}
    ours, calm_s = medians[MEDHA.label], ttft_quantile(_served(LOONGSERVE, SHORT, low, options), 0.9).seconds
    cases = [1 / ALIKE <= medians[system.label] / ours <= ALIKE for system in BASELINES]
    cases.append(p90[LOONGSERVE.label] >= BEHIND * p90[MEDHA.label])
    listed = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in medians.items())
    return Answer(
        float(np.mean(cases)),
        f"Medians at {low:g} QPS: {listed} (alike: within {ALIKE:g} times Medha's). P90 at {top:g} QPS: LoongServe "
        f"{p90[LOONGSERVE.label]:.2g} s, Medha {p90[MEDHA.label]:.2g} s (behind: {BEHIND:g} times); at {low:g} QPS "
        f"LoongServe has {calm_s:.2g} s, so that what our model of it lacks at {top:g} QPS is load.",
    )


def _truncated(options: Options) -> Answer:
    stop_s = window_s(options)
    cases, listed = [], []
    for qps in RATES_QPS[1:]:
        plays = {system.label: _served(system, MIX, qps, options) for system in BASELINES}
        shares = {name: finished_share(one, among=is_early(one.trace, stop_s)) for name, one in plays.items()}
        cases.append(min(shares.values()) < 1)
        listed.append(f"{qps:g} QPS " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()))
    return Answer(
        float(np.mean(cases)),
        "Finished within the window, of the requests that came in its first half (later ones need not have the time): "
        f"{'; '.join(listed)}.",
    )


def _over_time(options: Options) -> dict[str, Any]:
    """TTFT by arrival and active requests at 0.75 QPS (v5 figure 1b, v4 figure 21)."""
    times_s = np.linspace(0, window_s(options), 121)
    tree: dict[str, Any] = {"qps": _RATE, "times_s": times_s.tolist(), "systems": {}}
    for system in (MEDHA, LOONGSERVE):
        served = _served(system, MIX, _RATE, options)
        waits = [value if math.isfinite(value) else None for value in served.ttft_s.tolist()]
        tree["systems"][system.label] = {
            "arrival_s": served.trace.arrival_s.tolist(),
            "is_long": is_long(served.trace).tolist(),
            "ttft_s": waits,
            "active": num_active(served, times_s),
        }
    return tree


# ---------------------------------------------------------------------------------------------------------------------
# Drawing


def draw(numbers: Mapping[str, Any], figure: Any) -> None:
    """TTFT by rate without and with long requests; TTFT and active requests over time."""
    (left, middle), (waits, active) = figure.subplots(2, 2)
    for axes, (share, rows) in zip((left, middle), numbers["long"].items(), strict=True):
        _by_rate(axes, numbers["qps"], rows)
        finish(axes, title=f"long requests: {share}", ylabel="TTFT, s: P50 solid, P90 dotted", legend=axes is left)
    _waits(waits, numbers["over_time"])
    minutes = [second / 60 for second in numbers["over_time"]["times_s"]]
    lines(active, minutes, {name: one["active"] for name, one in numbers["over_time"]["systems"].items()}, marker="")
    active.set_xlabel("time, min")
    finish(active, title="Active requests, queued ones included", ylabel="requests")


def _by_rate(axes: Any, qps: Sequence[float], rows: Mapping[str, Any]) -> None:
    """Lines by system; hollow where only a lower bound is known."""
    for index, (name, points) in enumerate(rows.items()):
        color, marker = COLORS[index], MARKERS[index]
        for at, style in ((0, "-"), (1, ":")):
            least_s = [point["ttft_at_least_s"][at] for point in points]
            axes.plot(qps, least_s, style, color=color, label=name if at == 0 else None)
            for x, y, point in zip(qps, least_s, points, strict=True):
                hollow = point["ttft_s"]["all"][at] is None
                axes.plot([x], [y], marker, color=color, markerfacecolor="white" if hollow else color, markersize=5)
    axes.axhline(SLO_S, color=PAPER, linewidth=0.8, linestyle="--")
    axes.set_yscale("log")
    plain_ticks(axes.xaxis, qps)
    axes.set_xlabel("load, QPS (hollow: a lower bound)")


def _waits(axes: Any, tree: Mapping[str, Any]) -> None:
    for index, (name, one) in enumerate(tree["systems"].items()):
        points = list(zip(one["arrival_s"], one["ttft_s"], one["is_long"], strict=True))
        for long, size in ((False, 3), (True, 14)):
            some = [(at_s / 60, ttft_s) for at_s, ttft_s, is_long in points if ttft_s is not None and is_long == long]
            label, marker = f"{name}, {'long' if long else 'short'}", MARKERS[2] if long else MARKERS[0]
            x, y = [x for x, _ in some], [y for _, y in some]
            axes.scatter(x, y, s=size, color=COLORS[index], label=label, marker=marker)
    axes.set_yscale("log")
    axes.set_xlabel("arrival, min")
    axes.set_ylim(bottom=1e-3)
    finish(axes, title=f"5 % long, {tree['qps']:g} QPS", ylabel="TTFT, s", legend=False)
    axes.legend(fontsize=8, frameon=False, loc="lower center", ncols=2)


FIGURES = (FigureSpec("capacity", "TTFT under load, with and without long requests, 8B on 16 A100s", run, draw),)
