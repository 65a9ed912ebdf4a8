"""The worked example of v5 section 4.1: one long and two short requests on one server, by policy."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import numpy as np

from examples.reproduce.plotting import COLORS, Line, Panel
from examples.reproduce.result import Answer, FigureResult, Options, figure
from medha.sched.policy import Columns, Policy, edf, fcfs, lars, lrs

QUANTUM_S = 0.01
POLICIES: dict[str, Policy] = {"fcfs": fcfs, "edf": edf, "lrs": lrs, "lars": lars}


class Job(NamedTuple):
    """A request of the example; seconds."""

    name: str
    arrival_s: float
    work_s: float
    deadline_s: float


JOBS = (Job("long", 0.0, 10.0, 16.0), Job("short 1", 5.0, 0.5, 1.0), Job("short 2", 5.0, 0.5, 1.0))


def columns_of(jobs: list[Job], left_s: list[float]) -> Columns:
    """The jobs as a policy sees them."""
    arrival_s, deadline_s, work_s = np.array([(job.arrival_s, job.deadline_s, job.work_s) for job in jobs]).T
    zeros = np.zeros(len(jobs), np.int64)
    return Columns(arrival_s, deadline_s, work_s, np.array(left_s), zeros, zeros, zeros)


def play(policy: Policy) -> tuple[dict[str, float], list[tuple[str, float, float]]]:
    """Serve the example in quanta of 10 ms, always who has the smallest key.

    Returns:
        When each job ends, and (job, start, end) of each stretch on the server.
    """
    left = {job.name: round(job.work_s / QUANTUM_S) for job in JOBS}
    served: list[str] = []  # in each quantum
    while any(left.values()):
        now_s = len(served) * QUANTUM_S
        here = [job for job in JOBS if job.arrival_s <= now_s and left[job.name]]
        keys = policy(columns_of(here, [left[job.name] * QUANTUM_S for job in here]), now_s)
        served.append(here[int(np.argmin(keys))].name)
        left[served[-1]] -= 1
    stretches, start = [], 0
    for name, quanta in groupby(served):
        end = start + len(list(quanta))
        stretches.append((name, start * QUANTUM_S, end * QUANTUM_S))
        start = end
    return {name: end_s for name, _, end_s in stretches}, stretches


@figure("example", "The worked example of v5 section 4.1")
def run(options: Options) -> FigureResult:
    """Four policies of the library on the example; ``quick`` changes nothing."""
    played = {name: play(policy) for name, policy in POLICIES.items()}
    due = {job.name: job.arrival_s + job.deadline_s for job in JOBS}
    met = {name: [job for job, end in ends.items() if end <= due[job] + 1e-9] for name, (ends, _) in played.items()}
    stretches = {name: row for name, (_, row) in played.items()}
    start_s = {name: min(start for job, start, _ in row if job != "long") for name, row in stretches.items()}
    slacks = {job.name: float(lars(columns_of([job], [job.work_s]), job.arrival_s)[0]) for job in JOBS}
    panel = Panel(
        "v5 section 4.1: one long request, two short ones at 5 s (due at 6 s, the long one at 16 s)",
        "time, s",
        "policy",
        [
            Line(
                job.name if name == "fcfs" and not done else None,
                [start, end],
                [row, row],
                {"color": COLORS[index], "linewidth": 14, "solid_capstyle": "butt"},
            )
            for index, job in enumerate(JOBS)
            for row, name in enumerate(stretches)
            for done, (_, start, end) in enumerate(one for one in stretches[name] if one[0] == job.name)
        ],
        yticks={name: row for row, name in enumerate(stretches)},
    )
    lars_ends, lars_long = played["lars"][0], played["lars"][0]["long"]
    facts: dict[str, object] = {f"missed_{name}": 3 - len(met[name]) for name in ("lars", "edf")}
    facts |= {"start_s": start_s["lars"], "short_1": lars_ends["short 1"], "short_2": lars_ends["short 2"]}
    takes_turns = start_s["lars"] > JOBS[1].arrival_s and lars_ends["short 1"] < lars_long
    answers = {
        "example-fcfs": Answer(start_s["fcfs"]),
        "example-edf": Answer(start_s["edf"], met=len(met["edf"])),
        "example-slack-long": Answer(slacks["long"]),
        "example-slack-short": Answer(slacks["short 1"]),
        "example-lars": Answer(float(takes_turns), **facts),
        "example-lars-deadlines": Answer(len(met["lars"]) / len(JOBS)),
        "yield-16ms": Answer(1e3 * (1 - min(0.4, 0.2)) * 0.020),
    }
    return FigureResult([panel], answers)
