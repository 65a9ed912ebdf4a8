"""``medha simulate`` and ``medha plan``: the engine's scheduler on hardware that is not there.

Exit codes are in :mod:`medha.cli.command`; ``plan`` ends with 1 where no layout meets everything. What goes to stdout
and into files depends on the arguments alone; what was measured with a clock goes to stderr.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from medha.cli.command import FAILED_REQUESTS, check_apart, start_logging
from medha.cli.options import DEALT, MEMORY, PARALLEL, SCHEDULING, SERVING, SIMULATED, but, option, pick, takes
from medha.config import CDSP, SCHEDULERS, SchedulerConfig
from medha.errors import ConfigError, MedhaError, exit_code
from medha.workload.cli import PLAYED

NONE_MEETS = 1  # exit code of ``medha plan`` where no layout meets everything
BARE = {"tp": 8, "policy": ["priority,fcfs"], "qps": "0.3", "num_requests": 60}
"""What ``medha simulate`` without arguments runs: a convoy, and the default that dissolves it."""
BARE_TEXT = "medha simulate --tp 8 --policy priority,fcfs --request-rate 0.3 --num-prompts 60"
# What an engine needs, and a simulation does not or takes in its own way.
_OTHERS = (
    *("scheduler", "policy", "admission", "async_scheduling", "tenant_weights", "profile"),
    *("tp_forward", "dist_timeout", "kv_memory", "swap_space", "block_size"),
    *("decode_replicas", "decode_tp", "transfer_buffers"),
)
_SHARED = [but(group, *_OTHERS) for group in (PARALLEL, SCHEDULING, SERVING, MEMORY)]

OutputJson = Annotated[Path | None, option("--output-json", "--json", help="Write the report here; - is stdout.")]
_SPECS = "a100-80g, h100-80g, h200-141g, b200-180g, cpu (a thread), or the JSON file of a spec."
Hardware = Annotated[str, option(help=_SPECS, shows=True)]
_MODELS = "llama-3-8b, llama-3-70b, llama-3.1-8b, qwen2.5-14b-1m, a config.json or its folder."
Model = Annotated[str, option("--model", "-m", help=_MODELS, shows=True)]
_SCHEDULERS = f"Of {', '.join((*SCHEDULERS, CDSP))}; several: repeated or comma separated."
_NAMES = "priority[:NAME], srpt, lars, ilrs, lrs, edf, sjf, fcfs or package.module:name"
_POLICIES = f"Of the medha scheduler: {_NAMES}; several likewise."


@takes(*_SHARED, pick("max_model_len"), SIMULATED, DEALT, PLAYED)
def simulate(
    context: typer.Context,
    scheduler: Annotated[list[str] | None, option(help=_SCHEDULERS, shows="medha")] = None,
    policy: Annotated[list[str] | None, option(help=_POLICIES, shows="priority")] = None,
    hardware: Hardware = "h100-80g",
    model: Model = "llama-3-8b",
    prefill_only: Annotated[bool, option("--prefill-only", help="Requests end with their first token.")] = False,
    stop_s: Annotated[float | None, option(help="Stop at this second of the arrivals' clock.", shows="the end")] = None,
    output_json: OutputJson = None,
    timeline: Annotated[Path | None, option(help="Chrome trace of a single run (.json or .json.gz).")] = None,
    **_: Any,
) -> int:
    """Run the scheduler on predicted hardware: whole days of arrivals in minutes, without a GPU.

    Several schedulers, policies or rates in one call are compared on the same arrivals and lengths. Without arguments
    a small comparison runs.
    """
    from medha.cli.report import STDOUT, check_writable, deliver, progress
    from medha.sim.study import NOTES, Run, about, config_of, remarks, run_all, shown, speed, systems_of

    start_logging("warning")
    is_bare = not any(str(context.get_parameter_source(name)).endswith("COMMANDLINE") for name in context.params)
    given = {**context.params, **(BARE if is_bare else {})}
    for path in (output_json, timeline):
        check_writable(path)
    check_apart([output_json, timeline], [given["trace"], *filter(Path.is_file, (Path(hardware), Path(model)))])
    systems = systems_of(given)
    if timeline == STDOUT:
        raise ConfigError("timeline=-; accepted: a file, as stdout has the figures")
    if timeline is not None and len(systems) > 1:
        raise ConfigError(f"timeline={timeline} with {len(systems)} runs; accepted: one scheduler, policy and rate")
    runs: list[Run] = []
    failure: MedhaError | None = None
    with progress("simulating requests", sum(len(system.trace) for system in systems)) as done:
        try:
            runs.extend(run_all(systems, given, done))  # those before an error stay in the list
        except MedhaError as error:
            if not runs:
                raise
            failure = error
    reports = [run.report for run in runs]
    report = {
        "format": "medha-simulation",
        "version": 1,
        "complete": failure is None and all(one["complete"] for one in reports),
        "config": config_of(systems[0].replica, given),
        "runs": reports,
    }
    if timeline is not None:  # before stdout, whose reader may leave
        from medha.sim.outcome import write_trace

        write_trace(timeline, runs[0].outcome, runs[0].segments)
    title = "\n".join([*([BARE_TEXT] if is_bare else []), *about(systems, given)])
    deliver(report, output_json, shown={"title": title, **shown(reports), "notes": [*remarks(reports), *NOTES]})
    print(speed(runs), file=sys.stderr)
    if failure is not None:
        raise failure
    if runs[-1].interrupted:
        return exit_code(KeyboardInterrupt())
    return FAILED_REQUESTS if any(one["failed"] for one in reports) else 0


# ---------------------------------------------------------------------------------------------------------------------
# medha plan


@takes(
    pick("gpu_memory_utilization", "max_batch_tokens"), but(pick("max_model_len"), max_model_len=(None, "as --context"))
)
def plan(
    context: Annotated[int, option(help="Prompt tokens of the request that is planned for.")],
    ttft_s: Annotated[float, option("--ttft-s", help="Objective of its time to the first token, seconds.")],
    tpot_s: Annotated[float, option("--tpot-s", help="Objective of its time between tokens, seconds.")],
    gpus: Annotated[int, option("--gpus", help="Accelerators in all.")],
    model: Model = "llama-3-8b",
    hardware: Hardware = "h100-80g",
    top: Annotated[int, option(min=1, help="Layouts to print.", shows=True)] = 5,
    output_json: OutputJson = None,
    **given: Any,
) -> int:
    """Find the layout of a model on so many accelerators that meets TTFT and TPOT objectives, without a GPU.

    Every product of replicas, tp (inside a node), spp and kvp that uses all of them is simulated.
    """
    from medha.cli.report import check_writable, deliver, progress
    from medha.cost.hardware import load_spec
    from medha.sim.plan import Goal, Planner, report_of, shown
    from medha.sim.replica import Replica, find_model

    check_writable(output_json)
    check_apart([output_json], [*filter(Path.is_file, (Path(hardware), Path(model)))])
    shape, max_model_len = find_model(model), given["max_model_len"]
    if max_model_len is not None and context > max_model_len:
        raise ConfigError(f"context={context}; accepted: at most max_model_len={max_model_len}")
    if max_model_len is None and context > (claimed := shape.max_position_embeddings):
        what = f"{model} claims {claimed:,} positions; its RoPE is taken as scaled to {context:,}"
        print(f"medha: {what}", file=sys.stderr)
    scheduler = SchedulerConfig(max_batch_tokens=given["max_batch_tokens"])
    replica = Replica(load_spec(hardware), shape, scheduler=scheduler, utilization=given["gpu_memory_utilization"])
    planner = Planner(replica, Goal(gpus, context, ttft_s, tpot_s))
    with progress("simulating layouts", len(planner.layouts())) as done:
        candidates = planner.plan(done)
    options = {"model": model, "hardware": hardware}
    deliver(report_of(planner, options, candidates), output_json, shown=shown(planner, options, candidates, top=top))
    return 0 if candidates[0]["meets"] else NONE_MEETS
