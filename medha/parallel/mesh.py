"""Ranks: who is where, and the process groups between them.

The ranks have three axes, ("kvp", "spp", "tp"), tp fastest so that it lies inside a node; a decode instance is one more
group behind the KV-parallel ones. Process groups: one tensor-parallel group a stage, one for hidden states, one for
sampled tokens and digests, one for control messages, one for the parts of attention between the ranks of each stage and
tensor-parallel index, and one for keys and values on their way to decode instances. Those for hidden states, parts,
keys and values are of the device's backend, that of tokens and that of messages are gloo's.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from importlib.metadata import version
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from medha.config import ModelConfig, ParallelConfig
from medha.errors import ConfigError, ParallelConfigError, RankFailedError
from medha.parallel.health import BEHIND_S, Monitor
from medha.parallel.launch import Launch, gloo_interface

logger = logging.getLogger("medha")

# Control messages come when there is work; a dead peer is noticed by its closed connection, not by this timeout.
_CONTROL_TIMEOUT = timedelta(days=365)

_READ_LIMIT_S = 3600.0  # to find, download and check a model, before any process group exists


class Job(NamedTuple):
    """This process has met the others: no process group yet, and the degrees may not fit the model."""

    launch: Launch
    config: ParallelConfig
    store: Store
    monitor: Monitor


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process's place and its groups."""

    config: ParallelConfig
    rank: int  # global
    group: int  # coordinates on the axes kvp, spp and tp; decode instances are the groups from kvp on
    stage: int  # the first one embeds tokens
    tp_rank: int
    tp_mesh: DeviceMesh  # the ranks of this stage
    tp_group: dist.ProcessGroup
    pipe_group: dist.ProcessGroup  # for hidden states
    report_group: dist.ProcessGroup  # for sampled tokens and digests
    control_group: dist.ProcessGroup  # for messages from rank 0
    merge_group: dist.ProcessGroup | None  # for parts of attention, where there are several KV-parallel groups
    transfer_group: dist.ProcessGroup | None  # for keys and values, where there are decode instances
    job: Job

    @property
    def layout(self) -> ParallelConfig:
        """The degrees of this rank's group."""
        return self.config.of_group(self.group)

    @property
    def monitor(self) -> Monitor:
        """Notices failed ranks."""
        return self.job.monitor

    @property
    def is_sampler(self) -> bool:
        """Whether this rank draws tokens."""
        return self.rank == self.sampler_rank(self.group)

    def sampler_rank(self, group: int) -> int:
        """The global rank that samples for a KV-parallel group: the first of its last stage."""
        return self.config.rank_of(stage=self.config.of_group(group).spp - 1, tp_rank=0, kvp_rank=group)

    def of_groups(self, groups: Sequence[int]) -> list[int]:
        """The global ranks of some groups."""
        return [rank for rank in range(self.config.world_size) if self.config.coordinates(rank)[0] in groups]

    def neighbour(self, step: int) -> int | None:
        """The global rank with this group and tp index ``step`` stages on, None beyond an end."""
        is_there = 0 <= self.stage + step < self.layout.spp
        return self.rank + step * self.layout.tp if is_there else None


def check_layout(config: ParallelConfig, model: ModelConfig, world_size: int) -> None:
    """Refuse a layout that cannot work; a pure function of its arguments, so every rank says the same."""
    if config.world_size != world_size:
        what = f"{config} is {config.world_size} ranks, and {world_size} were started"
        which = "sum" if config.decode_replicas else "product"
        raise ParallelConfigError(f"{what}; accepted: degrees whose {which} is {world_size}")
    config.check_model(model)


