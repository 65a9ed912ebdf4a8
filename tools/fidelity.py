"""``python -m tools.fidelity``: kernel tables in, request times out, against what a real engine took.

The folder holds kernel tables of a model on an accelerator (``profile/``, see :mod:`tools.kernels`) and a run of
vLLM there (``vllm_run/``, see :mod:`tools.vllm_run`). The simulator is given coefficients fitted to the tables,
the engine's settings, a fixed time of the host for each step, and of each request when it was queued and its two
lengths. Nothing is fitted to the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from medha.cli.command import end_process, make_app, run_app
from medha.cli.report import check_writable, machine_line, stamp, write_report
from medha.cli.table import report_console
from medha.cost.coefficients import Coefficients, Link, ProfileKey
from medha.cost.predictor import Predictor
from medha.errors import ConfigError
from medha.sched.scheduler import Scheduler
from medha.sim.pipeline import Pipeline, Segment
from medha.sim.simulator import Simulation
from tools.kernels import fit_kernels, read_kernels
from tools.tables import Floats
from tools.vllm_run import MeasuredRun, Times, read_run

AIMS = {"latency of a request": 0.04, "TPOT mean": 0.03, "makespan": 0.03, "TTFT mean": 0.10}
"""Largest absolute error aimed at; of a request: the mean over all."""
SPREAD = ("mean", "median", "P90", "P95", "P99")


@dataclass(frozen=True, slots=True)
class FidelityOptions:
    """What the folder does not say.

    Attributes:
        run: folder.
        model: name or path; None is what the run's settings say.
        host_s: seconds of a step on the host.
        num_kv_tokens: size of the KV pool; None is what the settings say, or else as much as all requests need.
        all_reduce_alpha_s, all_reduce_bytes_per_s: of an all-reduce, with tensor parallelism.
    """

    run: Path
    model: str | None = None
    host_s: float = 1e-3
    num_kv_tokens: int | None = None
    all_reduce_alpha_s: float | None = None
    all_reduce_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.host_s < math.inf:
            raise ConfigError(f"host_s={self.host_s!r}; accepted: a finite number of at least 0")


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a run.

    Attributes:
        measured: on the real engine, seconds; None for an error of each request.
        simulated: seconds, or of an error of each request the mean over all, a share.
        other: another simulator's; None where it is not known.
    """

    name: str
    measured: float | None
    simulated: float
    other: float | None = None

    @property
    def error(self) -> float:
        """Signed, a share of what was measured; for an error of each request that error."""
        return self.simulated if self.measured is None else self.simulated / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class Steps:
    """Simulated steps of one kind.

    Attributes:
        kind: prefill, decode or mixed.
        count, num_tokens, seconds: of all of them.
    """

    kind: str
    count: int
    num_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fidelity:
    """What a comparison came to.

    Attributes:
        run: what was measured.
        num_blocks: of the simulated KV pool.
        figures: in the order in which they are shown.
        steps: by kind.
    """

    run: MeasuredRun
    num_blocks: int
    figures: tuple[Figure, ...]
    steps: tuple[Steps, ...]

    @property
    def aims(self) -> list[tuple[str, float, float]]:
        """(figure, absolute error, largest that is aimed at)."""
        return [(f.name, abs(f.error), AIMS[f.name]) for f in self.figures if f.name in AIMS]


def fidelity(options: FidelityOptions) -> Fidelity:
    """Simulate a run from the kernel tables beside it, and compare.

    Args:
        options: which run.

    Raises:
        ConfigError: the folder lacks something, or the run is not of a kind that can be simulated.
    """
    run = read_run(options.run / "vllm_run", model=options.model)
    kernels = read_kernels(options.run / "profile", run.model.num_layers)
    if run.config.max_batch_tokens > kernels.max_chunk:
        raise ConfigError(
            f"max_num_batched_tokens={run.config.max_batch_tokens} in {options.run}; accepted: at most "
            f"{kernels.max_chunk}, the longest chunk in its attention table"
        )
    coefficients = fit_kernels(kernels, _key(run), host_s=options.host_s, tp=_all_reduce(options, run))
    num_blocks = _num_blocks(options, run)
    simulated, segments = _replay(run, coefficients, num_blocks)
    return Fidelity(run, num_blocks, _figures(run, simulated), _steps(segments))


