"""The plots of ``medha simulate``, one PNG each, and the Chrome trace of a run (opens in ui.perfetto.dev)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from medha.errors import ConfigError
from medha.sim.outcome import Outcome
from medha.sim.pipeline import Segment
from medha.sim.study import Run
from medha.timeline import arrow_events, counter_event, name_event, slice_event, write_events
from medha.workload.metrics import Times

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which differ also for those who see few.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_SHORT, _LONG = "#0072B2", "#D55E00"
_LINES = ("-", "--", ":", "-.")
_MAX_PANELS = 9

logger = logging.getLogger("medha")


def check_plots(folder: Path) -> None:
    """Find out before a run that its plots cannot be drawn or written; makes the folder.

    Raises:
        ConfigError: matplotlib is missing, or there can be no such folder.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'medha[plot]'") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"plot={folder}: {error.strerror}; accepted: a folder that can be written") from error


def draw(runs: Sequence[Run], folder: Path, long_threshold: int) -> list[Path]:
    """Draw TTFT over time, and TTFT and TPOT of every run.

    Args:
        runs: at least one.
        folder: where the files go; exists.
        long_threshold: prompt tokens from which a request counts as long.

    Returns:
        The files, in order.
    """
    plots: dict[str, Callable[[], Figure]] = {
        "ttft_over_time": lambda: _over_time(runs, long_threshold),
        "ttft_tpot": lambda: _by_rate(runs),
    }
    paths = []
    for name, make in plots.items():
        path = folder / f"{name}.png"
        make().savefig(path, dpi=130, metadata={"Software": None})
        paths.append(path)
    return paths


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _styles(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A colour a system, a line a rate, and the label of each run."""
    names = list(dict.fromkeys(run.system.name for run in runs))
    rates = list(dict.fromkeys(run.system.qps for run in runs))
    return [
        {
            "color": _COLORS[names.index(run.system.name) % len(_COLORS)],
            "linestyle": _LINES[rates.index(run.system.qps) % len(_LINES)],
            "label": run.system.label if len(rates) > 1 else run.system.name,
        }
        for run in runs
    ]


def _finish(axes: Axes, **settings: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set(**settings)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,), numticks=15))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
            axis.set_minor_formatter(NullFormatter())


def _legend(figure: Figure, axes: Axes, ncols: int) -> None:
    """Above all panels."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=ncols, frameon=False)


def _over_time(runs: Sequence[Run], long_threshold: int) -> Figure:
    shown = runs[:_MAX_PANELS]
    columns = min(len({run.system.qps for run in shown}), 3)
    columns = columns if columns > 1 else min(len(shown), 3)  # the rates of a system beside each other
    rows = -(-len(shown) // columns)
    figure = _figure(max(4.2 * columns, 6), 2.9 * rows + 0.6)
    grid = figure.subplots(rows, columns, sharex="col", sharey=True, squeeze=False).ravel()
    for axes, run in zip(grid, shown, strict=False):
        times = run.outcome.times
        is_long = times.prompt_tokens >= long_threshold
        size = 14 if len(times) < 2000 else 4
        _dots(axes, times, ~is_long, color=_SHORT, s=size, label=f"prompt below {long_threshold:,} tokens")
        label = f"prompt of {long_threshold:,} tokens or more"
        _dots(axes, times, is_long, color=_LONG, s=2 * size, marker="s", label=label)
        _finish(axes, yscale="log")
        axes.set_title(run.system.label, fontsize="medium")
    for axes in grid[len(shown) :]:
        axes.set_visible(False)
    figure.supxlabel("arrival (s)", fontsize="medium")
    figure.supylabel("TTFT (s)", fontsize="medium")
    _legend(figure, grid[0], 2)
    return figure


def _dots(axes: Axes, times: Times, chosen: NDArray[np.bool_], **style: Any) -> None:
    axes.scatter(times.arrival_s[chosen], times.ttft_s[chosen], linewidths=0, alpha=0.75, **style)


def _by_rate(runs: Sequence[Run]) -> Figure:
    """P50 and P99 of TTFT and TPOT: over the rate where there are several, else by system."""
    rates = {run.report["request_rate"] for run in runs}
    figure = _figure(10, 4.2)
    panels = figure.subplots(1, 2)
    for axes, name, unit_ms in ((panels[0], "ttft", 1e3), (panels[1], "tpot", 1.0)):
        unit = "s" if unit_ms > 1 else "ms"
        if len(rates) > 1:
            _lines_over_rate(axes, runs, name, unit_ms)
            most = 1.05 * max(rate for rate in rates if rate is not None)
            _finish(axes, xlabel="requests a second", ylabel=f"{name.upper()} ({unit})", yscale="log", xlim=(0, most))
        else:
            _bars(axes, runs, name, unit_ms)
            _finish(axes, ylabel=f"{name.upper()} ({unit})", yscale="log" if name == "ttft" else "linear")
            axes.grid(visible=False, axis="x")
            axes.set_axisbelow(True)
    _legend(figure, panels[0], len({run.system.name for run in runs}) if len(rates) > 1 else 2)
    return figure


def _lines_over_rate(axes: Axes, runs: Sequence[Run], name: str, unit_ms: float) -> None:
    names = list(dict.fromkeys(run.system.name for run in runs))
    for (index, system), (figure, line, marker) in product(
        enumerate(names), (("median", "-", "o"), ("p99", "--", "^"))
    ):
        own = [run.report for run in runs if run.system.name == system]
        found = [(one["request_rate"], one[f"{figure}_{name}_ms"]) for one in own]
        points = sorted((rate, ms / unit_ms) for rate, ms in found if rate is not None and ms is not None)
        axes.plot(
            [rate for rate, _ in points],
            [value for _, value in points],
            color=_COLORS[index % len(_COLORS)],
            linestyle=line,
            marker=marker,
            markersize=4.5,
            label=f"{system} {'P50' if figure == 'median' else 'P99'}",
        )


def _bars(axes: Axes, runs: Sequence[Run], name: str, unit_ms: float) -> None:
    for offset, figure, color in ((-0.2, "median", _COLORS[5]), (0.2, "p99", _COLORS[0])):
        heights = [(run.report[f"{figure}_{name}_ms"] or 0.0) / unit_ms for run in runs]
        bars = axes.bar(
            np.arange(len(runs)) + offset, heights, 0.38, color=color, label="P50" if figure == "median" else "P99"
        )
        axes.bar_label(bars, fmt="{:.3g}", fontsize="x-small", padding=2)
    axes.set_xticks(range(len(runs)), [run.system.name for run in runs])
    axes.margins(y=0.12)


# ---------------------------------------------------------------------------------------------------------------------
# Chrome trace

MAX_SEGMENTS = 200_000
"""Batches on a stage that a trace holds; those that come later are left out, with a warning."""
_MAX_POINTS = 20_000


def write_trace(path: Path, outcome: Outcome, segments: Sequence[Segment]) -> None:
    """Write the trace of a run in microseconds of virtual time; gzip when the name ends in ``.gz``.

    Process 0 is the stages, a lane each, with arrows along which a batch goes on. Process 1 is the requests, a lane
    each: waiting, prefill, decode, and how many wait, are active, and what share of the KV blocks is in use.

    Args:
        path: a new file, or one that is replaced.
        outcome: what became of the requests.
        segments: every batch on every stage, in the order in which the pipeline told them.
    """
    if len(segments) > MAX_SEGMENTS:
        logger.warning("%s has the first %s batches on a stage of %s", path, f"{MAX_SEGMENTS:,}", f"{len(segments):,}")
        segments = segments[:MAX_SEGMENTS]
    events = [name_event("process_name", 0, 0, "stages"), name_event("process_name", 1, 0, "requests")]
    events += _stage_events(segments)
    events += _request_events(outcome)
    events += _counter_events(outcome)
    write_events(path, events)


def _stage_events(segments: Sequence[Segment]) -> Iterator[dict[str, Any]]:
    num_stages = 1 + max((segment.stage for segment in segments), default=0)
    num_groups = 1 + max((segment.group for segment in segments), default=0)
    for group in range(num_groups):
        for stage in range(num_stages):
            name = f"group {group}, stage {stage}" if num_groups > 1 else f"stage {stage}"
            yield name_event("thread_name", 0, group * num_stages + stage, name)
    came: dict[int, Segment] = {}
    for segment in segments:
        lane = segment.group * num_stages + segment.stage
        args = {"batch": segment.batch_id, "decodes": segment.num_decodes, "tokens": segment.num_tokens}
        yield slice_event(f"batch {segment.batch_id}", 0, lane, segment.start_s, segment.end_s, args)
        before = came.get(segment.group)
        if before is not None and (before.batch_id, before.stage + 1) == (segment.batch_id, segment.stage):
            left = (lane - 1, before.start_s, before.end_s)
            yield from arrow_events(segment.batch_id, left, (lane, segment.start_s))
        came[segment.group] = segment


def _request_events(outcome: Outcome) -> Iterator[dict[str, Any]]:
    times, end_s = outcome.times, outcome.duration_s
    end_s += float(times.arrival_s[0]) if len(times) else 0.0
    columns = (times.arrival_s, times.first_scheduled_s, times.first_token_s, times.finish_s)
    moments = np.stack(columns, axis=1).tolist()
    for lane, (row, refused) in enumerate(zip(moments, times.is_refused.tolist(), strict=True)):
        yield name_event("thread_name", 1, lane, str(outcome.trace.request_ids[lane]))
        if refused:
            continue
        args = {"prompt tokens": int(times.prompt_tokens[lane]), "output tokens": int(times.num_tokens[lane])}
        for name, start_s, to_s in zip(("waiting", "prefill", "decode"), row, row[1:], strict=False):
            if start_s == start_s:  # it came so far
                yield slice_event(name, 1, lane, start_s, to_s if to_s == to_s else end_s, args)


def _counter_events(outcome: Outcome) -> Iterator[dict[str, Any]]:
    times = outcome.times
    for name, (at_s, counts) in (("waiting", times.waiting()), ("active", times.active())):
        for time_s, count in zip(*_thinned(at_s, counts), strict=True):
            yield counter_event(f"{name} requests", time_s, {name: count})
    for time_s, _, _, share in outcome.series.rows:
        yield counter_event("KV blocks in use (%)", time_s, {"used": 100 * share})


def _thinned(at_s: NDArray[np.float64], counts: NDArray[np.int64]) -> tuple[list[float], list[int]]:
    every = -(-len(at_s) // _MAX_POINTS) or 1
    return at_s[::every].tolist(), counts[::every].tolist()
