"""The part of a model that one rank holds: which it is, loaded, packed and ready to run.

With it stands what a rank runs on: its device, and the attention backend that this device and the model's heads allow.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist

from medha.attention.flashinfer_backend import FlashInferBackend, wrong_with
from medha.attention.interface import AttentionBackend, LayerShape
from medha.config import ATTENTION_BACKENDS, CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from medha.cpu.library import lacks_products, library
from medha.errors import ConfigError
from medha.models.decoder import TP_PLAN, Decoder, build_decoder, fill_random_
from medha.models.layers import OWN_KERNELS, FusedKernels, TensorShard
from medha.models.weights import Checkpoint, TensorInfo, check_tensors, load_parameters
from medha.parallel.kvp import Merge
from medha.parallel.launch import Launch
from medha.parallel.mesh import Ranks, wait_for_all
from medha.parallel.shared_memory import share_memory
from medha.parallel.spp import Digests, StagePipe
from medha.parallel.tp import all_gather_over, all_reduce_over, local_slices, parallelize_
from medha.worker.kv_cache import KVCache
from medha.worker.runner import Runner
from medha.worker.swap import HostCache

logger = logging.getLogger("medha")

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_BUILD_LIMIT_S = 3600.0  # for compilers of other ranks
_CPU = torch.device("cpu")
_BLOCK_SIZE = CacheConfig().block_size


@dataclass(frozen=True, slots=True)
class ModelShard:
    """The part of a model that one rank holds."""

    whole: ModelConfig  # as its folder describes it
    model: ModelConfig  # that is built: KV heads repeated where there are fewer than tensor-parallel ranks
    layers: range  # held here
    num_kv_heads: int  # held here
    tp: int
    tp_rank: int
    dtype: torch.dtype  # of weights and KV
    device: torch.device

    @classmethod
    def at(
        cls, model: ModelConfig, parallel: ParallelConfig, rank: int, dtype: torch.dtype, device: torch.device = _CPU
    ) -> ModelShard:
        """What a global rank holds."""
        group, stage, tp_rank = parallel.coordinates(rank)
        parallel = parallel.of_group(group)
        tp = parallel.tp
        repeated = dataclasses.replace(model, num_kv_heads=max(tp, model.num_kv_heads)) if tp > 1 else model
        layers = parallel.layers_of(stage, model.num_layers)
        return cls(model, repeated, layers, repeated.num_kv_heads // tp, tp, tp_rank, dtype, device)

    @property
    def layer_shape(self) -> LayerShape:
        """The heads that this rank has of each layer."""
        return LayerShape(self.model.num_heads // self.tp, self.num_kv_heads, self.model.head_dim, self.dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values that a token leaves on this rank."""
        return 2 * len(self.layers) * self.num_kv_heads * self.model.head_dim * self.dtype.itemsize

    def index(self, name: str, parameter: torch.Tensor) -> tuple[slice, ...] | None:
        """Which slice of a checkpoint tensor this rank's parameter is; None for the whole."""
        if self.model.num_kv_heads != self.whole.num_kv_heads and re.search(r"\.[kv]_proj\.", name):
            head, H = self.tp_rank * self.whole.num_kv_heads // self.tp, self.whole.head_dim
            return (slice(head * H, (head + 1) * H), *(slice(0, n) for n in parameter.shape[1:]))
        return local_slices(parameter)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the parameters that this rank holds: those of its layers, its share of each that is split."""
        return self.whole.num_parameters(self.layers, self.tp) * self.dtype.itemsize


def build_runner(
    config: EngineConfig,
    shard: ModelShard,
    model: Decoder,
    backend: AttentionBackend,
    *,
    num_blocks: int,
    num_swap_blocks: int,
    **links: Any,
) -> Runner:
    """Put pools, and host memory for so many blocks, around this rank's part of the model; see :func:`make_links`."""
    cache = KVCache(
        shard.layer_shape,
        num_layers=len(shard.layers),
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        device=shard.device,
        has_scratch=wants_graphs(config, backend),
    )
    if model.fused is not None and model.fused.append_kv is not None:
        cache.append_by(model.fused.append_kv)
    host = HostCache(cache, num_swap_blocks) if num_swap_blocks else None
    return Runner(model, cache, backend, shard.device, host=host, **links)


