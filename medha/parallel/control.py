"""The control plane: an ordered stream of messages from rank 0 to every other rank.

Point-to-point sends, no collective: each rank reads at its own pace, so nothing synchronises the stages (a broadcast a
step was measured to cut a two-stage pipeline from 1.85 to 1.02 times one rank). They go over gloo, or through memory.
Messages are flat int32, with JSON only where a request is opened or a call ends; nothing is unpickled. A message longer
than one frame is sent in several.
"""

from __future__ import annotations

import json
import queue
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from medha.batch import Batch
from medha.errors import PlanDivergenceError
from medha.parallel.shared_memory import PAGE_BYTES, Line

T = TypeVar("T")

FRAME_INTS = 1 << 17
_POSTED = 4  # receives that a rank keeps posted ahead
_RING = 64  # sends in flight to one rank
_HEADER = 5  # kind, JSON bytes, integers of the batch, token ids, CRC-32 of the batch


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the stream."""

    kind: str  # see _KINDS
    fields: Mapping[str, Any] = field(default_factory=dict)  # what goes as JSON
    batch: Batch | None = None  # the plan of a step
    # Tokens of the rows that concern the receiver's group, in order; its first stage embeds them.
    token_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))


# A batch; a hand-over; a call of the front door begins, and ends; rank 0 asks for what was run; the end.
_KINDS = ("batch", "handover", "call", "end", "records", "stop")


def encode(message: Message, plan: npt.NDArray[np.int32] | None = None) -> npt.NDArray[np.int32]:
    """A message as int32: header, batch, token ids, JSON. ``plan`` is the batch where it is encoded already."""
    text = json.dumps(message.fields).encode() if message.fields else b""
    batch = encode_batch(message.batch) if plan is None else plan
    sizes = (len(text), len(batch), len(message.token_ids))
    header = np.array((_KINDS.index(message.kind), *sizes, zlib.crc32(batch.tobytes())), np.uint32).view(np.int32)
    padded = np.frombuffer(text + b" " * (-len(text) % 4), np.int32)
    return np.concatenate((header, batch, message.token_ids.astype(np.int32, copy=False), padded))


def encode_batch(batch: Batch | None) -> npt.NDArray[np.int32]:
    """A batch as int32; nothing of none."""
    return np.empty(0, np.int32) if batch is None else np.asarray(batch.to_ints(), np.int32)


def decode(ints: npt.NDArray[np.int32]) -> Message:
    """The inverse of :func:`encode`; ValueError where the integers are no message.

    PlanDivergenceError where the batch is not the one that was sent; within a tensor-parallel group nothing else tells.
    """
    kind, num_bytes, num_batch, num_ids, crc = ints[:_HEADER].view(np.uint32).tolist()
    batch_end, ids_end = _HEADER + num_batch, _HEADER + num_batch + num_ids
    if kind >= len(_KINDS) or len(ints) != ids_end + -(-num_bytes // 4):
        raise ValueError(f"a control message cannot have header {ints[:_HEADER].tolist()} and {len(ints)} integers")
    arrived = zlib.crc32(ints[_HEADER:batch_end].tobytes())
    if arrived != crc:
        what = f"batch {ints[_HEADER]}" if num_batch else "no batch"
        raise PlanDivergenceError(f"{what}: rank 0 sent a plan with digest {crc:08x}, {arrived:08x} has arrived")
    batch = Batch.from_ints(ints[_HEADER:batch_end].tolist()) if num_batch else None
    text = ints[ids_end:].tobytes()[:num_bytes]
    return Message(_KINDS[kind], json.loads(text) if text else {}, batch, ints[batch_end:ids_end])


class Sends:
    """Sends of this rank that may be on their way, ``most`` at once; a tensor is kept until it has arrived."""

    def __init__(self, group: dist.ProcessGroup, tag: int, most: int) -> None:
        self._group, self._tag, self._most = group, tag, most
        self._sends: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def add(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a tensor to a rank, behind the oldest one where there are many."""
        self.reserve()
        work = dist.isend(tensor, dst=rank, group=self._group, tag=self._tag)
        assert work is not None, "the sender is in the group"
        self._sends.append((work, tensor))

    def reserve(self) -> None:
        """Wait until a send can begin at once."""
        self.drain(self._most - 1)

    def drain(self, most: int = 0) -> None:
        """Wait until no more than so many are on their way."""
        while len(self._sends) > most:
            self._sends[0][0].wait()
            self._sends.popleft()


