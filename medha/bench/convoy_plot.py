"""The plot of ``medha bench convoy``: TTFT over arrival, where a convoy is a slope, and its distribution."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def plot_convoy(report: Mapping[str, Any], path: Path) -> bool:
    """Draw a report of the benchmark into a file; its ending says in which format.

    Returns:
        False, and nothing is written, where matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(12, 5), layout="constrained")
    over_time, distribution = figure.subplots(1, 2)
    shorts = {request["request_id"] for request in report["requests"] if request["arrival_s"] > 0}
    for index, system in enumerate(report["systems"]):
        served = [one for one in system["served"] if one["ttft_s"] is not None]
        label, color = system["system"], f"C{index}"
        for is_short, marker in ((True, "."), (False, "s")):
            some = [one for one in served if (one["request_id"] in shorts) == is_short]
            over_time.scatter(
                [one["arrival_s"] for one in some],
                [one["ttft_s"] for one in some],
                s=12 if is_short else 30,
                marker=marker,
                color=color,
                label=label if is_short else None,
            )
        ttfts = sorted(one["ttft_s"] for one in served if one["request_id"] in shorts)
        distribution.step(ttfts, [(i + 1) / len(shorts) for i in range(len(ttfts))], color=color, label=label)
    over_time.set(xlabel="arrival, s", ylabel="TTFT, s", yscale="log", title="dots: short requests, squares: long ones")
    distribution.set(xlabel="TTFT of short requests, s", ylabel="share", xscale="log", ylim=(0, 1))
    distribution.axvline(report["options"]["short_ttft_s"], color="gray", linestyle=":")
    over_time.legend(loc="lower left", fontsize="small")
    figure.savefig(path, dpi=150)
    return True
