"""Messages between ranks of one machine, through memory that they share.

On a CPU the parts of attention and the sums of a decode are small and come once a layer. With a message by gloo two
threads and the system's sockets have to do, and each thread waits for a core where all of them compute; one of these is
there as soon as it is written. Longer ones go by the process group.

Two ranks send each other equally many messages, at most two before they wait for as many, and now and then one of them
one more: while three of the four buffers for each direction are written, the message before may still be read.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence

import torch
import torch.distributed as dist

from medha.cpu.library import function, library
from medha.errors import RankFailedError
from medha.parallel.mesh import Ranks

MOST_BYTES = 1 << 17
"""Of a message."""

_FOLDER = "/dev/shm"
_NUM_BUFFERS = 4
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
        self._look_us = _LOOK_US if ranks.job.launch.spare_cores(torch.get_num_threads()) >= 0 else 0

    def buffer(self, rank: int, num_bytes: int) -> torch.Tensor:
        """Where the next message to a rank, of at most MOST_BYTES, is to be written."""
        channel = self._sent[rank]
        return channel.buffer(channel.number + 1, num_bytes)

    def send(self, rank: int) -> None:
        """Send what was written."""
        channel = self._sent[rank]
        channel.number += 1
        function("tell")(channel.at, channel.number)

    def receive(self, rank: int, num_bytes: int) -> torch.Tensor:
        """The next message of a rank, which stays until this rank has sent it another; waits for it.

        RankFailedError where a rank has failed meanwhile; RuntimeError where it takes longer than a transfer may.
        """
        channel, waited_us = self._received[rank], 0
        channel.number += 1
        while not function("wait_for")(channel.at, channel.number, self._look_us, _SLEEP_US):
            waited_us += _SLEEP_US
            if self._ranks.monitor.has_failure:
                raise RankFailedError(self._ranks.monitor.first_error() or "a rank has failed")
            if waited_us > self._ranks.config.dist_timeout_s * 1e6:
                raise RuntimeError(f"Timed out waiting {waited_us / 1e6:.0f} s for rank {rank}")
        return channel.buffer(channel.number, num_bytes)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """A contiguous tensor of at most MOST_BYTES of every member, in order; each of them calls this. Those of others
        stay until it is called again."""
        others = [rank for rank in self._members if rank != self._ranks.rank]
        for rank in others:
            self.buffer(rank, x.nbytes).view(x.dtype).view(x.shape).copy_(x)
            self.send(rank)
        found = {rank: self.receive(rank, x.nbytes).view(x.dtype).view(x.shape) for rank in others}
        return [found.get(rank, x) for rank in self._members]


class _Channel:
    """One direction between two ranks: a number in memory, and behind it buffers.

    Attributes:
        at: the address of the number, that of the last message that was sent.
        number: of the last message that this rank has sent or received.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.at, self.number = memory.data_ptr(), 0
        self._buffers = memory[_LINE:].view(_NUM_BUFFERS, MOST_BYTES).unbind()

    def buffer(self, number: int, num_bytes: int) -> torch.Tensor:
        """That of a message."""
        return self._buffers[number % _NUM_BUFFERS][:num_bytes]


def share_memory(ranks: Ranks, group: dist.ProcessGroup, device: torch.device) -> SharedMemory | None:
    """Memory for the ranks of a group, each of which calls this; None where they do not all compute on CPUs of one
    machine, or one of them cannot have it."""
    members, launch = dist.get_process_group_ranks(group), ranks.job.launch
    node = range(first := launch.rank - launch.local_rank, first + launch.local_world_size)
    if device.type != "cpu" or len(members) == 1 or not set(members) <= set(node):
        return None
    size, key = len(members) ** 2 * (_LINE + _NUM_BUFFERS * MOST_BYTES), f"memory/{members}"
    if ranks.rank == members[0]:
        ranks.job.store.set(key, _made(size))
    path, memory = ranks.job.store.get(key).decode(), None
    try:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), size)
    except (OSError, ValueError):
        pass
    is_there = torch.tensor(int(memory is not None and library()[0] is not None))
    dist.all_reduce(is_there, op=dist.ReduceOp.MIN, group=group)
    if ranks.rank == members[0] and path:
        os.unlink(path)
    return SharedMemory(memory, members, ranks) if memory is not None and is_there else None


def _made(size: int) -> str:
    """The path of a new file of zeros; none where there is no room for it."""
    path = ""
    try:
        file, path = tempfile.mkstemp(prefix="medha-", dir=_FOLDER)
        with open(file, "r+b"):
            os.posix_fallocate(file, 0, size)
    except OSError:
        if path:
            os.unlink(path)
        return ""
    return path
