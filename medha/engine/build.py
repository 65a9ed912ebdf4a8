"""From an :class:`EngineConfig` to a running :class:`Engine`: folder, model, weights, KV pool, tokenizer.

Everything that can be wrong in the model folder is checked before any weight is read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from medha.attention.interface import AttentionBackend, GraphBackend, LayerShape
from medha.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from medha.cost.machine import load_coefficients
from medha.cost.predictor import Predictor
from medha.cost.prefill_time import complete_config
from medha.engine.distributed import Caller, DrivingRunner, Follower
from medha.engine.engine import Engine, ModelLimits
from medha.errors import ConfigError, ParallelConfigError, TokenizerError
from medha.models.decoder import TP_PLAN, Decoder, build_decoder, fill_random_
from medha.models.hf_config import load_generation_config, load_model_config
from medha.models.hub import resolve_model
from medha.models.layers import TensorShard, local_part
from medha.models.weights import Checkpoint, TensorInfo, check_tensors, expected_tensors, is_ignored, load_parameters
from medha.parallel.control import ControlReceiver, ControlSender
from medha.parallel.health import failures_named, give_up
from medha.parallel.kvp import Merge
from medha.parallel.launch import Launch, read_launch
from medha.parallel.mesh import (
    Job,
    Ranks,
    check_layout,
    check_same_everywhere,
    init_ranks,
    least,
    meet,
    most,
    once_per_node,
    wait_for_all,
)
from medha.parallel.spp import StagePipe
from medha.parallel.tp import all_gather_over, all_reduce_over, local_slices, parallelize_
from medha.sched.policy import load_policy
from medha.sched.scheduler import Scheduler
from medha.text import Tokenizer, load_tokenizer
from medha.timeline import Timeline
from medha.worker.choose import choose_backend
from medha.worker.graphs import CudaGraphs, graph_sizes
from medha.worker.kv_cache import KVCache
from medha.worker.runner import Runner
from medha.worker.swap import AtOnce, HostCache, SideStream

logger = logging.getLogger("medha")

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FALLBACK_MEMORY = 4 << 30
_LOAD_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Role:
    """What this process does in a job.

    Attributes:
        limits: what requests are checked against.
        tokenizer: None where the folder has none.
        runner: this rank's own part of the model.
        engine: on rank 0, and where there is one process.
        caller: on rank 0 of several: how it tells the others what is called.
        follower: on the other ranks.
    """

    limits: ModelLimits
    tokenizer: Tokenizer | None
    runner: Runner
    engine: Engine | None = None
    caller: Caller | None = None
    follower: Follower | None = None

    @property
    def is_alone(self) -> bool:
        """Whether there is one process."""
        return self.caller is None and self.follower is None

    def describe(self) -> str:
        """What this process works on; for another thread."""
        worker = self.engine or self.follower
        assert worker is not None, "every rank has the one or the other"
        return worker.describe()

    def give_up(self, error: BaseException) -> None:
        """Tell every rank that this one goes with an error; they end too."""
        for part in (self.caller, self.follower):
            if part is not None:
                give_up(part.ranks.monitor, error)

    def close(self) -> None:
        """Leave the job; every rank calls it."""
        self.runner.graphs = None  # NCCL would wait for the graphs that hold its collectives
        if self.caller is not None:
            self.caller.close()
        if self.follower is not None:
            self.follower.close()


def build_engine(
    config: EngineConfig, *, timeline: Timeline | None = None, progress: Callable[[int], None] | None = None
) -> Engine:
    """Load a model and make an engine for it, in a single process; raises as :func:`build_role`."""
    engine = build_role(config, timeline=timeline, progress=progress).engine
    assert engine is not None, "one process has the engine"
    return engine


def build_role(
    config: EngineConfig,
    *,
    timeline: Timeline | None = None,
    progress: Callable[[int], None] | None = None,
    captured: Callable[[int, int], None] = lambda done, total: None,
) -> Role:
    """Load a model, or this rank's part of it, and make what this rank runs.

    Every rank of a torchrun job calls this with the same configuration.

    Args:
        config: what to load and how to run it.
        timeline: records what runs, if given.
        progress: called with the bytes of each parameter as it is loaded.
        captured: called with how many CUDA graphs are captured and how many there will be.

    Raises:
        ConfigError: something about the folder, the device, the layout or the sizes is wrong; the subclass says what.
        RankFailedError: another rank failed.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    launch = read_launch()
    if launch is None:
        _check_is_alone(config.parallel)
        return _build(config, None, timeline, progress, captured)
    job = meet(config.parallel, launch)
    with failures_named(job.monitor, activity="start"):
        return _build(config, job, timeline, progress, captured)