def post_receive(buffer: torch.Tensor, rank: int, group: dist.ProcessGroup, tag: int) -> Callable[[], torch.Tensor]:
    """Post the receive of a tensor; what is returned waits for it."""
    work = dist.irecv(buffer, src=rank, group=group, tag=tag)
    assert work is not None, "the receiver is in the group"

    def received() -> torch.Tensor:
        work.wait()
        return buffer

    return received


class ControlSender:
    """Rank 0's end, of a gloo group that is used for nothing else, or of memory that it shares with the others."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], lines: Mapping[int, Line] | None = None) -> None:
        self._sends = {rank: Sends(group, 0, _RING) for rank in ranks}
        self._lines = lines or {}
        self._batch: Batch | None = None  # of the last message, and encoded
        self._plan = encode_batch(None)

    def send(self, message: Message, *, only: Sequence[int] | None = None) -> None:
        """Send a message to every rank, or only to some; waits only for a rank that is a ring of buffers behind.

        Messages to different ranks may differ, their order may not.
        """
        if message.batch is not self._batch:  # it goes to several with different tokens
            self._batch, self._plan = message.batch, encode_batch(message.batch)
        frames = _frames(encode(message, self._plan), PAGE_BYTES // 4 if self._lines else FRAME_INTS)
        for rank in self._sends if only is None else only:
            for frame in frames:
                if self._lines:
                    self._lines[rank].send(frame)
                else:
                    self._sends[rank].add(frame, rank)

    def drain(self) -> None:
        """Wait until everything has been received."""
        for sends in self._sends.values():
            sends.drain()


class ControlReceiver(Generic[T]):
    """Another rank's end: a thread that keeps receives posted ahead, prepares what arrives and puts it into a queue.

    Args:
        group: its timeout must outlast any pause between messages.
        prepare: what is done with each message, in order, while the rank computes; it raises nothing.
        line: by which they come instead.
        in_turn: whether, with a line, whoever asks for a message takes and prepares it: none comes while it computes.
    """

    def __init__(
        self, group: dist.ProcessGroup, prepare: Callable[[Message], T], line: Line | None = None, in_turn: bool = False
    ) -> None:
        self._prepare, self._messages = prepare, _decoded(group, line)
        self._in_turn = in_turn and line is not None
        self.arrived: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()  # messages that are here and prepared
        if in_turn and line is not None:
            line.look()
        else:
            threading.Thread(target=self._run, name="medha-control", daemon=True).start()

    def receive(self) -> T:
        """What came of the next message; waits for it. Raises what broke the stream."""
        if self._in_turn:
            return self._prepare(next(self._messages))
        message = self.arrived.get()
        if isinstance(message, Exception):
            raise message
        return message

    def _run(self) -> None:
        try:
            for message in self._messages:
                self.arrived.put(self._prepare(message))
        except Exception as error:
            self.arrived.put(error)


def _decoded(group: dist.ProcessGroup, line: Line | None) -> Iterator[Message]:
    def post() -> Callable[[], torch.Tensor]:
        if line is not None:
            return partial(line.receive, torch.empty(PAGE_BYTES // 4, dtype=torch.int32, device="cpu"))
        return post_receive(torch.empty(FRAME_INTS, dtype=torch.int32, device="cpu"), 0, group, 0)

    posted = deque(post() for _ in range(_POSTED))
    parts, kind = list[npt.NDArray[np.int32]](), ""
    while kind != "stop":
        buffer = posted.popleft()()
        size, continues = buffer[:_FRAME_HEADER].tolist()
        parts.append(buffer[_FRAME_HEADER : _FRAME_HEADER + size].numpy())
        if not continues:
            message, parts = decode(np.concatenate(parts)), []
            kind = message.kind
            yield message
        posted.append(post())


_FRAME_HEADER = 2  # integers in the frame, whether more frames follow


def _frames(ints: npt.NDArray[np.int32], most: int) -> list[torch.Tensor]:
    """A message cut into frames of at most so many integers."""
    size = most - _FRAME_HEADER
    pieces = [ints[i : i + size] for i in range(0, len(ints), size)]
    numbered = enumerate(pieces, start=1)
    found = (np.concatenate(((len(piece), i < len(pieces)), piece), dtype=np.int32) for i, piece in numbered)
    return list(map(torch.from_numpy, found))
