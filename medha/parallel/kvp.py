"""KV-cache parallelism: the groups of a span attend each to its own shard, and exchange their parts once a layer.

Source: the paper, arXiv 2409.17264 v5 section 3.3. What travels is an output and a log-sum-exp for each query and head,
whatever the length of the context. Every rank of a span merges the same parts in shard order, so each gets the same
bits and no result need be sent back. Each sends its part to every other, all spans of a layer at once, over the one
group that the ranks of its stage and tensor-parallel index have on the device's backend: see docs/layouts.md. The
digest of the shared rows is compared once a batch, over gloo.

Legend: T tokens shared on a span, N query heads of one rank, H head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist

from medha.attention.merge import merge_partials
from medha.batch import Batch
from medha.parallel.spp import Digests, check_digest

_ALIGNMENT = 16  # bytes

Partial = tuple[torch.Tensor, torch.Tensor]


class Shared(NamedTuple):
    """The rows of a batch that one KVP span attends to together."""

    batch_id: int
    run: tuple[int, int]  # first and last group
    tokens: slice  # where their tokens lie among those of all shared rows of this rank's part of the batch
    digest: int  # CRC-32 of the rows

    def check(self, group: int, theirs: list[int]) -> None:
        """Refuse a group whose batch id and digest are others than those of the rows here."""
        check_digest([self.batch_id, self.digest], theirs, f"group {group} merges rows of")


@dataclass(eq=False, repr=False)
class Merge:
    """Merges of KVP spans, over the ranks of one stage and tensor-parallel index."""

    group: dist.ProcessGroup  # of the device's backend
    digests: Digests  # tell the others which rows are meant
    _: KW_ONLY
    ranks: Sequence[int]  # the global rank of each KV-parallel group
    own: int  # this rank's KV-parallel group

    def start(self, parts: Sequence[tuple[Shared, Partial]], *, compare: bool) -> Pending:
        """Begin to exchange this rank's parts of one layer with the other ranks of their spans, all in one group of
        sends and receives. Every rank of a span calls it, the spans in ascending order.

        Args:
            parts: of each span, out [T, N, H], and lse [T, N], natural logarithm, float32, -inf for an empty shard.
            compare: whether the digests of the rows are exchanged too; once a batch.
        """
        everyone, ops, digests = [], [], []
        for shared, partial in parts:
            first, last = shared.run
            others = [(self.ranks[group], group) for group in range(first, last + 1) if group != self.own]
            buffers = _buffers(partial, 1 + last - first)
            mine = buffers[self.own - first]
            for view, values in zip(_views(mine, partial), partial, strict=True):
                view.copy_(values)
            ops += [dist.P2POp(dist.irecv, buffers[group - first], rank, self.group) for rank, group in others]
            ops += [dist.P2POp(dist.isend, mine, rank, self.group) for rank, _ in others]
            everyone.append(buffers)
            if compare:
                digests += [(shared, group, self.digests.post(rank)) for rank, group in others]
                for rank, _ in others:
                    self.digests.send(shared.batch_id, shared.digest, rank)
        return Pending(parts, everyone, dist.batch_isend_irecv(ops), digests)

    def warm(self, device: torch.device) -> None:
        """Use the communicator once; the rank of every KV-parallel group calls it."""
        shared = Shared(-1, (0, len(self.ranks) - 1), slice(0), 0)
        empty = torch.zeros(1, 1, 2, device=device)
        self.start([(shared, (empty, empty[..., 0]))], compare=True).result()


class Pending(NamedTuple):
    """A merge under way; the buffers live as long as it does."""

    parts: Sequence[tuple[Shared, Partial]]
    everyone: list[torch.Tensor]  # of each span, the parts of its groups as bytes
    works: list[dist.Work]
    digests: list[tuple[Shared, int, Callable[[], list[int]]]]  # what each other group says of a span

    def result(self) -> list[torch.Tensor]:
        """The merged output [T, N, H] of each span over the whole context; waits for the other groups.

        PlanDivergenceError where a rank of a span merges other rows, if they are compared.
        """
        for shared, group, received in self.digests:
            shared.check(group, received())
        for work in self.works:
            work.wait()
        return [
            merge_partials([_views(row, partial) for row in buffers])[0]
            for (_, partial), buffers in zip(self.parts, self.everyone, strict=True)
        ]


def shared_rows(batch: Batch, *, dealt: bool = False) -> list[Shared]:
    """The rows of a rank's part of a batch that are shared, by run in ascending order: the order of all collectives;
    or those that are dealt."""
    found, start = [], 0
    wanted = (row for row in batch.rows if row.is_shared and row.is_dealt == dealt)
    for run, its_rows in groupby(wanted, key=lambda row: row.span):
        rows = tuple(its_rows)
        slots = {row.slot for row in rows}
        end = start + sum(row.q_len if batch.group is None else row.tokens_on(batch.group) for row in rows)
        theirs = Batch(batch.batch_id, rows, deals=tuple(deal for deal in batch.deals if deal.slot in slots))
        found.append(Shared(batch.batch_id, run, slice(start, end), theirs.digest()))
        start = end
    return found


def _buffers(like: Partial, num_groups: int) -> torch.Tensor:
    """Memory for the parts of so many groups, as bytes: output, then log-sum-exp."""
    size = sum(tensor.nbytes for tensor in like)
    return like[0].new_empty(num_groups, size + -size % _ALIGNMENT, dtype=torch.uint8)


def _views(buffer: torch.Tensor, like: Partial) -> Partial:
    """The output and log-sum-exp of a part of this shape."""
    out_TNH, lse_TN = like
    size, end = out_TNH.nbytes, out_TNH.nbytes + lse_TN.nbytes
    return (
        buffer[:size].view(out_TNH.dtype).view(out_TNH.shape),
        buffer[size:end].view(lse_TN.dtype).view(lse_TN.shape),
    )
