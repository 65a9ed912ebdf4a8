"""``python -m tools.fidelity``: kernel tables in, request times out, against what a real engine took.

The folder holds kernel tables of a model on an accelerator (``profile/``, see :mod:`tools.kernels`) and a run of
an engine there (``vllm_run/``, see :mod:`tools.vllm_run`). The simulator is given coefficients fitted to the tables,
the engine's settings, a fixed time of the host for each step, and of each request when it was queued and its two
lengths. Nothing is fitted to the run. With several tensor-parallel ranks the tables are those of one of them, and what
they exchange is counted with a link of a given latency and bandwidth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from medha.cli.options import OutputJson
from medha.cli.report import check_writable, deliver, stamp
from medha.cost.coefficients import Coefficients, Curve, Link, ProfileKey
from medha.cost.hardware import LinkRates
from medha.cost.predictor import Predictor
from medha.errors import ConfigError
from medha.sched.scheduler import Scheduler
from medha.sim.pipeline import Pipeline
from medha.sim.simulator import Simulation
from medha.workload.metrics import Floats, TokenTimes
from tools.command import main
from tools.kernels import fit_kernels, read_kernels
from tools.vllm_run import MeasuredRun, read_run

Figures = dict[str, dict[str, float]]
METRICS = {"TTFT": "ttft_s", "TPOT": "tpot_s", "latency": "e2el_s"}
SHARES = {"median": 50, "P90": 90, "P95": 95, "P99": 99}
AIMS = dict.fromkeys(("TTFT mean", "TPOT mean", "latency mean", "makespan"), 0.03)
"""Largest absolute error aimed at."""


def fidelity(
    folder: Path,
    *,
    model: str | None = None,
    host_s: float = 1e-3,
    num_kv_tokens: int | None = None,
    link: LinkRates | None = None,
) -> dict[str, Any]:
    """Simulate a run from the kernel tables beside it, and compare.

    Args:
        folder: with ``profile/`` and ``vllm_run/``.
        model: name or path; None is what the run's settings say.
        host_s: seconds of a step on the host.
        num_kv_tokens: size of the KV pool; None is what the settings say, or else as much as all requests need.
        link: of all-reduces among the tensor-parallel ranks of the run.

    Returns:
        The report.

    Raises:
        ConfigError: the folder lacks something, or the run is not of a kind that can be simulated.
    """
    run = read_run(folder / "vllm_run", model=model)
    kernels = read_kernels(folder / "profile", run.model.num_layers)
    if run.config.max_batch_tokens > kernels.max_chunk:
        raise ConfigError(
            f"max_num_batched_tokens={run.config.max_batch_tokens} in {folder}; accepted: at most "
            f"{kernels.max_chunk}, the longest chunk in its attention table"
        )
    if (run.tp > 1) != (link is not None):
        accepted = "a link, by latency and bandwidth, with several ranks and none with one"
        raise ConfigError(f"tensor_parallel_size={run.tp} in {folder} and link={link}; accepted: {accepted}")
    key = ProfileKey("kernel tables", run.model_name, run.model.dtype, "one rank", "vllm", 0, run.block_size, "")
    coefficients = fit_kernels(kernels, key, host_s=host_s)
    if link is not None:
        coefficients = _linked(coefficients, run, link)
    num_blocks = _num_blocks(run, num_kv_tokens)
    simulated = _replay(run, coefficients, num_blocks)
    return {
        "benchmark": "fidelity",
        "title": f"{run.model_name}: simulated against measured",
        "environment": stamp(),
        "options": {
            "run": folder.name,
            "host_s": host_s,
            "num_kv_tokens": num_kv_tokens,
            "link": link and asdict(link),
        },
        "run": {
            "num_requests": len(run.trace),
            "prompt_tokens": int(run.trace.prompt_tokens.sum()),
            "output_tokens": int(run.trace.output_tokens.sum()),
            "max_num_seqs": run.config.max_num_seqs,
            "max_batch_tokens": run.config.max_batch_tokens,
            "num_kv_tokens": num_blocks * run.block_size,
        },
        **_figures(run, simulated),
        "notes": [f"{host_s * 1e3:g} ms of the host a step; nothing is fitted to the run; one simulation"],
    }


def _linked(coefficients: Coefficients, run: MeasuredRun, link: LinkRates) -> Coefficients:
    """With two all-reduces a layer, and the gathering of logits; elements of two bytes."""
    reduces = Link(2 * run.model.num_layers, link.alpha_s, link.bytes_per_s, 2 * run.model.hidden_size)
    head, received = coefficients.head, 2 * run.model.vocab_size * (1 - 1 / run.tp) / link.bytes_per_s
    assert head is not None, "one stage has the head"
    gathered = tuple(seconds + link.alpha_s + rows * received for rows, seconds in zip(head.x, head.y, strict=True))
    return replace(coefficients, tp=reduces, head=Curve(head.x, gathered))


def _replay(run: MeasuredRun, coefficients: Coefficients, num_blocks: int) -> TokenTimes:
    """Simulate the requests of a run."""
    stage = Predictor(coefficients, max_tokens=run.config.max_batch_tokens)
    scheduler = Scheduler(run.config, num_blocks=num_blocks, block_size=run.block_size)
    outcome = Simulation(scheduler, Pipeline([stage]), run.trace).run().requests
    if outcome.is_refused.any():
        row = int(np.argmax(outcome.is_refused))
        tokens = int(run.trace.prompt_tokens[row] + run.trace.output_tokens[row])
        raise ConfigError(
            f"num_kv_tokens={num_blocks * run.block_size}; accepted: at least the {tokens} tokens of request "
            f"{run.trace.request_ids[row]}"
        )
    return TokenTimes(run.times.arrival_s, outcome.first_token_s, outcome.finish_s, run.times.num_tokens)


def _num_blocks(run: MeasuredRun, num_kv_tokens: int | None) -> int:
    if num_kv_tokens is not None:
        if num_kv_tokens < run.block_size:
            raise ConfigError(f"num_kv_tokens={num_kv_tokens}; accepted: at least a block, {run.block_size}")
        return num_kv_tokens // run.block_size
    if run.num_blocks is not None:
        return run.num_blocks
    return int(np.ceil((run.trace.prompt_tokens + run.trace.output_tokens) / run.block_size).sum())


def _figures(run: MeasuredRun, simulated: TokenTimes) -> dict[str, Any]:
    """Figures of the run, errors of each request, and which of both are as small as aimed at."""
    spreads = {metric: compared(getattr(run.times, name), getattr(simulated, name)) for metric, name in METRICS.items()}
    makespan = pair(makespan_s(run.times), makespan_s(simulated))
    each = {metric: request_error(run.times, simulated, metric) for metric in METRICS}
    errors = {
        "makespan": makespan["error"],
        **{f"{metric} of a request": error for metric, error in each.items()},
        **{f"{metric} mean": spread["mean"]["error"] for metric, spread in spreads.items()},
    }
    return {
        **spreads,
        "makespan": makespan,
        "of each request": {f"{metric}_error": error for metric, error in each.items()},
        "aims": against_aims(errors, AIMS),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Times of requests on a real engine against those in a simulation of it


def makespan_s(times: TokenTimes) -> float:
    """First arrival to last token of all."""
    return float(times.finish_s.max() - times.arrival_s.min())


def compared(measured: Floats, simulated: Floats) -> Figures:
    """Mean, median and percentiles on both sides, and the signed error as a share of the measured."""
    sides = [values[np.isfinite(values)] for values in (measured, simulated)]
    means = pair(*(float(values.mean()) for values in sides))
    return {"mean": means, **{n: pair(*(float(np.percentile(v, p)) for v in sides)) for n, p in SHARES.items()}}


def pair(measured_s: float, simulated_s: float) -> dict[str, float]:
    """A figure on both sides, seconds, and its error."""
    return {"measured_s": measured_s, "simulated_s": simulated_s, "error": simulated_s / measured_s - 1.0}


def request_error(measured: TokenTimes, simulated: TokenTimes, metric: str) -> float:
    """The absolute error of each request as a share of what was measured, the mean over all requests."""
    real, ours = (getattr(times, METRICS[metric]) for times in (measured, simulated))
    known = np.isfinite(real) & np.isfinite(ours) & (real > 0)
    return float(np.mean(np.abs(ours[known] / real[known] - 1.0)))


def against_aims(errors: Mapping[str, float], aims: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Whether absolute errors are within the largest that are aimed at, by name."""
    found = {name: (abs(errors[name]), aim) for name, aim in aims.items()}
    return {
        name: {"error": error, "aimed_error": aim, "verdict": "met" if error <= aim else "missed"}
        for name, (error, aim) in found.items()
    }


