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
import torch.distributed as dist

from medha.attention.merge import merge_partials
from medha.parallel.kvp import Merge, Partial, Shared

Moving = Callable[[], list[torch.Tensor]]
"""Of history on its way: waits for it, and gives what was received, in order, then what was sent."""


class Ring:
    """Rings over runs of KV-parallel groups, those of ``merge``."""

    def __init__(self, merge: Merge) -> None:
        self._group, self._digests, self._ranks, self._own = merge.group, merge.digests, merge.ranks, merge.own
        self._buffers: list[torch.Tensor | None] = [None, None]

    def buffer(self, index: int, size: int, like: torch.Tensor) -> torch.Tensor:
        """So many numbers of one of the two buffers, in the dtype and on the device of ``like``."""
        kept = self._buffers[index]
        if kept is None or len(kept) < size:
            kept = self._buffers[index] = like.new_empty(size)
        return kept[:size]

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
        first, last = shared.run
        count, index = 1 + last - first, self._own - first
        previous, following = (self._ranks[first + (index + step) % count] for step in (-1, 1))
        theirs: Callable[[], list[int]] | None = None
        if compare:
            theirs = self._digests.post(previous)
            self._digests.send(shared.batch_id, shared.digest, following)
        partials: list[Partial] = []
        for step in range(count):
            owner, works = (index - step) % count, []
            if step + 1 < count:
                arriving = self.buffer((step + 1) % 2, sizes[owner - 1], block)
                receive = dist.P2POp(dist.irecv, arriving, previous, self._group)
                works = dist.batch_isend_irecv([receive, dist.P2POp(dist.isend, block, following, self._group)])
            partials.append(attend(owner, block))
            with waiting():
                if theirs is not None:
                    shared.check((index - 1) % count + first, theirs())
                    theirs = None
                for work in works:
                    work.wait()
            if works:
                block = arriving
        return merge_partials(partials)[0]

    def move(self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]) -> Moving:
        """Begin to send history to some groups and to receive it from others, in the order of the shifts."""
        ops = [dist.P2POp(dist.irecv, tensor, self._ranks[group], self._group) for group, tensor in receives]
        ops += [dist.P2POp(dist.isend, tensor, self._ranks[group], self._group) for group, tensor in sends]
        works, tensors = dist.batch_isend_irecv(ops), [tensor for _, tensor in (*receives, *sends)]

        def arrived() -> list[torch.Tensor]:
            for work in works:
                work.wait()
            return tensors  # those that were sent too, which have to live so long

        return arrived
