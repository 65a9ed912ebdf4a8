"""``medha trace …``: stats and synth. Exit codes: :mod:`medha.cli.command`; 2: a wrong trace."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from medha.cli.command import make_app, start_logging
from medha.cli.options import Group, OutputJson, takes

app = make_app(help="Request traces: summarise, generate.")

PROCESSES = "poisson, gamma, uniform, at-once"
LENGTHS = (
    "sharegpt4-8k, medha-swe, medha-mix, medha-mix-2m, tetris-short, tetris-medium, tetris-long, fixed:P,D, "
    "uniform:A-B,C-D or sessions:DOCUMENT,P,D,REQUESTS"
)


def option(*flags: str, help: str, shows: bool | str = False, **more: Any) -> Any:
    """An option of the laboratory; ``shows`` is what stands for its default."""
    return typer.Option(*flags, help=help, show_default=shows, **more)


_load = partial(option, rich_help_panel="Workload")
Rate = Annotated[float | None, _load("--request-rate", "--qps", help="Requests a second, on average.")]
Rates = Annotated[str | None, _load("--request-rate", "--qps", help="Requests a second; several comma separated.")]
Arrivals = Annotated[str, _load(help=f"Of requests without arrival times: {PROCESSES}.", shows=True)]
Burstiness = Annotated[float, _load(help="Of gamma arrivals: 1 is Poisson, less is burstier.", shows=True)]
Seed = Annotated[int, _load(min=0, help="Of arrivals and lengths.", shows=True)]
_MANY = "Keep or generate so many requests."
Number = Annotated[int | None, _load("--num-prompts", "--num-requests", help=_MANY, min=1)]
Duration = Annotated[float | None, _load(help="Seconds of arrivals to keep or generate.")]
Lengths = Annotated[str | None, _load("--workload", "--lengths", help=f"{LENGTHS}.", shows="medha-mix, 200 requests")]
TraceFile = Annotated[Path | None, _load("--dataset-path", "--trace", help="Trace file in place of --workload.")]
Objective = Annotated[float | None, _load(help="Objective of requests without their own.", shows="none, or derived")]
_In = Annotated[Path, typer.Argument(metavar="IN", help="Plain or gzip.")]
_Out = Annotated[Path, typer.Argument(metavar="OUT", help="JSON lines; gzip if it ends in .gz.")]

DRAWN: Group = {
    **{"qps": (Rate, None), "arrivals": (Arrivals, "poisson"), "burstiness": (Burstiness, 1.0)},
    **{"num_requests": (Number, None), "duration": (Duration, None), "seed": (Seed, 0)},
}
PLAYED: Group = {
    **{"workload": (Lengths, None), "trace": (TraceFile, None), **DRAWN, "qps": (Rates, None)},
    **dict.fromkeys(("slo_ttft_s", "slo_tpot_s"), (Objective, None)),
}
"""What a simulation plays."""


@app.command()
def stats(source: _In, output_json: OutputJson = None) -> int:
    """Print rate, burstiness and lengths of a trace."""
    from medha.cli.report import deliver
    from medha.workload.io import read_trace
    from medha.workload.trace import trace_stats

    start_logging("warning")
    reading = read_trace(source)
    report = {
        "format": reading.format,
        "has_arrivals": reading.has_arrivals,
        **trace_stats(reading.trace),
    }
    deliver(report, output_json, title=f"{source.name} ({reading.format})")
    return 0


@app.command()
@takes(DRAWN)
def synth(
    target: _Out,
    lengths: Annotated[str, typer.Option(help=f"{LENGTHS}.")] = "medha-mix",
    **given: Any,
) -> int:
    """Generate a trace."""
    from medha.workload.io import write_trace
    from medha.workload.synth import synthesize

    trace = synthesize(lengths, given.pop("arrivals"), duration_s=given.pop("duration"), **given)
    write_trace(target, trace)
    rate = "all at once" if trace.qps is None else f"{trace.qps:.4g} requests/s"
    print(f"{target}: {len(trace)} requests over {trace.duration_s:,.3f} s, {rate}")
    return 0
