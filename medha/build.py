"""From an :class:`EngineConfig` to a running :class:`Engine`: folder, model, weights, KV pool, tokenizer.

Everything that can be wrong in the model folder is checked before any weight is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from medha.attention.interface import AttentionBackend
from medha.attention.torch_backend import TorchBackend
from medha.config import EngineConfig, ModelConfig
from medha.engine import Engine, ModelLimits
from medha.errors import ConfigError
from medha.kv_cache import KVCache
from medha.models.decoder import Decoder, build_decoder, fill_random_
from medha.models.generation_config import load_generation_config
from medha.models.hf_config import load_model_config
from medha.models.hub import resolve_model
from medha.models.weights import Checkpoint, check_tensors, expected_tensors, is_ignored, load_parameters
from medha.runner import Runner
from medha.sched.scheduler import Scheduler
from medha.text import Tokenizer, load_tokenizer
from medha.timeline import Timeline

logger = logging.getLogger("medha")

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FALLBACK_MEMORY = 4 << 30


def build_engine(
    config: EngineConfig, *, timeline: Timeline | None = None, progress: Callable[[int], None] | None = None
) -> Engine:
    """Load a model and make an engine for it.

    Args:
        config: what to load and how to run it.
        timeline: records what runs, if given.
        progress: called with the bytes of each parameter as it is loaded.

    Raises:
        ConfigError: something about the folder, the device or the sizes is wrong; the subclass says what.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    folder = resolve_model(config.model, revision=config.revision)
    model_config = load_model_config(
        folder,
        hf_overrides=config.hf_overrides,
        rope_scaling=config.rope_scaling,
        max_model_len=config.max_model_len,
    )
    generation = load_generation_config(folder, model_config.vocab_size)
    tokenizer = _load_tokenizer(config, folder, model_config)
    device = pick_device(config.device)
    dtype = TORCH_DTYPES[model_config.dtype if config.dtype == "auto" else config.dtype]
    max_model_len = _max_model_len(config, model_config)
    num_blocks = _num_blocks(config, model_config, dtype, device, max_model_len)
    model = _load_model(config, model_config, folder, dtype, device, progress)
    block_size = config.cache.block_size
    cache = KVCache(
        num_layers=model_config.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        dtype=dtype,
        device=device,
    )
    defaults = generation.sampling_defaults()
    eos = generation.eos_token_ids or model_config.eos_token_ids
    if not eos and tokenizer is not None and tokenizer.eos_token_id is not None:
        eos = (tokenizer.eos_token_id,)
    if not eos:
        logger.warning("%s defines no end-of-sequence token; generation ends by length or stop only", folder)
    logger.info(
        "%s on %s in %s, context %d, KV pool %d blocks of %d tokens; sampling defaults %s, end-of-sequence ids %s",
        model_config.architecture, device, dtype, max_model_len, num_blocks, block_size, defaults, list(eos),
    )  # fmt: skip
    limits = ModelLimits(model_config.vocab_size, max_model_len, eos, defaults, config.seed)
    scheduler = Scheduler(config.scheduler, num_blocks=num_blocks, block_size=block_size)
    runner = Runner(model, cache, pick_backend(config.attention_backend), device)
    return Engine(runner, scheduler, limits, tokenizer=tokenizer, timeline=timeline)


def pick_device(name: str) -> torch.device:
    """The device that ``name`` means; ``auto`` is CUDA where there is one.

    Raises:
        ConfigError: CUDA is asked for and not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name!r}: this machine has {torch.cuda.device_count()} CUDA devices; accepted: cpu")
    return device


def pick_backend(name: str) -> AttentionBackend:
    """The attention backend called ``name``; ``auto`` is ``torch``."""
    assert name in ("auto", "torch")
    return TorchBackend()


def _load_tokenizer(config: EngineConfig, folder: Path, model: ModelConfig) -> Tokenizer | None:
    if config.tokenizer is not None:
        folder = resolve_model(config.tokenizer)
    tokenizer = load_tokenizer(folder)
    if tokenizer is not None:
        tokenizer.check_vocab(model.vocab_size)
    return tokenizer


def _load_model(
    config: EngineConfig,
    model_config: ModelConfig,
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int], None] | None,
) -> Decoder:
    if config.load_format == "dummy":
        model = build_decoder(model_config, dtype=dtype, device=device)
        fill_random_(model, seed=config.seed)
    else:
        with Checkpoint(folder) as checkpoint:
            check_tensors(
                checkpoint, expected_tensors(model_config), ignored=lambda name: is_ignored(name, model_config)
            )
            model = build_decoder(model_config, dtype=dtype, device=device)
            load_parameters(dict(model.named_parameters()), checkpoint, progress=progress)
    model.pack_()
    return model


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    wanted = config.max_model_len
    if wanted is None:
        return model.max_position_embeddings
    if wanted > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len={wanted} exceeds the model's {model.max_position_embeddings} positions; "
            "accepted: at most that, or rope_scaling='yarn' to stretch it"
        )
    return wanted


def _num_blocks(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, max_model_len: int
) -> int:
    """KV blocks in the pool, from whichever size the configuration gives."""
    cache = config.cache
    if cache.num_blocks is not None:
        return cache.num_blocks
    block_bytes = model.kv_bytes_per_token(dtype.itemsize) * cache.block_size
    if cache.memory_bytes is not None:
        memory, source = cache.memory_bytes, "kv_memory"
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        weights = _num_parameters(model) * dtype.itemsize
        memory = int(free - total * (1 - cache.gpu_memory_utilization)) - weights
        source = "gpu_memory_utilization"
    else:
        memory, source = _available_memory() // 2, "half of the free memory"
    if memory < block_bytes:
        raise ConfigError(
            f"{source} leaves {memory} bytes for the KV pool; a block of {cache.block_size} tokens takes {block_bytes}"
        )
    useful = config.scheduler.max_num_seqs * -(-max_model_len // cache.block_size)
    fitting = memory // block_bytes
    return fitting if cache.memory_bytes is not None else min(fitting, useful)


def _num_parameters(model: ModelConfig) -> int:
    sizes = [torch.Size(shape).numel() for shape in expected_tensors(model).values()]
    return sum(sizes)


def _available_memory() -> int:
    """Bytes of memory that can be had without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2 * _FALLBACK_MEMORY
