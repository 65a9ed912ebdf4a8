"""The best improvement rate of the cdsp scheduler at each load, as a file for ``medha simulate --improvement-rate``.

Source: Tetris, sections 5.1 and 7.1. Requests of the lengths to come are played against the planner with each rate: as
plans are kept and take what is predicted, the TTFT of each is known at its arrival. A load has the rate with the least
mean TTFT. Beside the file it takes the options of ``medha simulate``:

python -m tools.best_rates rates.json --hardware a100-80g --kvp 16 --workload tetris-long --qps 0.5,1,1.5
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from medha.cli.command import end_process, make_app, run_app
from medha.cli.report import check_writable, print_report, progress
from medha.config import CDSP
from medha.cost.coefficients import Floats
from medha.cost.improvement import MAX_RATE, LoadWindow, RateTable
from medha.cost.roofline import shape_name
from medha.sched.cdsp import Planner
from medha.sim.cli import simulate
from medha.sim.study import about, systems_of
from medha.workload.trace import Trace

RATES = tuple(i / 20 for i in range(1, round(20 * MAX_RATE) + 1))  # from 0.05

app, simulations = make_app(), make_app()
simulations.command()(simulate)


@app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def best_rates(
    context: typer.Context, table: Annotated[Path, typer.Argument(metavar="FILE", help="The table to write.")]
) -> int:
    """Find the rate with the least mean TTFT at each --request-rate; options are those of medha simulate."""
    check_writable(table)
    given = typer.main.get_command(simulations).make_context("simulate", list(context.args)).params
    given |= {"scheduler": [CDSP], "prefill_only": True}
    systems, rows, layout = systems_of(given), list[tuple[float, float, float]](), ""
    with progress("planning requests", sum(len(system.trace) for system in systems)) as done:
        for system in sorted(systems, key=lambda system: system.qps or system.trace.qps or 0.0):
            planner, trace = system.replica.build()[0].planner, system.trace
            assert planner is not None, "cdsp plans"
            layout = planner.layout(system.replica.parallel.tp)
            rows.append((system.qps or trace.qps or 0.0, *best_rate(planner, trace)))
            done(len(trace))
    replica, (qps, rates, means) = systems[0].replica, zip(*rows, strict=True)
    what = given["trace"] or given["workload"] or "medha-mix"
    load = f"{what}, {len(systems[0].trace):,} requests, seed {given['seed']}"
    found = RateTable(replica.spec.name, shape_name(replica.model), layout, load, qps, rates, means)
    table.write_text(found.to_json(), encoding="utf-8")
    by_load = {f"{load:g} requests/s": rate for load, rate in zip(qps, rates, strict=True)}
    print_report({"title": about(systems, given)[0], "load": load, "improvement rates": by_load})
    return 0


def played_ttft_s(planner: Planner, trace: Trace, load: LoadWindow) -> Floats:
    """TTFT of each request where plans are made at arrival, kept, and take what is predicted; float64 [requests]."""
    free_s, ttft_s = [0.0] * planner.num_groups, list[float]()
    for arrival_s, prompt in zip(trace.arrival_s.tolist(), trace.prompt_tokens.tolist(), strict=True):
        load.arrived(arrival_s)
        queue_s = [max(one_s - arrival_s, 0.0) for one_s in free_s]
        plan = planner.plan(prompt, queue_s, load.rate)
        planner.occupy(queue_s, plan.chunks)
        free_s = [arrival_s + one_s for one_s in queue_s]
        ttft_s.append(plan.ttft_s)
    return np.array(ttft_s)


def best_rate(planner: Planner, trace: Trace) -> tuple[float, float]:
    """Of :data:`RATES` that with the least mean TTFT, the smaller of two alike, and that mean."""
    means = {rate: float(played_ttft_s(planner, trace, LoadWindow(rate)).mean()) for rate in RATES}
    rate = min(means, key=means.__getitem__)
    return rate, means[rate]


if __name__ == "__main__":
    end_process(run_app(app, "python -m tools.best_rates"))
