"""The arrays of a step on their way to the device, all in one copy.

A step needs token ids, positions, write targets and page tables on the device. Copied one by one they would cost a
launch each and, from pageable memory, a wait each; here they lie behind each other in one pinned buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16  # bytes; no kernel reads wider


def packed_bytes(arrays: Sequence[npt.NDArray[Any] | torch.Tensor]) -> int:
    """Bytes that arrays or tensors take behind each other."""
    return sum(array.nbytes + -array.nbytes % _ALIGNMENT for array in arrays)


def views_of(buffer: torch.Tensor, likes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What lies behind each other in a uint8 buffer, as tensors of these shapes and dtypes."""
    found, start = [], 0
    for like in likes:
        found.append(buffer[start : start + like.nbytes].view(like.dtype).view(like.shape))
        start += like.nbytes + -like.nbytes % _ALIGNMENT
    return found


def to_device(
    arrays: Sequence[npt.NDArray[Any]], device: torch.device, into: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Arrays on a device, in the order of the current stream; the host does not wait.

    Args:
        arrays: not changed before the copy is done; on the CPU the tensors share their memory.
        device: where to.
        into: uint8 on the device, of at least :func:`packed_bytes`; by default new memory.
    """
    if device.type == "cpu" and into is None:
        return [torch.from_numpy(array) for array in arrays]
    # The allocator of pinned memory gives none out again before the copies from it are done.
    host = torch.empty(packed_bytes(arrays), dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    flat, start = host.numpy(), 0
    for array in arrays:
        flat[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += array.nbytes + -array.nbytes % _ALIGNMENT
    buffer = torch.empty_like(host, device=device, pin_memory=False) if into is None else into[: len(host)]
    buffer.copy_(host, non_blocking=True)
    return views_of(buffer, [torch.from_numpy(array) for array in arrays])


def record_event(device: torch.device, *, timing: bool = False) -> torch.cuda.Event | None:
    """A point in the device's current stream, to be waited for from the host; None on the CPU, which is never behind.

    With ``timing`` the time between two such points may be asked for.
    """
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@contextmanager
def beside(stream: torch.cuda.Stream | None, after: torch.cuda.Event | None) -> Iterator[None]:
    """Within, what is issued goes to ``stream`` and waits for ``after``, if anything, not for the compute launched so
    far; on the CPU, which has neither, nothing changes."""
    if stream is None:
        yield
        return
    if after is not None:
        stream.wait_event(after)
    with torch.cuda.device(stream.device), torch.cuda.stream(stream):  # a stream alone would leave device 0 to a thread
        yield
