"""Looks that the figures share; matplotlib itself is handed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, told apart by colour-blind readers as well."""
PAPER = "#7A7A7A"
"""Of what a paper says."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def lines(
    axes: Any, x: Sequence[float], rows: Mapping[str, Sequence[float | None]], *, scale: float = 1.0, **style: Any
) -> None:
    """A line for each row over ``x``, times a scale, in the next colour, with the next marker unless told another;
    without what is None."""
    for index, (name, values) in enumerate(rows.items()):
        points = [(at, scale * value) for at, value in zip(x, values, strict=True) if value is not None]
        looks = {"color": COLORS[index], "marker": MARKERS[index], "label": name, **style}
        axes.plot([at for at, _ in points], [value for _, value in points], **looks)


def log_axis(axes: Any, values: Sequence[float], *, label: str) -> None:
    """A logarithmic x axis with a written-out tick at each value."""
    axes.set(xscale="log", xlabel=label)
    plain_ticks(axes.xaxis, values)


def token_label(tokens: float) -> str:
    """``32K``, ``1M``."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if tokens >= size:
            return f"{tokens / size:.3g}{unit}"
    return f"{tokens:g}"


def token_axis(axes: Any, tokens: Sequence[float], *, label: str) -> None:
    """A logarithmic axis of tokens with a tick at each point."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(tokens), [token_label(number) for number in tokens])
    axes.minorticks_off()
    axes.set_xlabel(label)


def plain_ticks(axis: Any, ticks: Sequence[float]) -> None:
    """Written-out ticks of a logarithmic axis, and no small ones."""
    axis.set_ticks(list(ticks), [f"{tick:g}" for tick in ticks])
    axis.set_ticks([], minor=True)


def finish(axes: Any, *, title: str, ylabel: str, legend: bool = True) -> None:
    """Title, label, light grid, legend."""
    axes.set_title(title, fontsize=10)
    axes.set_ylabel(ylabel)
    axes.grid(True, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if legend:
        axes.legend(fontsize=8, frameon=False)
