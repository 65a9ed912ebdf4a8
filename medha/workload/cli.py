"""``medha trace …``: convert, stats, synth and validate. Exit codes: :mod:`medha.cli.command`; 2: a wrong trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medha.cli.command import complain, make_app, start_logging
from medha.cli.options import OutputJson, but, takes

if TYPE_CHECKING:
    from collections.abc import Callable

    from medha.workload.io import Reading
    from medha.workload.trace import Trace, TraceFormatError

app = make_app(help="Request traces: convert, summarise, generate, check.")

FORMATS = "mooncake, azure, burstgpt, vidur, sharegpt or medha"
PROCESSES = "poisson, gamma, uniform, at-once"
LENGTHS = (
    "sharegpt4-8k, medha-swe, medha-mix, medha-mix-2m, tetris-short, tetris-medium, tetris-long, fixed:P,D or "
    "uniform:A-B,C-D"
)


def workload_option(*declarations: str, help: str, shows: bool | str = True, **options: Any) -> Any:
    """An option under the heading that simulate has it under too."""
    return typer.Option(*declarations, help=help, rich_help_panel="Workload", show_default=shows, **options)


Qps = Annotated[
    float | None, workload_option("--request-rate", "--qps", help="Requests a second, on average.", shows=False)
]
Arrivals = Annotated[str, workload_option(help=f"Of requests without arrival times: {PROCESSES}.")]
Burstiness = Annotated[float, workload_option(help="Of gamma arrivals: 1 is Poisson, less is burstier.")]
Seed = Annotated[int, workload_option(min=0, help="Of arrivals and lengths.")]
_MANY = "Keep or generate so many requests."
Number = Annotated[int | None, workload_option("--num-prompts", "--num-requests", help=_MANY, shows=False, min=1)]
Duration = Annotated[float | None, workload_option(shows=False, help="Seconds of arrivals to keep or generate.")]
_In = Annotated[Path, typer.Argument(metavar="IN", help="Plain or gzip.")]
_Out = Annotated[Path, typer.Argument(metavar="OUT", help="JSON lines; gzip if it ends in .gz.")]

# How a file is read
READING = {
    "from_format": (
        Annotated[str | None, typer.Option("--from", help=f"{FORMATS}; by default seen from the content.")],
        None,
    ),
    "time_unit": (
        Annotated[str | None, typer.Option(help="s, ms or us, instead of the format's own.", show_default=False)],
        None,
    ),
    "skip_invalid": (
        Annotated[bool, typer.Option("--skip-invalid", help="Leave wrong requests out and count them.")],
        False,
    ),
    "chars_per_token": (
        Annotated[float | None, typer.Option(help="Estimate for ShareGPT's texts.", show_default="4")],
        None,
    ),
}


@app.callback()
def trace() -> None:
    """Request traces: convert, summarise, generate, check."""


@app.command()
@takes(READING)
def convert(
    source: _In,
    target: _Out,
    qps: Qps = None,
    arrivals: Arrivals = "poisson",
    burstiness: Burstiness = 1.0,
    num_requests: Number = None,
    duration: Duration = None,
    from_zero: Annotated[bool, typer.Option("--from-zero", help="Shift the first arrival to 0.")] = False,
    seed: Seed = 0,
    **given: Any,
) -> int:
    """Write a trace in medha's format. --request-rate scales its arrivals, or draws them where it has none."""
    from medha.workload.io import write_trace
    from medha.workload.synth import retimed

    reading = _read(source, **given)
    if from_zero:
        reading = replace(reading, trace=reading.trace.from_zero())
    trace = retimed(reading, arrivals, qps=qps, burstiness=burstiness, seed=seed)
    trace = trace if duration is None else trace.window(duration)
    trace = trace if num_requests is None else trace.head(num_requests)
    write_trace(target, trace)
    _say_written(target, trace)
    return 0


@app.command()
@takes(READING)
def stats(source: _In, output_json: OutputJson = None, **given: Any) -> int:
    """Print rate, burstiness and lengths of a trace."""
    from medha.cli.report import deliver
    from medha.workload.trace import trace_stats

    reading = _read(source, **given)
    report = {
        "format": reading.format,
        "num_dropped": reading.num_dropped,
        "num_skipped": reading.num_faults,
        "has_arrivals": reading.has_arrivals,
        **trace_stats(reading.trace),
    }
    deliver(report, output_json, title=f"{source.name} ({reading.format})")
    return 0


@app.command()
def synth(
    target: _Out,
    lengths: Annotated[str, typer.Option(help=f"{LENGTHS}.")] = "medha-mix",
    arrivals: Annotated[str, typer.Option(help=f"{PROCESSES}, or trace:FILE.")] = "poisson",
    qps: Qps = None,
    burstiness: Burstiness = 1.0,
    num_requests: Number = None,
    duration: Duration = None,
    seed: Seed = 0,
) -> int:
    """Generate a trace."""
    from medha.workload.io import write_trace
    from medha.workload.synth import synthesize

    kind, _, name = arrivals.partition(":")
    trace = synthesize(
        lengths,
        _read(Path(name)).trace if kind == "trace" and name else arrivals,
        qps=qps,
        burstiness=burstiness,
        num_requests=num_requests,
        duration_s=duration,
        seed=seed,
    )
    write_trace(target, trace)
    _say_written(target, trace)
    return 0


@app.command()
@takes(but(READING, "skip_invalid", "chars_per_token"))
def validate(
    file: _In,
    limit: Annotated[int, typer.Option(min=1, help="Print so many faults; all are counted.")] = 20,
    **given: Any,
) -> int:
    """Print every fault of a trace with its line; exit 0 where there is none, else 2."""
    from medha.workload.trace import TraceFormatError

    num_faults = 0

    def note(error: TraceFormatError) -> None:
        nonlocal num_faults
        num_faults += 1
        if num_faults <= limit:
            print(" ".join(str(error).split()))

    reading = None
    try:
        reading = _read(file, **given, on_fault=note)
    except TraceFormatError as error:  # the file as a whole; a file that is not there goes on to the caller
        note(error)
    if num_faults or reading is None:
        return complain(f"{file}: {num_faults} faults", 2)
    trace = reading.trace
    dropped = f", {reading.num_dropped} dropped" if reading.num_dropped else ""
    span = f"over {trace.duration_s:,.3f} s" if reading.has_arrivals else "without arrival times"
    print(f"{file}: {len(trace)} requests of format {reading.format} {span}{dropped}")
    return 0


def _read(
    file: Path,
    from_format: str | None = None,
    time_unit: str | None = None,
    skip_invalid: bool = False,
    chars_per_token: float | None = None,
    *,
    on_fault: Callable[[TraceFormatError], None] | None = None,
) -> Reading:
    from medha.workload.formats import characters_over
    from medha.workload.io import read_trace

    start_logging("warning")
    return read_trace(
        file,
        from_format,
        time_unit=time_unit,
        count_tokens=None if chars_per_token is None else characters_over(chars_per_token),
        on_fault=(lambda error: None) if skip_invalid else on_fault,
    )


def _say_written(target: Path, trace: Trace) -> None:
    rate = "all at once" if trace.qps is None else f"{trace.qps:.4g} requests/s"
    print(f"{target}: {len(trace)} requests over {trace.duration_s:,.3f} s, {rate}")
