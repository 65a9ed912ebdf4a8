"""Tensor parallelism: a plan of splits becomes DTensor parameters, and the packed forward gets its collectives.

The plan (:data:`~medha.models.decoder.TP_PLAN`) is given to ``parallelize_module``, which makes parameters DTensors.
Everything else reads the result: loading takes each parameter's slice from its placement, the packed forward its local
tensor. The DTensor modules themselves are the reference forward; in the hot path they would cost 40 to 60 us a layer.

Legend: S rows, W features of one rank.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from medha.parallel.shared_memory import MOST_BYTES, SharedMemory

Collective = Callable[[torch.Tensor], torch.Tensor]


def parallelize_(module: nn.Module, mesh: DeviceMesh, plan: Mapping[str, str]) -> None:
    """Turn the planned parameters of ``module`` into DTensors over a one-axis mesh, in place; nothing is sent.

    Args:
        module: its parameters may be without memory (meta device).
        mesh: the tensor-parallel axis.
        plan: split of each module by its name, a glob; what matches nothing is in another stage.
    """
    # Imported where something is split: a third of what torch takes to start.
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    made: dict[str, Callable[[], ParallelStyle]] = {
        "column": ColwiseParallel,
        "row": RowwiseParallel,
        "vocab": lambda: RowwiseParallel(input_layouts=Replicate()),
        "gathered": lambda: ColwiseParallel(output_layouts=Replicate()),
    }
    present = [name for name, _ in module.named_modules()]
    styles = {name: made[split]() for name, split in plan.items() if fnmatch.filter(present, name)}
    parallelize_module(module, mesh, styles, src_data_rank=None)


def local_slices(parameter: torch.Tensor) -> tuple[slice, ...] | None:
    """Which part of the whole tensor this rank holds of a DTensor, as an index; None for all of a plain one."""
    if not hasattr(parameter, "to_local"):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    split: Any = parameter
    shape, offset = compute_local_shape_and_global_offset(split.shape, split.device_mesh, split.placements)
    return tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))


def all_reduce_over(group: dist.ProcessGroup, memory: SharedMemory | None = None) -> Collective:
    """A function that sums a tensor over ``group``, maybe in place, and returns it; every rank calls it. Short ones go
    through ``memory``, where all ranks have it."""

    def all_reduce(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if memory is not None and x.nbytes <= MOST_BYTES:
            return reduce(torch.add, memory.gather(x))
        dist.all_reduce(x, group=group)
        return x

    return all_reduce


def all_gather_over(group: dist.ProcessGroup, memory: SharedMemory | None = None) -> Collective:
    """A function that puts [S, W] of every rank of ``group`` side by side, [S, size * W]; every rank calls it. As of
    :func:`all_reduce_over`."""
    # The name changed in torch 2.13; 2.11 has only the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    size = dist.get_world_size(group)

    def all_gather(x_SW: torch.Tensor) -> torch.Tensor:
        x_SW = x_SW.contiguous()
        if memory is not None and x_SW.nbytes <= MOST_BYTES:
            return torch.cat(memory.gather(x_SW), dim=1)
        S, W = x_SW.shape
        parts = x_SW.new_empty(size * S, W)
        gather(parts, x_SW, group=group)
        return parts.view(size, S, W).transpose(0, 1).reshape(S, size * W)

    return all_gather
