"""``medha trace …``: convert, stats, synth and validate. Exit codes: :mod:`medha.cli.command`; 2: a wrong trace."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medha.cli.command import check_apart, complain, make_app, start_logging
from medha.cli.options import Group, OutputJson, but, option, takes

if TYPE_CHECKING:
    from medha.workload.io import OnFault, Reading
    from medha.workload.trace import Trace, TraceFormatError

app = make_app(help="Request traces: convert, summarise, generate, check.")

FORMATS = "mooncake, azure, burstgpt, vidur, sharegpt or medha"
PROCESSES = "poisson, gamma, uniform, at-once"
LENGTHS = (
    "sharegpt4-8k, medha-swe, medha-mix, medha-mix-1, medha-mix-2m, tetris-short, tetris-medium, tetris-long, "
    "fixed:P,D, uniform:A-B,C-D or sessions:DOCUMENT,P,D,REQUESTS"
)

_load = partial(option, rich_help_panel="Workload")
Rate = Annotated[float | None, _load("--request-rate", "--qps", help="Requests a second, on average.")]
Rates = Annotated[str | None, _load("--request-rate", "--qps", help="Requests a second; several comma separated.")]
Arrivals = Annotated[str, _load(help=f"Of requests without arrival times: {PROCESSES}.", shows=True)]
Burstiness = Annotated[float, _load(help="Of the gaps: 1 is Poisson, less is burstier (gamma).", shows=True)]
Seed = Annotated[int, _load(min=0, help="Of arrivals and lengths.", shows=True)]
_MANY = "Keep or generate so many requests."
Number = Annotated[int | None, _load("--num-prompts", "--num-requests", help=_MANY, min=1)]
Duration = Annotated[float | None, _load(help="Seconds of arrivals to keep or generate.")]
Lengths = Annotated[str | None, _load("--workload", "--lengths", help=f"{LENGTHS}.", shows="medha-mix, 200 requests")]
TraceFile = Annotated[Path | None, _load("--dataset-path", "--trace", help="Trace file in place of --workload.")]
Objective = Annotated[float | None, _load(help="Objective of requests without their own.", shows="none, or derived")]
_In = Annotated[Path, typer.Argument(metavar="IN", help="Plain or gzip; - is stdin.")]
_Out = Annotated[Path, typer.Argument(metavar="OUT", help="JSON lines; gzip if it ends in .gz; - is stdout.")]

DRAWN: Group = {
    **{"qps": (Rate, None), "arrivals": (Arrivals, "poisson"), "burstiness": (Burstiness, 1.0)},
    **{"num_requests": (Number, None), "duration": (Duration, None), "seed": (Seed, 0)},
}
PLAYED: Group = {
    **{"workload": (Lengths, None), "trace": (TraceFile, None), **DRAWN, "qps": (Rates, None)},
    **dict.fromkeys(("slo_ttft_s", "slo_tpot_s"), (Objective, None)),
}
"""What a simulation plays."""
_From = Annotated[str | None, typer.Option("--from", help=f"{FORMATS}; by default seen from the content.")]
_SHOWN = 20  # faults that are printed
_Skip = Annotated[bool, typer.Option("--skip-invalid", help="Leave wrong requests out and count them.")]


@app.command()
@takes(DRAWN)
def convert(
    source: _In,
    target: _Out,
    from_zero: Annotated[bool, typer.Option("--from-zero", help="Shift the first arrival to 0.")] = False,
    from_format: _From = None,
    skip_invalid: _Skip = False,
    **given: Any,
) -> int:
    """Write a trace in medha's format. --request-rate scales its arrivals, or draws them where it has none."""
    from medha.workload.synth import retimed

    check_apart([target], [source])
    reading = _read(source, from_format, _ignored if skip_invalid else None)
    if from_zero:
        reading = reading._replace(trace=reading.trace.from_zero())
    return _write(target, retimed(reading, given.pop("arrivals"), duration_s=given.pop("duration"), **given))


@app.command()
def stats(source: _In, output_json: OutputJson = None, from_format: _From = None, skip_invalid: _Skip = False) -> int:
    """Print rate, burstiness and lengths of a trace."""
    from medha.cli.report import check_writable, deliver
    from medha.workload.trace import trace_stats

    check_writable(output_json)
    check_apart([output_json], [source])
    reading = _read(source, from_format, _ignored if skip_invalid else None)
    report = {
        "format": reading.format,
        "num_dropped": reading.num_dropped,
        "num_skipped": reading.num_faults,
        "has_arrivals": reading.has_arrivals,
        **trace_stats(reading.trace),
    }
    deliver(report, output_json, shown={"title": f"{source.name} ({reading.format})", **report})
    return 0


@app.command()
@takes(but(DRAWN, "arrivals"))
def synth(
    target: _Out,
    lengths: Annotated[str, typer.Option(help=f"{LENGTHS}.")] = "medha-mix",
    arrivals: Annotated[str, typer.Option(help=f"{PROCESSES}, or trace:FILE.")] = "poisson",
    **given: Any,
) -> int:
    """Generate a trace."""
    from medha.workload.synth import synthesize

    kind, _, name = arrivals.partition(":")
    process = _read(Path(name)).trace if kind == "trace" and name else arrivals
    return _write(target, synthesize(lengths, process, duration_s=given.pop("duration"), **given))


@app.command()
def validate(file: _In, from_format: _From = None) -> int:
    """Print the first faults of a trace with their lines and count all; exit 0 where there is none, else 2."""
    from medha.workload.trace import TraceFormatError

    faults: list[TraceFormatError] = []
    reading = None
    try:
        reading = _read(file, from_format, on_fault=faults.append)
    except TraceFormatError as error:  # the file as a whole; a file that is not there goes on to the caller
        if error.__cause__ not in faults:  # else it has no other requests than those
            faults.append(error)
    for fault in faults[:_SHOWN]:
        print(" ".join(str(fault).split()))
    if faults or reading is None:
        return complain(f"{file}: {len(faults)} fault{'s' * (len(faults) > 1)}", 2)
    trace = reading.trace
    dropped = f", {reading.num_dropped} dropped" if reading.num_dropped else ""
    span = f"over {trace.duration_s:,.3f} s" if reading.has_arrivals else "without arrival times"
    print(f"{file}: {len(trace)} requests of format {reading.format} {span}{dropped}")
    return 0


def _read(file: Path, from_format: str | None = None, on_fault: OnFault | None = None) -> Reading:
    from medha.workload.io import read_trace

    start_logging("warning")
    return read_trace(file, from_format, on_fault=on_fault)


def _ignored(fault: TraceFormatError) -> None:
    """With ``--skip-invalid``."""


def _write(target: Path, trace: Trace) -> int:
    from medha.workload.io import STDIO, write_trace

    write_trace(target, trace)
    rate = "all at once" if trace.qps is None else f"{trace.qps:.4g} requests/s"
    summary = f"{target}: {len(trace)} requests over {trace.duration_s:,.3f} s, {rate}"
    print(summary, file=sys.stderr if target == STDIO else sys.stdout)
    return 0