def make_links(ranks: Ranks, shard: ModelShard) -> dict[str, Any]:
    """What a runner takes to be one of several; every rank calls it, as communicators are used for the first time."""
    digests, like = Digests(ranks.report_group), torch.empty(0, dtype=shard.dtype, device=shard.device)
    pipe = StagePipe(ranks, digests, like, dim=shard.model.hidden_size, num_buffers=ranks.layout.spp + 1)
    merge = None
    if ranks.merge_group is not None:
        memory = share_memory(ranks, ranks.merge_group, shard.device)
        members = dist.get_process_group_ranks(ranks.merge_group)
        merge = Merge(ranks.merge_group, digests, ranks=members, own=ranks.group, memory=memory)
        merge.warm(shard.device)
    pipe.warm()
    is_to_share = shard.device.type == "cuda" and shard.tp > 1 and ranks.layout.spp == 1
    share = partial(dist.broadcast, group=ranks.tp_group, group_src=0) if is_to_share else None  # of the sampling rank
    return {"pipe": pipe, "merge": merge, "samples": ranks.is_sampler, "group": ranks.group, "share": share}


def agreed(ranks: Ranks | None, what: str, wrong: str | None) -> str | None:
    """What is wrong with ``what`` on this rank, or on the first rank where something is: all do without it then, as
    ranks that compute by different kernels would not wait for each other. None where nothing is; every rank calls it.

    It may take as long as a compiler: no group is used. RankFailedError where a rank has failed.
    """
    if ranks is None:
        return wrong
    told = wait_for_all(ranks.job, what, wrong, limit_s=_BUILD_LIMIT_S)
    return next((f"{text} (rank {rank})" for rank, text in enumerate(told) if text), None)


def _fused_kernels(backend: AttentionBackend, shard: ModelShard, ranks: Ranks | None) -> FusedKernels | None:
    """FlashInfer's, where it serves attention on CUDA: both have the same dtypes; our own on the CPU. None where a rank
    has none; every rank calls it."""
    model, dtype, device = shard.model, shard.dtype, shard.device
    if device.type == "cpu":
        if missing := agreed(ranks, "kernels of the CPU", library()[1]):
            logger.info("products, norms and RoPE by torch: the CPU's own need %s", missing)
            return None
        if lacking := agreed(ranks, "products of the CPU", lacks_products(dtype)):
            logger.info("products by torch: the CPU's own lack %s", lacking)
        return OWN_KERNELS._replace(packed_linear=None) if lacking else OWN_KERNELS
    if not isinstance(backend, FlashInferBackend):
        return None
    api = backend.api
    rope, append_kv = api.apply_rope_with_cos_sin_cache_inplace, api.append_paged_kv_cache
    fused = FusedKernels(api.rmsnorm, api.fused_add_rmsnorm, api.silu_and_mul, rope, append_kv=append_kv)

    def try_out() -> None:
        x = torch.zeros(2, model.hidden_size, dtype=dtype, device=device)
        fused.fused_add_rmsnorm(fused.rmsnorm(x, x[0], 1e-6), x, x[0].clone(), 1e-6)
        api.silu_and_mul(x)
        q, ints = x.new_zeros(2, 1, model.head_dim), torch.zeros(2, dtype=torch.int32, device=device)
        fused.apply_rope(ints, q, q.clone(), model.head_dim, q[:, 0].float())
        append_kv(q, q, ints, ints, (q[None].clone(), q[None].clone()), ints[:1], ints, ints[:1])

    if (wrong := agreed(ranks, "fused kernels", wrong_with(try_out, device))) is not None:
        what = "norms, silu, RoPE and writes of keys and values run unfused"
        logger.warning("%s: FlashInfer's kernels could not be built: %s", what, wrong)
        return None
    return fused


def load_model(
    config: EngineConfig, shard: ModelShard, ranks: Ranks | None, folder: Path, backend: AttentionBackend
) -> Decoder:
    """Load this rank's part of the model."""
    tp_ranks = ranks if ranks is not None and ranks.layout.tp > 1 else None
    split = partial(parallelize_, mesh=tp_ranks.tp_mesh, plan=TP_PLAN) if tp_ranks else None
    place: dict[str, Any] = {"dtype": shard.dtype, "device": shard.device, "layers": shard.layers}
    build = partial(build_decoder, shard.model, **place, parallelize_=split)
    if config.load_format == "dummy":
        model = build()
        fill_random_(model, seed=config.seed)
    else:
        with Checkpoint(folder) as checkpoint:
            check_tensors(checkpoint, shard.whole)
            model = build()
            load_parameters(dict(model.named_parameters()), checkpoint, index=shard.index)
    if config.parallel.tp_forward == "local":
        tensor_shard, fused = None, _fused_kernels(backend, shard, ranks)
        if tp_ranks is not None:
            group = tp_ranks.tp_group
            memory = share_memory(tp_ranks, group, shard.device)
            collectives = all_reduce_over(group, memory), all_gather_over(group, memory)
            tensor_shard = TensorShard(shard.tp_rank, shard.tp, *collectives)
        model.pack_(tensor_shard, fused)
    return model


