"""What a figure draws, as data (it is the figure's JSON as well), and the one way to draw it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, told apart by colour-blind readers as well."""
PAPER = "#7A7A7A"
"""Of what a paper says."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_HEIGHT = 4.2
_MAX_TICKS = 12
_FEW_DECADES = 3e3  # a logarithmic axis that spans less has ticks within its decades


@dataclass(frozen=True, slots=True)
class Line:
    """Points under a label, without those that are None; ``style`` is matplotlib's."""

    label: str | None
    x: Sequence[float]
    y: Sequence[float | None]
    style: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Panel:
    """A pair of axes.

    Attributes:
        title, xlabel, ylabel: texts.
        lines: from left to right.
        bars: by label, a height at each of some names.
        paper: by label, a point that a paper states.
        levels: by label, a horizontal line.
        band: of values, in grey.
        notes: x, y and a text beside it.
        log: axes that are logarithmic: ``x``, ``y`` or ``xy``. A logarithmic x axis has a tick at each point that
            all lines have, in K and M where it is of tokens; a linear y axis begins at 0.
        yticks: by label, where; empty as matplotlib chooses.
    """

    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[Line] = ()
    bars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    paper: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    levels: Mapping[str, float] = field(default_factory=dict)
    band: tuple[float, float] | None = None
    notes: Sequence[tuple[float, float, str]] = ()
    log: str = ""
    yticks: Mapping[str, float] = field(default_factory=dict)


def paths(rows: Mapping[str, tuple[Sequence[float], Sequence[float | None]]], **style: Any) -> list[Line]:
    """A line for each row of places and values, in the next colour, with the next marker unless told another."""
    return [
        Line(name, list(x), list(y), {"color": COLORS[index], "marker": MARKERS[index], **style})
        for index, (name, (x, y)) in enumerate(rows.items())
    ]


def lines(
    x: Sequence[float], rows: Mapping[str, Sequence[float | None]], *, scale: float = 1.0, **style: Any
) -> list[Line]:
    """The same for values over one ``x``, times a scale."""
    scaled = {name: [None if y is None else scale * y for y in values] for name, values in rows.items()}
    return paths({name: (x, values) for name, values in scaled.items()}, **style)


def shares_below(rows: Mapping[str, Sequence[float | None]], *, scale: float = 1.0) -> list[Line]:
    """Distributions from 101 quantiles each: the percent below, over the value times a scale."""
    known = {name: [(scale * v, n) for n, v in enumerate(values) if v is not None] for name, values in rows.items()}
    return [
        Line(
            name,
            [value for value, _ in points],
            [share for _, share in points],
            {"color": COLORS[index], "linestyle": ("-", "--")[index % 2]},
        )
        for index, (name, points) in enumerate(known.items())
    ]


def token_label(tokens: float) -> str:
    """``32K``, ``1M``."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return f"{tokens:g}"


def draw(panels: Sequence[Panel], canvas: Any) -> None:
    """Draw panels into a matplotlib figure, up to three in a row."""
    num_columns = 2 if len(panels) == 4 else min(len(panels), 3)
    num_rows = -(-len(panels) // num_columns)
    canvas.set_size_inches(1.5 + 4.6 * num_columns + 1.5 * (num_columns == 1), _HEIGHT * num_rows)
    for axes, panel in zip(np.ravel(canvas.subplots(num_rows, num_columns)), panels, strict=True):
        _draw(axes, panel)


def _draw(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator  # an extra: reports do without

    for line in panel.lines:
        points = [(x, y) for x, y in zip(line.x, line.y, strict=True) if y is not None]
        axes.plot([x for x, _ in points], [y for _, y in points], label=line.label, **line.style)
    width = 0.8 / max(len(panel.bars), 1)
    for index, (label, heights) in enumerate(panel.bars.items()):
        at = [place + (index - (len(panel.bars) - 1) / 2) * width for place in range(len(heights))]
        drawn = axes.bar(at, list(heights.values()), width, color=COLORS[index], label=label)
        axes.bar_label(drawn, fmt="%.3g", fontsize=7)
        axes.set_xticks(range(len(heights)), list(heights))
    for label, (x, y) in panel.paper.items():
        axes.scatter([x], [y], marker="x", s=60, color=PAPER, zorder=3, label=label)
    for label, y in panel.levels.items():
        axes.axhline(y, color=PAPER, linestyle=":", label=label)
    if panel.band is not None:
        axes.axhspan(*panel.band, color="#EEEEEE", zorder=0)
    for x, y, text in panel.notes:
        axes.annotate(text, (x, y), textcoords="offset points", xytext=(4, 5), fontsize=8)
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, **{f"{name}scale": "log" for name in panel.log})
    for axis in [{"x": axes.xaxis, "y": axes.yaxis}[name] for name in panel.log]:
        low, high = axis.get_view_interval()
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < _FEW_DECADES else (1,)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")
    places = sorted({x for line in panel.lines for x in line.x})
    if "x" in panel.log and len(places) <= _MAX_TICKS and places == sorted(panel.lines[0].x):
        written = token_label if panel.xlabel.endswith(", tokens") else "{:g}".format
        axes.set_xticks(places, [written(x) for x in places])
        axes.set_xticks([], minor=True)
    if panel.yticks:
        axes.set_yticks(list(panel.yticks.values()), list(panel.yticks))
    elif "y" not in panel.log:
        axes.set_ylim(bottom=0)
    axes.set_title(panel.title, fontsize=10)
    axes.grid(True, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, edgecolor="none", framealpha=0.5)