def _replay(run: MeasuredRun, coefficients: Coefficients, num_blocks: int) -> tuple[Times, list[Segment]]:
    """Simulate the requests of a run; their times and all steps."""
    segments: list[Segment] = []
    stage = Predictor(coefficients, max_tokens=run.config.max_batch_tokens)
    scheduler = Scheduler(run.config, num_blocks=num_blocks, block_size=run.block_size)
    simulation = Simulation(scheduler, Pipeline([stage], on_segment=segments.append), run.trace)
    outcome = simulation.run().requests
    if outcome.is_refused.any():
        row = int(np.argmax(outcome.is_refused))
        tokens = int(run.trace.prompt_tokens[row] + run.trace.output_tokens[row])
        raise ConfigError(
            f"num_kv_tokens={num_blocks * run.block_size}; accepted: at least the {tokens} tokens of request "
            f"{run.trace.request_ids[row]}"
        )
    return Times(run.times.arrival_s, outcome.first_token_s, outcome.finish_s, run.times.num_tokens), segments


def _num_blocks(options: FidelityOptions, run: MeasuredRun) -> int:
    if options.num_kv_tokens is not None:
        if options.num_kv_tokens < run.block_size:
            raise ConfigError(f"num_kv_tokens={options.num_kv_tokens}; accepted: at least a block, {run.block_size}")
        return options.num_kv_tokens // run.block_size
    if run.num_blocks is not None:
        return run.num_blocks
    return int(np.ceil((run.trace.prompt_tokens + run.trace.output_tokens) / run.block_size).sum())


def _all_reduce(options: FidelityOptions, run: MeasuredRun) -> Link | None:
    alpha_s, bytes_per_s = options.all_reduce_alpha_s, options.all_reduce_bytes_per_s
    if run.tp == 1:
        return None
    if alpha_s is None or bytes_per_s is None:
        raise ConfigError(
            f"the run is of {run.tp} tensor-parallel ranks, whose all-reduces are in no kernel table; accepted: "
            "all_reduce_alpha_s and all_reduce_bytes_per_s"
        )
    return Link(2 * run.model.num_layers, alpha_s, bytes_per_s, 2 * run.model.hidden_size)


def _key(run: MeasuredRun) -> ProfileKey:
    return ProfileKey(
        machine="kernel tables",
        model=run.model_name,
        dtype=run.model.dtype,
        layout=f"tp{run.tp} spp1 kvp1",
        backend="vllm",
        num_threads=0,
        block_size=run.block_size,
        torch_version="none",
    )


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def _figures(run: MeasuredRun, simulated: Times) -> tuple[Figure, ...]:
    """Errors of each request, then figures of the run."""
    figures = []
    for name, attribute in (("latency", "e2e_s"), ("TTFT", "ttft_s"), ("TPOT", "tpot_s")):
        error = _request_error(getattr(run.times, attribute), getattr(simulated, attribute))
        figures.append(Figure(f"{name} of a request", None, error))
    for name, attribute in (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("latency", "e2e_s")):
        spreads = [_spread(getattr(times, attribute)) for times in (run.times, simulated)]
        for share, real_s, simulated_s in zip(SPREAD, *spreads, strict=True):
            label = f"{name} {share}"
            figures.append(Figure(label, real_s, simulated_s, run.others.get(label)))
    return (*figures, Figure("makespan", run.times.makespan_s, simulated.makespan_s))


def _request_error(measured: Floats, simulated: Floats) -> float:
    """Mean absolute error over requests, as a share of what was measured."""
    with np.errstate(invalid="ignore", divide="ignore"):
        errors = np.abs(simulated / measured - 1.0)
    return float(np.mean(errors[np.isfinite(errors)]))


def _spread(seconds: Floats) -> list[float]:
    """Mean, median, P90, P95 and P99 of what there is."""
    known = seconds[np.isfinite(seconds)]
    return [float(known.mean()), *np.percentile(known, [50, 90, 95, 99]).tolist()]


def _steps(segments: Sequence[Segment]) -> tuple[Steps, ...]:
    """Steps by kind."""
    rows: dict[str, list[Segment]] = {"decode": [], "mixed": [], "prefill": []}
    for one in segments:
        kind = "prefill" if not one.num_decodes else ("mixed" if one.num_tokens > one.num_decodes else "decode")
        rows[kind].append(one)
    return tuple(
        Steps(kind, len(found), sum(one.num_tokens for one in found), sum(one.end_s - one.start_s for one in found))
        for kind, found in rows.items()
    )


# ---------------------------------------------------------------------------------------------------------------------
# Printing


def run_and_print(options: FidelityOptions, output_json: Path | None) -> int:
    """Compare, print the tables on stdout and write the report; returns 0."""
    check_writable(output_json)
    found = fidelity(options)
    console = report_console()
    for line in _load(options, found):
        console.print(line, highlight=False)
    console.print(_figure_table(found), _step_table(found))
    for name, error, aim in found.aims:
        verdict = "met" if error <= aim else "missed"
        console.print(f"{name}: {error:.2%}, aim {aim:.0%}: {verdict}", highlight=False)
    console.print(f"{machine_line()}; one simulation", highlight=False)
    write_report(output_json, report(options, found))
    return 0


