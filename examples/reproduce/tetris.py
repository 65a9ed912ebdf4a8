"""``python -m examples.reproduce.tetris``: Tetris against fixed groups, LoongServe's allocation and single chunks.

Of the paper's evaluation (sections 7.2 and 7.3, Llama-3 8B) the prefill side: no memory, no decode, no transfer
(:mod:`examples.reproduce.baselines.tetris`). Its traces are unpublished: lengths have their published ranges and means.

- A system's capacity is the load at which its median TTFT is 25 times that of fixed SP8 at a light load (0.1 requests
  a second); the paper normalises its figure 8 so.
- Ratios of TTFT are over Tetris, at shares of fixed SP8's capacity. They rise steeply near it, so whole curves are
  written too. The paper compares at the highest load that its best baseline bears, which it does not number.
- Improvement rates are found on another seed, in steps of 0.5 requests a second, and Tetris reads the load as it runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from examples.reproduce.baselines.tetris import CDSP, LOONGSERVE, SINGLE, SP8, SP16, SYSTEMS, Stream, rates_of, ttft_s
from medha.cli.command import end_process, make_app, run_app
from medha.cli.report import print_report, progress

app = make_app()

TRACES = ("tetris-short", "tetris-medium", "tetris-long")
LIGHT_QPS, LIMIT = 0.1, 25.0
SHARES = (0.8, 0.9, 1.0)
"""Of fixed SP8's capacity, at which systems are compared."""
CURVE = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4)
STEP_QPS, MOST_QPS = 0.5, 12.0
OTHER_SEED = 1000  # more, of the requests on which improvement rates are found
_HALVINGS, _PROFILED = 9, 500
PAPER = {
    "capacity over fixed SP8": "1.20 to 1.45",
    "P50, fixed SP8 over Tetris": "1.64 to 2.78",
    "P99, fixed SP8 over Tetris": "1.52 to 3.13",
    "P50, single chunk over Tetris": "2.33 to 4.17",
    "P99, single chunk over Tetris": "2.64 to 3.58",
}
Quantiles = dict[str, tuple[float, float]]


class Trial:
    """One trace, of one seed: every system, with its improvement rates."""

    def __init__(self, lengths: str, count: int, seed: int) -> None:
        self.stream = Stream(lengths, count, seed)
        self.limit_s = LIMIT * self.quantiles(SP8, LIGHT_QPS, 0.0)[0]
        self.rates: dict[str, Any] = {SP8.label: 0.0}
        self.sp8_qps = self.capacity_qps(SP8)
        most, profiled = 1.5 * self.sp8_qps, Stream(lengths, min(count, _PROFILED), seed + OTHER_SEED)
        loads = [STEP_QPS * step for step in range(1, int(most / STEP_QPS) + 2)]
        self.rates = {system.label: rates_of(system, profiled, loads) for system in SYSTEMS}

    def quantiles(self, system: Any, qps: float, rates: Any = None) -> tuple[float, float]:
        """P50 and P99 of the TTFT, seconds."""
        found = ttft_s(system, self.stream, qps, self.rates[system.label] if rates is None else rates)
        p50, p99 = np.percentile(found, (50, 99)).tolist()
        return p50, p99

    def capacity_qps(self, system: Any) -> float:
        """The load at which the median TTFT comes to the limit."""
        low, high = LIGHT_QPS, MOST_QPS
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.quantiles(system, middle)[0] <= self.limit_s else (low, middle)
        return low

    def at(self, share: float) -> Quantiles:
        """Quantiles of every system at a share of fixed SP8's capacity."""
        return {system.label: self.quantiles(system, share * self.sp8_qps) for system in SYSTEMS}


def figures_of(trial: Trial) -> dict[str, float]:
    """Capacities over fixed SP8's, and ratios of TTFT over Tetris's."""
    found = {f"capacity, {one.label}": trial.capacity_qps(one) / trial.sp8_qps for one in SYSTEMS if one is not SP8}
    for share in SHARES:
        times = trial.at(share)
        for other in (SP8, SINGLE, LOONGSERVE, SP16):
            for name, of, over in zip(("P50", "P99"), times[other.label], times[CDSP.label], strict=True):
                found[f"{name} at {share:g}, {other.label} over Tetris"] = of / over
    return found


def median_rows(figures: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """A row for each figure: by trace the median over seeds, and the least and the most."""
    rows = []
    for name in next(iter(figures.values()))[0]:
        row: dict[str, Any] = {"figure": name}
        for lengths, seeds in figures.items():
            values = sorted(one[name] for one in seeds)
            row[lengths] = f"{np.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"
        rows.append(row)
    return rows


def curve_rows(trial: Trial, shares: Sequence[float] = CURVE) -> list[dict[str, Any]]:
    """P50 and P99 of every system over loads."""
    rows = []
    for share in shares:
        row: dict[str, Any] = {"requests/s": round(share * trial.sp8_qps, 3), "of SP8's": share}
        for label, (p50, p99) in trial.at(share).items():
            row |= {f"{label}, P50 s": p50, f"{label}, P99 s": p99}
        rows.append(row)
    return rows


@app.command()
def tetris(
    count: Annotated[int, typer.Option(min=100, help="Requests of each trace.")] = 2000,
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 3,
    output_json: Annotated[Path | None, typer.Option(help="Write figures and curves here.", show_default=False)] = None,
) -> int:
    """Compare capacity and TTFT on the short, the medium and the long trace."""
    figures: dict[str, list[dict[str, float]]] = {lengths: [] for lengths in TRACES}
    curves, rates = dict[str, Any](), dict[str, Any]()
    with progress("playing traces", len(TRACES) * seeds) as done:
        for lengths in TRACES:
            for seed in range(seeds):
                trial = Trial(lengths, count, seed)
                figures[lengths].append(figures_of(trial))
                if not seed:
                    curves[lengths] = curve_rows(trial)
                    table = trial.rates[CDSP.label]
                    rates[lengths] = dict(zip(table.qps, table.rates, strict=True))
                done(1)
    rows = median_rows(figures)
    if output_json is not None:
        report = {"count": count, "seeds": seeds, "paper": PAPER, "figures": figures, "curves": curves, "rates": rates}
        output_json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    title = f"{count:,} requests, seeds 0 to {seeds - 1}: the median, and from the least to the most"
    print_report({"title": title, "figures": rows, "in the paper, 8B": PAPER})
    return 0


if __name__ == "__main__":
    end_process(run_app(app, "python -m examples.reproduce.tetris"))
