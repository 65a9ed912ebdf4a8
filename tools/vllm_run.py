"""A run of a real engine that was measured: its settings, its requests, and when each got its tokens.

The folder has ``meta.json`` (the engine's settings, and its KV pool under ``kv_cache`` where it is known) and
``requests.csv`` (lengths and times of each request, seconds), as LLMServingSim's benchmark of vLLM writes them.
SGLang's names of settings are read as well. A column ``hash_ids`` (numbers with blanks between, one each 512 tokens of
the prompt, as Mooncake's traces have them) says what prompts share; without it a request shares with nobody but itself,
where it gives way and comes back.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    for degree in ("data_parallel_size", "pipeline_parallel_size"):
        if _setting(path, settings, degree, default=1) != 1:
            raise ConfigError(f"{path}: {degree}={settings[degree]}; accepted: 1")
    block_size, num_blocks = _pool(path, meta, settings)
    trace, times = _requests(find_file(folder, "requests.csv", "requests.csv.gz"))
    return MeasuredRun(
        model_name=name,
        model=find_model(name),
        config=_config(path, settings),
        tp=_setting(path, settings, "tensor_parallel_size", "tp_size", default=1),
        block_size=block_size,
        num_blocks=num_blocks,
        trace=trace,
        times=times,
    )


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
