"""Ranks: who is where, and the process groups between them.

The mesh has three named axes, ("kvp", "spp", "tp"), tp fastest so that it lies inside a node. Process groups: one
tensor-parallel group a stage (from the mesh), one for hidden states, one for sampled tokens, one for control messages.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import medha
from medha.config import ModelConfig, ParallelConfig
from medha.errors import ConfigError, ParallelConfigError
from medha.parallel.health import Monitor
from medha.parallel.launch import Launch

logger = logging.getLogger("medha")

# Control messages come when there is work; a dead peer is noticed by its closed connection, not by this timeout.
_CONTROL_TIMEOUT = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place and its groups.

    Attributes:
        config: degrees.
        rank: global rank.
        stage, tp_rank: coordinates.
        mesh: all three axes.
        tp_group: the ranks of this stage.
        pipe_group: for hidden states; report_group: for sampled tokens; control_group: for messages from rank 0.
        monitor: notices failed ranks.
    """

    config: ParallelConfig
    rank: int
    stage: int
    tp_rank: int
    mesh: DeviceMesh
    tp_group: dist.ProcessGroup
    pipe_group: dist.ProcessGroup
    report_group: dist.ProcessGroup
    control_group: dist.ProcessGroup
    monitor: Monitor

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits."""
        return self.stage == self.config.spp - 1

    @property
    def sampler_rank(self) -> int:
        """The global rank that samples: the first of the last stage."""
        return self.config.rank_of(stage=self.config.spp - 1, tp_rank=0)

    @property
    def first_stage_ranks(self) -> tuple[int, ...]:
        """Global ranks of the first stage."""
        return tuple(self.config.rank_of(stage=0, tp_rank=t) for t in range(self.config.tp))

    def neighbour(self, step: int) -> int | None:
        """The global rank with this tp index ``step`` stages on, None beyond an end."""
        stage = self.stage + step
        return self.config.rank_of(stage=stage, tp_rank=self.tp_rank) if 0 <= stage < self.config.spp else None


def check_layout(config: ParallelConfig, model: ModelConfig, world_size: int) -> None:
    """Refuse a layout that cannot work; a pure function of its arguments, so every rank says the same.

    Raises:
        ParallelConfigError: names the degree, and what would work.
    """
    if config.kvp != 1:
        raise ParallelConfigError(f"kvp={config.kvp} is not implemented; accepted: 1")
    if config.world_size != world_size:
        raise ParallelConfigError(
            f"tp={config.tp} x spp={config.spp} x kvp={config.kvp} is {config.world_size} ranks, "
            f"and {world_size} were started; accepted: degrees whose product is {world_size}"
        )
    if config.spp > model.num_layers:
        raise ParallelConfigError(
            f"spp={config.spp} stages for {model.num_layers} layers; accepted: 1 to {model.num_layers}"
        )
    fitting = [tp for tp in range(1, model.num_heads + 1) if _tp_fits(tp, model)]
    if config.tp not in fitting:
        raise ParallelConfigError(
            f"tp={config.tp} does not divide {model.num_heads} query heads, {model.num_kv_heads} KV heads and "
            f"{model.intermediate_size} MLP features; accepted: {', '.join(map(str, fitting))}"
        )


def init_ranks(config: ParallelConfig, launch: Launch, device: torch.device) -> Ranks:
    """Join the other ranks: process groups with explicit timeouts, and the mesh. Every rank calls it.

    Raises:
        ConfigError: the ranks could not meet.
    """
    timeout = timedelta(seconds=config.dist_timeout_s)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=timeout)
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise ConfigError(f"rank {launch.rank} could not join the others at {launch.address}: {error}") from error
    mesh = init_device_mesh(device.type, (config.kvp, config.spp, config.tp), mesh_dim_names=("kvp", "spp", "tp"))
    everyone = list(range(config.world_size))
    _, stage, tp_rank = config.coordinates(launch.rank)
    monitor = Monitor(_default_store(), rank=launch.rank, world_size=launch.world_size)
    dist.barrier()
    monitor.start()
    return Ranks(
        config=config,
        rank=launch.rank,
        stage=stage,
        tp_rank=tp_rank,
        mesh=mesh,
        tp_group=mesh["tp"].get_group(),
        pipe_group=_new_group(everyone, timeout),
        report_group=_new_group(everyone, timeout),
        control_group=_new_group(everyone, _CONTROL_TIMEOUT),
        monitor=monitor,
    )


def _default_store() -> Store:
    """The store over which the ranks met."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def fingerprint(*parts: object) -> int:
    """A number that differs between ranks whose version or configuration differs."""
    text = repr((medha.__version__, *parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7])


def check_same_everywhere(ranks: Ranks, number: int) -> None:
    """Compare a fingerprint over all ranks; every rank calls it.

    Raises:
        ConfigError: names the ranks that differ from rank 0; the same text on every rank.
    """
    numbers = _gathered(ranks, number)
    odd = [rank for rank, theirs in enumerate(numbers) if theirs != numbers[0]]
    if odd:
        raise ConfigError(f"ranks {odd} run another version or configuration of medha than rank 0")


def least(ranks: Ranks, number: int) -> int:
    """The least of the numbers that the ranks bring; every rank calls it."""
    return min(_gathered(ranks, number))


def _gathered(ranks: Ranks, number: int) -> list[int]:
    mine = torch.tensor([number], dtype=torch.int64)
    everyone = [torch.empty_like(mine) for _ in range(ranks.config.world_size)]
    dist.all_gather(everyone, mine, group=ranks.report_group)
    return [int(theirs) for theirs in everyone]


def _new_group(ranks: list[int], timeout: timedelta) -> dist.ProcessGroup:
    group = dist.new_group(ranks, timeout=timeout, backend="gloo")
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group


def _tp_fits(tp: int, model: ModelConfig) -> bool:
    kv_fits = model.num_kv_heads % tp == 0 or tp % model.num_kv_heads == 0
    return model.num_heads % tp == 0 and kv_fits and model.intermediate_size % tp == 0
