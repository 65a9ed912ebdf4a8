"""``python -m tools.fidelity``: kernel tables in, request times out, against what a real engine took.

The folder holds kernel tables of a model on an accelerator (``profile/``, see :mod:`tools.kernels`) and a run of
an engine there (``vllm_run/``). The simulator is given coefficients fitted to the tables,
the engine's settings, a fixed time of the host for each step, and of each request when it was queued and its two
lengths. Nothing is fitted to the run. With several tensor-parallel ranks the tables are those of one of them, and what
they exchange is counted with a link of a given latency and bandwidth.

The run has ``meta.json`` (the engine's settings, and its KV pool under ``kv_cache`` where it is known) and
``requests.csv`` (lengths and times of each request, seconds), as LLMServingSim's benchmark of vLLM writes them.
SGLang's names of settings are read as well. A column ``hash_ids`` (numbers with blanks between, one each 512 tokens of
the prompt, as Mooncake's traces have them) says what prompts share; without it a request shares with nobody but itself,
where it gives way and comes back.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from medha.cli.options import OutputJson
from medha.cli.report import check_writable, deliver, stamp
from medha.config import ModelConfig, SchedulerConfig
from medha.cost.coefficients import Coefficients, Curve, Link, ProfileKey
from medha.cost.hardware import LinkRates
from medha.cost.predictor import Predictor
from medha.errors import ConfigError
from medha.models.folder import read_json_object
from medha.sched.scheduler import Scheduler
from medha.sim.pipeline import Pipeline
from medha.sim.replica import find_model
from medha.sim.simulator import Simulation
from medha.workload.metrics import Floats, TokenTimes
from medha.workload.trace import Trace
from tools.command import main
from tools.kernels import fit_kernels, read_kernels
from tools.tables import columns_of, find_file

_COLUMNS = ("input_tokens", "output_tokens", "queued_s", "first_token_s", "last_token_s")
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run of a real engine.

    Attributes:
        model_name: as its settings say.
        model: its shape.
        config: of the scheduler that stands for the engine's.
        tp: ranks that share each layer.
        block_size, num_blocks: of the KV pool; ``num_blocks`` is None where the settings do not say.
        trace: the requests as they were queued.
        times: measured.
    """

    model_name: str
    model: ModelConfig
    config: SchedulerConfig
    tp: int
    block_size: int
    num_blocks: int | None
    trace: Trace
    times: TokenTimes


def read_run(folder: Path, *, model: str | None = None) -> MeasuredRun:
    """Read settings, requests and times of a run.

    Args:
        folder: that holds them.
        model: name or path; None is what ``meta.json`` says.

    Raises:
        ConfigError: a file, a setting or a column is missing or wrong, or the model is not known.
    """
    path = find_file(folder, "meta.json")
    meta = read_json_object(path)
    settings = meta.get("engine_kwargs")
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} has engine_kwargs={settings!r}; accepted: an object with the engine's settings")
    name = model or meta.get("model") or settings.get("model")
    if not isinstance(name, str):
        raise ConfigError(f"{path} names no model; accepted: a field model, or the option model")
    for degree in ("data_parallel_size", "pipeline_parallel_size"):
        if _setting(path, settings, degree, default=1) != 1:
            raise ConfigError(f"{path}: {degree}={settings[degree]}; accepted: 1")
    tp = _setting(path, settings, "tensor_parallel_size", "tp_size", default=1)
    pool, requests = _pool(path, meta, settings), _requests(find_file(folder, "requests.csv", "requests.csv.gz"))
    return MeasuredRun(name, find_model(name), _config(path, settings), tp, *pool, *requests)


def _config(path: Path, settings: Mapping[str, Any]) -> SchedulerConfig:
    budget = _setting(path, settings, "max_num_batched_tokens", "chunked_prefill_size")
    caching = settings.get("enable_prefix_caching") is not False and settings.get("disable_radix_cache") is not True
    return SchedulerConfig(
        scheduler="vllm",
        max_num_seqs=_setting(path, settings, "max_num_seqs", "max_running_requests"),
        max_batch_tokens=budget,
        chunk_size=_setting(path, settings, "long_prefill_token_threshold", default=0) or budget,
        depth=1,
        overcommit=True,  # vLLM takes KV blocks as they are needed, too
        prefix_caching=caching,  # on where the settings do not say
    )


def _pool(path: Path, meta: Mapping[str, Any], settings: Mapping[str, Any]) -> tuple[int, int | None]:
    """Tokens of a block, and blocks of the KV pool; None where nothing says how many."""
    pool = meta.get("kv_cache") or {}
    if not isinstance(pool, dict):
        raise ConfigError(f"{path}: kv_cache={pool!r}; accepted: an object with num_gpu_blocks or num_kv_tokens")
    said = {**settings, **pool}
    block_size = _setting(path, said, "block_size", "page_size", default=_BLOCK_SIZE)
    if block_size == 0:
        raise ConfigError(f"{path}: block_size=0; accepted: a whole number of at least 1")
    if blocks := _setting(path, {**meta, **said}, "num_gpu_blocks", default=0):
        return block_size, blocks - 1  # vLLM keeps one, which nobody gets
    return block_size, _setting(path, said, "num_kv_tokens", default=0) // block_size or None