def fidelity_command(
    run: Annotated[
        Path, typer.Option(help="Folder with kernel tables in profile/ and a measured run of vLLM in vllm_run/.")
    ],
    model: Annotated[
        str | None, typer.Option(help="Name, or path of a config.json; by default as the run says.")
    ] = None,
    host_s: Annotated[float, typer.Option("--host-s", min=0, help="Seconds of a step on the host.")] = 1e-3,
    num_kv_tokens: Annotated[
        int | None, typer.Option(help="KV pool of the run; by default as it says, or all requests at once.")
    ] = None,
    link_bandwidth: Annotated[
        float | None, typer.Option(min=0, help="GB/s (10^9) of all-reduces, with several tensor-parallel ranks.")
    ] = None,
    link_latency: Annotated[float | None, typer.Option(min=0, help="Their latency, us.")] = None,
    output_json: OutputJson = None,
) -> None:
    """Simulated against measured request times: a run of vLLM from its kernel tables."""
    check_writable(output_json)
    if (link_bandwidth is None) != (link_latency is None) or link_bandwidth == 0:
        accepted = "a bandwidth above 0 and a latency, or neither"
        raise ConfigError(f"link_bandwidth={link_bandwidth}, link_latency={link_latency}; accepted: {accepted}")
    link = None
    if link_bandwidth is not None and link_latency is not None:
        link = LinkRates(1e-6 * link_latency, 1e9 * link_bandwidth)
    deliver(fidelity(run, model=model, host_s=host_s, num_kv_tokens=num_kv_tokens, link=link), output_json)


if __name__ == "__main__":
    main(fidelity_command)
