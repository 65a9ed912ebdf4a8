"""TTFT over the time of arrival, from a report: ``python -m tools.plot_ttft REPORT.json TTFT.png``.

The report is one of ``medha simulate``, ``medha bench serve`` or its preset, the convoy, by ``--output-json``; a panel
is a system. The ending of the picture's name says in which format it is. Needs matplotlib (``pip install -e .[plot]``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from matplotlib.figure import Figure

from medha.workload.metrics import Floats
from tools.command import main

_LONG = 8192  # tokens of a prompt from which it is long
_COLUMNS = 3


def panels_of(report: dict[str, Any]) -> dict[str, Floats]:
    """Of each system of a report [3, requests]: arrivals, TTFTs (seconds; NaN where there was none), prompt tokens."""
    if "systems" in report:  # a convoy
        rows = {one["system"]: one["requests"] for one in report["systems"]}
        names = ("arrival_s", "ttft_s", "input_len")
        columns = {name: [[row[key] for row in some] for key in names] for name, some in rows.items()}
    else:
        names = ("start_times", "ttfts", "input_lens")
        runs = report["runs"] if isinstance(report.get("runs"), list) else [report]
        columns = {run.get("label", "medha"): [run[key] for key in names] for run in runs}
    return {name: np.array(some, np.float64) for name, some in columns.items()}  # None is NaN


def draw(panels: dict[str, Floats], path: Path, *, long_tokens: int = _LONG) -> None:
    """A panel a system, prompts of so many tokens or more apart from the others."""
    columns = min(len(panels), _COLUMNS)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(4.2 * columns, 6), 2.9 * rows + 0.6), layout="constrained")
    grid = figure.subplots(rows, columns, sharex="col", sharey=True, squeeze=False).ravel()
    for axes, (name, (arrival_s, ttft_s, tokens)) in zip(grid, panels.items(), strict=False):
        is_long, size = tokens >= long_tokens, 14 if len(tokens) < 2000 else 4
        short = f"prompt below {long_tokens:,} tokens"
        # Okabe and Ito's colours, which differ also for those who see few
        for chosen, label, color, s in ((~is_long, short, "#0072B2", size), (is_long, "longer", "#D55E00", 2 * size)):
            axes.scatter(arrival_s[chosen], ttft_s[chosen], s, color, linewidths=0, alpha=0.75, label=label)
        axes.set(yscale="log", title=name)
        axes.grid(alpha=0.25, linewidth=0.6)
    figure.supxlabel("arrival (s)")
    figure.supylabel("TTFT (s)")
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    figure.savefig(path, dpi=130, metadata={"Software": None} if path.suffix == ".png" else None)


def plot_ttft(
    report: Annotated[Path, typer.Argument(help="Of medha simulate or medha bench serve.")],
    picture: Annotated[Path, typer.Argument(help="File to draw.")],
    long_tokens: Annotated[int, typer.Option(help="Tokens of a prompt from which it is long.")] = _LONG,
) -> None:
    """Draw the TTFT of each request of a report over its arrival."""
    draw(panels_of(json.loads(report.read_text())), picture, long_tokens=long_tokens)


if __name__ == "__main__":
    main(plot_ttft)