def _setting(path: Path, settings: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """A whole number, under one of its names; ``default`` where it is missing or null."""
    name = next((name for name in names if settings.get(name) is not None), names[0])
    value = default if settings.get(name) is None else settings[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"{path}: {name}={value!r}; accepted: a whole number")
    return value


def _requests(path: Path) -> tuple[Trace, TokenTimes]:
    """Lengths and times, in the order in which requests were queued; the first at 0."""
    records, columns = columns_of(path, _COLUMNS)
    if not np.isfinite(columns).all():
        raise ConfigError(f"table {path} has a value that is not finite; accepted: requests that ended")
    order = np.argsort(columns[2], kind="stable")
    prompts, outputs, *times_s = columns[:, order]
    arrival_s, first_s, last_s = (column - times_s[0][0] for column in times_s)
    ids = np.array([records[row].get("request_id") or str(row) for row in order.tolist()])
    trace = Trace(arrival_s, prompts.astype(np.int64), outputs.astype(np.int64), ids)
    if "hash_ids" in records[0]:
        trace = replace(trace, prefix_hashes=_hashes(path, [records[row]["hash_ids"] or "" for row in order.tolist()]))
    return trace, TokenTimes(arrival_s, first_s, last_s, trace.output_tokens)


def _hashes(path: Path, texts: Sequence[str]) -> NDArray[np.object_]:
    """Ids of the blocks of each prompt."""
    found = np.empty(len(texts), dtype=object)
    try:
        found[:] = [array("q", map(int, text.split())) for text in texts]
    except ValueError as error:
        raise ConfigError(f"table {path}, hash_ids: {error}; accepted: whole numbers with blanks between") from error
    return found


Figures = dict[str, dict[str, float]]
METRICS = {"TTFT": "ttft_s", "TPOT": "tpot_s", "latency": "e2el_s"}
SHARES = {"median": 50, "P90": 90, "P95": 95, "P99": 99}
AIM = 0.03
"""Largest absolute error aimed at, of the means and the makespan."""


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
        what = f"max_num_batched_tokens={run.config.max_batch_tokens} in {folder}"
        raise ConfigError(f"{what}; accepted: at most {kernels.max_chunk}, the longest chunk in its attention table")
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
    scheduler = Scheduler(run.config, num_blocks=num_blocks, block_size=run.block_size, predictor=stage)
    outcome = Simulation(scheduler, Pipeline([stage]), run.trace).run().requests
    if outcome.is_refused.any():
        row = int(np.argmax(outcome.is_refused))
        tokens = int(run.trace.prompt_tokens[row] + run.trace.output_tokens[row])
        accepted = f"at least the {tokens} tokens of request {run.trace.request_ids[row]}"
        raise ConfigError(f"num_kv_tokens={num_blocks * run.block_size}; accepted: {accepted}")
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
    sides = {metric: (getattr(run.times, name), getattr(simulated, name)) for metric, name in METRICS.items()}
    spreads = {metric: compared(*both) for metric, both in sides.items()}
    makespan = pair(makespan_s(run.times), makespan_s(simulated))
    means = {f"{metric} mean": spread["mean"]["error"] for metric, spread in spreads.items()}
    return {
        **spreads,
        "makespan": makespan,
        "of each request": {f"{metric}_error": request_error(*both) for metric, both in sides.items()},
        "aims": against_aim({**means, "makespan": makespan["error"]}, AIM),
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


def request_error(measured: Floats, simulated: Floats) -> float:
    """The absolute error of each request as a share of what was measured, the mean over all requests."""
    known = np.isfinite(measured) & np.isfinite(simulated) & (measured > 0)
    return float(np.mean(np.abs(simulated[known] / measured[known] - 1.0)))


def against_aim(errors: Mapping[str, float], aim: float) -> dict[str, dict[str, Any]]:
    """Whether absolute errors are within the largest that is aimed at, by name."""
    return {
        name: {"error": abs(error), "aimed_error": aim, "verdict": "met" if abs(error) <= aim else "missed"}
        for name, error in errors.items()
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
    link = None
    if link_bandwidth and link_latency is not None:
        link = LinkRates(1e-6 * link_latency, 1e9 * link_bandwidth)
    elif link_bandwidth is not None or link_latency is not None:
        accepted = "a bandwidth above 0 and a latency, or neither"
        raise ConfigError(f"link_bandwidth={link_bandwidth}, link_latency={link_latency}; accepted: {accepted}")
    deliver(fidelity(run, model=model, host_s=host_s, num_kv_tokens=num_kv_tokens, link=link), output_json)


if __name__ == "__main__":
    main(fidelity_command)
