"""From an :class:`EngineConfig` to a running :class:`Engine`: folder, model, weights, KV pool, tokenizer.

Everything that can be wrong in the model folder is checked before any weight is read.
"""

from __future__ import annotations

import dataclasses
import logging
import platform
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ReduceOp

from medha.config import CDSP, EngineConfig, ModelConfig
from medha.cost.chunk_times import fitted_times
from medha.cost.coefficients import Coefficients, ProfileKey
from medha.cost.hardware import spec_of_device
from medha.cost.predictor import Predictor, slowest_of
from medha.cost.roofline import Shard, hopper_chunks, layout_name, shape_name, stage_coefficients
from medha.engine.decode import DecodeInstance, HandOvers
from medha.engine.distributed import IS_EVERYWHERE, DrivingRunner, Follower
from medha.engine.engine import Engine
from medha.engine.request import ModelLimits
from medha.errors import ConfigError, ParallelConfigError, TokenizerError
from medha.models.folder import resolve_model
from medha.models.hf_config import load_generation_config, model_config_of
from medha.outputs import RequestOutput
from medha.parallel import mesh
from medha.parallel.control import ControlSender
from medha.parallel.health import failures_named, give_up
from medha.parallel.launch import Launch, cpu_name, read_launch
from medha.parallel.shared_memory import Lines, share_lines
from medha.records import Tracer
from medha.sched.cdsp import Planner
from medha.sched.policy import load_policy
from medha.sched.scheduler import Scheduler, complete_config
from medha.text import Tokenizer, load_tokenizer
from medha.worker import shard
from medha.worker.graphs import CudaGraphs, graph_sizes
from medha.worker.runner import Runner
from medha.worker.sizing import bytes_beside_kv, num_kv_blocks, num_swap_blocks
from medha.worker.transfer import TransferLine

logger = logging.getLogger("medha")

_HOPPER = 9  # the compute capability of GPUs with FA3
_LOAD_LIMIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class RankHandle(AbstractContextManager["RankHandle"]):
    """What this process does in a job, with its own part of the model."""

    limits: ModelLimits
    tokenizer: Tokenizer | None
    runner: Runner
    describe: Callable[[], str]  # what this process works on; for another thread
    engine: Engine | None = None  # on rank 0, and where there is one process
    part: DrivingRunner | Follower | None = None  # in what several ranks do; the first is rank 0's

    def call(self, name: str, run: Callable[[], list[RequestOutput]]) -> list[RequestOutput]:
        """Make a call that every rank makes: it runs where the engine is, the others take part and return nothing. What
        it raises all of them raise, unless the engine has ended."""
        return run() if self.part is None else self.part.call(name, run)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Leave the job; where an error ends this rank alone tell the others, which may be anywhere, without a wait."""
        if self.part is None or error is None or isinstance(error, SystemExit) or IS_EVERYWHERE in vars(error):
            self.close()
        else:
            give_up(self.part.ranks.monitor, error)

    def close(self) -> None:
        """Leave the job; every rank calls it."""
        if self.part is not None:
            if self.engine is not None:  # what is in flight ends on every rank
                self.engine.end(list(self.engine.live))
            self.part.stop()  # where rank 0 drives the engine the others first follow it to its end
        self.runner.drop_graphs()
        if self.runner.device.type == "cuda":  # what it still sends is freed with this
            with suppress(RuntimeError):  # of a device that has failed, which somebody else tells
                torch.cuda.synchronize(self.runner.device)
        if self.tokenizer is not None:
            self.tokenizer.close()


def build_role(config: EngineConfig, *, timeline: Tracer | None = None) -> RankHandle:
    """Load a model, or this rank's part of it, and make what this rank runs.

    Every rank of a torchrun job calls this with the same configuration.

    Raises:
        ConfigError: something about the folder, the device, the layout or the sizes is wrong; the subclass says what.
        RankFailedError: another rank failed.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    launch = read_launch()
    if launch is None:
        if (size := config.parallel.world_size) > 1:
            start = f"OMP_NUM_THREADS=1 torchrun --nproc-per-node {size} {_this_program()}"
            what = f"{config.parallel} needs {size} ranks, this is one process"
            raise ParallelConfigError(f"{what}; start it as: {start}")
        with torch.device("cpu"):  # whatever a program has made torch's default
            return _build(config, None, timeline)
    job = mesh.meet(config.parallel, launch)
    with torch.device("cpu"), failures_named(job.monitor, activity="start"):
        role = _build(config, job, timeline)
    job.monitor.describe = role.describe
    job.monitor.doing("idle")  # a server may wait long for its first request
    return role