def checkpoint_facts(config: EngineConfig, folder: Path) -> list[object]:
    """What tells two checkpoints apart without reading them whole: of each tensor its shape, dtype and middle row."""
    if config.load_format == "dummy":
        return []
    with Checkpoint(folder) as checkpoint:
        infos = sorted(checkpoint.tensors.items())
        return [(name, info.shape, info.dtype, _middle(checkpoint, info)) for name, info in infos]


def _middle(checkpoint: Checkpoint, info: TensorInfo) -> str:
    """A digest of the middle row of a tensor, or of the second half of one with one axis."""
    if not info.shape or 0 in info.shape:
        return ""
    half = info.shape[0] // 2
    row = checkpoint.read(info.name, (slice(half, half + 1 if len(info.shape) > 1 else info.shape[0]),))
    return hashlib.sha256(row.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def torch_dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    """The dtype of weights and KV: as asked for, or the model's own."""
    return TORCH_DTYPES[model.dtype if config.dtype == "auto" else config.dtype]


def pick_device(name: str) -> torch.device:
    """The device that ``name`` means; ``auto`` is CUDA where there is one. ConfigError where it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise ConfigError(f"device={name!r}; accepted on this machine: {', '.join(there)}")
    return device


def own_device(device: torch.device, launch: Launch | None) -> torch.device:
    """This rank's device, made the current one: kernels that take no device run there.

    ``cuda`` without an index is a GPU of its own for each rank of a node; ConfigError where there are fewer.
    """
    if device.type != "cuda":
        return device
    index: int | None = device.index
    if index is None:
        index, num_gpus = 0 if launch is None else launch.local_rank, torch.cuda.device_count()
        if index >= num_gpus:
            what = f"device='cuda' for local rank {index}; accepted: as many ranks as GPUs, {num_gpus} here"
            raise ConfigError(f"{what}, or 'cuda:0' where each rank sees a GPU of its own")
    own = torch.device("cuda", index)
    torch.cuda.set_device(own)
    return own


def choose_backend(
    name: str, shape: LayerShape, device: torch.device, *, block_size: int = _BLOCK_SIZE, ranks: Ranks | None = None
) -> tuple[AttentionBackend, str]:
    """An attention backend for this rank's layers, and in words why it is that one.

    ``name`` is one of :data:`medha.config.ATTENTION_BACKENDS`, in whose place torch serves where it has no kernel for
    the layers, or ``auto``. All of ``ranks`` get the same; each of them calls it. ConfigError where what it needs is
    missing.
    """
    why = "what it needs is here" if name == "auto" else "as asked for"
    for candidate in ATTENTION_BACKENDS if name == "auto" else (name, "torch"):
        backend: type[AttentionBackend] = resolve_name(ATTENTION_BACKENDS[candidate])
        if name == "auto" and backend.device_type not in (None, device.type):
            continue
        built, wrong = None, None
        if missing := backend.needs(device):
            if candidate == name:
                raise ConfigError(f"attention_backend={name!r} needs {missing}; accepted here: auto, torch")
            wrong = f"{candidate} needs {missing}"
        elif lacking := backend.lacks(shape):
            wrong = f"{candidate} has no kernel for {lacking}"
        else:
            built = backend.build(device, block_size)
            if failed := built.build_kernels(shape, device):
                wrong = f"{candidate}'s kernels could not be built: {failed}"
        if (wrong := agreed(ranks, f"attention by {candidate}", wrong)) is None:
            break
        why = wrong
    assert built is not None, "torch serves everywhere"
    if isinstance(built, FlashInferBackend):
        built.no_fa3 = agreed(ranks, "FA3", built.no_fa3)
    return built, why


def wants_graphs(config: EngineConfig, backend: AttentionBackend) -> bool:
    """Whether decodes are captured."""
    return config.cuda_graphs and isinstance(backend, FlashInferBackend)
