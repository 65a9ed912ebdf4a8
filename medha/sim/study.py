"""What ``medha simulate`` runs: systems on traces, one after the other, from parameters that are checked before."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from medha.cli.display import budget_text
from medha.cli.options import DEALT
from medha.config import CDSP, CacheConfig, ParallelConfig, SchedulerConfig, whole_blocks
from medha.config.fields import POSITIVE, check_number, number_or_text, read_option, words
from medha.cost.hardware import load_spec
from medha.errors import ConfigError
from medha.sched.policy import DEFAULT_POLICY
from medha.sim.outcome import DRAIN, Outcome, System, alone_seconds, report
from medha.sim.pipeline import Segment
from medha.sim.replica import Replica, find_model, spec_fields
from medha.sim.simulator import Simulation
from medha.workload.io import read_trace
from medha.workload.metrics import Floats
from medha.workload.synth import retimed, synthesize
from medha.workload.trace import Trace

NUM_REQUESTS = 200  # of a workload where neither a number nor a duration is given
LIVE_ONLY = ("scheduler", "policy", "admission", "async_scheduling", "tenant_weights")
"""Fields of a scheduler's configuration that a simulation does not take from its options as they are."""


class Run(NamedTuple):
    """One system and what it came to."""

    system: System
    report: dict[str, Any]  # of medha.sim.outcome.report
    outcome: Outcome
    segments: list[Segment]  # batches on the stages, where they are kept
    wall_s: float  # that the simulation took on this machine; no part of the report
    interrupted: bool = False


def run_all(
    systems: Sequence[System], given: Mapping[str, Any], on_progress: Callable[[int], None] = lambda count: None
) -> Iterator[Run]:
    """Run one after the other; an interrupt ends the present one, and with it all.

    Of the parameters ``stop_s`` counts, and ``timeline``, for which batches on the stages are kept; ``on_progress`` is
    told how many more requests are closed.
    """
    alone: dict[float | None, Floats] = {}
    for system in systems:
        if system.qps not in alone:
            alone[system.qps] = alone_seconds(system.replica, system.trace.prompt_tokens)
        segments: list[Segment] = []
        built = system.replica.build(on_segment=None if given["timeline"] is None else segments.append)
        simulation = Simulation(*built, system.trace, stop_s=given["stop_s"], on_progress=on_progress)
        start_s, interrupted = time.perf_counter(), False
        try:
            simulation.run()
        except KeyboardInterrupt:
            interrupted = True
        wall_s = time.perf_counter() - start_s
        figures = report(system, simulation.outcome, alone[system.qps], interrupted=interrupted)
        yield Run(system, figures, simulation.outcome, segments, wall_s, interrupted)
        if interrupted:
            return


def speed(runs: Sequence[Run]) -> str:
    """How fast this machine was, in words."""
    wall_s = max(sum(run.wall_s for run in runs), 1e-9)
    virtual_s = sum(run.outcome.duration_s for run in runs)
    requests, batches = (sum(run.report[name] for run in runs) / wall_s for name in ("num_prompts", "num_batches"))
    return f"simulated {virtual_s:,.0f} s in {wall_s:,.1f} s: {requests:,.0f} requests/s, {batches:,.0f} batches/s"


# ---------------------------------------------------------------------------------------------------------------------
# From parameters


def systems_of(given: Mapping[str, Any]) -> list[System]:
    """The runs that the parameters ask for: every system at every rate, each built once to see that it fits."""
    for name in ("stop_s", "slo_ttft_s", "slo_tpot_s"):
        if given[name] is not None:
            check_number(name, given[name])
    spec, model = load_spec(given["hardware"]), find_model(given["model"])
    cache = CacheConfig(num_blocks=given["num_kv_blocks"], gpu_memory_utilization=given["gpu_memory_utilization"])
    parallel = ParallelConfig(tp=given["tp"], spp=given["spp"], kvp=given["kvp"])
    replica = Replica(spec, model, parallel, utilization=cache.gpu_memory_utilization, num_blocks=cache.num_blocks)
    configs, traces = _schedulers(given), _traces(given)
    if CDSP in configs and any((trace.output_tokens > 1).any() for trace in traces.values()):
        accepted = "--prefill-only, as no decode runs"
        raise ConfigError(f"scheduler='cdsp' with outputs of more than a token; accepted: {accepted}")
    longest, most = max(trace.longest for trace in traces.values()), given["max_model_len"]
    if most is not None and longest > most:
        raise ConfigError(f"a request has {longest:,} tokens and max_model_len={most}; accepted: at least as many")
    replica = replace(replica, max_model_len=most or longest)
    systems = [
        System(name, replace(replica, scheduler=config), trace, rate)
        for name, config in configs.items()
        for rate, trace in traces.items()
    ]
    for system in systems:
        try:
            system.replica.build()
        except ValueError as error:  # also what the pool does not hold
            raise ConfigError(str(error)) from error
    return systems