def _build(config: EngineConfig, job: mesh.Job | None, timeline: Tracer | None) -> RankHandle:
    """:func:`build_role` where the ranks, if there are several, have met."""
    # fetched once a node
    folder = resolve_model(config.model, revision=config.revision, with_weights=config.load_format != "dummy")
    model_config = model_config_of(config, folder)
    launch = None if job is None else job.launch
    mesh.check_layout(config.parallel, model_config, 1 if launch is None else launch.world_size)
    limits, tokenizer = _load_text_side(config, folder, model_config)
    device = shard.own_device(shard.pick_device(config.device), launch)
    config = _with_async(config, device, launch)
    dtype = shard.torch_dtype(config, model_config)
    ranks = None
    if job is not None:
        mesh.check_nodes(job)
        sections = config, config.cache, config.parallel, config.scheduler
        named = ((f.name, getattr(section, f.name)) for section in sections for f in dataclasses.fields(section))
        parts = {name: value for name, value in named if value not in sections}
        parts |= {"config.json": model_config, "checkpoint": shard.checkpoint_facts(config, folder)}
        mesh.check_same_everywhere(job, parts)
        ranks = mesh.init_ranks(job, device)
    own = shard.ModelShard.at(model_config, config.parallel, ranks.rank if ranks else 0, dtype, device)
    decodes = ranks is not None and ranks.group >= config.parallel.kvp
    if config.scheduler.scheduler == CDSP and not decodes:  # a chunk may be a whole prompt on one group
        most = min(max(config.scheduler.max_batch_tokens, limits.max_model_len), 1 << 24)
        config = _scheduling(config, max_batch_tokens=most)
    pools = _num_blocks(ranks, decodes, num_kv_blocks(config, own, limits.max_model_len))
    num_host_blocks = mesh.over_ranks(ranks, num_swap_blocks(config, own), ReduceOp.MIN)
    _check_pools(config, pools[False], num_host_blocks)
    wanted, block_size = config.attention_backend, config.cache.block_size
    backend, why = shard.choose_backend(wanted, own.layer_shape, device, block_size=block_size, ranks=ranks)
    if wanted != "torch" and backend.name == "torch":
        level = logging.INFO if wanted == "auto" else logging.WARNING
        logger.log(level, "attention_backend=%r: %s; torch serves", wanted, why)
    coefficients = load_coefficients(config, model_config, backend=backend.name, dtype=dtype, device=device)
    model = shard.load_model(config, own, ranks, folder, backend)
    links, lines = dict[str, Any](), dict[int, Lines]()
    if job is not None and ranks is not None:
        # Loading may take far longer than a transfer may, so no group is used; whoever is missing is named.
        mesh.wait_for_all(job, "loaded", limit_s=_LOAD_LIMIT_S)
        links, lines = shard.make_links(ranks, own), share_lines(ranks, device)
    if device.type == "cuda" and config.cache.num_blocks is None and config.cache.memory_bytes is None:
        # the KV pool takes what the rest leaves of the GPU
        beside = bytes_beside_kv(config, own, model, backend)
        pools = _num_blocks(ranks, decodes, num_kv_blocks(config, own, limits.max_model_len, beside=beside))
        num_blocks, gib = pools[decodes], beside / 2**30
        logger.info("KV pool of %d blocks; steps and CUDA graphs take %.2f GiB beside it", num_blocks, gib)
        _check_pools(config, pools[False], num_host_blocks)
    sizes = {"num_blocks": pools[decodes], "num_swap_blocks": num_host_blocks}
    runner = shard.build_runner(config, own, model, backend, **sizes, **links)
    if job is not None:
        job.monitor.waits_for = lambda: runner.recorder.waits_for
    config = _with_swap(config, runner, ranks)
    if runner.cache.has_scratch:
        runner.capture(CudaGraphs(device, is_alone=own.tp == 1), *graph_sizes(config.scheduler))
    has_instances = config.parallel.decode_replicas > 0
    lanes = has_instances or config.scheduler.scheduler == CDSP  # prefills and decodes are in different groups
    ahead = lanes or config.scheduler.async_scheduling is not False
    transfers = TransferLine(ranks, runner, own) if ranks is not None and has_instances else None
    ends: dict[str, Any] = {"ahead": ahead, "transfers": transfers, "lines": lines}
    if ranks is not None and ranks.rank != 0:
        follower = Follower(runner, ranks, decodes=decodes or not lanes, depth=config.scheduler.num_in_flight, **ends)
        return RankHandle(limits, tokenizer, runner, follower.describe, part=follower)
    gpu, longest = torch.cuda.get_device_name(device) if device.type == "cuda" else None, limits.max_model_len
    machine = {"hardware": spec_of_device(gpu, torch.get_num_threads()).name, "model": shape_name(model_config)}
    scheduler = _build_scheduler(config, coefficients, longest, pools[False], **machine)
    instances: list[DecodeInstance] = []
    if has_instances:
        alone = dataclasses.replace(config, parallel=config.parallel.of_group(config.parallel.kvp), profile=None)
        is_async = config.scheduler.scheduler == CDSP or config.scheduler.async_scheduling
        alone = _scheduling(alone, async_scheduling=is_async, scheduler="medha", max_kv_per_group=None, ring=False)
        if alone.parallel != dataclasses.replace(config.parallel.of_group(0), kvp=1):  # else they hold for it as well
            coefficients = load_coefficients(alone, model_config, backend=backend.name, dtype=dtype, device=device)
        for group in range(config.parallel.kvp, config.parallel.num_groups):
            instances.append(DecodeInstance(group, _build_scheduler(alone, coefficients, longest, pools[True])))
    reasons = "; ".join(filter(None, (why, backend.describe(own.layer_shape))))
    attention = backend.name if device.type == "cpu" else f"{backend.name} ({reasons})"
    place = f"{str(dtype).removeprefix('torch.')} on {device}"
    logger.info("%s, %d layers, %s, attention %s", model_config.architecture, model_config.num_layers, place, attention)
    _log_start(config, limits, scheduler)
    texts: dict[str, Any] = {"tokenizer": tokenizer, "timeline": timeline}
    if ranks is None:
        engine = Engine(runner, scheduler, limits, **texts)
        return RankHandle(limits, tokenizer, runner, engine.describe, engine)
    control = {rank: its.control for rank, its in lines.items()}
    sender = ControlSender(ranks.control_group, range(1, ranks.config.world_size), control)
    driven = DrivingRunner(runner, ranks, sender, lanes=lanes, timeline=timeline, **ends)
    hand_overs = HandOvers(instances, config.parallel.transfer_buffers, driven.hand_over)
    engine = Engine(driven, scheduler, limits, hand_overs=hand_overs, news=driven.news, **texts)
    ranks.monitor.predicted_s = lambda: engine.scheduler.longest_s()
    if timeline is not None:
        timeline.gather_from(driven.gather_records, zero_s=time.perf_counter() - engine.now())
    return RankHandle(limits, tokenizer, runner, engine.describe, engine, driven)


