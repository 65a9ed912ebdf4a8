"""``medha plan``: which layout to run. Exit codes as in :mod:`medha.cli.command`; 1: no layout meets everything."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from medha.config import CacheConfig, SchedulerConfig
from medha.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from medha.config import ModelConfig
    from medha.sim.plan import Candidate, Planner, Rate
    from medha.workload.trace import Trace

NONE_MEETS = 1
"""Exit code where no layout meets everything."""
_NAMED = 4
_SAMPLE = 100_000
"""Requests drawn to find the longest of a workload."""


def plan(
    context: Annotated[int, typer.Option(help="Prompt tokens of the request that is planned for.")],
    tpot_s: Annotated[float, typer.Option("--tpot-s", help="Objective of its time between tokens, seconds.")],
    gpus: Annotated[int, typer.Option("--gpus", help="Accelerators in all.")],
    ttft_s: Annotated[
        float | None,
        typer.Option(
            "--ttft-s",
            help="Objective of its time to the first token, seconds.",
            show_default="5 times that of the fastest layout",
        ),
    ] = None,
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="llama-3-8b, llama-3-70b, llama-3.1-8b, qwen2.5-14b-1m, or a config.json."),
    ] = "llama-3-8b",
    hardware: Annotated[
        str, typer.Option(help="a100-80g, h100-80g, h200-141g, b200-180g, or the JSON file of a spec.")
    ] = "h100-80g",
    workload: Annotated[
        str | None,
        typer.Option(
            help="Find the capacity for these requests: sharegpt4-8k, medha-mix, fixed:P,D and the like, as medha "
            "trace synth --lengths, or a trace file.",
            show_default=False,
        ),
    ] = None,
    qps: Annotated[
        float | None, typer.Option(help="Requests a second of the workload to reach, in all.", show_default=False)
    ] = None,
    duration: Annotated[float, typer.Option(help="Seconds of the workload's arrivals to simulate.")] = 60.0,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Longest context the model is run with, its RoPE scaled.", show_default="as --context"),
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of the memory to use.")
    ] = CacheConfig().gpu_memory_utilization,
    max_batch_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a step.")
    ] = SchedulerConfig().max_batch_tokens,
    top: Annotated[int, typer.Option(min=1, help="Layouts to print.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of the workload's arrivals and lengths.")] = 0,
    output_json: Annotated[
        Path | None, typer.Option("--json", help="Write every layout here.", show_default=False)
    ] = None,
) -> int:
    """Find the layout of a model on so many accelerators that meets TTFT and TPOT objectives, without a GPU.

    Every product of replicas, tp (inside a node), spp and kvp that uses all of them is simulated.
    """
    from medha.cli.report import check_writable, write_report
    from medha.cli.table import report_console
    from medha.cost.hardware import load_spec
    from medha.sim.known_models import find_model
    from medha.sim.plan import NO_OBJECTIVE_S, Goal, Planner, to_json

    check_writable(output_json)
    if qps is not None and workload is None:
        raise ConfigError(f"qps={qps:g} without a workload; accepted: --workload too")
    shape = find_model(model)
    _check_context(context, max_model_len, model, shape)
    goal = Goal(gpus, context, NO_OBJECTIVE_S if ttft_s is None else ttft_s, tpot_s, duration, qps)
    rate, longest = (None, 1) if workload is None else _workload(workload, duration, seed)
    planner = Planner(
        load_spec(hardware),
        shape,
        goal,
        scheduler=SchedulerConfig(max_batch_tokens=max_batch_tokens),
        utilization=gpu_memory_utilization,
        workload=rate,
        longest=longest,
    )
    if ttft_s is None:
        planner = planner.with_derived_ttft()
    candidates = _with_progress(planner)
    options = {"model": model, "hardware": hardware, "workload": workload, "seed": seed}
    write_report(output_json, _report(planner, options, [to_json(candidate) for candidate in candidates]))
    _print(report_console(), planner, options, candidates, top=top)
    return NONE_MEETS if candidates[0].reasons else 0


def _check_context(context: int, max_model_len: int | None, name: str, model: ModelConfig) -> None:
    if max_model_len is not None and context > max_model_len:
        raise ConfigError(f"context={context}; accepted: at most max_model_len={max_model_len}")
    claimed = model.max_position_embeddings
    if max_model_len is None and context > claimed:
        print(
            f"medha: {name} claims {claimed:,} positions; its RoPE is taken as scaled to {context:,}", file=sys.stderr
        )


def _workload(name: str, duration_s: float, seed: int) -> tuple[Rate, int]:
    """The requests at a rate, of a trace file or drawn; and the tokens of the longest."""
    from medha.workload.io import read_trace
    from medha.workload.synth import synthesize

    if Path(name).is_file():
        trace = read_trace(Path(name)).trace.from_zero()
        return lambda qps: trace.scaled(qps).window(duration_s), _longest(trace)

    def drawn(qps: float) -> Trace:
        return synthesize(name, qps=qps, duration_s=duration_s, seed=seed)

    return drawn, _longest(synthesize(name, "at-once", num_requests=_SAMPLE, seed=seed))


def _longest(trace: Trace) -> int:
    return int((trace.prompt_tokens + trace.output_tokens).max())


def _with_progress(planner: Planner) -> list[Candidate]:
    """Plan with a bar on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TextColumn("layouts"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(planner.layouts()))
        return planner.plan(lambda: bar.advance(task))


