"""Stream pipeline parallelism: hidden states of one batch after the other flow from stage to stage.

Source: the paper, arXiv 2409.17264 v5 section 3.3. Chunk i + 1 of a prompt needs the KV cache of chunk i, not its
output, so it enters stage 0 as chunk i enters stage 1. Each stage receives from the rank with its own tensor-parallel
index in the stage before. Both sides know the number of rows from the batch, whose digest rides along.

``torch.distributed.pipelining`` does not fit: its schedules are built for a fixed list of microbatches of one shape.
"""

from __future__ import annotations

from collections import deque
from dataclasses import KW_ONLY, InitVar, dataclass

import torch
import torch.distributed as dist

from medha.batch import Batch
from medha.errors import PlanDivergenceError
from medha.parallel.control import Sends

TAIL_BYTES = 16
"""Behind what a rank sends of a batch: its id and digest, int64 each."""


@dataclass(eq=False, repr=False)
class StagePipe:
    """The two ends of one stage's pipe: global ranks of the neighbours, None at an end of the pipeline, and how many
    sends of hidden states [T, ``dim``] are kept in flight.

    Buffers are kept and used again: that of a send once it is done, that of a receive at the next one's end.
    """

    group: dist.ProcessGroup
    _: KW_ONLY
    previous: int | None
    following: int | None
    dim: int
    dtype: torch.dtype
    num_buffers: InitVar[int]

    def __post_init__(self, num_buffers: int) -> None:
        self._row_bytes = self.dim * self.dtype.itemsize
        self._receives: deque[tuple[Batch, dist.Work, torch.Tensor]] = deque()
        self._received: torch.Tensor | None = None  # what the last batch's hidden states lie in
        self._sends = Sends(self.group, 0, num_buffers)
        self._free_receives: list[torch.Tensor] = []
        self._free_sends: list[torch.Tensor] = []

    def post(self, batch: Batch) -> None:
        """Post the receive of a batch's hidden states; batches are posted in the order in which they run."""
        if self.previous is None:
            return
        buffer = self._sized(batch, self._free_receives)
        work = dist.irecv(buffer, src=self.previous, group=self.group)
        assert work is not None, "the receiver is in the group"
        self._receives.append((batch, work, buffer))

    def receive(self, batch: Batch) -> torch.Tensor:
        """The hidden states [T, D] of the oldest posted batch, until the next call; waits for them."""
        posted, work, buffer = self._receives.popleft()
        assert posted.batch_id == batch.batch_id, "receives are taken in the order of their posts"
        work.wait()
        if self._received is not None:
            self._free_receives.append(self._received)
        self._received = buffer
        size = batch.num_tokens * self._row_bytes
        theirs = tuple(buffer[size:].clone().view(torch.int64).tolist())
        ours = (batch.batch_id, batch.digest())
        if theirs != ours:
            raise PlanDivergenceError(
                f"batch {batch.batch_id}: the stage before ran batch {theirs[0]} with digest {theirs[1]:08x}, "
                f"this one has {ours[0]} with {ours[1]:08x}"
            )
        return buffer[:size].view(self.dtype).view(batch.num_tokens, self.dim)

    def reserve(self) -> None:
        """Wait until a send can begin at once: for the oldest one when all buffers are in flight."""
        self._free_sends += self._sends.reserve()

    def send(self, batch: Batch, x_TD: torch.Tensor) -> None:
        """Send the hidden states of a batch on; returns at once after :meth:`reserve`."""
        assert self.following is not None, "the last stage sends no hidden states"
        self.reserve()
        buffer = self._sized(batch, self._free_sends)
        size = batch.num_tokens * self._row_bytes
        buffer[:size].view(self.dtype).view(x_TD.shape).copy_(x_TD)
        tail = torch.tensor([batch.batch_id, batch.digest()], dtype=torch.int64)
        buffer[size:].copy_(tail.view(torch.uint8))
        self._sends.add(buffer, self.following)

    def drain(self) -> None:
        """Wait for every send."""
        self._sends.drain()

    def _sized(self, batch: Batch, free: list[torch.Tensor]) -> torch.Tensor:
        """A buffer of exactly a batch's bytes: the storage of a free one if it is large enough, else new."""
        size = batch.num_tokens * self._row_bytes + TAIL_BYTES
        buffer = free.pop() if free else None  # one that is too small is dropped, so their number does not grow
        if buffer is None or buffer.untyped_storage().nbytes() < size:
            return torch.empty(size, dtype=torch.uint8)
        return buffer.as_strided((size,), (1,), 0)