def _num_blocks(ranks: mesh.Ranks | None, decodes: bool, num_blocks: int) -> list[int]:
    """KV blocks of each pool, by whether its rank is of a decode instance: as many as all ranks of that kind have room
    for, this one for ``num_blocks``; every rank calls it."""
    return [mesh.over_ranks(ranks, num_blocks if decodes == kind else 2**62, ReduceOp.MIN) for kind in (False, True)]


def _check_pools(config: EngineConfig, num_blocks: int, num_host_blocks: int) -> None:
    pool, given = num_blocks * config.cache.block_size, config.scheduler.max_kv_per_group
    if given is not None and given > pool:
        raise ConfigError(f"max_kv_per_group={given}; accepted: at most the pool's {pool} tokens")
    by_class = load_policy(config.scheduler.policy).by_class and config.scheduler.scheduler == "medha"
    if num_host_blocks and not (by_class or config.scheduler.overcommit) and config.scheduler.prefix_caching is False:
        what = "without prefix caching nobody is preempted but with overcommit=True or a policy 'priority'"
        logger.warning("swap_space has no use: %s", what)


def load_coefficients(
    config: EngineConfig, model: ModelConfig, *, backend: str, dtype: torch.dtype, device: torch.device
) -> Coefficients:
    """Coefficients of the slowest stage of a group: of ``config.profile``, or of a spec for hardware of this kind.

    ConfigError where the profile cannot be read, or was measured for something else.
    """
    parallel, num_threads = config.parallel, torch.get_num_threads()
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    heads = f"{model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}"
    key = ProfileKey(
        machine=gpu or cpu_name() or platform.machine(),
        model=f"{shape_name(model)}, {heads}, MLP {model.intermediate_size}, vocabulary {model.vocab_size}",
        dtype=str(dtype).removeprefix("torch."),
        layout=layout_name(parallel),
        backend=backend,
        num_threads=num_threads,
        block_size=config.cache.block_size,
        torch_version=torch.__version__,
    )
    if config.profile is not None:
        return Coefficients.load(Path(config.profile), expected=key)
    spec = spec_of_device(gpu, num_threads)
    stages = [stage_coefficients(spec, model, parallel, s, dtype_bytes=dtype.itemsize) for s in range(parallel.spp)]
    if backend == "flashinfer" and torch.cuda.get_device_capability(device)[0] == _HOPPER:
        for stage, one in enumerate(stages):
            shard = Shard.of(model, parallel, stage, dtype.itemsize)
            stages[stage] = dataclasses.replace(one, chunks=hopper_chunks(spec, shard, one.chunks))
    return dataclasses.replace(slowest_of([Predictor(stage) for stage in stages]).coefficients, key=key)