def _load(options: FidelityOptions, found: Fidelity) -> list[str]:
    run, config = found.run, found.run.config
    trace = run.trace
    return [
        f"{run.model_name}, tp {run.tp}: {len(trace)} requests queued within {trace.duration_s:.1f} s, "
        f"{int(trace.prompt_tokens.sum()):,} prompt and {int(trace.output_tokens.sum()):,} output tokens",
        f"scheduler vllm: at most {config.max_num_seqs} requests and {config.max_batch_tokens} tokens a step; "
        f"{found.num_blocks * run.block_size:,} KV tokens; {options.host_s * 1e3:g} ms of the host a step; "
        "nothing is fitted to the run",
    ]


def _figure_table(found: Fidelity) -> Table:
    """Milliseconds and errors; the mean absolute errors of each request have no more than that."""
    table = Table(title="simulated against measured; milliseconds", box=SIMPLE_HEAD)
    _columns(table, "", "measured", "simulated", "error", "LLMServingSim", "error")
    for figure in found.figures:
        if figure.measured is None:
            table.add_row(figure.name, "", "", f"{figure.error:.2%}", "", "")
            continue
        cells = [f"{figure.measured * 1e3:,.1f}", f"{figure.simulated * 1e3:,.1f}", f"{figure.error:+.2%}"]
        if figure.other is not None:
            cells += [f"{figure.other * 1e3:,.1f}", f"{figure.other / figure.measured - 1:+.2%}"]
        table.add_row(figure.name, *cells)
    return table


def _step_table(found: Fidelity) -> Table:
    table = Table(title="simulated steps", box=SIMPLE_HEAD)
    _columns(table, "kind", "steps", "tokens", "seconds", "ms a step")
    for steps in found.steps:
        each = f"{steps.seconds / steps.count * 1e3:.1f}" if steps.count else ""
        table.add_row(steps.kind, f"{steps.count:,}", f"{steps.num_tokens:,}", f"{steps.seconds:.2f}", each)
    return table


def _columns(table: Table, first: str, *others: str) -> None:
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)


def report(options: FidelityOptions, found: Fidelity) -> dict[str, Any]:
    """The comparison as what is written."""
    run = found.run
    return {
        "benchmark": "fidelity",
        "environment": stamp(),
        "options": {**asdict(options), "run": options.run.name},
        "run": {
            "model": run.model_name,
            "tp": run.tp,
            "num_requests": len(run.trace),
            "max_num_seqs": run.config.max_num_seqs,
            "max_batch_tokens": run.config.max_batch_tokens,
            "num_kv_tokens": found.num_blocks * run.block_size,
        },
        "figures": [{**asdict(figure), "error": figure.error} for figure in found.figures],
        "aims": [{"name": name, "error": error, "aim": aim, "met": error <= aim} for name, error, aim in found.aims],
        "steps": [asdict(steps) for steps in found.steps],
    }


app = make_app()


@app.command()
def fidelity_command(
    run: Annotated[
        Path, typer.Option(help="Folder with kernel tables in profile/ and a measured run of vLLM in vllm_run/.")
    ],
    model: Annotated[str | None, typer.Option(help="Name or path; by default as the run says.")] = None,
    host_s: Annotated[float, typer.Option("--host-s", help="Seconds of a step on the host.")] = 1e-3,
    num_kv_tokens: Annotated[
        int | None, typer.Option(help="KV pool of the run; by default as it says, or all requests at once.")
    ] = None,
    all_reduce_alpha_s: Annotated[
        float | None, typer.Option("--all-reduce-alpha-s", help="Latency, with tensor parallelism.")
    ] = None,
    all_reduce_bytes_per_s: Annotated[
        float | None, typer.Option("--all-reduce-bytes-per-s", help="Bandwidth, with tensor parallelism.")
    ] = None,
    output_json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
) -> int:
    """Simulated against measured request times: a run of vLLM from its kernel tables."""
    options = FidelityOptions(
        run=run,
        model=model,
        host_s=host_s,
        num_kv_tokens=num_kv_tokens,
        all_reduce_alpha_s=all_reduce_alpha_s,
        all_reduce_bytes_per_s=all_reduce_bytes_per_s,
    )
    return run_and_print(options, output_json)


def main() -> NoReturn:
    """Entry point of ``python -m tools.fidelity``. Ends in SystemExit."""
    end_process(run_app(app, "python -m tools.fidelity"))


if __name__ == "__main__":
    main()
