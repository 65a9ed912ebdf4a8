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
from medha.parallel.kvp import Merge, Shared, Tensors, exchange


def buffer_of(buffers: list[torch.Tensor], number: int, size: int) -> torch.Tensor:
    """So many numbers of the one whose turn it is; its memory is kept for the next time."""
    index = number % len(buffers)
    if len(buffers[index]) < size:
        buffers[index] = empty = buffers[index].new_empty(0)  # not both at once
        buffers[index] = empty.new_empty(size)
    return buffers[index][:size]


class Ring:
    """Rings over runs of KV-parallel groups, those of ``merge``, for blocks of the dtype and on the device of
    ``like``."""

    def __init__(self, merge: Merge, like: torch.Tensor) -> None:
        self._group, self._digests, self._ranks, self._own = merge.group, merge.digests, merge.ranks, merge.own
        self.buffers = [like.new_empty(0), like.new_empty(0)]

    def attend(
        self,
        shared: Shared,
        block: torch.Tensor,
        sizes: Sequence[int],
        attend: Callable[[int, torch.Tensor], Partial],
        *,
        compare: bool,
        waiting: Callable[[], AbstractContextManager[object]],
    ) -> torch.Tensor:
        """Attention of this rank's tokens over the blocks of the whole run; every rank of it calls this, the runs in
        ascending order.

        Args:
            shared: the rows.
            block: this rank's, in buffer 0.
            sizes: numbers of each block, in the order of the run.
            attend: partial attention of this rank's tokens over the block of a member of the run: out [T, N, H] and
                lse [T, N], natural logarithm, float32, -inf where a token sees none of its keys.
            compare: whether the digests of the rows are exchanged too; once a batch.
            waiting: within, this rank waits for another.

        Raises:
            PlanDivergenceError: the rank behind deals other rows, if they are compared.
        """
        groups, count, index = shared.groups, len(shared.groups), shared.groups.index(self._own)
        previous, following = (self._ranks[groups[(index + step) % count]] for step in (-1, 1))
        if compare:
            digest = self._digests.post(previous)
            self._digests.send(shared.batch_id, shared.digest, following)
        partials: list[Partial] = []
        for step in range(count):
            owner, wait = (index - step) % count, None
            if step + 1 < count:
                arriving = buffer_of(self.buffers, step + 1, sizes[owner - 1])
                wait = exchange(self._group, [(following, block)], [(previous, arriving)])
            partials.append(attend(owner, block))
            with waiting():
                if compare and step == 0:
                    shared.check(groups[index - 1], digest())
                if wait is not None:
                    wait()
                    block = arriving
        return merge_partials(partials)[0]

    def move(self, sends: Tensors, receives: Tensors) -> Callable[[], None]:
        """Begin to send history to some groups and to receive it from others, in the order of the shifts; what is
        returned waits for all of it."""
        going, coming = ([(self._ranks[group], tensor) for group, tensor in some] for some in (sends, receives))
        return exchange(self._group, going, coming)
