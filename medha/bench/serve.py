"""``medha bench serve``: requests arrive at a live engine, and a stream of probes measures how they stall others.

The engine runs in this process; there is no server and no network, so TTFT is what scheduling and computing make of it.
The fields of the report are those of ``vllm bench serve``. A probe is a small request that has nothing to do with the
load: how long it takes says what the load does to somebody else (the convoy of arXiv:2409.17264). Probes arrive as a
Poisson process of their own until the load is done, and count in no other figure.

Objectives (``--goodput``, or a trace's own) are told to the scheduler, except for the end-to-end latency, of which no
policy knows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from medha.batch import Batch
from medha.bench.harness import Local, Subject, loaded, random_prompt, terms, title_of
from medha.bench.load import fixed_output, serve_load
from medha.bench.workloads import Workload, arrivals_of, described, longest_of, rate_text
from medha.cli.command import FAILED_REQUESTS
from medha.cli.report import check_writable, progress, write_report
from medha.cli.table import figures_table, report_console
from medha.cost.correction import KINDS, RunningError
from medha.engine.arrivals import Arrival
from medha.engine.engine import Engine
from medha.errors import ConfigError
from medha.sched.decision import Prediction
from medha.workload.metrics import METRICS, Goodput, Served, cell, detailed, percentile_name, serving_figures
from medha.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What is measured.

    Attributes:
        max_concurrency: requests of the load at once; who comes while there are so many arrives when one ends.
        goodput: objectives of requests that bring none.
        metrics, percentiles: what is reported of which figures, see :mod:`medha.workload.metrics`.
        probe_request_rate: probes a second on average; 0 is none.
        probe_input_len, probe_output_len: tokens of a probe.
        num_warmups: requests of the load that are served before it, all at once, and do not count.
        save_detailed: also report the arrays of one value a request.
        label: copied into the report.
    """

    subject: Subject = field(default_factory=Subject)
    workload: Workload = field(default_factory=Workload)
    max_concurrency: int | None = None
    goodput: Goodput = field(default_factory=Goodput)
    metrics: tuple[str, ...] = METRICS
    percentiles: tuple[float, ...] = (99.0,)
    probe_request_rate: float = 0.0
    probe_input_len: int = 16
    probe_output_len: int = 1
    num_warmups: int = 1
    save_detailed: bool = False
    label: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.probe_request_rate < math.inf:
            raise ConfigError(
                f"probe_request_rate={self.probe_request_rate:g}; accepted: probes a second, a finite number, not "
                "negative"
            )


def serve(
    options: ServeOptions,
    trace: Trace,
    *,
    output_json: Path | None = None,
    on_end: Callable[[], None] = lambda: None,
) -> tuple[Local, dict[str, Any]]:
    """Run the load.

    Args:
        options: what to run.
        trace: of the workload.
        output_json: where to write the report.
        on_end: called as each request of the load ends.

    Returns:
        What ran, and the report.

    Raises:
        ConfigError: the options are wrong, or the model has no room for a request.
    """
    load = os.getloadavg()[0]
    longest = max(longest_of(trace), options.probe_input_len + options.probe_output_len)
    with loaded(options.subject, longest=longest) as local:
        seed = options.workload.seed
        arrivals = arrivals_of(trace, local, seed=seed, slo=options.goodput.slo)
        warm = arrivals[: options.num_warmups]
        serve_load(local.engine, [replace(one, request_id=f"warm-{one.request_id}", arrival_s=0.0) for one in warm])
        with errors_counted(local.engine) as errors:
            served = serve_load(
                local.engine,
                arrivals,
                probes=probe_stream(options, local.model.vocab_size),
                max_concurrency=options.max_concurrency,
                on_end=on_end,
            )
        head = local.report("serve", _plain_options(options, trace), load)
    report = head | _fields(local, options, trace, served) | {"prediction_error": errors_by_kind(errors)}
    if options.save_detailed:
        report |= detailed(served.outcomes)
    write_report(output_json, report)
    return local, report


def probe_stream(options: ServeOptions, vocab_size: int) -> Iterator[Arrival]:
    """Probes without end, or none."""
    if not options.probe_request_rate:
        return
    chance = np.random.default_rng((options.workload.seed, 1))
    at_s, number = 0.0, 0
    while True:
        at_s += float(chance.exponential(1 / options.probe_request_rate))
        prompt = random_prompt(options.probe_input_len, vocab_size, chance)
        yield Arrival(f"probe-{number}", prompt, fixed_output(options.probe_output_len), arrival_s=at_s)
        number += 1


@contextmanager
def errors_counted(engine: Engine) -> Iterator[RunningError]:
    """Count how far predicted step times are off while this is open."""
    errors = RunningError()

    def note(batch: Batch, prediction: Prediction | None, busy_s: float) -> None:
        if prediction is not None and prediction.seconds > 0 and busy_s > 0:
            errors.add(prediction.kind, prediction.seconds, busy_s)

    engine.on_step = note
    try:
        yield errors
    finally:
        engine.on_step = None