def _report(planner: Planner, options: dict[str, Any], layouts: list[dict[str, Any]]) -> dict[str, Any]:
    from dataclasses import asdict

    spec, scheduler = planner.spec, planner.scheduler
    return {
        "format": "medha-plan",
        "version": 1,
        "options": {**options, **asdict(planner.goal), "gpu_memory_utilization": planner.utilization},
        "max_batch_tokens": scheduler.max_batch_tokens,
        "spec": {"name": spec.name, "machine": spec.machine, "provenance": spec.provenance},
        "layouts": layouts,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Printing


def _print(
    console: Console, planner: Planner, options: dict[str, Any], candidates: Sequence[Candidate], *, top: int
) -> None:
    from medha.sim.plan import ATTAINMENT, grouped

    goal, spec = planner.goal, planner.spec
    derived = " (5 times that of the fastest layout)" if goal.ttft_is_derived else ""
    console.print(
        f"{options['model']} on {goal.num_gpus} x {spec.name} ({spec.provenance}), {len(candidates)} layouts: a "
        f"prompt of {goal.context:,} tokens, TTFT {goal.ttft_s:g} s{derived}, TPOT {goal.tpot_s * 1e3:g} ms",
        highlight=False,
    )
    good = [candidate for candidate in candidates if not candidate.reasons]
    if good:
        console.print(_table(f"{len(good)} meet everything, the best first", good[:top]))
    else:
        near = [candidate for candidate in candidates if candidate.ttft_s is not None]
        console.print("no layout meets everything", highlight=False)
        if near:
            console.print(_table("the nearest", near[:top]))
    for kind, group in grouped(list(candidates)):
        names = ", ".join(str(candidate.layout) for candidate in group[:_NAMED])
        more = f" and {len(group) - _NAMED} more" if len(group) > _NAMED else ""
        text = group[0].reasons[0].text
        console.print(f"{kind}: {names}{more}; the first of them: {text}", highlight=False)
    if planner.workload is not None:
        console.print(
            f"capacity: the highest rate at which {ATTAINMENT:.0%} of the requests of {options['workload']} meet both "
            f"objectives, in simulations of one replica over {goal.duration_s:g} s of arrivals",
            highlight=False,
        )


def _table(title: str, candidates: Sequence[Candidate]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    has_capacity = any(one.capacity_qps is not None for one in candidates)
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("layout", no_wrap=True)
    for name in ("TTFT\ns", "TPOT\nms", "beside a\nchunk ms", "KV tokens\nmillions", "free\nbeside"):
        table.add_column(name, justify="right", no_wrap=True)
    if has_capacity:
        table.add_column("capacity\nrequests/s", justify="right", no_wrap=True)
    for one in candidates:
        cells = (
            _cell(one.ttft_s, ",.2f"),
            _cell(one.tpot_s, ".1f", 1e3),
            _cell(one.tpot_beside_s, ".1f", 1e3),
            _cell(one.num_kv_tokens, ",.2f", 1e-6),
            _cell(one.headroom, ".0%"),
        )
        table.add_row(str(one.layout), *cells, *([_cell(one.capacity_qps, ".3g")] if has_capacity else []))
    return table


def _cell(value: float | None, form: str, scale: float = 1.0) -> str:
    return "" if value is None else f"{value * scale:{form}}"
