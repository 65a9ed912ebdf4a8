"""Capacity under load: TTFT by rate with and without long requests, and over time.

v5 sections 1, 2.5, 6.2 and 6.4, figures 1 and 9; v4 section 5.2, figures 1, 15 and 21. Setup:
:mod:`examples.reproduce.load`.

*Effective capacity*, which the papers do not define, is here the highest rate tested at which, and at all lower ones,
90 % of the short requests have their first token within 10 s (what v5 section 6.4 promises of Medha), and 90 % of all
and of the long ones that arrived in the first half of the window finish within it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from examples.reproduce.load import MIX, MIX_1, RATES_QPS, SHORT, Bounded, Served, System, run_of, runs_of
from examples.reproduce.plotting import COLORS, MARKERS, Line, Panel
from examples.reproduce.result import Answer, FigureResult, Options, figure
from examples.reproduce.systems import LOONGSERVE, MEDHA, SARATHI_512, SARATHI_2048, WHOLE
from medha.workload.metrics import Flags, Floats

BASELINES: tuple[System, ...] = (LOONGSERVE, SARATHI_512, SARATHI_2048, WHOLE)
SYSTEMS: tuple[System, ...] = (MEDHA, *BASELINES)
LOW_QPS = (0.02, 0.05, 0.1, 0.15, 0.2)
"""Below the papers' rates, where the baselines' capacity is."""
SLO_S = 10.0
ENOUGH = 0.9
ALIKE, BEHIND = 3.0, 2.0
"""Medians within such a factor of each other are alike; who has so many times the P90 is behind."""
BETTER = 1.5
"""Who has so many times the P90 TTFT is considerably worse."""
_RATE = 0.75


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
    arrival_s, is_finished = served.trace.arrival_s, served.is_finished
    short = ~served.is_long & (arrival_s <= stop_s - SLO_S)  # the others had not the time to be late
    early = arrival_s < stop_s / 2
    cases = [served.ttft_s[short] <= SLO_S, is_finished[early], is_finished[early & served.is_long]]
    return all(one.mean() >= ENOUGH for one in cases if len(one))


def capacity(system: System, rates_qps: Sequence[float], options: Options) -> Capacity:
    """The effective capacity with 5 % long requests, of rising rates, up to the first that is too high."""
    held = 0.0
    for qps in rates_qps:
        if not sustains(run_of(system, MIX, qps, options), options.window_s):
            return Capacity(held, qps)
        held = qps
    return Capacity(held, None)


@figure("capacity", "TTFT under load, with and without long requests, 8B on 16 A100s")
def run(options: Options) -> FigureResult:
    """All systems at the papers' rates; ``quick`` plays 5 minutes instead of 60, and fewer low rates."""
    low_qps = LOW_QPS[1::2] if options.quick else LOW_QPS
    capacities = {
        system.label: capacity(system, RATES_QPS if system is MEDHA else (*low_qps, *RATES_QPS), options)
        for system in SYSTEMS
    }
    answers = {
        "capacity-5": _capacity_answer(capacities),
        **_ttft(options),
        **_sensitivity(options),
        "short-alike": _short_alike(options),
        "short-sarathi": _short_sarathi(options),
        "truncated-60min": _truncated(options),
    }
    panels = [
        _rates_panel("none", runs_of(SYSTEMS, SHORT, options)),
        _rates_panel("5 %", runs_of(SYSTEMS, MIX, options)),
        _arrivals_panel([(system.label, run_of(system, MIX, _RATE, options)) for system in (MEDHA, LOONGSERVE)]),
    ]
    return FigureResult(panels, answers)


def _capacity_answer(capacities: Mapping[str, Capacity]) -> Answer:
    ours = capacities[MEDHA.label]
    best = max(BASELINES, key=lambda system: (capacities[system.label].qps, capacities[system.label].fails_at_qps or 0))
    theirs = capacities[best.label]
    listed = "; ".join(f"{name}: {found.says}" for name, found in capacities.items())
    base_qps = theirs.qps or theirs.fails_at_qps or math.nan
    return Answer(ours.qps / base_qps, enough=ENOUGH, slo_s=SLO_S, listed=listed)


def _ttft(options: Options) -> dict[str, Answer]:
    ours, theirs = (run_of(system, MIX, _RATE, options) for system in (MEDHA, LOONGSERVE))
    quantiles = {share: (theirs.ttft_quantile(share), ours.ttft_quantile(share)) for share in (0.5, 0.9, 0.99)}
    (median, ours_median), (p90, ours_p90), p99 = quantiles.values()
    slow = stretches_s(theirs.trace.arrival_s, theirs.ttft_s > SLO_S)
    ours_slow = stretches_s(ours.trace.arrival_s, ~ours.is_long & (ours.ttft_s > SLO_S))
    facts = {"qps": _RATE, "median": (median, ours_median), "overload": _overload(theirs, options.window_s)}
    tails = facts | {"sign": _sign(p90, ours_p90), "p90": (p90, ours_p90), "p99": p99}
    bound = "A lower bound. " if ours_p90.is_least else ""
    return {
        "ttft-median-30": Answer(median.seconds / ours_median.seconds, sign=_sign(median, ours_median), **facts),
        "ttft-tail-174": Answer(p90.seconds / ours_p90.seconds, **tails),
        "median-30-percent": Answer(100 * (1 - ours_median.seconds / median.seconds), **facts),
        "p90-10s": Answer(ours_p90.seconds, bound=bound, qps=_RATE),
        "spikes-100s": Answer(max(slow, default=0.0), qps=_RATE, slo_s=SLO_S, theirs=len(slow), ours=len(ours_slow)),
    }


