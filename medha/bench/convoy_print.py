"""The tables of ``medha bench convoy``, and what they must say besides figures: load, objectives, definitions."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from medha.bench.convoy import (
    CHUNKED,
    OURS,
    WHOLE,
    Calibration,
    ConvoyOptions,
    ConvoyResult,
    SystemResult,
    convoy,
    report,
    systems,
)
from medha.bench.convoy_figures import LONG, SHORT
from medha.bench.convoy_plot import plot_convoy
from medha.bench.model import describe
from medha.cli.report import check_writable, machine_line
from medha.cli.table import report_console


def run_and_print(options: ConvoyOptions, output_json: Path | None, plot: Path | None) -> int:
    """Run with a progress bar on stderr, print load and tables on stdout; returns 0."""
    check_writable(output_json)
    check_writable(plot)
    console = report_console()
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("serving", total=1 + len(systems(options)))
        result = convoy(
            options,
            output_json=output_json,
            on_calibrated=lambda measured: _print_load(console, options, measured),
            on_job=lambda: bar.advance(task),
        )
    for table in (_by_bucket(result), _by_system(result), _against_baselines(result)):
        console.print(table)
    _print_notes(console, result)
    if plot is not None and not plot_convoy(report(result), plot):
        console.print("matplotlib is not installed, so there is no plot; pip install 'medha[plot]'")
    return 0


def _print_load(console: Console, options: ConvoyOptions, measured: Calibration) -> None:
    low, high = options.short_lens
    span_s = measured.capacity_s / options.load
    alone = ", ".join(f"{length:,}: {seconds:.3g} s" for length, seconds in measured.alone_s)
    for line in (
        f"{describe(options.config)}, spp2, one thread a rank, float32; {machine_line()}",
        f"{options.num_long} prompts of {options.long_len:,} tokens queued at 0 s, {options.num_short} of {low} to "
        f"{high} (Poisson) within {span_s:.1f} s; {options.num_output_tokens} output tokens each; seed {options.seed}",
        f"capacity: the whole mix at once takes {measured.capacity_s:.1f} s (measured under LARS with sharing); "
        f"load {options.load:g}",
        f"TTFT alone by prompt tokens, measured (between them a straight line): {alone}",
        "steps predicted from a profile measured now"
        if options.is_profiled
        else "steps predicted from the default sheet",
        f"t_target_s {options.t_target_s:g}, {options.depth} batches in flight; TPOT target "
        f"{options.tpot_target_s:g} s (the one times the other)",
        f"TTFT objective: short {options.short_ttft_s:g} s, long {measured.long_deadline_s:.1f} s (derived by the "
        "scheduler in the calibration run, then given to all)",
    ):
        console.print(line)


def _by_bucket(result: ConvoyResult) -> Table:
    table = Table(title="by prompt length; times in seconds", box=SIMPLE_HEAD)
    table.add_column("system", no_wrap=True)
    names = ("tokens", "TTFT\nP50/P90/P99", "slowdown\nP50/P99", "TPOT\nP99", "SLO met")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for name, system in result.systems.items():
        for bucket in system.figures.buckets:
            table.add_row(
                name if bucket is system.figures.buckets[0] else "",
                bucket.bucket,
                "/".join(map(_seconds, bucket.ttft_s)),
                "/".join(map(_number, (bucket.slowdown[0], bucket.slowdown[-1]))),
                _seconds(bucket.tpot_p99_s),
                f"{bucket.attainment:.1%}",
                end_section=bucket is system.figures.buckets[-1],
            )
    return table


def _by_system(result: ConvoyResult) -> Table:
    table = Table(title="by system", box=SIMPLE_HEAD)
    table.add_column("system", no_wrap=True)
    for name in (
        "TPOT s\nP99",
        "requests\na second",
        "tokens\na second",
        "span s",
        "error of\nprediction",
        "load\naverage",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for name, system in result.systems.items():
        figures, errors = system.figures, system.stream.prediction
        is_used = bool(errors.get("count"))
        table.add_row(
            name,
            _seconds(figures.tpot_p99_s),
            f"{figures.requests_per_s:.2f}",
            f"{figures.tokens_per_s:,.0f}",
            f"{figures.span_s:.1f}",
            f"{errors['mean_abs']:.0%} ({errors['mean_signed']:+.0%})" if is_used else "-",
            f"{system.load_average[0]:.1f}-{system.load_average[1]:.1f}",
        )
    return table


def _against_baselines(result: ConvoyResult) -> Table:
    title = f"TTFT as a multiple of that under {WHOLE}, and of the best of {', '.join(CHUNKED)}"
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("system", no_wrap=True)
    names = (
        "short sooner\nP50/P99",
        "than chunked\nP50/P99",
        "long later\nmean/last/worst",
        "TPOT P99\n/target",
    )
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for name, ratio in result.ratios.items():
        table.add_row(
            name,
            "/".join(map(_number, (ratio.short_p50, ratio.short_p99))),
            "/".join(map(_number, (ratio.chunked_p50, ratio.chunked_p99))),
            "/".join(map(_number, (ratio.long_mean, ratio.long_last, ratio.long_worst))),
            _number(ratio.tpot),
        )
    return table


def _print_notes(console: Console, result: ConvoyResult) -> None:
    ratio = result.ratios[OURS[-1]]
    unfinished = [f"{name} {num}" for name, one in result.systems.items() if (num := _num_unfinished(one))]
    worse = [bucket for bucket, is_attained in ratio.is_attained.items() if not is_attained]
    for line in (
        "TTFT: arrival to first token, queueing included. TPOT: (last - first token) / (tokens - 1). Percentiles by "
        "nearest rank. SLO met: finished, and TTFT by the deadline. Slowdown: TTFT over that of such a request alone. "
        "Long ratios: of the mean TTFT, of the last one's, and of the same request's at worst.",
        f"Requests that were not finished in time: {', '.join(unfinished) or 'none'}.",
        f"Aims, {OURS[-1]} against {WHOLE}: {SHORT} P50 {_number(ratio.short_p50)}x (30x or more), P99 "
        f"{_number(ratio.short_p99)}x (50x or more), {LONG} {_number(ratio.long_mean)}x (1.3x or less), TPOT P99 "
        f"{_number(ratio.tpot)}x its target (1.2x or less), SLO attainment below "
        f"the best baseline's in: {', '.join(worse) or 'no bucket'}.",
    ):
        console.print(line)


def _num_unfinished(system: SystemResult) -> int:
    return sum(not one.has_finished for one in system.stream.served)


def _seconds(value: float | None) -> str:
    return (
        "never"
        if value is None
        else f"{value:.1f}"
        if value >= 10
        else f"{value:.2f}"
        if value >= 1
        else f"{value:.3f}"
    )


def _number(value: float | None) -> str:
    return (
        "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    )
