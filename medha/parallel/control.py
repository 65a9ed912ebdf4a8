"""The control plane: an ordered stream of messages from rank 0 to every other rank.

It is a stream of point-to-point sends, not a collective: each rank reads at its own pace, so nothing synchronises the
stages (a broadcast a step was measured to cut a two-stage pipeline from 1.85 to 1.02 times one rank). Messages are flat
int32, with JSON only where a request is opened or a call ends; nothing is unpickled. A message longer than one frame is
sent in several.
"""

from __future__ import annotations

import json
import queue
import threading
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from medha.batch import Batch

FRAME_INTS = 1 << 17
_POSTED = 4  # receives that a rank keeps posted ahead
_RING = 64  # sends in flight to one rank
_HEADER = 4  # kind, JSON bytes, batch integers, further frames


@dataclass(frozen=True, slots=True)
class Message:
    """One message of the stream.

    Attributes:
        kind: ``batch``, ``call`` (a call of the front door begins), ``end`` (it ends) or ``stop``.
        fields: what goes as JSON.
        batch: the plan of a step.
    """

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    batch: Batch | None = None


_KINDS = ("batch", "call", "end", "stop")


def encode(message: Message) -> array[int]:
    """A message as int32."""
    text = json.dumps(message.fields).encode() if message.fields else b""
    ints = array("i") if message.batch is None else message.batch.to_ints()
    out = array("i", (_KINDS.index(message.kind), len(text), len(ints), 0))
    out.extend(ints)
    out.frombytes(text + b" " * (-len(text) % out.itemsize))
    return out


def decode(ints: Sequence[int]) -> Message:
    """The inverse of :func:`encode`.

    Raises:
        ValueError: the integers are no message.
    """
    kind, num_bytes, num_ints, _ = ints[:_HEADER]
    if not 0 <= kind < len(_KINDS) or min(num_bytes, num_ints) < 0:
        raise ValueError(f"a control message with header {tuple(ints[:_HEADER])} has no known kind or size")
    batch = Batch.from_ints(ints[_HEADER : _HEADER + num_ints]) if num_ints else None
    text = array("i", ints[_HEADER + num_ints :]).tobytes()[:num_bytes]
    return Message(_KINDS[kind], json.loads(text) if text else {}, batch)


class ControlSender:
    """Rank 0's end.

    Args:
        group: gloo group of all ranks, used for nothing else.
        ranks: the others.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        self._group = group
        self._ranks = ranks
        self._sends: dict[int, deque[tuple[dist.Work, torch.Tensor]]] = {rank: deque() for rank in ranks}

    def send(self, message: Message, *, only: Sequence[int] | None = None) -> None:
        """Send a message to every rank, or only to some; returns before it has arrived.

        Messages to different ranks may differ (token ids go to the first stage alone), their order may not. Waits only
        for a rank that is more than a ring of buffers behind.
        """
        frames = _frames(encode(message))
        for rank in self._ranks if only is None else only:
            sends = self._sends[rank]
            for frame in frames:
                if len(sends) >= _RING:
                    sends.popleft()[0].wait()
                work = dist.isend(frame, dst=rank, group=self._group)
                assert work is not None, "rank 0 is in the group"
                sends.append((work, frame))

    def drain(self) -> None:
        """Wait until everything has been received."""
        for sends in self._sends.values():
            while sends:
                sends.popleft()[0].wait()


class ControlReceiver:
    """Another rank's end: a thread that keeps receives posted ahead and puts what arrives into a queue.

    Args:
        group: as the sender's; its timeout must outlast any pause between messages.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._arrived: queue.SimpleQueue[Message | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="medha-control", daemon=True).start()

    @property
    def has_message(self) -> bool:
        """Whether a message is here."""
        return not self._arrived.empty()

    def receive(self) -> Message:
        """The next message; waits for it. Raises what broke the stream."""
        message = self._arrived.get()
        if isinstance(message, Exception):
            raise message
        return message

    def _run(self) -> None:
        try:
            posted = deque(self._post() for _ in range(_POSTED))
            parts: list[int] = []
            while True:
                work, buffer = posted.popleft()
                work.wait()
                posted.append(self._post())
                size, continues = buffer[:_FRAME_HEADER].tolist()
                parts += buffer[_FRAME_HEADER : _FRAME_HEADER + size].tolist()
                if continues:
                    continue
                message, parts = decode(parts), []
                self._arrived.put(message)
                if message.kind == "stop":
                    return
        except Exception as error:
            self._arrived.put(error)

    def _post(self) -> tuple[dist.Work, torch.Tensor]:
        buffer = torch.empty(FRAME_INTS, dtype=torch.int32)
        work = dist.irecv(buffer, src=0, group=self._group)
        assert work is not None, "the receiver is in the group"
        return work, buffer


_FRAME_HEADER = 2  # integers in the frame, whether more frames follow


def _frames(ints: array[int]) -> list[torch.Tensor]:
    """A message cut into frames of at most FRAME_INTS."""
    size = FRAME_INTS - _FRAME_HEADER
    cuts = range(0, len(ints), size)
    return [
        torch.tensor([len(ints[i : i + size]), int(i + size < len(ints)), *ints[i : i + size]], dtype=torch.int32)
        for i in cuts
    ]