def _build_scheduler(
    config: EngineConfig, coefficients: Coefficients, longest: int, num_blocks: int, **machine: str
) -> Scheduler:
    """``machine`` is what improvement rates are for: ``hardware`` and ``model``."""
    predictor = Predictor(coefficients, max_tokens=config.scheduler.max_batch_tokens)
    sizes = {"num_blocks": num_blocks, "block_size": config.cache.block_size}
    completed = complete_config(config.scheduler, predictor, config.parallel, longest=longest, **sizes)
    planner = None
    if completed.scheduler == CDSP:
        times = partial(fitted_times, lambda _: predictor, longest=longest)
        planner = Planner.of(completed, config.parallel, times, **machine)
    sizes |= {"num_groups": config.parallel.kvp, "max_prompt_tokens": longest}
    return Scheduler(completed, planner, predictor=predictor, **sizes)


def _with_async(config: EngineConfig, device: torch.device, launch: Launch | None) -> EngineConfig:
    """The configuration with async scheduling decided: on where something runs beside this host's schedule. With stages
    or several machines that waits for messages; on one machine's CPU it takes cores, unless some are left."""
    if config.scheduler.async_scheduling is not None:
        return config
    is_async = device.type == "cuda"
    if not is_async and launch is not None:
        is_alone = config.parallel.spp == 1 and launch.local_world_size == launch.world_size
        is_async = not is_alone or launch.spare_cores(torch.get_num_threads()) > 0
    return _scheduling(config, async_scheduling=is_async)


