"""``--dry-run``: what a layout would look like, for any number of ranks, from ``config.json`` alone on one CPU."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from medha.build import TORCH_DTYPES, Part
from medha.config import EngineConfig, ModelConfig
from medha.models.hf_config import load_model_config
from medha.models.hub import resolve_model
from medha.parallel.mesh import check_layout


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank would hold.

    Attributes:
        weight_bytes: parameters.
        kv_bytes_per_token: keys and values of one token in the layers held here.
        kv_tokens: tokens that its pool holds, None where no size is given.
    """

    rank: int
    kvp_rank: int
    stage: int
    tp_rank: int
    layers: range
    weight_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int | None


def plan_ranks(config: EngineConfig, model: ModelConfig) -> list[RankPlan]:
    """The plan of every rank of a layout.

    Raises:
        ParallelConfigError: the layout cannot work.
    """
    parallel = config.parallel
    check_layout(parallel, model, parallel.world_size)
    itemsize = TORCH_DTYPES[model.dtype if config.dtype == "auto" else config.dtype].itemsize
    plans = []
    for rank in range(parallel.world_size):
        part = Part.at(model, parallel, rank)
        token_bytes = 2 * len(part.layers) * part.num_kv_heads * model.head_dim * itemsize
        plans.append(
            RankPlan(
                rank,
                *parallel.coordinates(rank),
                part.layers,
                part.num_parameters() * itemsize,
                token_bytes,
                _kv_tokens(config, token_bytes),
            )
        )
    return plans


def run_dry(config: EngineConfig, console: Console) -> int:
    """Print rank map, memory plan and longest context; returns 0."""
    folder = resolve_model(config.model, revision=config.revision)
    model = load_model_config(
        folder,
        hf_overrides=config.hf_overrides,
        rope_scaling=config.rope_scaling,
        max_model_len=config.max_model_len,
    )
    plans = plan_ranks(config, model)
    table = Table(title=f"{model.architecture} on {len(plans)} ranks", title_justify="left")
    for name in ("rank", "kvp", "stage", "tp", "layers", "weights", "KV a token", "KV pool"):
        table.add_column(name, justify="right", no_wrap=True)
    for plan in plans:
        table.add_row(
            str(plan.rank),
            str(plan.kvp_rank),
            str(plan.stage),
            str(plan.tp_rank),
            f"{plan.layers.start}-{plan.layers.stop - 1}",
            f"{plan.weight_bytes / 2**30:.2f} GiB",
            f"{plan.kv_bytes_per_token:,} B",
            "-" if plan.kv_tokens is None else f"{plan.kv_tokens:,} tokens",
        )
    console.print(table)
    limit = config.max_model_len or model.max_position_embeddings
    pools = [plan.kv_tokens for plan in plans if plan.kv_tokens is not None]
    if pools:
        fits = min(pools) * config.parallel.kvp
        console.print(f"Longest context: {min(limit, fits):,} tokens (the model allows {limit:,}).")
    else:
        most = max(plan.kv_bytes_per_token for plan in plans)
        console.print(
            f"The model allows {limit:,} tokens; their keys and values take "
            f"{limit * most / config.parallel.kvp / 2**30:.2f} GiB on the "
            "fullest rank. With --kv-memory or --num-kv-blocks, the longest context that fits is told."
        )
    return 0


def _kv_tokens(config: EngineConfig, token_bytes: int) -> int | None:
    cache = config.cache
    if cache.num_blocks is not None:
        return cache.num_blocks * cache.block_size
    if cache.memory_bytes is None:
        return None
    return cache.memory_bytes // (token_bytes * cache.block_size) * cache.block_size
