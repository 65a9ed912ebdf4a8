"""KV-cache parallelism: the groups of a run attend each to its own shard, and one all-gather a layer merges the parts.

Source: the paper, arXiv 2409.17264 v5 section 3.3. What travels is an output and a log-sum-exp for each query and head,
whatever the length of the context. Every rank of a run merges the same parts in shard order, so each gets the same bits
and no result need be sent back. The digest of the shared rows rides along and is compared.

Legend: T tokens shared on a run, N query heads of one rank, H head dimension.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist

from medha.attention.merge import merge_partials
from medha.batch import Batch
from medha.errors import PlanDivergenceError
from medha.parallel.spp import TAIL_BYTES

Partial = tuple[torch.Tensor, torch.Tensor]


class Shared(NamedTuple):
    """The rows of a batch that one KVP span attends to together."""

    batch_id: int
    run: tuple[int, int]  # first and last group
    tokens: slice  # where their tokens lie among those of all shared rows of this rank's part of the batch
    digest: int  # CRC-32 of the rows


class Merge:
    """Merges of one KVP span, over its ranks at this stage and tensor-parallel index, in shard order."""

    def __init__(self, group: dist.ProcessGroup, num_groups: int) -> None:
        self._group = group
        self._num_groups = num_groups

    def start(self, shared: Shared, partial: Partial) -> Pending:
        """Begin the all-gather of this rank's part: out [T, N, H], and lse [T, N], natural logarithm, float32, -inf for
        an empty shard. Every rank of the run calls it in the same order."""
        mine = _packed(shared, partial)
        everyone = mine.new_empty(self._num_groups * len(mine))
        # The name changed in torch 2.13; 2.11 has only the old one.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = gather(everyone, mine, group=self._group, async_op=True)
        return Pending(shared, partial, everyone.view(self._num_groups, -1), work, mine)

    def warm(self, device: torch.device) -> None:
        """Use the communicator once; every rank of the run calls it."""
        shared = Shared(-1, (0, 0), slice(0), 0)
        empty = torch.zeros(1, 1, 2, device=device)
        self.start(shared, (empty, empty[..., 0])).result(compare=True)


class Pending(NamedTuple):
    """A merge under way; the buffers live as long as it does."""

    shared: Shared
    partial: Partial
    everyone: torch.Tensor
    work: dist.Work
    mine: torch.Tensor

    def result(self, *, compare: bool) -> torch.Tensor:
        """The merged output [T, N, H] over the whole context; waits for the other groups.

        With ``compare``, once a batch, PlanDivergenceError where a rank of the run merges other rows.
        """
        self.work.wait()
        parts = [_views(row, self.partial) for row in self.everyone]
        ours = [self.shared.batch_id, self.shared.digest]
        for group, (*_, tail) in enumerate(parts if compare else (), start=self.shared.run[0]):
            if (theirs := tail.tolist()) != ours:
                raise PlanDivergenceError(
                    f"batch {ours[0]}: group {group} merges rows of batch {theirs[0]} with digest {theirs[1]:08x}, "
                    f"this one has {ours[0]} with {ours[1]:08x}"
                )
        return merge_partials([(out_TNH, lse_TN) for out_TNH, lse_TN, _ in parts])[0]


def shared_rows(batch: Batch) -> list[Shared]:
    """The rows of a rank's part of a batch that are shared, by run in ascending order: the order of all collectives."""
    found, start = [], 0
    for run, its_rows in groupby((row for row in batch.rows if row.is_shared), key=lambda row: row.span):
        rows = tuple(its_rows)
        end = start + sum(row.q_len for row in rows)
        found.append(Shared(batch.batch_id, run, slice(start, end), Batch(batch.batch_id, rows).digest()))
        start = end
    return found


def _packed(shared: Shared, partial: Partial) -> torch.Tensor:
    """One part as bytes: output, log-sum-exp, batch id and digest."""
    size = sum(tensor.nbytes for tensor in partial)
    buffer = torch.empty(size + -size % 8 + TAIL_BYTES, dtype=torch.uint8, device=partial[0].device)
    tail = torch.tensor([shared.batch_id, shared.digest], dtype=torch.int64)
    if buffer.is_cuda:
        tail = tail.pin_memory()  # so that the host does not wait in every layer
    for view, values in zip(_views(buffer, partial), (*partial, tail), strict=True):
        view.copy_(values, non_blocking=True)
    return buffer


def _views(buffer: torch.Tensor, like: Partial) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, log-sum-exp and tail of a packed part of this shape."""
    out_TNH, lse_TN = like
    size, end = out_TNH.nbytes, out_TNH.nbytes + lse_TN.nbytes
    return (
        buffer[:size].view(out_TNH.dtype).view(out_TNH.shape),
        buffer[size:end].view(lse_TN.dtype).view(lse_TN.shape),
        buffer[-TAIL_BYTES:].view(torch.int64),
    )