def _with_swap(config: EngineConfig, runner: Runner, ranks: mesh.Ranks | None) -> EngineConfig:
    """The configuration with what the scheduler is to know of host memory; every rank calls it.

    The seconds of a move are measured now and fixed for the run, so that decisions replay: those of the slowest rank.
    """
    if runner.host is None:
        return _scheduling(config, num_swap_blocks=0, swap_block_s=0.0)
    num_blocks = runner.host.num_blocks
    block_s = mesh.over_ranks(ranks, round(runner.host.measure_block_s() * 1e9), ReduceOp.MAX) / 1e9
    logger.info("host memory for %d KV blocks of each group; one moves in %.3g ms", num_blocks, 1e3 * block_s)
    return _scheduling(config, num_swap_blocks=num_blocks, swap_block_s=block_s)


def _scheduling(config: EngineConfig, **changes: Any) -> EngineConfig:
    return dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, **changes))


def _log_start(config: EngineConfig, limits: ModelLimits, scheduler: Scheduler) -> None:
    """Say how long requests may be, and what predicts them."""
    memory, context = scheduler.memory, limits.max_model_len
    pool = f"{memory.num_blocks * memory.block_size:,} tokens"
    if memory.num_groups > 1:
        spread = f", spread from {memory.spread_kv:,} on" if memory.spread_kv < memory.max_kv_per_group else ""
        most = f"at most {memory.max_kv_per_group:,} of a request on one{spread}"
        pool += f" on each of {memory.num_groups} groups, {most}"
    longest = min(context, memory.max_request_tokens)
    logger.info("longest request %s tokens: context %s, KV pool %s", f"{longest:,}", f"{context:,}", pool)
    source = "a hardware spec of the kind of this machine; medha profile measures them"
    logger.info("step times from %s", f"profile {config.profile}" if config.profile else source)
    if unread := config.scheduler.unread():
        logger.warning("scheduler %s does not read %s", config.scheduler.scheduler, ", ".join(unread))
    given = [name for name in ("ring", "max_kv_per_group") if getattr(config.scheduler, name)]
    if given and memory.num_groups == 1:
        logger.warning("%s: for requests on several KV-parallel groups, and there is one (kvp)", ", ".join(given))
    if limits.sampling_defaults:
        logger.info("sampling defaults %s, from generation_config.json", dict(limits.sampling_defaults))


def _this_program() -> str:
    """How this program was started, as arguments of torchrun."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    program = sys.argv[0] if spec is None else f"-m {spec.name.removesuffix('.__main__')}"
    return shlex.join([*program.split(" ", 1), *sys.argv[1:]])


def _load_text_side(config: EngineConfig, folder: Path, model: ModelConfig) -> tuple[ModelLimits, Tokenizer | None]:
    """What requests are checked against, and the tokenizer."""
    sampling, eos = load_generation_config(folder, model.vocab_size)
    text_folder = folder if config.tokenizer is None else resolve_model(config.tokenizer, with_weights=False)
    tokenizer = load_tokenizer(text_folder)
    if tokenizer is None and config.tokenizer is not None:
        raise TokenizerError(f"tokenizer={config.tokenizer!r}: {text_folder} has no tokenizer.json")
    if tokenizer is not None:
        tokenizer.check_vocab(model.vocab_size)
    eos = eos or model.eos_token_ids
    if not eos and tokenizer is not None and tokenizer.eos_token_id is not None:
        eos = (tokenizer.eos_token_id,)
    if not eos:
        logger.warning("%s defines no end-of-sequence token; generation ends by length or stop only", folder)
    most, wanted = model.max_position_embeddings, config.max_model_len
    if wanted is not None and wanted > most:
        what = f"max_model_len={wanted} exceeds the model's {most} positions"
        raise ConfigError(f"{what}; accepted: at most that, or rope_scaling='yarn' to stretch it")
    decodes = config.scheduler.scheduler != CDSP or config.parallel.decode_replicas > 0
    return ModelLimits(model.vocab_size, wanted or most, eos, sampling, config.seed, None if decodes else 1), tokenizer
