"""The tables of ``medha simulate``: figures of each run, TTFT by prompt length, and what the columns mean."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from medha.sim.report import DRAIN, Report

NOTES = (
    "TTFT: arrival to first token, queueing included. TPOT: (last - first token) / (tokens - 1). Slowdown: TTFT over "
    "its predicted value for that prompt on the idle replica. All three P50/P99.",
    "In time: finished, TTFT by the deadline (given, or derived by the scheduler) and TPOT by its objective; a share "
    "of the requests that arrived. Goodput: those a second.",
    "Bubble: share of the time in which a stage had no work and another stage had some; busy and bubble are means over "
    "stages. Preempted: gave its memory up, with the seconds that are computed again.",
    "Over-saturated: the queue (arrived, no first token) grows through the second half of the arrivals by more than "
    "the square root of their number, which is chance, and what is in it at the last arrival takes more than "
    f"{DRAIN:.0%} of the time of arrivals to drain.",
)


def print_reports(console: Console, reports: Sequence[Report]) -> None:
    """Three tables, then what is unusual, then what the words mean."""
    for table in (_latency(reports), _load(reports), _by_length(reports)):
        console.print(table)
    for line in (*_remarks(reports), *NOTES):
        console.print(line)


def _table(*columns: str) -> Table:
    """With the columns that name a run, and others."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("system", no_wrap=True)
    for name in ("qps", *columns):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _latency(reports: Sequence[Report]) -> Table:
    table = _table("TTFT s", "TPOT ms", "slowdown", "in time", "over-\nsaturated")
    for one in reports:
        serving = one.serving
        table.add_row(
            one.system.name,
            _number(serving["request_rate"]),
            f"{_seconds(serving['median_ttft_ms'])}/{_seconds(serving['p99_ttft_ms'])}",
            f"{_number(serving['median_tpot_ms'])}/{_number(serving['p99_tpot_ms'])}",
            f"{_number(one.slowdown[0], never=True)}/{_number(one.slowdown[1], never=True)}",
            f"{one.slo_attainment:.1%}",
            "yes" if one.saturation.is_over else "no",
        )
    return table


def _load(reports: Sequence[Report]) -> Table:
    table = _table(
        "goodput\na second",
        "output\ntokens/s",
        "waiting\nmean/max",
        "active\nmean/max",
        "KV use\nmean/max",
        "busy/\nbubble",
    )
    for one in reports:
        shares = zip(*((stage.occupancy, stage.bubble) for stage in one.stages), strict=True)
        busy, bubble = (sum(column) / len(one.stages) for column in shares)
        table.add_row(
            one.system.name,
            _number(one.serving["request_rate"]),
            _number(one.serving["request_goodput"]),
            _number(one.serving["output_throughput"]),
            f"{_number(one.waiting.mean)}/{one.waiting.max:,}",
            f"{_number(one.active.mean)}/{one.active.max:,}",
            f"{one.kv_mean:.0%}/{one.kv_max:.0%}",
            f"{busy:.0%}/{bubble:.0%}",
        )
    return table


def _by_length(reports: Sequence[Report]) -> Table:
    table = _table("prompt tokens", "requests", "TTFT s\nP50/P90/P99", "in time")
    for one in reports:
        for bucket in one.buckets:
            is_first = bucket is one.buckets[0]
            table.add_row(
                one.system.name if is_first else "",
                _number(one.serving["request_rate"]) if is_first else "",
                bucket.name,
                f"{bucket.num_requests:,}",
                "/".join("never" if s is None else _seconds(1e3 * s) for s in bucket.ttft_s),
                f"{bucket.slo_attainment:.1%}",
                end_section=bucket is one.buckets[-1],
            )
    return table


def _remarks(reports: Sequence[Report]) -> list[str]:
    remarks = []
    for one in reports:
        said = []
        if not one.is_complete:
            said.append(f"stopped at {one.serving['duration']:,.6g} s with {one.num_unfinished:,} unfinished")
        if one.serving["failed"]:
            said.append(f"{one.serving['failed']:,} refused, as they never fit the KV memory")
        if one.num_preemptions:
            moved = f" or swapped ({one.num_swaps:,} times)" if one.num_swaps else ""
            said.append(f"{one.num_preemptions:,} preempted, {one.work_lost_s:,.3g} s computed again{moved}")
        if one.saturation.is_over:
            drain_s = one.saturation.drain_s
            drain = "does not drain" if drain_s is None else f"drains in {drain_s:,.3g} s after the last arrival"
            said.append(f"over-saturated: the queue grows by {one.saturation.growth:,.3g} and {drain}")
        if said:
            remarks.append(f"{one.system.label}: {'; '.join(said)}.")
    return remarks


def _seconds(ms: float | None) -> str:
    """Milliseconds as seconds of three digits."""
    return _number(None if ms is None else ms / 1e3)


def _number(value: float | None, *, never: bool = False) -> str:
    if value is None:
        return "never" if never else "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"