def _build(
    config: EngineConfig,
    job: Job | None,
    timeline: Timeline | None,
    progress: Callable[[int], None] | None,
    captured: Callable[[int, int], None],
) -> Role:
    """:func:`build_role` where the ranks, if there are several, have met."""
    folder = _resolve(config, job)
    model_config = load_model_config(
        folder,
        hf_overrides=config.hf_overrides,
        rope_scaling=config.rope_scaling,
        max_model_len=config.max_model_len,
    )
    check_layout(config.parallel, model_config, 1 if job is None else job.launch.world_size)
    limits, tokenizer = _load_text_side(config, folder, model_config)
    device = own_device(pick_device(config.device), None if job is None else job.launch)
    config = _with_decode_lag(config, device)
    dtype = TORCH_DTYPES[model_config.dtype if config.dtype == "auto" else config.dtype]
    ranks = None
    if job is not None:
        parts = {"configuration": config, "config.json": model_config, "checkpoint": _checkpoint_facts(config, folder)}
        check_same_everywhere(job, parts)
        ranks = init_ranks(job, device)
    part = Part.of(model_config, ranks)
    num_blocks = _num_blocks(config, part, dtype, device, limits.max_model_len)
    num_swap_blocks = _num_swap_blocks(config, part, dtype)
    if ranks is not None:
        num_blocks = least(ranks, num_blocks)
        num_swap_blocks = least(ranks, num_swap_blocks)
    _check_max_kv_per_group(config, num_blocks)
    by_class = load_policy(config.scheduler.policy).by_class and config.scheduler.scheduler == "medha"
    if num_swap_blocks and not (by_class or config.scheduler.overcommit):
        logger.warning("swap_space has no use: nobody gives way without overcommit=True or a policy 'priority'")
    backend, why = choose_backend(
        config.attention_backend, part.layer_shape(dtype), device, block_size=config.cache.block_size
    )
    if config.attention_backend not in ("auto", backend.name):
        logger.warning("attention_backend=%r: %s; torch serves", config.attention_backend, why)
    coefficients = load_coefficients(config, model_config, backend=backend.name, dtype=dtype, device=device)
    runner = _build_runner(
        config,
        part,
        ranks,
        folder,
        backend,
        num_blocks=num_blocks,
        num_swap_blocks=num_swap_blocks,
        dtype=dtype,
        device=device,
        on=progress,
    )
    if job is not None:
        job.monitor.waits_for = lambda: runner.recorder.waits_for
        # Loading may take far longer than a transfer may, so no group is used; whoever is missing is named.
        wait_for_all(job, "loaded", limit_s=_LOAD_LIMIT_S)
        for _, merge in sorted(runner.merges.items()):
            merge.warm(device)
    config = _with_swap(config, runner, ranks)
    if runner.cache.has_scratch:
        _capture(runner, config, captured)
    if ranks is not None and ranks.rank != 0:
        follower = Follower(runner, ranks, ControlReceiver(ranks.control_group))
        ranks.monitor.describe = follower.describe
        return Role(limits, tokenizer, runner, follower=follower)
    predictor = Predictor(coefficients, max_tokens=config.scheduler.max_batch_tokens)
    scheduler = Scheduler(
        complete_config(
            config.scheduler,
            predictor,
            config.parallel,
            longest=limits.max_model_len,
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
        ),
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        num_groups=config.parallel.kvp,
        predictor=predictor,
        max_prompt_tokens=limits.max_model_len,
    )
    attention = backend.name if device.type == "cpu" else f"{backend.name} ({why})"
    _log_start(model_config, limits, scheduler, device=device, dtype=dtype, profile=config.profile, attention=attention)
    if ranks is None:
        return Role(
            limits, tokenizer, runner, Engine(runner, scheduler, limits, tokenizer=tokenizer, timeline=timeline)
        )
    sender = ControlSender(ranks.control_group, range(1, ranks.config.world_size))
    driven = DrivingRunner(runner, ranks, sender)
    engine = Engine(driven, scheduler, limits, tokenizer=tokenizer, timeline=timeline)
    ranks.monitor.predicted_s = lambda: engine.predicted_s
    ranks.monitor.describe = engine.describe
    if timeline is not None:
        timeline.gather_from(driven.gather_records, zero_s=time.perf_counter() - engine.now())
    return Role(limits, tokenizer, runner, engine, Caller(sender, ranks, timeline))


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of a model.

    Attributes:
        whole: the model as its folder describes it.
        model: the model that is built: KV heads repeated where there are fewer than tensor-parallel ranks.
        layers: held here.
        num_kv_heads: held here.
        tp, tp_rank: tensor-parallel place.
    """

    whole: ModelConfig
    model: ModelConfig
    layers: range
    num_kv_heads: int
    tp: int = 1
    tp_rank: int = 0

    @classmethod
    def of(cls, model: ModelConfig, ranks: Ranks | None) -> Part:
        """This rank's part."""
        if ranks is None:
            return cls.at(model, ParallelConfig(), 0)
        return cls.at(model, ranks.config, ranks.rank)

    @classmethod
    def at(cls, model: ModelConfig, parallel: ParallelConfig, rank: int) -> Part:
        """The part of a global rank."""
        _, stage, tp_rank = parallel.coordinates(rank)
        tp = parallel.tp
        repeated = dataclasses.replace(model, num_kv_heads=max(tp, model.num_kv_heads)) if tp > 1 else model
        layers = parallel.layers_of(stage, model.num_layers)
        return cls(model, repeated, layers, repeated.num_kv_heads // tp, tp, tp_rank)

    def layer_shape(self, dtype: torch.dtype) -> LayerShape:
        """The heads that this rank has of each layer."""
        return LayerShape(self.model.num_heads // self.tp, self.num_kv_heads, self.model.head_dim, dtype)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that a token leaves on this rank."""
        return 2 * len(self.layers) * self.num_kv_heads * self.model.head_dim * dtype.itemsize

    def index(self, name: str, parameter: torch.Tensor) -> tuple[slice, ...] | None:
        """Which slice of a checkpoint tensor this rank's parameter is; None for the whole."""
        if self.model.num_kv_heads != self.whole.num_kv_heads and re.search(r"\.[kv]_proj\.", name):
            head, H = self.tp_rank * self.whole.num_kv_heads // self.tp, self.whole.head_dim
            return (slice(head * H, (head + 1) * H), *(slice(0, n) for n in parameter.shape[1:]))
        return local_slices(parameter)

    def num_parameters(self) -> int:
        """Parameters that this rank holds: those of its layers, its share of each that is split."""
        total = 0
        for name, shape in expected_tensors(self.model).items():
            if self._holds(name):
                total += torch.Size(shape).numel() // (self.tp if _is_split(name) else 1)
        return total

    def _holds(self, name: str) -> bool:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer is not None:
            return int(layer[1]) in self.layers
        is_first, is_last = self.layers.start == 0, self.layers.stop == self.model.num_layers
        if name == "model.embed_tokens.weight":
            return is_first or (is_last and self.model.tie_word_embeddings)
        return is_last


def _is_split(name: str) -> bool:
    """Whether the plan splits a tensor of the checkpoint over tensor-parallel ranks."""
    module, _, kind = name.rpartition(".")
    split = TP_PLAN.get(re.sub(r"\.\d+\.", ".*.", module))
    return split is not None and not (split == "row" and kind == "bias")


def _build_runner(
    config: EngineConfig,
    part: Part,
    ranks: Ranks | None,
    folder: Path,
    backend: AttentionBackend,
    *,
    num_blocks: int,
    num_swap_blocks: int,
    dtype: torch.dtype,
    device: torch.device,
    on: Callable[[int], None] | None,
) -> Runner:
    """This rank's model, pools and pipe."""
    model = _load_model(config, part, ranks, folder, dtype=dtype, device=device, progress=on)
    cache = KVCache(
        num_layers=len(part.layers),
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        num_kv_heads=part.num_kv_heads,
        head_dim=part.model.head_dim,
        dtype=dtype,
        device=device,
        has_scratch=_wants_graphs(config, backend, device),
    )
    host = None
    if num_swap_blocks:
        host = HostCache(cache, num_swap_blocks, SideStream(device) if device.type == "cuda" else AtOnce())
    if ranks is None:
        return Runner(model, cache, backend, device, decode_lag=config.scheduler.decode_lag or 0, host=host)
    pipe = StagePipe(
        ranks.pipe_group,
        previous=ranks.neighbour(-1),
        following=ranks.neighbour(1),
        dim=part.model.hidden_size,
        dtype=dtype,
        num_buffers=ranks.config.spp + 1,
    )
    merges = {run: Merge(group, 1 + run[1] - run[0]) for run, group in ranks.run_groups.items()}
    return Runner(
        model,
        cache,
        backend,
        device,
        pipe=pipe,
        samples=ranks.is_sampler,
        group=ranks.group,
        merges=merges,
        host=host,
    )


def _with_decode_lag(config: EngineConfig, device: torch.device) -> EngineConfig:
    """The configuration with a decode lag where it leaves that open: where a host can run ahead of a device."""
    scheduler = config.scheduler
    if scheduler.decode_lag is not None:
        return config
    is_fit = device.type == "cuda" and config.parallel.world_size == 1 and scheduler.depth in (None, 2)
    return dataclasses.replace(config, scheduler=dataclasses.replace(scheduler, decode_lag=int(is_fit)))


def _with_swap(config: EngineConfig, runner: Runner, ranks: Ranks | None) -> EngineConfig:
    """The configuration with what the scheduler is to know of host memory; every rank calls it.

    The seconds of a move are measured now and fixed for the run, so that decisions replay: those of the slowest rank.
    """
    num_swap_blocks, block_s = 0, 0.0
    if runner.host is not None:
        num_swap_blocks, block_s = runner.host.num_blocks, runner.host.measure_block_s()
        if ranks is not None:
            block_s = most(ranks, round(block_s * 1e9)) / 1e9
        logger.info("host memory for %d KV blocks of each group; one moves in %.3g ms", num_swap_blocks, 1e3 * block_s)
    scheduler = dataclasses.replace(config.scheduler, num_swap_blocks=num_swap_blocks, swap_block_s=block_s)
    return dataclasses.replace(config, scheduler=scheduler)


def _wants_graphs(config: EngineConfig, backend: AttentionBackend, device: torch.device) -> bool:
    """Whether decodes are captured."""
    return config.cuda_graphs and device.type == "cuda" and isinstance(backend, GraphBackend)


def _capture(runner: Runner, config: EngineConfig, captured: Callable[[int, int], None]) -> None:
    """Capture graphs of decodes, and say which."""
    start = time.perf_counter()
    sizes = graph_sizes(config.scheduler.max_num_seqs)
    runner.capture(CudaGraphs(runner.device), sizes, captured, is_alone=config.parallel.tp == 1)
    assert runner.graphs is not None, "they have just been captured"
    captured_sizes = ", ".join(map(str, runner.graphs.sizes)) or "none"
    logger.info("CUDA graphs of %s decodes, captured in %.1f s", captured_sizes, time.perf_counter() - start)


def _log_start(
    model: ModelConfig,
    limits: ModelLimits,
    scheduler: Scheduler,
    *,
    device: torch.device,
    dtype: torch.dtype,
    profile: str | None,
    attention: str,
) -> None:
    memory = scheduler.memory
    pool = memory.num_blocks * memory.block_size
    groups = ""
    if memory.num_groups > 1:
        groups = f" on each of {memory.num_groups} groups, at most {memory.max_kv_per_group:,} of a request on one"
    source = (
        f"profile {profile}" if profile else "a hardware spec of the kind of this machine; medha profile measures them"
    )
    lines = [
        f"{model.architecture}, {model.num_layers} layers, {str(dtype).removeprefix('torch.')} on {device}, attention "
        f"{attention}",
        f"longest request {min(limits.max_model_len, memory.max_request_tokens):,} tokens: context "
        f"{limits.max_model_len:,}, KV pool {pool:,} tokens{groups}",
        f"step times from {source}",
    ]
    if limits.sampling_defaults:
        lines.append(f"sampling defaults {dict(limits.sampling_defaults)}, from generation_config.json")
    for line in lines:
        logger.info("%s", line)
    logger.debug("end-of-sequence ids %s", list(limits.eos_token_ids))


def _check_max_kv_per_group(config: EngineConfig, num_blocks: int) -> None:
    """Refuse more than the pool."""
    pool, given = num_blocks * config.cache.block_size, config.scheduler.max_kv_per_group
    if given is not None and given > pool:
        raise ConfigError(f"max_kv_per_group={given}; accepted: at most the pool's {pool} tokens")


def _checkpoint_facts(config: EngineConfig, folder: Path) -> list[object]:
    """What tells two checkpoints apart without reading them whole: of each tensor its shape, dtype and middle row."""
    if config.load_format == "dummy":
        return []
    with Checkpoint(folder) as checkpoint:
        infos = [checkpoint.info(name) for name in sorted(checkpoint.names)]
        return [(info.name, info.shape, info.dtype, _middle(checkpoint, info)) for info in infos]


def _middle(checkpoint: Checkpoint, info: TensorInfo) -> str:
    """A digest of the middle row of a tensor, or of the second half of one with one axis."""
    if not info.shape or 0 in info.shape:
        return ""
    half = info.shape[0] // 2
    row = checkpoint.read(info.name, (slice(half, half + 1 if len(info.shape) > 1 else info.shape[0]),))
    return hashlib.sha256(row.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _resolve(config: EngineConfig, job: Job | None) -> Path:
    """The model's folder; one from the hub is downloaded once a node, while no collective waits."""
    resolve = partial(resolve_model, config.model, revision=config.revision)
    if job is None or Path(config.model).exists():
        return resolve()
    return once_per_node(job, "downloaded", resolve, limit_s=_LOAD_LIMIT_S)


def _check_is_alone(parallel: ParallelConfig) -> None:
    if parallel.world_size > 1:
        raise ParallelConfigError(
            f"tp={parallel.tp} x spp={parallel.spp} x kvp={parallel.kvp} needs {parallel.world_size} ranks, this is "
            "one process; start it as: OMP_NUM_THREADS=1 "
            f"torchrun --nproc-per-node {parallel.world_size} {_this_program()}"
        )


def _this_program() -> str:
    """How this program was started, as arguments of torchrun."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = sys.argv[0] if spec is None else f"-m {spec.name.removesuffix('.__main__')}"
    return shlex.join([*program.split(" ", 1), *sys.argv[1:]])


def _load_text_side(config: EngineConfig, folder: Path, model: ModelConfig) -> tuple[ModelLimits, Tokenizer | None]:
    """What requests are checked against, and the tokenizer."""
    generation = load_generation_config(folder, model.vocab_size)
    tokenizer = _load_tokenizer(config, folder, model)
    eos = generation.eos_token_ids or model.eos_token_ids
    if not eos and tokenizer is not None and tokenizer.eos_token_id is not None:
        eos = (tokenizer.eos_token_id,)
    if not eos:
        logger.warning("%s defines no end-of-sequence token; generation ends by length or stop only", folder)
    max_model_len = _max_model_len(config, model)
    return ModelLimits(model.vocab_size, max_model_len, eos, generation.sampling_defaults(), config.seed), tokenizer


def pick_device(name: str) -> torch.device:
    """The device that ``name`` means; ``auto`` is CUDA where there is one.

    Raises:
        ConfigError: CUDA is asked for and not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise ConfigError(f"device={name!r}; accepted on this machine: {', '.join(there)}")
    return device


def own_device(device: torch.device, launch: Launch | None) -> torch.device:
    """This rank's device, made the current one: kernels that take no device run there.

    Args:
        device: from :func:`pick_device`; ``cuda`` without an index is a GPU of its own for each rank of a node.
        launch: of a job of several ranks.

    Raises:
        ConfigError: the node has fewer GPUs than ranks.
    """
    if device.type != "cuda":
        return device
    index: int | None = device.index
    if index is None:
        index, num_gpus = 0 if launch is None else launch.local_rank, torch.cuda.device_count()
        if index >= num_gpus:
            raise ConfigError(f"device='cuda' for local rank {index}; accepted: as many ranks as GPUs, {num_gpus} here")
    own = torch.device("cuda", index)
    torch.cuda.set_device(own)
    return own


def pick_backend(
    name: str, shape: LayerShape, device: torch.device, *, block_size: int = CacheConfig().block_size
) -> AttentionBackend:
    """The attention backend called ``name``, apart from an engine; see :func:`medha.worker.choose.choose_backend`.

    Raises:
        ConfigError: it cannot serve here.
    """
    return choose_backend(name, shape, device, block_size=block_size)[0]


def _load_tokenizer(config: EngineConfig, folder: Path, model: ModelConfig) -> Tokenizer | None:
    if config.tokenizer is not None:
        folder = resolve_model(config.tokenizer)
    tokenizer = load_tokenizer(folder)
    if tokenizer is None and config.tokenizer is not None:
        raise TokenizerError(f"tokenizer={config.tokenizer!r}: {folder} has no tokenizer.json")
    if tokenizer is not None:
        tokenizer.check_vocab(model.vocab_size)
    return tokenizer


def _load_model(
    config: EngineConfig,
    part: Part,
    ranks: Ranks | None,
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int], None] | None,
) -> Decoder:
    split = ranks is not None and ranks.config.tp > 1
    build = partial(
        build_decoder,
        part.model,
        dtype=dtype,
        device=device,
        layers=part.layers,
        parallelize_=partial(parallelize_, mesh=ranks.tp_mesh, plan=TP_PLAN) if ranks and split else None,
    )
    if config.load_format == "dummy":
        model = build()
        fill_random_(model, seed=config.seed)
    else:
        whole = part.whole
        with Checkpoint(folder) as checkpoint:
            check_tensors(checkpoint, expected_tensors(whole), ignored=lambda name: is_ignored(name, whole))
            model = build()
            parameters = dict(model.named_parameters())
            load_parameters(
                {name: local_part(parameter) for name, parameter in parameters.items()},
                checkpoint,
                index=lambda name: part.index(name, parameters[name]),
                progress=progress,
            )
    if config.parallel.tp_forward == "local":
        model.pack_(_tensor_shard(ranks) if ranks and split else None)
    return model


def _tensor_shard(ranks: Ranks) -> TensorShard:
    group = ranks.tp_group
    return TensorShard(ranks.tp_rank, ranks.config.tp, all_reduce_over(group), all_gather_over(group))


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


def _num_blocks(config: EngineConfig, part: Part, dtype: torch.dtype, device: torch.device, max_model_len: int) -> int:
    """KV blocks in the pool, from whichever size the configuration gives; sizes in bytes are a rank's own."""
    cache = config.cache
    if cache.num_blocks is not None:
        return cache.num_blocks
    block_bytes = part.kv_bytes_per_token(dtype) * cache.block_size
    if cache.memory_bytes is not None:
        memory, source = cache.memory_bytes, "kv_memory"
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        weights = part.num_parameters() * dtype.itemsize
        memory = int(free - total * (1 - cache.gpu_memory_utilization)) - weights
        source = "gpu_memory_utilization"
    else:
        launch = read_launch()
        memory, source = _available_memory() // 2, "half of the free memory"
        memory //= 1 if launch is None else launch.local_world_size
    if memory < block_bytes:
        raise ConfigError(
            f"{source} leaves {memory} bytes for the KV pool; a block of {cache.block_size} tokens takes {block_bytes}"
        )
    useful = config.scheduler.max_num_seqs * -(-max_model_len // cache.block_size)
    fitting = memory // block_bytes
    return fitting if cache.memory_bytes is not None else min(fitting, useful)


def _num_swap_blocks(config: EngineConfig, part: Part, dtype: torch.dtype) -> int:
    """KV blocks that a rank's own part of host memory holds."""
    cache = config.cache
    block_bytes = part.kv_bytes_per_token(dtype) * cache.block_size
    if 0 < cache.swap_bytes < block_bytes:
        raise ConfigError(
            f"swap_space={cache.swap_bytes} bytes; accepted: 0, or at least a block of {cache.block_size} tokens, "
            f"{block_bytes} bytes (a number is GiB; or text as '512MiB')"
        )
    return cache.swap_bytes // block_bytes


def _available_memory() -> int:
    """Bytes of memory that can be had without swapping."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2 * _FALLBACK_MEMORY
