"""KV-cache parallelism: the groups of a span attend each to its own shard, and exchange their parts once a layer.

Source: the paper, arXiv 2409.17264 v5 section 3.3. What travels is an output and a log-sum-exp for each query and head,
whatever the length of the context. Every rank of a span merges the same parts in shard order, so each gets the same
bits and no result need be sent back. Each sends its parts of all spans of a layer to every other at once, over the one
group that the ranks of its stage and tensor-parallel index have on the device's backend (docs/layouts.md); short ones,
where the ranks compute on CPUs of one machine, through memory that they share. The digest of the shared rows is
compared once a batch, over gloo or likewise.

All groups of a span have its rows' hidden states at the end. Where ranks share memory, each computes a part of the
logits of those that sample, for the one that draws.

Legend: T tokens shared on a span, N query heads of one rank, H head dimension, S rows that sample, D model dimension, W
outputs of a rank's head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial, reduce
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist

from medha.attention.merge import Partial, merge_partials
from medha.attention.staging import packed_bytes, views_of
from medha.batch import Batch
from medha.cpu.decoder import PackedLinear
from medha.parallel.shared_memory import MOST_BYTES, SharedMemory
from medha.parallel.spp import Digests, check_digest

Tensors = Sequence[tuple[int, torch.Tensor]]
"""Tensors, each with the group that it goes to or comes from."""


class Shared(NamedTuple):
    """The rows of a batch that one KVP span attends to together."""

    batch_id: int
    groups: range  # of the run
    tokens: slice  # where their tokens lie among those of all shared rows of this rank's part of the batch
    digest: int  # CRC-32 of the rows

    def check(self, group: int, theirs: list[int]) -> None:
        """Refuse a group whose batch id and digest are others than those of the rows here."""
        check_digest([self.batch_id, self.digest], theirs, f"group {group} merges rows of")


class SharedDraw(NamedTuple):
    """Rows of one run that sample: each of its groups computes a part of their logits, and the first one draws."""

    groups: range
    tokens: list[int]  # index of the last token of each among those of this rank's part of the batch


@dataclass(eq=False, repr=False)
class Merge:
    """Merges of KVP spans, over the ranks of one stage and tensor-parallel index."""

    group: dist.ProcessGroup  # of the device's backend
    digests: Digests  # tell the others which rows are meant
    _: KW_ONLY
    ranks: Sequence[int]  # the global rank of each KV-parallel group
    own: int  # this rank's KV-parallel group
    memory: SharedMemory | None = None  # by which short messages go, where all ranks have it

    def start(self, parts: Sequence[tuple[Shared, Partial]], *, compare: bool) -> Callable[[], list[torch.Tensor]]:
        """Begin to exchange this rank's parts of one layer with the other ranks of their spans, a message to each.
        Every rank of a span calls it, the spans in ascending order.

        Args:
            parts: of each span, out [T, N, H], and lse [T, N], natural logarithm, float32, -inf for an empty shard.
            compare: whether the digests of the rows are exchanged too; once a batch.

        Returns:
            What waits for the other groups and merges: the output [T, N, H] of each span over the whole context.
            PlanDivergenceError where a rank of a span merges other rows, if they are compared.
        """
        digests, sends, receives = [], [], []
        arriving: list[tuple[int, list[torch.Tensor], Callable[[], torch.Tensor]]] = []
        for group in sorted({group for shared, _ in parts for group in shared.groups} - {self.own}):
            told = [tensor for shared, part in parts if group in shared.groups for tensor in part]
            rank, size = self.ranks[group], packed_bytes(told)
            if compare:
                spans = [shared for shared, _ in parts if group in shared.groups]
                digest = reduce(lambda one, next_one: (31 * one + next_one) % (1 << 32), [one.digest for one in spans])
                meant = spans[0]._replace(digest=digest)  # of all, which in another order is another
                digests.append((meant, group, self._compare(meant, rank)))
            memory = self.memory if size <= MOST_BYTES else None
            mine = told[0].new_empty(size, dtype=torch.uint8)
            torch._foreach_copy_(views_of(mine, told), told)
            if memory is None:
                theirs = torch.empty_like(mine)
                arriving.append((group, told, theirs.contiguous))  # itself
                sends.append((group, mine))
                receives.append((group, theirs))
            else:
                memory.put(rank, mine)
                arriving.append((group, told, partial(memory.receive, rank, size)))
        wait = self.exchange(sends, receives)

        def result() -> list[torch.Tensor]:
            for meant, group, received in digests:
                meant.check(group, received())
            wait()
            found: dict[int, Iterator[Partial]] = {self.own: iter([part for _, part in parts])}
            for group, likes, message in arriving:
                views = views_of(message(), likes)
                found[group] = zip(views[::2], views[1::2], strict=True)
            its_parts = ([next(found[group]) for group in shared.groups] for shared, _ in parts)
            by_kernel = self.memory is not None  # where all ranks have the CPU's own
            return [merge_partials(some, by_kernel=by_kernel)[0] for some in its_parts]

        return result

    def draws(self, draws: Sequence[SharedDraw], head: PackedLinear, itemsize: int) -> list[SharedDraw]:
        """Those whose logits are computed in parts: where a part is a short message. Every rank of a run says the
        same."""
        most = 0 if self.memory is None else MOST_BYTES // itemsize
        return [one for one in draws if len(one.tokens) * len(head.outputs_of(0, len(one.groups))) <= most]

    def logits(self, x_SD: torch.Tensor, draws: Sequence[SharedDraw], head: PackedLinear) -> torch.Tensor:
        """Compute parts of logits for other groups, and [S, W] of the rows that this one draws from, with what others
        compute of these. Every rank of a run calls it.

        Args:
            x_SD: normed rows, those that are drawn from here and then those of draws of other groups, in their order.
            draws: of runs with this group, each of which begins at another one.
            head: this rank's.
        """
        assert self.memory is not None, "parts of logits are short messages"
        memory = self.memory
        own_outputs = [head.outputs_of(one.groups.index(self.own), len(one.groups)) for one in draws]
        here = next((one for one in draws if one.groups[0] == self.own), None)
        num_here = len(x_SD) - sum(len(one.tokens) for one in draws if one is not here)
        # a row that other groups know nothing of needs the whole head, which computes all rows then
        is_whole = len(set(own_outputs)) > 1 or num_here > (0 if here is None else len(here.tokens))
        product_SW, end = head(x_SD, None if is_whole else own_outputs[0]), num_here
        found = [product_SW[:num_here]]
        for one, outputs in zip(draws, own_outputs, strict=True):
            if one is not here:
                part = product_SW[end : (end := end + len(one.tokens))]
                part = part[:, outputs.start : outputs.stop] if is_whole else part
                memory.put(self.ranks[one.groups[0]], part)
        if here is not None:
            for index, group in list(enumerate(here.groups))[1:]:
                shape = len(here.tokens), len(head.outputs_of(index, len(here.groups)))
                part = memory.receive(self.ranks[group], math.prod(shape) * x_SD.itemsize)
                found.append(part.view(x_SD.dtype).view(shape))
        return found[0] if is_whole else torch.cat(found, dim=1)

    def _compare(self, meant: Shared, rank: int) -> Callable[[], list[int]]:
        """Tell a rank which rows are meant; what is returned waits for what it says of them."""
        if (memory := self.memory) is None:
            received = self.digests.post(rank)
            self.digests.send(meant.batch_id, meant.digest, rank)
            return received
        ours = torch.tensor([meant.batch_id, meant.digest], device="cpu")
        memory.put(rank, ours)
        return lambda: memory.receive(rank, ours.nbytes).view(ours.dtype).tolist()

    def exchange(self, sends: Tensors, receives: Tensors) -> Callable[[], None]:
        """Begin to send tensors to other groups and to receive them from these; what is returned waits for all of
        it."""
        ops = [dist.P2POp(dist.irecv, tensor, self.ranks[group], self.group) for group, tensor in receives]
        ops += [dist.P2POp(dist.isend, tensor, self.ranks[group], self.group) for group, tensor in sends]
        works = dist.batch_isend_irecv(ops) if ops else []

        def wait() -> None:
            for work in works:
                work.wait()
            ops.clear()  # what is sent has to live so long

        return wait

    def warm(self, device: torch.device) -> None:
        """Use the communicator once; the rank of every KV-parallel group calls it."""
        shared = Shared(-1, range(len(self.ranks)), slice(0), 0)
        empty = torch.zeros(1, 1, 2, dtype=torch.float32, device=device)
        self.start([(shared, (empty, empty[..., 0]))], compare=True)()


def shared_rows(batch: Batch, *, dealt: bool = False) -> list[Shared]:
    """The rows of a rank's part of a batch that are shared, by run in ascending order: the order of all collectives;
    or those that are dealt."""
    found, start = [], 0
    wanted = (row for row in batch.rows if row.is_shared and row.is_dealt == dealt)
    for groups, its_rows in groupby(wanted, key=lambda row: row.groups):
        rows = tuple(its_rows)
        slots = {row.slot for row in rows}
        end = start + sum(row.q_len if batch.group is None else row.tokens_on(batch.group) for row in rows)
        theirs = Batch(batch.batch_id, rows, deals=tuple(deal for deal in batch.deals if deal.slot in slots))
        found.append(Shared(batch.batch_id, groups, slice(start, end), theirs.digest()))
        start = end
    return found


def shared_draws(batch: Batch) -> list[SharedDraw]:
    """Of each group the rows that sample on the longest run that begins there, in a rank's part of a batch. Whoever is
    in a shorter run is in the longest too, so all ranks of a run say the same."""
    found, end = dict[tuple[int, int], list[int]](), 0
    for row in batch.rows:
        end += row.q_len if batch.group is None else row.tokens_on(batch.group)
        if row.samples and row.is_shared and not row.is_dealt:
            found.setdefault(row.span, []).append(end - 1)
    longest = {run[0]: run for run in sorted(found)}
    return [SharedDraw(range(run[0], run[1] + 1), found[run]) for run in longest.values()]
