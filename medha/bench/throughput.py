"""``medha bench throughput``: a number of requests, all there from the start, to the end of the last one.

The fields are those of ``vllm bench throughput``; those of the run with the median time are reported, and the times of
all runs beside them. ``host`` is what a step takes beside the runner's compute (:mod:`medha.bench.host`), over the
steps of all runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rich.table import Table

from medha.bench.harness import Local, Subject, loaded, title_of
from medha.bench.host import HostClock, HostFigures, HostStep
from medha.bench.load import serve_load
from medha.bench.timing import Timing, in_turn
from medha.bench.workloads import Workload, arrivals_of, described, longest_of
from medha.cli.report import check_writable, progress, write_report
from medha.cli.table import figures_table, report_console
from medha.errors import ConfigError
from medha.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class ThroughputOptions:
    """What is measured.

    Attributes:
        workload: the requests; their arrivals do not count.
        warmup, runs: passes over all of them.
    """

    subject: Subject = field(default_factory=Subject)
    workload: Workload = field(default_factory=Workload)
    warmup: int = 1
    runs: int = 3


@dataclass(frozen=True, slots=True)
class Throughput:
    """The result; token counts are of one pass.

    Attributes:
        seconds: of each pass that counts.
        host: of their steps.
    """

    num_requests: int
    total_input_tokens: int
    total_output_tokens: int
    seconds: tuple[float, ...]
    host: HostFigures

    def report(self) -> dict[str, Any]:
        """The fields of ``vllm bench throughput``, and medha's."""
        timing = Timing.of(self.seconds)
        elapsed_s, tokens = timing.median_s, self.total_input_tokens + self.total_output_tokens
        return {
            "elapsed_time": elapsed_s,
            "num_requests": self.num_requests,
            "total_num_tokens": tokens,
            "requests_per_second": self.num_requests / elapsed_s,
            "tokens_per_second": tokens / elapsed_s,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "output_tokens_per_second": self.total_output_tokens / elapsed_s,
            "elapsed_times": self.seconds,
            "timing": asdict(timing),
            "host": asdict(self.host),
        }


def throughput(
    options: ThroughputOptions,
    trace: Trace,
    *,
    output_json: Path | None = None,
    on_end: Callable[[], None] = lambda: None,
) -> tuple[Local, Throughput]:
    """Run the measurement.

    Args:
        options: what to run.
        trace: of the workload.
        output_json: where to write the report.
        on_end: called as each request ends, warm-up included.

    Raises:
        ConfigError: the options are wrong, or the model has no room for a request.
    """
    load = os.getloadavg()[0]
    with loaded(options.subject, longest=longest_of(trace)) as local:
        arrivals = [replace(one, arrival_s=0.0) for one in arrivals_of(trace, local, seed=options.workload.seed)]
        clock = HostClock(local.engine)
        steps: list[list[HostStep]] = []

        def run() -> float:
            clock.begin()
            served = serve_load(local.engine, arrivals, on_end=on_end)
            failed = next((one for one in served.outcomes if not one.is_completed), None)
            if failed is not None:
                raise ConfigError(f"{failed.request_id} of {failed.input_len} tokens has failed: {failed.error}")
            steps.append(clock.steps)
            return served.duration_s

        seconds = in_turn({"pass": run}, warmup=options.warmup, runs=options.runs)["pass"]
        host = HostFigures.of(list(chain.from_iterable(steps[options.warmup :])))
        tokens = int(trace.prompt_tokens.sum()), int(trace.output_tokens.sum())
        found = Throughput(len(trace), *tokens, tuple(seconds), host)
        fields = asdict(options) | {"workload": described(options.workload, trace)}
        report = local.report("throughput", fields, load) | found.report()
    write_report(output_json, report)
    return local, found


def run_and_print(options: ThroughputOptions, output_json: Path | None) -> int:
    """Run with a progress bar on stderr, print the table on stdout; returns 0."""
    check_writable(output_json)
    trace = options.workload.trace()
    with progress("serving", (options.warmup + options.runs) * len(trace)) as advance:
        local, found = throughput(options, trace, output_json=output_json, on_end=advance)
    console = report_console()
    console.print(_table(local, found))
    console.print(_host_table(found.host))
    console.print(
        "host: a step less the runner's compute: scheduler, engine, and noting the tokens here; over the steps of all "
        "passes that count",
        highlight=False,
    )
    runs = f"all requests at once; median of {options.runs} passes after {options.warmup} warm-up"
    console.print(local.footer(runs), highlight=False)
    return 0


def _table(local: Local, found: Throughput) -> Table:
    fields, timing = found.report(), Timing.of(found.seconds)
    headings = (
        "prompt\ntokens",
        "output\ntokens",
        "seconds",
        "min-max",
        "requests\n/s",
        "tokens\n/s",
        "output\ntokens/s",
    )
    title = f"{found.num_requests:,} requests at once: {title_of(local.subject, local.model)}"
    table = figures_table(title, headings)
    table.add_row(
        f"{found.total_input_tokens:,}",
        f"{found.total_output_tokens:,}",
        f"{timing.median_s:,.2f}",
        f"{timing.min_s:,.2f}-{timing.max_s:,.2f}",
        f"{fields['requests_per_second']:,.2f}",
        f"{fields['tokens_per_second']:,.1f}",
        f"{fields['output_tokens_per_second']:,.1f}",
    )
    return table


def _host_table(host: HostFigures) -> Table:
    table = figures_table("host of a step", ("ms", "min-max", "steps"), words=("batch",))
    for name, timing in (("all", host.timing), (f"largest, {host.largest_batch:,} rows", host.at_largest)):
        spread = f"{timing.min_s * 1e3:,.2f}-{timing.max_s * 1e3:,.2f}"
        table.add_row(name, f"{timing.median_s * 1e3:,.2f}", spread, f"{timing.runs:,}")
    return table
