"""Which layout a job of several ranks gets where none was asked for, and ``--dry-run``: the plan of every rank."""

from __future__ import annotations

import logging
from contextlib import suppress
from math import gcd

from rich.console import Console

from medha.cli.report import print_rows
from medha.config import CDSP, EngineConfig, ModelConfig, ParallelConfig
from medha.errors import ParallelConfigError
from medha.models.folder import resolve_model
from medha.models.hf_config import model_config_of
from medha.parallel.launch import Launch
from medha.parallel.mesh import check_layout
from medha.worker.shard import ModelShard, pick_device, torch_dtype

logger = logging.getLogger("medha")


def choose_layout(config: EngineConfig, launch: Launch) -> dict[str, int]:
    """Degrees for a model where none were asked for; every rank says the same.

    On GPUs as much tensor parallelism as a node and the heads allow, with which a token comes quickest there; on
    CPUs as little, since each of its many transfers takes a millisecond. The rest are stages, as far as layers go, for
    the scheduler ``cdsp`` and a ring KV-parallel groups.
    """
    model, size = _load_model_config(config), launch.world_size
    is_gpu = pick_device(config.device).type == "cuda"
    in_node = gcd(size, launch.local_world_size)  # nodes may differ
    splits = sorted(((tp, size // tp) for tp in range(1, in_node + 1) if in_node % tp == 0), reverse=is_gpu)
    deals = config.scheduler.ring or config.scheduler.scheduler == CDSP
    layouts = [ParallelConfig(tp=tp, kvp=rest) if deals else ParallelConfig(tp=tp, spp=rest) for tp, rest in splits]
    for layout in (*layouts, ParallelConfig(kvp=size)):
        with suppress(ParallelConfigError):
            check_layout(layout, model, size)
            break
    chosen = {"tp": layout.tp, "spp": layout.spp, "kvp": layout.kvp}
    named = " x ".join(f"{axis}={degree}" for axis, degree in chosen.items() if degree > 1)
    logger.info("layout of %d ranks: %s, as none was asked for with --tp, --spp or --kvp", size, named)
    return chosen


def _load_model_config(config: EngineConfig) -> ModelConfig:
    return model_config_of(config, resolve_model(config.model, revision=config.revision, with_weights=False))


def run_dry(config: EngineConfig, console: Console) -> int:
    """Print rank map, memory plan and longest context; returns 0. ParallelConfigError where the layout cannot work."""
    model, parallel = _load_model_config(config), config.parallel
    check_layout(parallel, model, parallel.world_size)
    dtype = torch_dtype(config, model)
    shards = [ModelShard.at(model, parallel, rank, dtype) for rank in range(parallel.world_size)]
    rows = [
        {
            **dict(zip(("rank", "kvp", "stage", "tp"), (rank, *parallel.coordinates(rank)), strict=True)),
            "layers": f"{shard.layers.start}-{shard.layers.stop - 1}",
            "weights_bytes": shard.weight_bytes,
            "KV_a_token_bytes": shard.token_bytes,
            "KV_pool_tokens": _kv_tokens(config, shard.token_bytes),
        }
        for rank, shard in enumerate(shards)
    ]
    print_rows(console, f"{model.architecture} on {parallel.world_size} rank{'s' * (parallel.world_size > 1)}", rows)
    limit = config.max_model_len or model.max_position_embeddings
    most = max(shard.token_bytes for shard in shards)
    if (least := _kv_tokens(config, most)) is not None:
        console.print(f"Longest context: {min(limit, least * parallel.kvp):,} tokens (the model allows {limit:,}).")
    else:
        gib = limit * most / parallel.kvp / 2**30
        said = f"The model allows {limit:,} tokens; their keys and values take {gib:.2f} GiB on the fullest rank."
        console.print(f"{said} With --kv-memory or --num-kv-blocks, the longest context that fits is told.")
    return 0


def _kv_tokens(config: EngineConfig, token_bytes: int) -> int | None:
    """Tokens that the pool of a rank holds; None where no size is given."""
    cache = config.cache
    if cache.num_blocks is not None:
        return cache.num_blocks * cache.block_size
    if cache.memory_bytes is None:
        return None
    return cache.memory_bytes // (token_bytes * cache.block_size) * cache.block_size
