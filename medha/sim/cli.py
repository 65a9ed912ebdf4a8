"""``medha simulate``: the engine's scheduler on hardware that is not there. Exit codes are in :mod:`medha.cli.command`.

What goes to stdout and into files depends on the arguments alone; what was measured with a clock goes to stderr.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medha.cli.command import FAILED_REQUESTS, start_logging
from medha.config import SCHEDULERS, CacheConfig, SchedulerConfig
from medha.errors import ConfigError, exit_code

if TYPE_CHECKING:
    from rich.console import Console

    from medha.sim.study import Run, Study

_DEFAULT = SchedulerConfig()


def _panel(name: str, *declarations: str, help: str, shows: bool | str = True, **options: Any) -> Any:
    return typer.Option(*declarations, help=help, rich_help_panel=name, show_default=shows, **options)


def simulate(
    context: typer.Context,
    scheduler: Annotated[
        list[str] | None,
        _panel("Systems", help=f"Of {', '.join(SCHEDULERS)}; several: repeated or comma separated.", shows="medha"),
    ] = None,
    policy: Annotated[
        list[str] | None,
        _panel(
            "Systems",
            help="Of the medha scheduler: lars, ilrs, lrs, edf, srpt, sjf, fcfs, priority[:NAME] or "
            "package.module:name; several likewise.",
            shows="lars",
        ),
    ] = None,
    hardware: Annotated[
        str, _panel("Systems", help="a100-80g, h100-80g, h200-141g, b200-180g, or the JSON file of a spec.")
    ] = "h100-80g",
    model: Annotated[
        str,
        _panel(
            "Systems",
            "--model",
            "-m",
            help="llama-3-8b, llama-3-70b, llama-3.1-8b, qwen2.5-14b-1m, a config.json or its folder.",
        ),
    ] = "llama-3-8b",
    tp: Annotated[int, _panel("Systems", "--tp", help="Tensor-parallel ranks.")] = 1,
    spp: Annotated[int, _panel("Systems", "--spp", help="Stream-pipeline stages.")] = 1,
    kvp: Annotated[int, _panel("Systems", "--kvp", help="KV-parallel groups.")] = 1,
    workload: Annotated[
        str | None,
        _panel(
            "Workload",
            help="Lengths: sharegpt4-8k, medha-swe, medha-mix, medha-mix-2m, tetris-short, tetris-medium, tetris-long, "
            "fixed:P,D or uniform:A-B,C-D.",
            shows="medha-mix",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        _panel("Workload", help="File of any format that medha trace reads, in place of --workload.", shows=False),
    ] = None,
    arrivals: Annotated[str, _panel("Workload", help="poisson, gamma, uniform or at-once.")] = "poisson",
    burstiness: Annotated[float, _panel("Workload", help="Of gamma arrivals: 1 is Poisson, less is burstier.")] = 1.0,
    qps: Annotated[
        str | None,
        _panel("Workload", help="Requests a second; several rates comma separated. Scales a trace.", shows=False),
    ] = None,
    duration: Annotated[float | None, _panel("Workload", help="Seconds of arrivals.", shows=False)] = None,
    num_requests: Annotated[
        int | None, _panel("Workload", help="So many of them.", shows="200, or all of a trace", min=1)
    ] = None,
    seed: Annotated[int, _panel("Workload", help="Of arrivals and lengths.", min=0)] = 0,
    slo_ttft_s: Annotated[
        float | None, _panel("Workload", help="TTFT objective of requests without their own.", shows="derived")
    ] = None,
    slo_tpot_s: Annotated[
        float | None, _panel("Workload", help="TPOT objective of requests without their own.", shows="none")
    ] = None,
    max_model_len: Annotated[
        int | None, _panel("Memory and batching", help="Most tokens, prompt and output.", shows="those of the longest")
    ] = None,
    gpu_memory_utilization: Annotated[
        float, _panel("Memory and batching", help="Share of the memory to use.")
    ] = CacheConfig().gpu_memory_utilization,
    num_kv_blocks: Annotated[
        int | None, _panel("Memory and batching", help="KV blocks of a group.", shows="as many as fit", min=1)
    ] = None,
    max_kv_per_group: Annotated[
        int | None, _panel("Memory and batching", help="KV tokens of a request on one group.", shows=False)
    ] = _DEFAULT.max_kv_per_group,
    overcommit: Annotated[
        bool, _panel("Memory and batching", "--overcommit", help="Give KV memory away twice; who lacks it gives way.")
    ] = _DEFAULT.overcommit,
    num_swap_blocks: Annotated[
        int, _panel("Memory and batching", help="KV blocks of host memory of a group, for who gives way.", min=0)
    ] = _DEFAULT.num_swap_blocks,
    swap_block_s: Annotated[
        float, _panel("Memory and batching", help="Seconds in which one moves there or back.", min=0)
    ] = _DEFAULT.swap_block_s,
    max_num_seqs: Annotated[int, _panel("Memory and batching", help="Most requests at once.")] = _DEFAULT.max_num_seqs,
    max_batch_tokens: Annotated[
        int, _panel("Memory and batching", help="Most tokens of a step.")
    ] = _DEFAULT.max_batch_tokens,
    chunk_size: Annotated[
        int | None, _panel("Memory and batching", help="Most tokens of a prompt in a step.", shows=False)
    ] = _DEFAULT.chunk_size,
    t_target_s: Annotated[
        float | None, _panel("Scheduling", help="Seconds a step may take; else from the decodes' TPOT.", shows=False)
    ] = _DEFAULT.t_target_s,
    quantum_s: Annotated[
        float, _panel("Scheduling", help="The same where no decode has a TPOT objective.")
    ] = _DEFAULT.quantum_s,
    rho_max: Annotated[
        float, _panel("Scheduling", help="Most that a long prefill yields of a step; 0 is no space sharing.")
    ] = _DEFAULT.rho_max,
    long_threshold: Annotated[
        int, _panel("Scheduling", help="Prompt tokens from which a prefill is long.")
    ] = _DEFAULT.long_threshold,
    late_share: Annotated[
        float, _panel("Scheduling", help="Share of a step for prefills that are late or passed over.")
    ] = _DEFAULT.late_share,
    patience_s: Annotated[
        float, _panel("Scheduling", help="Seconds after which a prefill counts as passed over.")
    ] = _DEFAULT.patience_s,
    stream: Annotated[
        bool,
        _panel(
            "Scheduling",
            "--stream/--no-stream",
            help="Whether a prompt's next chunk enters the pipeline before the one before has left it.",
        ),
    ] = _DEFAULT.stream,
    stop_s: Annotated[float | None, _panel("Run", help="Virtual seconds at which to stop.", shows="the end")] = None,
    no_skip: Annotated[
        bool, _panel("Run", "--no-skip", help="Step over nothing; slower, with the same outcome.")
    ] = False,
    output_json: Annotated[Path | None, _panel("Output", "--json", help="Write the report here.", shows=False)] = None,
    plot: Annotated[Path | None, _panel("Output", help="Folder for plots; needs matplotlib.", shows=False)] = None,
    timeline: Annotated[
        Path | None, _panel("Output", help="Chrome trace of a single run (.json or .json.gz).", shows=False)
    ] = None,
) -> int:
    """Run the scheduler on predicted hardware: whole days of arrivals in minutes, without a GPU.

    Several schedulers, policies or rates in one call are compared on the same arrivals and lengths.
    """
    from medha.cli.report import check_writable
    from medha.cli.table import report_console
    from medha.sim.options import about, study_of

    start_logging("warning")
    if plot is not None:
        from medha.sim.plots import check_plots

        check_plots(plot)
    for path in (output_json, timeline):
        check_writable(path)
    study = study_of(context.params)
    study.check()
    if timeline is not None and len(study.systems) > 1:
        raise ConfigError(
            f"timeline={timeline} with {len(study.systems)} runs; accepted: one scheduler, policy and rate"
        )
    console = report_console()
    for line in about(study, context.params):
        console.print(line)
    runs = _run_with_progress(study)
    return _finish(console, context.params, study, runs)


def _finish(console: Console, given: Mapping[str, Any], study: Study, runs: list[Run]) -> int:
    """Write what came of it, then print it; returns the exit code."""
    from medha.cli.report import write_report
    from medha.sim.options import config_of
    from medha.sim.tables import print_reports

    reports = [run.report for run in runs]
    interrupted = runs[-1].interrupted
    write_report(
        given["output_json"],
        {
            "format": "medha-simulation",
            "version": 1,
            "complete": not interrupted and all(one.is_complete for one in reports),
            "config": config_of(study, given),
            "runs": [one.to_json() for one in reports],
        },
    )
    plots: list[Path] = []
    if given["timeline"] is not None:
        from medha.sim.perfetto import write_trace

        write_trace(given["timeline"], runs[0].outcome, runs[0].segments)
    if given["plot"] is not None:
        from medha.sim.plots import draw

        plots = draw(runs, given["plot"], given["long_threshold"])
    print_reports(console, reports)
    for path in plots:
        console.print(str(path), soft_wrap=True)
    _print_wall(runs)
    if interrupted:
        return exit_code(KeyboardInterrupt())
    return FAILED_REQUESTS if any(one.serving["failed"] for one in reports) else 0


def _run_with_progress(study: Study) -> list[Run]:
    """Run all with a bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn("requests"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=study.num_requests)
        return list(study.runs(lambda count: bar.update(task, completed=count)))


def _print_wall(runs: list[Run]) -> None:
    """How fast this machine was, on stderr."""
    wall_s = max(sum(run.wall_s for run in runs), 1e-9)
    requests = sum(run.report.num_arrived for run in runs)
    batches = sum(run.report.num_batches for run in runs)
    skipped = sum(run.report.num_skipped for run in runs)
    virtual_s = sum(run.outcome.duration_s for run in runs)
    print(
        f"simulated {virtual_s:,.0f} s in {wall_s:,.1f} s: {requests / wall_s:,.0f} requests/s, "
        f"{batches / wall_s:,.0f} batches/s ({skipped / max(batches, 1):.0%} of {batches:,} stepped over), "
        f"peak memory {_peak_bytes() / 2**20:,.0f} MiB",
        file=sys.stderr,
    )


def _peak_bytes() -> int:
    """Resident memory of this process at its largest."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