def meet(config: ParallelConfig, launch: Launch) -> Job:
    """Join the other ranks at the launcher's address and begin to watch them; every rank calls it, before all else."""
    interface = gloo_interface(launch)
    monitor = Monitor(launch, name=lambda rank: _place(config, rank))
    if not dist.is_initialized():
        atexit.register(_destroy_all)  # before the monitor's, which comes first then
    monitor.start()
    has_store = launch.rank == 0 and not launch.agent_has_store
    try:
        timeout = timedelta(seconds=config.dist_timeout_s)
        whole = TCPStore(launch.host, launch.port, None, has_store, timeout, wait_for_workers=False, multi_tenant=True)
        if has_store:
            atexit.register(lambda: whole)  # held to the end: the next LLM of this process meets at the same store
        # the launcher may start the ranks again, and a process may build one LLM after the other
        prefix = f"medha/{launch.attempt}"
        prefix = f"{prefix}/{PrefixStore(prefix, whole).add(f'joins/{launch.rank}', 1)}"
        own = whole.clone()  # type: ignore[attr-defined]  # a connection that nothing else uses
        monitor.attach(PrefixStore(prefix, own))
    except BaseException as error:
        monitor.stop()
        if not isinstance(error, (dist.DistError, RuntimeError, ValueError)):
            raise
        what = f"rank {launch.rank} {'could not listen' if has_store else 'could not reach the others'}"
        raise ConfigError(f"{what} at {launch.address} (MASTER_ADDR and MASTER_PORT): {error}") from error
    job = Job(launch, config, PrefixStore(prefix, whole), monitor)
    wait_for_all(job, "here", limit_s=config.dist_timeout_s)
    if launch.rank == 0:
        message = (
            "%d ranks meet at %s (store of %s, open on every interface), gloo listens on %s; none of it asks for a "
            "password: keep it inside a network you trust"
        )
        logger.info(message, launch.world_size, launch.address, monitor.store_holder, interface)
    return job


def wait_for_all(job: Job, point: str, value: Any = None, *, limit_s: float) -> list[Any]:
    """Wait until every rank has come to a named point, for at most ``limit_s`` seconds; no process group is needed.
    Returns what each brings there, which JSON has, rank 0's first.

    The first rank that has come names in the log those that take long. RankFailedError where one has failed.
    """
    launch, begin_s, is_named = job.launch, time.monotonic(), False
    job.store.set(f"{point}/{launch.rank}", json.dumps(value))
    missing = list(range(launch.world_size))
    while missing := [rank for rank in missing if not job.store.check([f"{point}/{rank}"])]:
        if job.monitor.has_failure:
            raise RankFailedError(job.monitor.first_error() or "a rank has failed")
        waited_s, speaks = time.monotonic() - begin_s, all(rank in missing for rank in range(launch.rank))
        if speaks and not is_named and waited_s > BEHIND_S:
            is_named = True
            level = logging.ERROR if launch.rank else logging.WARNING  # other ranks than 0 write errors alone
            logger.log(level, "ranks %s have not come (%s) after %.0f s; others wait", missing, point, waited_s)
        if waited_s > limit_s:
            text = f"ranks {missing} of {launch.world_size} have not come to {launch.address} within {limit_s:.0f} s"
            if speaks and launch.rank > 0:
                logger.error("%s", text)
            raise ConfigError(text)
        time.sleep(0.01)
    return [json.loads(job.store.get(f"{point}/{rank}")) for rank in range(launch.world_size)]


def init_ranks(job: Job, device: torch.device) -> Ranks:
    """Make the process groups, with explicit timeouts; every rank makes the same ones in the same order.

    Those of all ranks and of tensor parallelism live as long as the process, the others until this job's :func:`leave`.
    """
    config, launch = job.config, job.launch
    timeout = timedelta(seconds=config.dist_timeout_s)
    wait_for_all(job, "ready", limit_s=_READ_LIMIT_S)
    try:
        if not dist.is_initialized():
            # the next LLM may be on another device
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            store, size = PrefixStore("groups", job.store), launch.world_size
            dist.init_process_group(backend, store=store, rank=launch.rank, world_size=size, timeout=timeout)
        tp_mesh = _tp_mesh(dist.group.WORLD, device.type, _tp_neighbours(config), timeout)
        pipe = dist.new_group(timeout=timeout)
        report, control = (dist.new_group(timeout=limit, backend="gloo") for limit in (timeout, _CONTROL_TIMEOUT))
        step = config.spp * config.tp  # ranks of a group: of every step-th one stage and tensor-parallel index
        merging = [range(first, config.kvp * step, step) for first in range(step)]
        merge = _own_group(merging, timeout) if config.kvp > 1 else None
        transfer = dist.new_group(timeout=timeout) if config.decode_replicas else None
        tp_group, place = tp_mesh.get_group(), config.coordinates(launch.rank)
        return Ranks(config, launch.rank, *place, tp_mesh, tp_group, pipe, report, control, merge, transfer, job)
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{job.monitor.place} could not connect to the others: {error}") from error


