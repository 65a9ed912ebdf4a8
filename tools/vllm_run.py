"""A run of vLLM that was measured: its settings, its requests, and when each got its tokens.

The folder has ``meta.json`` (the engine's settings) and ``requests.csv`` (lengths and times of each request, seconds),
as LLMServingSim's benchmark of vLLM writes them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from medha.config import ModelConfig, SchedulerConfig
from medha.errors import ConfigError
from medha.sim.replica import find_model
from medha.workload.metrics import TokenTimes
from medha.workload.trace import Trace
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
        block_size, num_blocks: of the KV pool; ``num_blocks`` is None where the settings do not say.
        trace: the requests as they were queued.
        times: measured.
    """

    model_name: str
    model: ModelConfig
    config: SchedulerConfig
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
    try:
        meta = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    settings = meta.get("engine_kwargs") if isinstance(meta, dict) else None
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} has engine_kwargs={settings!r}; accepted: an object with the engine's settings")
    name = model or meta.get("model") or settings.get("model")
    if not isinstance(name, str):
        raise ConfigError(f"{path} names no model; accepted: a field model, or the option model")
    for degree in ("data_parallel_size", "tensor_parallel_size"):  # all-reduces are in no kernel table
        if _setting(path, settings, degree, 1) != 1:
            raise ConfigError(f"{path}: {degree}={settings[degree]}; accepted: 1")
    trace, times = _requests(find_file(folder, "requests.csv", "requests.csv.gz"))
    return MeasuredRun(
        model_name=name,
        model=find_model(name),
        config=_config(path, settings),
        block_size=_setting(path, settings, "block_size", _BLOCK_SIZE),
        num_blocks=_setting(path, meta, "num_gpu_blocks", 0) or None,
        trace=trace,
        times=times,
    )


def _config(path: Path, settings: Mapping[str, Any]) -> SchedulerConfig:
    budget = _setting(path, settings, "max_num_batched_tokens")
    return SchedulerConfig(
        scheduler="vllm",
        max_num_seqs=_setting(path, settings, "max_num_seqs"),
        max_batch_tokens=budget,
        chunk_size=_setting(path, settings, "long_prefill_token_threshold", 0) or budget,
        depth=1,
        overcommit=True,  # vLLM takes KV blocks as they are needed, too
        prefix_caching=settings.get("enable_prefix_caching") is not False,  # on where the settings do not say
    )


def _setting(path: Path, settings: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number; ``default`` where it is missing or null."""
    value = settings.get(name)
    value = default if value is None else value
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
    return trace, TokenTimes(arrival_s, first_s, last_s, trace.output_tokens)