def _sign(over: Bounded, under: Bounded) -> str:
    words = over.ratio_says(under)
    return f"The ratio is {words.strip()} this. " if words else ""


def _overload(theirs: Served, stop_s: float) -> str:
    """What the first half of the arrivals came to, which tells whether the queue grows without end."""
    share = theirs.finished_share(stop_s / 2)
    grows = (
        "its queue does not grow without end, which would give any ratio"
        if share >= ENOUGH
        else "its queue grows, and the ratio with the window"
    )
    return f"Of what came in the first half of the window our LoongServe finishes {share:.0%}: {grows}."


def _sensitivity(options: Options) -> dict[str, Answer]:
    runs = [run_of(LOONGSERVE, lengths, _RATE, options) for lengths in (SHORT, MIX_1, MIX)]
    p50, p90 = ([served.ttft_quantile(share) for served in runs] for share in (0.5, 0.9))
    sign = _sign(p90[1], p90[0])
    return {"long-1-percent": Answer(p90[1].seconds / p90[0].seconds, sign=sign, qps=_RATE, p50=p50, p90=p90)}


def _short_alike(options: Options) -> Answer:
    low, top = RATES_QPS[0], RATES_QPS[-1]
    medians = {system.label: run_of(system, SHORT, low, options).ttft_quantile(0.5).seconds for system in SYSTEMS}
    p90 = {system.label: run_of(system, SHORT, top, options).ttft_quantile(0.9).seconds for system in SYSTEMS}
    ours, calm_s = medians[MEDHA.label], run_of(LOONGSERVE, SHORT, low, options).ttft_quantile(0.9).seconds
    cases = [1 / ALIKE <= medians[system.label] / ours <= ALIKE for system in BASELINES]
    cases.append(p90[LOONGSERVE.label] >= BEHIND * p90[MEDHA.label])
    listed = ", ".join(f"{name} {seconds:.2g} s" for name, seconds in medians.items())
    limits = {"low": low, "top": top, "alike": ALIKE, "behind": BEHIND}
    return Answer(cases, listed=listed, p90=p90, calm_s=calm_s, **limits)


def _short_sarathi(options: Options) -> Answer:
    cases, listed = [], []
    for qps in RATES_QPS:
        ours, *theirs = (
            run_of(system, SHORT, qps, options).ttft_quantile(0.9).seconds
            for system in (MEDHA, SARATHI_512, SARATHI_2048)
        )
        cases += [other >= BETTER * ours for other in theirs]
        listed.append(f"{qps:g} QPS {', '.join(f'{1e3 * seconds:.0f}' for seconds in (ours, *theirs))} ms")
    return Answer(cases, listed="; ".join(listed), better=BETTER)


def _truncated(options: Options) -> Answer:
    stop_s = options.window_s
    cases, listed = [], []
    for qps in RATES_QPS[1:]:
        shares = {system.label: run_of(system, MIX, qps, options).finished_share(stop_s / 2) for system in BASELINES}
        cases.append(min(shares.values()) < 1)
        listed.append(f"{qps:g} QPS " + ", ".join(f"{name} {share:.0%}" for name, share in shares.items()))
    return Answer(cases, listed="; ".join(listed))


def stretches_s(arrival_s: Floats, is_slow: Flags) -> list[float]:
    """Seconds of arrivals without a break that were all slow: from the first to the last of each run of them."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_slow, [False]]).astype(np.int8)))
    return [float(arrival_s[last - 1] - arrival_s[first]) for first, last in zip(edges[::2], edges[1::2], strict=True)]


def _rates_panel(share: str, runs: Mapping[str, Sequence[Served]]) -> Panel:
    """Lines by system; hollow where only a lower bound is known."""
    rows = []
    for (index, (name, row)), (quantile, style) in itertools.product(enumerate(runs.items()), ((0.5, "-"), (0.9, ":"))):
        points = [served.ttft_quantile(quantile) for served in row]
        label, looks = name if quantile == 0.5 else None, {"color": COLORS[index], "marker": MARKERS[index]}
        rows.append(Line(label, RATES_QPS, [point.seconds for point in points], looks | {"linestyle": style}))
        bounds = [point.seconds if point.is_least else None for point in points]
        rows.append(Line(None, RATES_QPS, bounds, looks | {"linestyle": "", "markerfacecolor": "white"}))
    return Panel(
        f"long requests: {share}",
        "load, QPS (hollow: a lower bound)",
        "TTFT, s: P50 solid, P90 dotted",
        rows,
        levels={f"{SLO_S:g} s": SLO_S} if share != "none" else {},
        log="xy",
    )


def _arrivals_panel(runs: Sequence[tuple[str, Served]]) -> Panel:
    """TTFT by arrival at 0.75 QPS (v5 figure 1b): the P90 of short requests by minute, and each long one."""
    rows = []
    for (index, (name, served)), kind in itertools.product(enumerate(runs), ("short", "long")):
        chosen = np.isfinite(served.ttft_s) & (served.is_long == (kind == "long"))
        minutes, ttft_s = served.trace.arrival_s[chosen] / 60, served.ttft_s[chosen]
        style = {"color": COLORS[index], "marker": "^", "linestyle": "", "alpha": 0.6}
        if kind == "short":
            of = minutes.astype(int)
            ttft_s = np.array([np.percentile(ttft_s[of == minute], 90) for minute in np.unique(of)])
            minutes, style = np.unique(of) + 0.5, {"color": COLORS[index]}
        label = f"{name}, {'P90 of short, by minute' if kind == 'short' else 'long'}"
        rows.append(Line(label, minutes.tolist(), ttft_s.tolist(), style))
    return Panel(f"5 % long, {_RATE:g} QPS", "arrival, min", "TTFT, s", rows, log="y")
