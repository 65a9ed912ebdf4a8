"""Messages between ranks of one machine, through memory that they share.

On a CPU the parts of attention and the sums of a decode are small and come once a layer. With a message by gloo two
threads and the system's sockets have to do, and each thread waits for a core where all of them compute; one of these is
there as soon as it is written. Longer ones go by the process group. Batches and reports go by :class:`Line`.

Two ranks send each other at most two messages before they wait for as many, and between two such exchanges one of them
may send one more: while three of the five buffers for each direction are written, the two before may still be read.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from medha.cpu.library import function, library
from medha.parallel.mesh import Ranks

logger = logging.getLogger("medha")

MOST_BYTES = 1 << 17
"""Of a message."""

PAGE_BYTES = 1 << 14
"""Of a message of a :class:`Line`."""

_FOLDER = "/dev/shm"
_NUM_BUFFERS = 5
_NUM_PAGES = 16
_LINE = 64  # bytes
_LOOK_US = 200  # before a rank that waits sleeps, where each has its cores
_SLEEP_US = 100_000  # before it asks whether another has failed


class SharedMemory:
    """This rank's end. For each sender and receiver there are the number of messages and the buffers behind it.

    Args:
        memory: zeros, shared by the members.
        members: their global ranks, this one's among them.
        ranks: tells of failures, and how long to wait.
    """

    def __init__(self, memory: mmap.mmap, members: Sequence[int], ranks: Ranks) -> None:
        whole, own = torch.frombuffer(memory, dtype=torch.uint8).view(len(members), len(members), -1), ranks.rank
        self._ranks, self._members, index = ranks, members, members.index(own)
        self._sent = dict(zip(members, map(_Channel, whole[index]), strict=True))
        self._received = dict(zip(members, map(_Channel, whole[:, index]), strict=True))
        self._look_us = _look_us(ranks)

    def put(self, rank: int, x: torch.Tensor) -> None:
        """Send a tensor of at most MOST_BYTES."""
        self._sent[rank].put(x)

    def receive(self, rank: int, num_bytes: int) -> torch.Tensor:
        """The next message of a rank, which stays until this rank has sent it another; waits for it. Raises as
        :func:`_await`."""
        return self._received[rank].take(num_bytes, self._ranks, rank, self._look_us, self._ranks.config.dist_timeout_s)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """A contiguous tensor of at most MOST_BYTES of every member, in order; each of them calls this. Those of others
        stay until it is called again."""
        others = [rank for rank in self._members if rank != self._ranks.rank]
        for rank in others:
            self.put(rank, x)
        found = {rank: self.receive(rank, x.nbytes).view(x.dtype).view(x.shape) for rank in others}
        return [found.get(rank, x) for rank in self._members]


class Line:
    """This rank's end of one-way messages of at most PAGE_BYTES, one after the other, to another rank or from it.

    Args:
        memory: zeros that the two ranks share.
        other: the other one's global rank.
        ranks: tells of failures.
    """

    def __init__(self, memory: torch.Tensor, other: int, ranks: Ranks) -> None:
        self._taken, self._channel = memory.data_ptr(), _Channel(memory[_LINE:], PAGE_BYTES)
        self._other, self._ranks, self._look_us = other, ranks, 0

    def look(self) -> None:
        """Look before sleeping from now on, where ranks have their cores: for as long as a step is decided."""
        self._look_us = 15 * _look_us(self._ranks)

    def send(self, message: torch.Tensor) -> None:
        """Send a contiguous tensor; waits where the receiver is as many behind as there are pages."""
        _await(self._ranks, self._taken, self._channel.number + 1 - _NUM_PAGES, self._other)
        self._channel.put(message)

    @torch.inference_mode()  # in which the tensor may be made, by a program whose other threads are not in it
    def receive(self, into: torch.Tensor, *, limit_s: float = math.inf) -> torch.Tensor:
        """Wait for the next message, which is put into a contiguous tensor and returned. Raises as :func:`_await`."""
        message = self._channel.take(into.nbytes, self._ranks, self._other, self._look_us, limit_s)
        into.copy_(message.view(into.dtype).view(into.shape))
        function("tell")(self._taken, self._channel.number)
        return into


def _look_us(ranks: Ranks) -> int:
    """Microseconds for which a rank that computes looks before it sleeps."""
    return _LOOK_US if ranks.job.launch.spare_cores(torch.get_num_threads()) >= 0 else 0


def _await(ranks: Ranks, at: int, number: int, rank: int, look_us: int = 0, limit_s: float = math.inf) -> None:
    """Wait until the number at an address has come, which another rank tells. RuntimeError, as of a transfer that has
    lost its other end, where a rank has failed meanwhile or it takes longer than a transfer may."""
    waited_us, wait_for = 0, function("wait_for")
    while not wait_for(at, number, look_us, _SLEEP_US):
        waited_us, look_us = waited_us + _SLEEP_US, 0
        if ranks.monitor.has_failure:
            raise RuntimeError(f"Timed out waiting for rank {rank}: a rank has failed")
        if waited_us > limit_s * 1e6:
            raise RuntimeError(f"Timed out waiting {waited_us / 1e6:.0f} s for rank {rank} (--dist-timeout)")


class _Channel:
    """One direction between two ranks: a number in memory, and behind it buffers.

    Attributes:
        at: the address of the number, that of the last message that was sent.
        number: of the last message that this rank has sent or received.
    """

    def __init__(self, memory: torch.Tensor, most_bytes: int = MOST_BYTES) -> None:
        self.at, self.number = memory.data_ptr(), 0
        self._buffers = memory[_LINE:].view(-1, most_bytes).unbind()

    def put(self, x: torch.Tensor) -> None:
        """Send a tensor."""
        self.number += 1
        self._buffer(x.nbytes).view(x.dtype).view(x.shape).copy_(x)
        function("tell")(self.at, self.number)

    def take(self, num_bytes: int, ranks: Ranks, rank: int, look_us: int, limit_s: float) -> torch.Tensor:
        """The next message, where it lies; waits for it as :func:`_await`."""
        self.number += 1
        _await(ranks, self.at, self.number, rank, look_us, limit_s)
        return self._buffer(num_bytes)

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        return self._buffers[self.number % len(self._buffers)][:num_bytes]


def share_memory(ranks: Ranks, group: dist.ProcessGroup, device: torch.device) -> SharedMemory | None:
    """Memory for the ranks of a group, each of which calls this; None where they do not all compute on CPUs of one
    machine, or one of them cannot have it."""
    members = dist.get_process_group_ranks(group)
    size = len(members) ** 2 * (_LINE + _NUM_BUFFERS * MOST_BYTES)
    memory = _shared(ranks, group, device, size, f"memory/{members}")
    return None if memory is None else SharedMemory(memory, members, ranks)


class Lines(NamedTuple):
    """Between rank 0 and another one."""

    control: Line  # to the other
    reports: Line  # from it


def share_lines(ranks: Ranks, device: torch.device) -> dict[int, Lines]:
    """By other rank the lines of this one, rank 0's with each other or another's with rank 0; every rank calls it. None
    where :func:`share_memory` has no memory."""
    size = ranks.config.world_size
    memory = _shared(ranks, ranks.report_group, device, size * 2 * (2 * _LINE + _NUM_PAGES * PAGE_BYTES), "lines")
    if memory is None:
        return {}
    whole = torch.frombuffer(memory, dtype=torch.uint8).view(size, 2, -1)
    others = range(1, size) if ranks.rank == 0 else [ranks.rank]
    return {one: Lines(*(Line(part, one if ranks.rank == 0 else 0, ranks) for part in whole[one])) for one in others}


def _shared(ranks: Ranks, group: dist.ProcessGroup, device: torch.device, size: int, key: str) -> mmap.mmap | None:
    """Zeros that the ranks of a group share, each of which calls this; ``key`` is theirs alone."""
    members, launch = dist.get_process_group_ranks(group), ranks.job.launch
    node = range(first := launch.rank - launch.local_rank, first + launch.local_world_size)
    if device.type != "cpu" or len(members) == 1 or not set(members) <= set(node):
        return None
    path, memory = "", None
    with ExitStack() as stack:
        if ranks.rank == members[0]:
            try:
                made = stack.enter_context(tempfile.NamedTemporaryFile(prefix="medha-", dir=_FOLDER))
                os.posix_fallocate(made.fileno(), 0, size)
                path = made.name
            except OSError as error:  # as in a container without --shm-size
                what = f"{_FOLDER} takes no {size >> 10} KiB ({error.strerror}): the ranks of this host decode slower"
                logger.warning("%s, as small messages go by gloo", what)
            ranks.job.store.set(key, path)
        with suppress(OSError, ValueError), open(ranks.job.store.get(key), "r+b") as file:
            memory = mmap.mmap(file.fileno(), size)
        is_there = torch.tensor(int(memory is not None and library()[0] is not None))
        dist.all_reduce(is_there, op=dist.ReduceOp.MIN, group=group)
    return memory if is_there else None
