"""What orders prefills: policies with one prefill a batch against Medha's LARS with several (v5 section 6.4, figure 13;
v4 section 5.4, figure 22). Setup: :mod:`examples.reproduce.load`.

The guard for the late, which the papers do not have, is on in all of them: the order alone, and the number of prefills,
are what differs.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from examples.reproduce.load import MIX, RATES_QPS, run_of, window_s
from examples.reproduce.plotting import Panel, shares_below
from examples.reproduce.result import Answer, FigureResult, Options, figure
from examples.reproduce.served import Bounded, Served, curve
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


def prompt_tokens_done(served: Served) -> int:
    """Prompt tokens of the requests that got a first token."""
    return int(served.trace.prompt_tokens[np.isfinite(served.ttft_s)].sum())


def _throughput(served: Mapping[str, Served], options: Options) -> Answer:
    several, one = served[MEDHA.label], served[LARS.label]
    tokens = [prompt_tokens_done(play) / window_s(options) for play in (several, one)]
    return Answer(
        tokens[0] / tokens[1],
        f"Prompt tokens a second of requests that got their first token, at {TOP:g} QPS: {tokens[0]:,.0f} with several "
        f"prefills a batch, {tokens[1]:,.0f} with one, both LARS; requests finished {several.is_finished.sum()} and "
        f"{one.is_finished.sum()}. A batch's 20 ms are filled either way, by one chunk or by "
        f"several, and {1e3 * fixed_batch_s():.1f} ms of them do not grow with its tokens: no more can be saved, "
        "and what goes to short requests is taken from long ones.",
    )


def _median(medians: Mapping[float, Mapping[str, Bounded]]) -> Answer:
    over = sorted(times[LARS.label].seconds / times[MEDHA.label].seconds for times in medians.values())
    listed = "; ".join(
        f"{qps:g} QPS: " + ", ".join(f"{name} {times[name]}" for name in (LARS.label, LRS.label, MEDHA.label))
        for qps, times in medians.items()
    )
    return Answer(
        (over[0], over[1]),
        f"Medians: {listed}. The range is of LARS without it over Medha at the two rates. With one prefill a batch "
        "LARS keeps a short request until it is more urgent than the long one under way, near its deadline of 1 s, "
        "which is ours, as the papers state none; with several it takes the share that the long one yields. Under "
        "overload long ones are late, have no slack, and yield nothing.",
    )


def _policies(medians: Mapping[float, Mapping[str, Bounded]], served: Mapping[float, Mapping[str, Served]]) -> Answer:
    low, top = medians[LOW], medians[TOP]
    edf, fcfs = top[EDF.label], top[FCFS.label]
    begun = {name: float(np.mean(np.isfinite(served[TOP][name].ttft_s))) for name in (EDF.label, FCFS.label)}
    waiting = float(np.mean(served[LOW][FCFS.label].ttft_s > 1))
    ours = low[MEDHA.label].seconds
    cases = [1 / ALIKE <= low[system.label].seconds / ours <= ALIKE for system in SYSTEMS[:-1]]
    cases.append((edf.is_least and fcfs.is_least) or edf.seconds * _CLOSE >= fcfs.seconds)
    listed = ", ".join(f"{name} {median}" for name, median in low.items())
    return Answer(
        float(np.mean(cases)),
        f"Medians at {LOW:g} QPS: {listed} (alike: within {ALIKE:g} times Medha's, by policy); under FCFS "
        f"{waiting:.0%} wait more than 1 s. At {TOP:g} QPS: EDF {edf}, FCFS {fcfs}; {begun[EDF.label]:.0%} and "
        f"{begun[FCFS.label]:.0%} have a first token within the window (no better: neither median has one, or EDF's is "
        "not below FCFS's).",
    )
