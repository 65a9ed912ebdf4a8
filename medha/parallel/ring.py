"""Ring attention: the groups of a run compute a share of a dealt row's tokens each, and their keys go around.

Sources: Ring Attention (Liu et al., arXiv:2310.01889); the zigzag of pieces, with which all do as much in each step,
and a history that lies evenly on the ring are of Tetris ("Optimizing Long-context LLM Serving via Fine-grained Sequence
Parallelism"). A group's *block* is what it holds of the rows' keys and values once the new ones are written, page
behind page; whoever has it attends to it as to a pool. In each of s steps a rank sends on the block that it has,
receives the next one into the other of two buffers, and meanwhile attends to the one that it has. What it finds is
merged as by KV parallelism, and stays where it is: each rank ends with the output of its own tokens.

Sends go over the group of :mod:`.kvp`, so each stage and tensor-parallel index has rings of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from medha.attention.merge import Partial, merge_partials
from medha.parallel.kvp import Merge, Shared


def buffer_of(buffers: list[torch.Tensor], number: int, size: int) -> torch.Tensor:
    """So many numbers of the one whose turn it is; its memory is kept for the next time."""
    index = number % len(buffers)
    if len(buffers[index]) < size:
        buffers[index] = empty = buffers[index].new_empty(0)  # not both at once
        buffers[index] = empty.new_empty(size)
    return buffers[index][:size]


class Ring:
    """Rings over runs of KV-parallel groups, those of ``merge``, for blocks of the dtype and on the device of
    ``like``. Within ``waiting`` this rank waits for another."""

    def __init__(self, merge: Merge, like: torch.Tensor, waiting: Callable[[], AbstractContextManager[object]]) -> None:
        self._merge, self._waiting = merge, waiting
        self.buffers = [like.new_empty(0), like.new_empty(0)]

    def attend(
        self, shared: Shared, sizes: Sequence[int], attend: Callable[[int, torch.Tensor], Partial], *, compare: bool
    ) -> torch.Tensor:
        """Attention of this rank's tokens over the blocks of the whole run; every rank of it calls this with its own
        block in buffer 0, the runs in ascending order.

        Args:
            shared: the rows.
            sizes: numbers of each block, in the order of the run.
            attend: partial attention of this rank's tokens over the block of a member of the run: out [T, N, H] and
                lse [T, N], natural logarithm, float32, -inf where a token sees none of its keys.
            compare: whether the digests of the rows are exchanged too; once a batch.

        Raises:
            PlanDivergenceError: the rank behind deals other rows, if they are compared.
        """
        merge, groups, count = self._merge, shared.groups, len(shared.groups)
        index = groups.index(merge.own)
        previous, following = groups[index - 1], groups[(index + 1) % count]
        if compare:
            digest = merge.digests.post(merge.ranks[previous])
            merge.digests.send(shared.batch_id, shared.digest, merge.ranks[following])
        partials, block = list[Partial](), buffer_of(self.buffers, 0, sizes[index])
        for step in range(count):
            owner, wait = (index - step) % count, None
            if step + 1 < count:
                arriving = buffer_of(self.buffers, step + 1, sizes[owner - 1])
                wait = merge.exchange([(following, block)], [(previous, arriving)])
            partials.append(attend(owner, block))
            with self._waiting():
                if compare and step == 0:
                    shared.check(previous, digest())
                if wait is not None:
                    wait()
                    block = arriving
        return merge_partials(partials)[0]