def about(systems: Sequence[System], given: Mapping[str, Any]) -> list[str]:
    """What is run, in two lines, and what a batch of each scheduler may hold, in one."""
    replica, trace = systems[0].replica, systems[0].trace
    spec, layout = replica.spec, replica.parallel
    tokens = replica.kv_blocks() * replica.block_size
    has_tpot = trace.tpot_slo_s is not None and not np.isnan(trace.tpot_slo_s).all()
    what = given["trace"] or f"{given['workload'] or 'medha-mix'} ({given['arrivals']}, seed {given['seed']})"
    at_rate = " at the first rate" * (len({system.qps for system in systems}) > 1)
    return [
        f"{given['model']} on {layout.world_size} x {spec.name} ({spec.provenance}): tp {layout.tp}, "
        f"spp {layout.spp}, kvp {layout.kvp}, {tokens:,} KV tokens a group",
        f"{what}: {len(trace):,} requests over {trace.duration_s:,.4g} s, {int(trace.prompt_tokens.sum()):,} prompt "
        f"and {int(trace.output_tokens.sum()):,} output tokens{at_rate}",
        *dict.fromkeys(budget_text(system.replica.scheduler, has_tpot=has_tpot) for system in systems),
    ]


def config_of(replica: Replica, given: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for, as plain values, for a report."""
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    for name in ("scheduler", "policy", "qps", "output_json", "timeline"):
        plain.pop(name)  # each run has its own, or it is not about the outcome
    return {
        "medha": version("medha"),
        **plain,
        "workload": (given["workload"] or "medha-mix") if given["trace"] is None else None,
        "max_model_len": replica.max_model_len,
        "num_gpus": replica.parallel.world_size,
        "hardware_spec": spec_fields(replica.spec),
        "num_kv_blocks": replica.kv_blocks(),
        "block_size": replica.block_size,
    }


def _schedulers(given: Mapping[str, Any]) -> dict[str, SchedulerConfig]:
    """By name; each policy of the medha scheduler is one, and the others have none."""
    schedulers = _listed("scheduler", given) or ["medha"]
    policies = _listed("policy", given)
    if policies and "medha" not in schedulers:
        raise ConfigError(f"policy={','.join(policies)!r} is for the medha scheduler; accepted: --scheduler medha too")
    asked = [one for one in fields(SchedulerConfig) if one.name not in LIVE_ONLY and given[one.name] is not None]
    for one in asked:
        if CDSP not in schedulers and one.name in DEALT and read_option(one, given[one.name]) != one.default:
            raise ConfigError(f"{one.name}={given[one.name]!r} is for cdsp; accepted: --scheduler cdsp too")
    budgets = {one.name: read_option(one, given[one.name]) for one in asked}
    budgets["max_kv_per_group"] = whole_blocks(given["max_kv_per_group"], CacheConfig().block_size)
    configs = {}
    for scheduler in schedulers:
        for policy in (policies or [DEFAULT_POLICY]) if scheduler == "medha" else [None]:
            own: dict[str, Any] = {} if policy is None else {"policy": policy}
            configs[policy or scheduler] = SchedulerConfig(scheduler, **own, **budgets)
    return configs


def _listed(name: str, given: Mapping[str, Any]) -> list[str]:
    """The parts of comma separated values, each once."""
    text = ",".join(values := given[name] or [])
    if not (names := list(dict.fromkeys(words(text)))) and values:
        raise ConfigError(f"{name}={text!r}; accepted: names, comma separated")
    return names


def _traces(given: Mapping[str, Any]) -> dict[float | None, Trace]:
    """The requests of each rate; None is that of a trace, or all at once."""
    path, number, duration_s = given["trace"], given["num_requests"], given["duration"]
    if path is not None and given["workload"] is not None:
        raise ConfigError(f"workload={given['workload']!r} and trace={str(path)!r}; accepted: one of the two")
    reading = None if path is None else read_trace(path)
    if reading is None and number is None and duration_s is None:
        number = NUM_REQUESTS
    drawn = {"burstiness": given["burstiness"], "seed": given["seed"], "num_requests": number, "duration_s": duration_s}
    traces = {}
    for rate in _rates(given["qps"]):
        if reading is not None:
            trace = retimed(reading, given["arrivals"], qps=rate, **drawn)
            if not len(trace):
                raise ConfigError(f"no request of {path} arrives within duration={duration_s} s")
        else:
            trace = synthesize(given["workload"] or "medha-mix", given["arrivals"], qps=rate, **drawn)
        if given["stop_s"] is not None and given["stop_s"] <= (first_s := trace.arrival_s[0]):
            at = "" if rate is None else f" at {rate:g} requests/s"
            raise ConfigError(f"no request arrives before stop_s={given['stop_s']}{at}; accepted: above {first_s}")
        for name in ("ttft_slo_s", "tpot_slo_s"):  # the objectives of the command are for requests that bring none
            own, value = getattr(trace, name), given[f"slo_{name.replace('_slo', '')}"]
            if value is not None:
                own = np.full(len(trace), np.nan) if own is None else own
                trace = replace(trace, **{name: np.where(np.isnan(own), value, own)})
        if given["prefill_only"]:
            trace = replace(trace, output_tokens=np.ones_like(trace.output_tokens))
        traces[rate] = trace
    return traces


def _rates(text: str | None) -> list[float | None]:
    rates: list[Any] = [number_or_text(word) for word in words(text or "")]
    if (text is not None and not rates) or not all(POSITIVE.holds(rate) for rate in rates):
        raise ConfigError(f"qps={text!r}; accepted: finite numbers above 0, comma separated")
    return list(dict.fromkeys(rates)) or [None]


# ---------------------------------------------------------------------------------------------------------------------
# What is printed of reports

NOTES = (
    "TTFT: arrival to first token, queueing included. TPOT: (last - first token) / (tokens - 1). Slowdown: TTFT over "
    "its predicted value for that prompt on the idle replica.",
    "In time: finished, TTFT by the deadline (given, or derived by the scheduler) and TPOT by its objective; a "
    "share of the requests that arrived. Goodput: those a second.",
    "Bubble: share of the time in which a stage had no work and another had some; a mean over stages, as busy.",
    "Over-saturated: the queue (arrived, no first token) grows through the second half of the arrivals by more than "
    f"chance, and takes more than {DRAIN:.0%} of the time of arrivals to drain after the last.",
)
_LATENCY = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "p50_slowdown", "p99_slowdown")
_LOAD = {"goodput": "request_goodput", "output tokens/s": "output_throughput", "waiting": "waiting", "active": "active"}


def shown(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of reports that are printed, as tables of a row a run or a bucket of prompt lengths."""
    latency, load, lengths = [], [], []
    for one in reports:
        who = {"system": one["label"]}
        rest = {"in time share": one["slo_attainment"], "over-saturated": one["saturation"]["is_over"]}
        latency.append({**who, **{name: one[name] for name in _LATENCY}, **rest})
        busy, bubble = (fmean(stage[name] for stage in one["stages"]) for name in ("occupancy", "bubble"))
        kv_use = {f"{name} share": share for name, share in one["kv_cache_usage"].items()}
        rest = {"KV use": kv_use, "busy share": busy, "bubble share": bubble}
        load.append({**who, **{short: one[name] for short, name in _LOAD.items()}, **rest})
        for bucket in one["ttft_by_length"]:
            figures = {name: bucket[name] for name in bucket if name.startswith("p")}
            share = {"in time share": bucket["slo_attainment"]}
            lengths.append({**who, "prompt": bucket["bucket"], "requests": bucket["num_requests"], **figures, **share})
    return {"latency": latency, "load": load, "by prompt tokens": lengths}


def remarks(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is unusual about runs, a line each."""
    lines = []
    for one in reports:
        said, over = [], one["saturation"]
        if not one["complete"]:
            said.append(f"stopped at {one['duration']:,.6g} s with {one['unfinished']:,} unfinished")
        if one["failed"]:
            said.append(f"{one['failed']:,} refused, as they never fit the KV memory")
        if one["num_preemptions"]:
            moved = f" or swapped ({one['num_swaps']:,} times)" if one["num_swaps"] else ""
            said.append(f"{one['num_preemptions']:,} preempted, {one['work_lost_s']:,.3g} s computed again{moved}")
        if over["is_over"]:
            drain_s = over["drain_s"]
            drain = "does not drain" if drain_s is None else f"drains in {drain_s:,.3g} s after the last arrival"
            said.append(f"over-saturated: the queue grows by {over['growth']:,.3g} and {drain}")
        if said:
            lines.append(f"{one['label']}: {'; '.join(said)}.")
    return lines
