"""How many KV blocks a rank's memory holds.

On CUDA the pool gets what weights, communicators, a step's own memory and CUDA graphs leave. A step's memory is
measured by running the largest one before the pool is there.
"""

from __future__ import annotations

import torch

from medha.attention.flashinfer_backend import FlashInferBackend
from medha.attention.interface import AttentionBackend
from medha.config import CDSP, EngineConfig
from medha.errors import ConfigError
from medha.models.decoder import Decoder
from medha.models.layers import cos_sin, inverse_frequencies
from medha.parallel.launch import read_launch
from medha.params import SamplingParams
from medha.worker.graphs import graph_sizes
from medha.worker.sampling import SlotSampling, draw
from medha.worker.shard import ModelShard, wants_graphs

_FALLBACK_MEMORY = 8 << 30


def num_kv_blocks(config: EngineConfig, shard: ModelShard, max_model_len: int, *, beside: int | None = None) -> int:
    """KV blocks in the pool, from whichever size the configuration gives; sizes in bytes are a rank's own.

    Args:
        beside: :func:`bytes_beside_kv`, where the model has been loaded.
    """
    cache = config.cache
    if cache.num_blocks is not None:
        return cache.num_blocks
    block_bytes = shard.token_bytes * cache.block_size
    if cache.memory_bytes is not None:
        memory, source = cache.memory_bytes, "kv_memory"
    elif shard.device.type == "cuda":
        torch.cuda.empty_cache()  # what an LLM before this one has left counts as taken
        free, total = torch.cuda.mem_get_info(shard.device)
        memory = int(free - total * (1 - cache.gpu_memory_utilization))
        memory -= shard.weight_bytes if beside is None else beside
        if config.scheduler.ring or config.scheduler.scheduler == CDSP:  # two blocks of all that a layer holds
            memory = memory * len(shard.layers) // (len(shard.layers) + 2)
        source = "gpu_memory_utilization"
    else:
        launch = read_launch()
        memory = _available_memory() // (1 if launch is None else launch.local_world_size)
        memory, source = max(memory - shard.weight_bytes, 0) // 2, "half of the memory that is free beside the weights"
    if memory < block_bytes:
        what = f"{source} leaves {memory} bytes for the KV pool"
        raise ConfigError(f"{what}; a block of {cache.block_size} tokens takes {block_bytes}")
    useful = config.scheduler.max_num_seqs * -(-max_model_len // cache.block_size)
    fitting = memory // block_bytes
    return fitting if cache.memory_bytes is not None else min(fitting, useful)


def bytes_beside_kv(config: EngineConfig, shard: ModelShard, model: Decoder, backend: AttentionBackend) -> int:
    """Bytes of a GPU that steps take beside weights and KV pool; every rank calls it, with the model loaded.

    The largest batch is run, without attention, and a token drawn of as many rows as there may be. With graphs the
    largest of them is run too, as they have memory of their own. Attention's workspace is allocated here for good.

    Raises:
        ConfigError: the memory does not suffice.
    """
    scheduler, device = config.scheduler, shard.device
    sizes, pieces = graph_sizes(scheduler) if wants_graphs(config, backend) else ((), ())
    shape = shard.layer_shape
    # what a piece leaves for the attention of each layer, at every size; and what goes in, which all sizes share
    qkv_bytes = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim * shape.dtype.itemsize
    shared_bytes = 3 * shard.model.hidden_size * shape.dtype.itemsize  # hidden states, attention's results, rotations
    taken = sum(pieces) * len(shard.layers) * qkv_bytes + max(pieces, default=0) * shared_bytes
    if others := config.parallel.kvp - 1:  # messages of a merge, out and in, and what it merges in float32
        messages = 2 * others * (shape.head_dim * shape.dtype.itemsize + torch.float32.itemsize)
        taken += scheduler.max_batch_tokens * shape.num_heads * (messages + 2 * shape.head_dim * torch.float32.itemsize)
    try:
        if isinstance(backend, FlashInferBackend):
            backend.workspace(shard.layer_shape, device, num_decodes=max(sizes, default=0))
            taken += backend.wrapper_bytes(len(sizes))
        for num_tokens in (scheduler.max_batch_tokens, *([max(sizes + pieces)] if sizes else [])):
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            _run_step(model, shard, num_tokens, min(num_tokens, scheduler.max_num_seqs))
            taken += torch.cuda.max_memory_allocated(device) - before
            torch.cuda.empty_cache()
    except torch.OutOfMemoryError as error:
        what = f"no memory on {device} for a batch of max_batch_tokens={scheduler.max_batch_tokens} beside the weights"
        raise ConfigError(f"{what}; accepted: fewer, a smaller model or dtype, or more ranks") from error
    return taken


@torch.inference_mode()
def _run_step(model: Decoder, shard: ModelShard, num_tokens: int, num_drawn: int) -> None:
    """Run the layers on so many tokens, and draw from so many rows of logits."""
    inv_freq = inverse_frequencies(model.config.rope, model.config.head_dim).to(shard.device)
    cos_sin_TH = cos_sin(torch.zeros(num_tokens, dtype=torch.int64, device=shard.device), inv_freq)
    x_TD = torch.zeros(num_tokens, model.config.hidden_size, dtype=shard.dtype, device=shard.device)
    x_TD = model(x_TD, cos_sin_TH, lambda layer, q_TNH, k_TKH, v_TKH: q_TNH.new_zeros(q_TNH.shape))
    if model.has_head:
        slot = SlotSampling(SamplingParams(temperature=1.0, top_p=0.9, logprobs=1).resolve({}), 0, (), 1)
        draw(model.logits(x_TD[:num_drawn]), [slot] * num_drawn, [0] * num_drawn)


def num_swap_blocks(config: EngineConfig, shard: ModelShard) -> int:
    """KV blocks that a rank's own part of host memory holds."""
    cache = config.cache
    block_bytes = shard.token_bytes * cache.block_size
    if 0 < cache.swap_bytes < block_bytes:
        least = f"at least a block of {cache.block_size} tokens, {block_bytes} bytes"
        accepted = f"0, or {least} (a number is GiB; or text as '512MiB')"
        raise ConfigError(f"swap_space={cache.swap_bytes} bytes; accepted: {accepted}")
    return cache.swap_bytes // block_bytes


def _available_memory() -> int:
    """Bytes of memory that can be had without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return _FALLBACK_MEMORY
