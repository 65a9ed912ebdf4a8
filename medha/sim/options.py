"""From the parameters of ``medha simulate`` to what is run; they are checked here, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from medha.config import CacheConfig, ParallelConfig, SchedulerConfig, whole_blocks
from medha.cost.hardware import load_spec
from medha.errors import ConfigError
from medha.sim.known_models import find_model
from medha.sim.replica import Replica
from medha.sim.report import System
from medha.sim.study import Study
from medha.workload.io import Reading, read_trace
from medha.workload.synth import arrival_times, generators, synthesize
from medha.workload.trace import Trace

NUM_REQUESTS = 200
"""Of a workload where neither a number nor a duration is given."""

SCHEDULING = (
    "max_num_seqs", "max_batch_tokens", "chunk_size", "t_target_s", "quantum_s", "rho_max", "long_threshold",
    "late_share", "patience_s", "max_kv_per_group", "overcommit", "stream", "num_swap_blocks",
    "swap_block_s",
)  # fmt: skip
_TOLD = (
    "hardware", "model", "tp", "spp", "kvp", "workload", "trace", "arrivals", "burstiness", "duration", "num_requests",
    "seed", "slo_ttft_s", "slo_tpot_s", "gpu_memory_utilization", "stop_s", *SCHEDULING,
)  # fmt: skip


def study_of(given: Mapping[str, Any]) -> Study:
    """The runs that the parameters ask for: every system at every rate.

    Raises:
        ConfigError: a parameter is not accepted.
    """
    _check_above_0("stop_s", given["stop_s"])
    spec, model = load_spec(given["hardware"]), find_model(given["model"])
    parallel = ParallelConfig(tp=given["tp"], spp=given["spp"], kvp=given["kvp"])
    configs = _schedulers(given)
    traces = _traces(given)
    replica = Replica(
        spec,
        model,
        parallel,
        max_model_len=_longest(traces, given["max_model_len"]),
        utilization=given["gpu_memory_utilization"],
        num_blocks=given["num_kv_blocks"],
    )
    systems = [
        System(name, replace(replica, scheduler=config), rate) for name, config in configs.items() for rate in traces
    ]
    keeps: Literal["none", "window", "all"] = "none" if given["plot"] is None else "window"
    return Study(
        systems,
        traces,
        stop_s=given["stop_s"],
        skips=not given["no_skip"],
        keeps=keeps if given["timeline"] is None else "all",
    )


def about(study: Study, given: Mapping[str, Any]) -> list[str]:
    """What is run, in two lines, and what a batch of each scheduler may hold, in one."""
    replica = study.systems[0].replica
    spec, layout = replica.spec, replica.parallel
    tokens = replica.kv_blocks() * replica.block_size
    trace = next(iter(study.traces.values()))
    what = given["trace"] or f"{given['workload'] or 'medha-mix'} ({given['arrivals']}, seed {given['seed']})"
    return [
        f"{given['model']} on {replica.num_gpus} x {spec.name} ({spec.provenance}): tp {layout.tp}, "
        f"spp {layout.spp}, kvp {layout.kvp}, {tokens:,} KV tokens a group",
        f"{what}: {len(trace):,} requests over {trace.duration_s:,.4g} s, {int(trace.prompt_tokens.sum()):,} prompt "
        f"and {int(trace.output_tokens.sum()):,} output tokens" + " at the first rate" * (len(study.traces) > 1),
        *dict.fromkeys(system.replica.scheduler.budget_text(has_tpot=_has_tpot(trace)) for system in study.systems),
    ]


def _has_tpot(trace: Trace) -> bool:
    return trace.tpot_slo_s is not None and not bool(np.isnan(trace.tpot_slo_s).all())


def config_of(study: Study, given: Mapping[str, Any]) -> dict[str, Any]:
    """What was asked for, as plain values, for a report."""
    replica = study.systems[0].replica
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in given.items() if name in _TOLD}
    return {
        "medha": version("medha"),
        **plain,
        "workload": (given["workload"] or "medha-mix") if given["trace"] is None else None,
        "max_model_len": replica.max_model_len,
        "num_gpus": replica.num_gpus,
        "spec": {"name": replica.spec.name, "machine": replica.spec.machine, "provenance": replica.spec.provenance},
        "num_kv_blocks": replica.kv_blocks(),
        "block_size": replica.block_size,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Systems


def _schedulers(given: Mapping[str, Any]) -> dict[str, SchedulerConfig]:
    """By name; each policy of the medha scheduler is one, and the others have none."""
    schedulers = _listed(given["scheduler"]) or ["medha"]
    policies = _listed(given["policy"])
    if policies and "medha" not in schedulers:
        raise ConfigError(f"policy={','.join(policies)!r} is for the medha scheduler; accepted: --scheduler medha too")
    budgets = {name: given[name] for name in SCHEDULING}
    budgets["max_kv_per_group"] = whole_blocks(budgets["max_kv_per_group"], CacheConfig().block_size)
    configs = {}
    for scheduler in schedulers:
        if scheduler == "medha":
            for policy in policies or ["lars"]:
                configs[policy] = SchedulerConfig(scheduler, policy, **budgets)
        else:
            configs[scheduler] = SchedulerConfig(scheduler, **budgets)
    return configs


def _listed(values: list[str] | None) -> list[str]:
    """The parts of comma separated values, each once."""
    parts = [part.strip() for value in values or [] for part in value.split(",")]
    return list(dict.fromkeys(part for part in parts if part))


# ---------------------------------------------------------------------------------------------------------------------
# Requests


def _traces(given: Mapping[str, Any]) -> dict[float | None, Trace]:
    """The requests of each rate; None is that of a trace, or all at once."""
    rates, path = _rates(given["qps"]), given["trace"]
    if path is not None and given["workload"] is not None:
        raise ConfigError(f"workload={given['workload']!r} and trace={str(path)!r}; accepted: one of the two")
    reading = None if path is None else read_trace(path)
    return {
        rate: _with_objectives(_synthetic(given, rate) if reading is None else _of_file(reading, given, rate), given)
        for rate in rates
    }


def _rates(text: str | None) -> list[float | None]:
    if text is None:
        return [None]
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = [math.nan]
    if not all(0 < rate < math.inf for rate in rates):
        raise ConfigError(f"qps={text!r}; accepted: finite numbers above 0, comma separated")
    return list(dict.fromkeys(rates))


def _synthetic(given: Mapping[str, Any], rate: float | None) -> Trace:
    number, duration_s = given["num_requests"], given["duration"]
    _check_rate(given, rate)
    return synthesize(
        given["workload"] or "medha-mix",
        given["arrivals"],
        qps=rate,
        burstiness=given["burstiness"],
        num_requests=NUM_REQUESTS if number is None and duration_s is None else number,
        duration_s=duration_s,
        seed=given["seed"],
    )


def _of_file(reading: Reading, given: Mapping[str, Any], rate: float | None) -> Trace:
    """The requests of a file at some rate, those that are asked for."""
    trace = reading.trace
    if reading.has_arrivals:
        trace = trace if rate is None else trace.scaled(rate)
    else:
        _check_rate(given, rate)
        process, rng, burstiness = given["arrivals"], generators(given["seed"])[0], given["burstiness"]
        trace = trace.with_arrivals(
            arrival_times(process, rng, qps=rate, burstiness=burstiness, num_requests=len(trace))
        )
    if given["duration"] is not None:
        trace = trace.window(given["duration"])
    if given["num_requests"] is not None:
        trace = trace.head(given["num_requests"])
    if not len(trace):
        raise ConfigError(f"no request of {given['trace']} arrives within duration={given['duration']} s")
    return trace


def _check_rate(given: Mapping[str, Any], rate: float | None) -> None:
    if rate is None and given["arrivals"] != "at-once":
        raise ConfigError(f"arrivals={given['arrivals']!r} without a rate; accepted: --qps, or --arrivals at-once")


def _with_objectives(trace: Trace, given: Mapping[str, Any]) -> Trace:
    """With the objectives of the command for the requests that bring none."""
    for name in ("slo_ttft_s", "slo_tpot_s"):
        _check_above_0(name, given[name])
    ttft_s = _filled(trace.ttft_slo_s, given["slo_ttft_s"], len(trace))
    return replace(trace, ttft_slo_s=ttft_s, tpot_slo_s=_filled(trace.tpot_slo_s, given["slo_tpot_s"], len(trace)))


def _filled(column: NDArray[np.float64] | None, value: float | None, count: int) -> NDArray[np.float64] | None:
    if value is None:
        return column
    own = np.full(count, np.nan) if column is None else column
    return np.where(np.isnan(own), value, own)


def _longest(traces: dict[float | None, Trace], most: int | None) -> int:
    """Tokens of the longest request; the limit, where one is given."""
    longest = max(int((trace.prompt_tokens + trace.output_tokens).max()) for trace in traces.values())
    if most is not None and longest > most:
        raise ConfigError(f"a request has {longest:,} tokens and max_model_len={most}; accepted: at least as many")
    return longest if most is None else most


def _check_above_0(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{name}={value!r}; accepted: a finite number above 0")
