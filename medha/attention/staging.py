"""The integers of a step on their way to the device: gathered on the host, copied at once.

A step needs token ids, positions, write targets and page tables on the device. Copied one by one they would cost a
launch each and, from pageable memory, a wait each; here they lie behind each other in one pinned buffer and travel
together.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16  # bytes; no kernel reads wider


class Staged:
    """Integers that were handed in, and once they were sent, where they lie on the device."""

    def __init__(self, ints: npt.NDArray[Any], start: int) -> None:
        self.ints = ints
        self.bytes = slice(start, start + ints.nbytes)
        self._tensor: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The integers on the device, one axis, in their own dtype."""
        assert self._tensor is not None, "what is staged has been sent before it is used"
        return self._tensor


class Staging:
    """One copy from host to device.

    Args:
        device: where to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[Staged] = []
        self._size = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that were handed in, each part rounded up."""
        return self._size

    def add(self, ints: npt.NDArray[Any]) -> Staged:
        """Hand in integers of one axis; not copied before :meth:`send`."""
        staged = Staged(ints, self._size)
        self._parts.append(staged)
        self._size = staged.bytes.stop + -staged.bytes.stop % _ALIGNMENT
        return staged

    def send(self, into: torch.Tensor | None = None) -> None:
        """Copy everything at once; on CUDA in the order of the current stream, without waiting.

        Args:
            into: uint8 on the device, at least as long as what was handed in; by default new memory.
        """
        # The allocator of pinned memory gives none out again before the copies from it are done.
        host = torch.empty(self._size, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        flat = host.numpy()
        for part in self._parts:
            flat[part.bytes] = np.ascontiguousarray(part.ints).view(np.uint8)
        if into is None:
            buffer = host.to(self._device, non_blocking=True)
        else:
            buffer = into[: self._size]
            buffer.copy_(host, non_blocking=True)
        for part in self._parts:
            part._tensor = buffer[part.bytes].view(torch.from_numpy(part.ints).dtype)


def record_event(device: torch.device, *, timing: bool = False) -> torch.cuda.Event | None:
    """A point in the current stream, to be waited for from the host; None on the CPU, which is never behind.

    Args:
        device: whose stream.
        timing: whether the time between two such points will be asked for.
    """
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
