"""Stream pipeline parallelism: hidden states of one batch after the other flow from stage to stage.

Source: the paper, arXiv 2409.17264 v5 section 3.3. Chunk i + 1 of a prompt needs the KV cache of chunk i, not its
output, so it enters stage 0 as chunk i enters stage 1. Each rank sends its share of the hidden states, one of as many
slices as there are tensor-parallel ranks, to the rank with its own index in the next stage; the receivers gather the
slices among themselves. Transfers go over the device's own backend (NCCL, or gloo on the CPU). Both sides know the
number of rows from the batch, whose digest travels beside them over gloo.

On CUDA a receive is posted when its batch is to run and its sender has said so, not before: NCCL's kernel would hold up
whatever waits for the whole device, as loading another kernel does, within a batch whose tokens the sender waits for.
It runs on a stream of its own, so that it waits for its buffer alone and not for the compute that has been launched; a
send waits for the compute that made its data, and compute launched later does not wait for it.

``torch.distributed.pipelining`` does not fit: its schedules are built for a fixed list of microbatches of one shape.

Legend: T tokens, D model dimension, W numbers of a slice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from medha.attention.staging import beside, record_event
from medha.batch import Batch, Row
from medha.errors import PlanDivergenceError
from medha.parallel.control import Sends, post_receive
from medha.parallel.mesh import Ranks
from medha.parallel.tp import all_gather_over

_DIGESTS_TAG = 3  # the report group's others are in medha/engine/wire.py
_DIGESTS_IN_FLIGHT = 64
_WARMING = Batch(-1, (Row(0, 0, 1, is_decode=False, samples=False),))


class Digests:
    """Tells other ranks which batch a transfer is of, and hears it from them, over gloo: its id and digest."""

    def __init__(self, group: dist.ProcessGroup, tag: int = _DIGESTS_TAG) -> None:
        self._group, self._tag = group, tag
        self._sends = Sends(group, tag, _DIGESTS_IN_FLIGHT)
        self.drain = self._sends.drain  # waits for every send

    def send(self, batch_id: int, digest: int, rank: int) -> None:
        """Tell a rank."""
        self._sends.add(torch.tensor([batch_id, digest], dtype=torch.int64, device="cpu"), rank)

    def post(self, rank: int) -> Callable[[], list[int]]:
        """Post the receive of a rank's next; what is returned waits for it."""
        received = post_receive(torch.empty(2, dtype=torch.int64, device="cpu"), rank, self._group, self._tag)
        return lambda: received().tolist()


def check_digest(ours: list[int], theirs: list[int], what: str) -> None:
    """Refuse what another rank says of a batch, ``what`` it did with it, if it is not the id and digest here."""
    if theirs != ours:
        there = f"{what} batch {theirs[0]} with digest {theirs[1]:08x}"
        raise PlanDivergenceError(f"batch {ours[0]}: {there}, this one has {ours[0]} with {ours[1]:08x}")


class StagePipe:
    """The two ends of one stage's pipe, for hidden states [T, ``dim``] of the dtype and on the device of ``like``.

    The buffer of a receive is kept and used again at the next one's end; ``num_buffers`` sends are kept in flight.
    """

    def __init__(self, ranks: Ranks, digests: Digests, like: torch.Tensor, *, dim: int, num_buffers: int) -> None:
        self.digests, self._device, self._like, self._dim = digests, like.device, like, dim
        self._group, self._tp, self._tp_rank = ranks.pipe_group, ranks.layout.tp, ranks.tp_rank
        # global ranks of the neighbours, None at an end of the pipeline
        self._previous, self._following = ranks.neighbour(-1), ranks.neighbour(1)
        # puts [1, W] of every tensor-parallel rank side by side
        self._all_gather = all_gather_over(ranks.tp_group) if self._tp > 1 else None
        self._receives = deque[tuple[Callable[[], list[int]], Callable[[], torch.Tensor]]]()  # digest, slice [1, W]
        self._received: torch.Tensor | None = None  # the slice that came last
        self._sends = Sends(self._group, 0, num_buffers)
        # with what to wait for before they are written
        self._free_receives: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []
        self._aside = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def warm(self) -> None:
        """Pass a token on once: a pair's communicator is made when it is first used. Every rank calls it."""
        self.post(_WARMING)
        x_TD = self._like.new_zeros(1, self._dim) if self._previous is None else self.receive(_WARMING)
        if self._following is not None:
            self.send(_WARMING, x_TD)

    def post(self, batch: Batch) -> None:
        """Post the receive of a batch's hidden states, on CUDA of its digest alone; batches are posted in the order in
        which they run."""
        if (rank := self._previous) is not None:
            width = self._width(batch)
            part = self._post_slice(rank, width) if self._aside is None else lambda: self._post_slice(rank, width)()
            self._receives.append((self.digests.post(rank), part))

    def _post_slice(self, rank: int, width: int) -> Callable[[], torch.Tensor]:
        free, used = self._free_receives.pop() if self._free_receives else (None, None)
        if free is not None and free.untyped_storage().nbytes() >= width * self._like.itemsize:
            slice_1W = free.as_strided((1, width), (width, 1), 0)
        else:  # a smaller one is dropped, so their number does not grow
            slice_1W = self._like.new_empty(1, width)
            used = record_event(self._device)  # whoever had this memory before may still use it
        with beside(self._aside, used):
            return post_receive(slice_1W, rank, self._group, 0)

    def receive(self, batch: Batch) -> torch.Tensor:
        """The hidden states [T, D] of the oldest posted batch, until the next call; waits for them: on CUDA the host
        for the digest, the current stream for the rest."""
        digest, posted = self._receives.popleft()
        check_digest([batch.batch_id, batch.digest()], digest(), "the stage before ran")
        part = posted()
        if self._received is not None:
            self._free_receives.append((self._received, record_event(self._device)))
        self._received = part
        whole = part if self._all_gather is None else self._all_gather(part)
        return whole.view(-1)[: batch.num_tokens * self._dim].view(batch.num_tokens, self._dim)

    def reserve(self) -> None:
        """Wait until a send can begin at once: for the oldest one when so many are in flight."""
        self._sends.reserve()

    def send(self, batch: Batch, x_TD: torch.Tensor) -> None:
        """Send this rank's slice of the hidden states of a batch on; returns at once after :meth:`reserve`."""
        assert self._following is not None, "the last stage sends no hidden states"
        width = self._width(batch)
        slice_1W = self._like.new_empty(1, width)
        own = x_TD.flatten()[self._tp_rank * width : (self._tp_rank + 1) * width]  # less at the end, if it is not even
        slice_1W[0, : len(own)].copy_(own)
        self.digests.send(batch.batch_id, batch.digest(), self._following)
        self._sends.add(slice_1W, self._following)

    def _width(self, batch: Batch) -> int:
        """Numbers of a rank's slice of a batch."""
        return -(-batch.num_tokens * self._dim // self._tp)