@cache
def _tp_mesh(
    world: dist.ProcessGroup, device_type: str, neighbours: tuple[tuple[int, ...], ...], timeout: timedelta
) -> DeviceMesh:
    """The mesh of this rank's tensor-parallel group; every rank makes the groups of all.

    Made once in a ``world``: DTensor keeps what it has derived from a mesh by the ranks in it, so a second mesh of the
    same ranks would be given the groups of the first, which may have been destroyed.
    """
    return DeviceMesh.from_group(_own_group(neighbours, timeout), device_type, mesh_dim_names=("tp",))


def _own_group(neighbours: Iterable[Sequence[int]], timeout: timedelta) -> Any:
    """Make the groups of all these ranks; returns this rank's, None where it is in none."""
    mine, _ = dist.new_subgroups_by_enumeration([*map(list, neighbours)], timeout)  # type: ignore[no-untyped-call]
    return mine


def _tp_neighbours(config: ParallelConfig) -> tuple[tuple[int, ...], ...]:
    """The global ranks of each tensor-parallel group: those of one group and stage."""
    groups = groupby(range(config.world_size), key=lambda rank: config.coordinates(rank)[:2])
    return tuple(tuple(ranks) for _, ranks in groups)


def _destroy_all() -> None:
    """At the end of a process that has left all jobs; a group that outlives the interpreter aborts it."""
    _tp_mesh.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def leave(ranks: Ranks) -> None:
    """Leave the job and its process groups; every rank calls it, within ``failures_named``, when no CUDA graph is left
    that has captured a collective: NCCL would wait for its end for ever."""
    dist.barrier(group=ranks.report_group)
    ranks.monitor.leave()
    groups = ranks.pipe_group, ranks.report_group, ranks.control_group, ranks.merge_group, ranks.transfer_group
    for group in filter(None, groups):
        with suppress(ValueError):  # a program may have destroyed all that there were
            dist.destroy_process_group(group)


def check_same_everywhere(job: Job, parts: Mapping[str, object]) -> None:
    """Refuse ranks whose ``parts``, by name, have another ``repr`` than those of rank 0; every rank calls it."""
    parts = {"version of medha": version("medha"), **parts}
    prints = {name: hashlib.sha256(repr(part).encode()).hexdigest() for name, part in parts.items()}
    theirs = wait_for_all(job, "compared", prints, limit_s=_READ_LIMIT_S)
    if odd := [rank for rank, them in enumerate(theirs) if them != theirs[0]]:
        names = [name for name in prints if any(theirs[rank].get(name) != theirs[0].get(name) for rank in odd)]
        raise ConfigError(f"ranks {odd} differ from rank 0 in: {', '.join(names)}; accepted: the same on every rank")


def check_nodes(job: Job) -> None:
    """Refuse ranks that do not agree on who is on their node, as who shares memory follows from it; every rank calls
    it."""
    launch = job.launch
    first = launch.rank - launch.local_rank
    nodes = wait_for_all(job, "nodes", [first, first + launch.local_world_size], limit_s=_READ_LIMIT_S)
    mine = [[rank for rank, other in enumerate(nodes) if other == node] for node in nodes]
    if odd := [rank for rank, node in enumerate(nodes) if mine[rank] != list(range(*node))]:
        what = f"LOCAL_RANK and LOCAL_WORLD_SIZE of ranks {odd} make no node of them"
        raise ConfigError(f"{what}; accepted: both as torchrun sets them, without --virtual-local-rank")


def over_ranks(ranks: Ranks | None, number: int, which: dist.ReduceOp.RedOpType) -> int:
    """The least or the most (``ReduceOp.MIN``, ``MAX``) of the numbers that the ranks bring, of one alone its own;
    every rank calls it."""
    if ranks is None:
        return number
    found = torch.tensor([number], dtype=torch.int64)
    dist.all_reduce(found, op=which, group=ranks.report_group)
    return int(found)


def _place(config: ParallelConfig, rank: int) -> str:
    group, stage, _ = config.coordinates(rank)
    if group >= config.kvp:
        return f"rank {rank} (decode instance {group - config.kvp})"
    return f"rank {rank} (group {group}, stage {stage})" if config.kvp > 1 else f"rank {rank} (stage {stage})"
