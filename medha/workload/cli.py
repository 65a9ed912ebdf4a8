"""``medha trace …``: convert, stats, synth and validate. Exit codes: :mod:`medha.cli.command`; 2: a wrong trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medha.cli.command import complain, make_app, start_logging
from medha.cli.options import OutputJson
from medha.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from medha.workload.io import Reading
    from medha.workload.trace import Trace, TraceFormatError

app = make_app(help="Request traces: convert, summarise, generate, check.")

_FORMATS = "mooncake, azure, burstgpt, vidur, sharegpt or medha"
_PROCESS = "poisson, gamma, uniform, at-once"

From = Annotated[str | None, typer.Option("--from", help=f"{_FORMATS}; by default seen from the content.")]
TimeUnit = Annotated[str | None, typer.Option(help="s, ms or us, instead of the format's own.", show_default=False)]
SkipInvalid = Annotated[bool, typer.Option("--skip-invalid", help="Leave wrong requests out and count them.")]
CharsPerToken = Annotated[float | None, typer.Option(help="Estimate for ShareGPT's texts.", show_default="4")]
Qps = Annotated[
    float | None,
    typer.Option("--request-rate", "--qps", help="Requests a second, on average.", show_default=False),
]
Burstiness = Annotated[float, typer.Option(help="Of gamma arrivals: 1 is Poisson, less is burstier.")]
Seed = Annotated[int, typer.Option(min=0, help="Of arrivals and lengths.")]
Number = Annotated[
    int | None,
    typer.Option(
        "--num-prompts", "--num-requests", min=1, show_default=False, help="Keep or generate so many requests."
    ),
]
Duration = Annotated[float | None, typer.Option(show_default=False, help="Seconds of arrivals to keep or generate.")]


@app.callback()
def trace() -> None:
    """Request traces: convert, summarise, generate, check."""


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Plain or gzip.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="JSON lines; gzip if it ends in .gz.")],
    from_format: From = None,
    qps: Qps = None,
    arrivals: Annotated[str, typer.Option(help=f"Of a trace without arrivals: {_PROCESS}.")] = "poisson",
    burstiness: Burstiness = 1.0,
    num_requests: Number = None,
    duration: Duration = None,
    from_zero: Annotated[bool, typer.Option("--from-zero", help="Shift the first arrival to 0.")] = False,
    seed: Seed = 0,
    time_unit: TimeUnit = None,
    skip_invalid: SkipInvalid = False,
    chars_per_token: CharsPerToken = None,
) -> int:
    """Write a trace in medha's format. --request-rate scales its arrivals, or draws them where it has none."""
    from medha.workload.io import write_trace
    from medha.workload.synth import arrival_times, generators

    reading = _read(source, from_format, time_unit, skip_invalid, chars_per_token)
    trace = reading.trace
    if not reading.has_arrivals:
        if qps is None and arrivals != "at-once":
            raise ConfigError(f"{source} has no arrival times; accepted: --request-rate, or --arrivals at-once")
        rng, _ = generators(seed)
        times = arrival_times(arrivals, rng, qps=qps, burstiness=burstiness, num_requests=len(trace))
        trace = trace.with_arrivals(times)
    if from_zero:
        trace = trace.from_zero()
    if reading.has_arrivals and qps is not None:
        trace = trace.scaled(qps)
    if duration is not None:
        trace = trace.window(duration)
    trace = trace if num_requests is None else trace.head(num_requests)
    write_trace(target, trace)
    _say_written(target, trace)
    return 0


@app.command()
def stats(
    file: Annotated[Path, typer.Argument(help="Plain or gzip.")],
    from_format: From = None,
    output_json: OutputJson = None,
    time_unit: TimeUnit = None,
    skip_invalid: SkipInvalid = False,
    chars_per_token: CharsPerToken = None,
) -> int:
    """Print rate, burstiness and lengths of a trace."""
    from medha.cli.report import deliver
    from medha.workload.trace import trace_stats

    reading = _read(file, from_format, time_unit, skip_invalid, chars_per_token)
    report = {
        "format": reading.format,
        "num_dropped": reading.num_dropped,
        "num_skipped": reading.num_faults,
        "has_arrivals": reading.has_arrivals,
        **trace_stats(reading.trace),
    }
    deliver(report, output_json, title=f"{file.name} ({reading.format})")
    return 0


@app.command()
def synth(
    target: Annotated[Path, typer.Argument(metavar="OUT", help="JSON lines; gzip if it ends in .gz.")],
    lengths: Annotated[
        str,
        typer.Option(
            help="sharegpt4-8k, medha-swe, medha-mix, medha-mix-2m, tetris-short, tetris-medium, tetris-long, "
            "fixed:P,D or uniform:A-B,C-D."
        ),
    ] = "medha-mix",
    arrivals: Annotated[str, typer.Option(help=f"{_PROCESS}, or trace:FILE.")] = "poisson",
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
        _read(Path(name)).trace.arrival_s if kind == "trace" and name else arrivals,
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
def validate(
    file: Annotated[Path, typer.Argument(help="Plain or gzip.")],
    from_format: From = None,
    time_unit: TimeUnit = None,
    limit: Annotated[int, typer.Option(min=1, help="Print so many faults; all are counted.")] = 20,
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
        reading = _read(file, from_format, time_unit, on_fault=note)
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