def errors_by_kind(errors: RunningError) -> dict[str, dict[str, float]]:
    """Count, mean absolute and mean signed error of predicted step times, as shares: of all steps, and by kind."""
    return {"all": asdict(errors.figures()), **{kind: asdict(errors.figures(kind)) for kind in KINDS}}


def _plain_options(options: ServeOptions, trace: Trace) -> dict[str, Any]:
    return asdict(options) | {"workload": described(options.workload, trace)}


def _fields(local: Local, options: ServeOptions, trace: Trace, served: Served) -> dict[str, Any]:
    """The fields of ``vllm bench serve``, and medha's."""
    given = options.workload.request_rate
    rate = given if given is not None else trace.qps
    has_tokenizer = local.role.tokenizer is not None
    return {
        "backend": "medha",
        "label": options.label,
        "tokenizer_id": local.subject.model_id if has_tokenizer else None,
        "num_prompts": len(trace),
        "request_rate": rate_text(math.inf if rate is None else rate),
        "burstiness": options.workload.burstiness,
        "max_concurrency": options.max_concurrency,
        "runs": 1,
        "warmup": min(options.num_warmups, len(trace)),
        **serving_figures(served, goodput=options.goodput, metrics=options.metrics, percentiles=options.percentiles),
    }


def run_and_print(options: ServeOptions, output_json: Path | None) -> int:
    """Run with a progress bar on stderr, print the tables on stdout; returns 0, or 3 where requests have failed."""
    check_writable(output_json)
    trace = options.workload.trace()
    with progress("serving", len(trace)) as advance:
        local, report = serve(options, trace, output_json=output_json, on_end=advance)
    console = report_console()
    console.print(_latencies(local, options, report))
    for line in _lines(options, report):
        console.print(line, highlight=False)
    console.print(_buckets(options, report["ttft_by_length"]))
    console.print(terms("TTFT", "TPOT", "ITL", "E2EL", "goodput", "SLO attainment"), highlight=False)
    console.print(local.footer(f"one run after {report['warmup']} warm-up requests"), highlight=False)
    return FAILED_REQUESTS if report["failed"] else 0


def _latencies(local: Local, options: ServeOptions, report: dict[str, Any]) -> Table:
    scheduler = local.config.scheduler
    how = f"{scheduler.scheduler}, {scheduler.policy}"
    title = f"{report['completed']:,} requests served ({how}): {title_of(local.subject, local.model)}"
    names = ["mean", "median", "std", *map(percentile_name, options.percentiles)]
    table = figures_table(title, names, words=("milliseconds",))
    for metric in options.metrics:
        table.add_row(metric.upper(), *(cell(report, f"{name}_{metric}_ms") for name in names))
    return table


def _lines(options: ServeOptions, report: dict[str, Any]) -> list[str]:
    """What does not fit the table."""
    per_s = {name: report[name] or 0.0 for name in ("request_throughput", "output_throughput")}
    lines = [
        f"{report['completed']:,} completed, {report['failed']:,} failed in {report['duration']:,.2f} s; request rate "
        f"{_rate(report)}, burstiness {report['burstiness']:g}; at most {report['max_concurrent_requests']} at once",
        f"{per_s['request_throughput']:,.2f} requests/s, {per_s['output_throughput']:,.1f} output tokens/s, "
        f"{report['total_token_throughput'] or 0.0:,.1f} tokens/s, at most {report['max_output_tokens_per_s']:,.0f} "
        "output tokens in a second",
    ]
    if report["slo_attainment"] is not None:
        lines.append(
            f"goodput {report['request_goodput']:,.2f} requests/s, SLO attainment {report['slo_attainment']:.1%}"
        )
    if options.probe_request_rate:
        times = (cell(report, f"probe_{name}_e2el_ms") for name in ("median", "p99", "max"))
        lines.append(
            f"probes of {options.probe_input_len} + {options.probe_output_len} tokens: {report['probe_completed']} "
            f"completed, {report['probe_failed']} failed; E2EL median, p99, max {' / '.join(times)} ms"
        )
    errors = {kind: of for kind, of in report["prediction_error"].items() if of["count"]}
    if errors:
        words = (f"{kind} {of['mean_abs']:.1%} ({of['mean_signed']:+.1%})" for kind, of in errors.items())
        lines.append(f"error of predicted step times, mean absolute (signed): {', '.join(words)}")
    return lines


def _rate(report: dict[str, Any]) -> str:
    rate = report["request_rate"]
    return rate if isinstance(rate, str) else f"{rate:.4g}/s"


def _buckets(options: ServeOptions, lines: Sequence[dict[str, Any]]) -> Table:
    names = ["mean", "median", *map(percentile_name, options.percentiles)]
    table = figures_table("TTFT by prompt length, milliseconds", ("prompt", "requests", "completed", *names, "in SLO"))
    for line in lines:
        share = line["slo_attainment"]
        table.add_row(
            line["bucket"],
            f"{line['num_requests']:,}",
            f"{line['completed']:,}",
            *(cell(line, f"{name}_ttft_ms") for name in names),
            "-" if share is None else f"{share:.1%}",
        )
    return table
