"""What orders prefills: policies with one prefill a batch against Medha's LARS with several (v5 section 6.4, figure 13;
v4 section 5.4, figure 22). Setup: :mod:`examples.reproduce.load`.

The guard for the late, which the papers do not have, is on in all of them: the order alone, and the number of prefills,
are what differs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from examples.reproduce.load import MIX, RATES_QPS, Bounded, Served, curve, run_of
from examples.reproduce.plotting import Panel, shares_below
from examples.reproduce.result import Answer, FigureResult, Options, figure
from examples.reproduce.systems import EDF, FCFS, LARS, LRS, MEDHA, fixed_batch_s

SYSTEMS = (FCFS, EDF, LRS, LARS, MEDHA)
LOW, TOP = RATES_QPS[0], RATES_QPS[-1]
ALIKE = 2.0
_CLOSE = 1.15


@figure("schedulers", "TTFT by scheduling policy, 8B on 16 A100s")
def run(options: Options) -> FigureResult:
    """Five ways at the lowest and the highest rate, 5 % long requests."""
    served = {qps: {system.label: run_of(system, MIX, qps, options) for system in SYSTEMS} for qps in (LOW, TOP)}
    medians = {qps: {name: one.ttft_quantile(0.5) for name, one in runs.items()} for qps, runs in served.items()}
    panels = [
        Panel(
            f"5 % long, {qps:g} QPS (Medha: several prefills a batch, the others one)",
            "TTFT, s (ends where none came within the window)",
            "% of requests",
            shares_below({name: curve(one.ttft_s) for name, one in runs.items()}),
            log="x",
        )
        for qps, runs in served.items()
    ]
    answers = {
        "multi-prefill-throughput": _throughput(served[TOP], options),
        "multi-prefill-median": _median(medians),
        "policies-low-load": _policies(medians, served),
    }
    return FigureResult(panels, answers)


def _throughput(served: Mapping[str, Served], options: Options) -> Answer:
    plays = [served[MEDHA.label], served[LARS.label]]
    begun = [play.trace.prompt_tokens[np.isfinite(play.ttft_s)].sum() for play in plays]  # tokens of who got a token
    rates = [int(tokens) / options.window_s for tokens in begun]
    ends = [play.is_finished.sum() for play in plays]
    return Answer(rates[0] / rates[1], qps=TOP, rates=rates, ends=ends, fixed_ms=1e3 * fixed_batch_s())


def _median(medians: Mapping[float, Mapping[str, Bounded]]) -> Answer:
    low, high = sorted(times[LARS.label].seconds / times[MEDHA.label].seconds for times in medians.values())
    listed = "; ".join(
        f"{qps:g} QPS: " + ", ".join(f"{name} {times[name]}" for name in (LARS.label, LRS.label, MEDHA.label))
        for qps, times in medians.items()
    )
    return Answer((low, high), listed=listed)


def _policies(medians: Mapping[float, Mapping[str, Bounded]], served: Mapping[float, Mapping[str, Served]]) -> Answer:
    low, top = medians[LOW], medians[TOP]
    edf, fcfs = top[EDF.label], top[FCFS.label]
    begun = [float(np.mean(np.isfinite(served[TOP][name].ttft_s))) for name in (EDF.label, FCFS.label)]
    waiting = float(np.mean(served[LOW][FCFS.label].ttft_s > 1))
    ours = low[MEDHA.label].seconds
    cases = [1 / ALIKE <= low[system.label].seconds / ours <= ALIKE for system in SYSTEMS[:-1]]
    cases.append((edf.is_least and fcfs.is_least) or edf.seconds * _CLOSE >= fcfs.seconds)
    listed = ", ".join(f"{name} {median}" for name, median in low.items())
    limits = {"low": LOW, "top": TOP, "alike": ALIKE}
    return Answer(cases, listed=listed, waiting=waiting, edf=edf, fcfs=fcfs, begun=begun, **limits)
