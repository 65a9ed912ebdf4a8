"""KV in host memory: where the blocks of a preempted request go, and how they are copied there and back.

Who is swapped, and which host blocks it gets, the scheduler decides (:mod:`medha.sched.preempt`); a rank moves its own
layers and heads of them. On CUDA the copies run on a stream of their own beside the compute, layer by layer: a layer's
new keys are written when its own copies are done, while those of later layers go on. Nothing waits on the host. On the
CPU they are made at once, before the compute. Not in the paper.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable, Sequence

import torch

from medha.attention.staging import beside, record_event
from medha.errors import ConfigError
from medha.worker.kv_cache import KVCache, Run, copy_tokens, new_pool

Wait = Callable[[], None]

_MEASURED_BLOCKS = 4
_MEASURED_TIMES = 3


class HostCache:
    """Pools ``k`` and ``v`` in host memory, of the layout of the cache that is swapped, for so many blocks.

    On CUDA they are pinned; PyTorch rounds each layer's up to a power of two of bytes. Copies run in order: on CUDA on
    a stream beside the device's current one, on which the compute is; on the CPU here at once when they are issued, as
    compute is never ahead. ConfigError where the memory cannot be had.
    """

    def __init__(self, cache: KVCache, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._cache, self._device = cache, cache.k[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        tokens, cpu, pinned = num_blocks * cache.block_size, torch.device("cpu"), self._device.type == "cuda"
        try:
            self.k, self.v = ([new_pool(tokens, cache.shape, cpu, is_pinned=pinned) for _ in cache.k] for _ in range(2))
        except RuntimeError as error:
            what = f"swap_space of {num_blocks} blocks takes {num_blocks * cache.block_bytes} bytes of host memory"
            raise ConfigError(f"{what}, and the system does not give them ({error}); accepted: less") from error

    def move(self, out: Sequence[Run], back: Sequence[Run]) -> list[Wait]:
        """Begin to copy tokens, behind the compute launched so far: in each layer first out, then back in.

        What is returned, by layer, makes compute launched later wait for the copies of this layer and those before.
        """
        with beside(self._stream, record_event(self._device)):
            return [self._move(layer, out, back) for layer in range(len(self.k))]

    def finish(self) -> None:
        """Wait on the host until all that :meth:`move` began is copied."""
        if self._stream is not None:
            self._stream.synchronize()

    def measure_block_s(self) -> float:
        """Seconds in which a block moves one way, least of a few; what the device's pool holds stays as it is."""
        blocks = min(_MEASURED_BLOCKS, self.num_blocks, self._cache.num_blocks)
        run = [(0, 0, blocks * self._cache.block_size)]

        def both_ways() -> None:
            self.move(run, run)
            self.finish()

        seconds = timeit.repeat(both_ways, number=1, repeat=1 + _MEASURED_TIMES)
        return min(seconds[1:]) / (2 * blocks)  # the first touches the memory

    def _move(self, layer: int, out: Sequence[Run], back: Sequence[Run]) -> Wait:
        """Copy a layer's tokens, after what was copied before; what is returned makes later compute wait for it."""
        pairs = ((self._cache.k[layer], self.k[layer]), (self._cache.v[layer], self.v[layer]))
        for runs, is_back in ((out, False), (back, True)):
            for pool, host in pairs:
                copy_tokens(pool, host, runs, is_back=is_back)
        if self._stream is None:
            return lambda: None
        event = self._stream.record_event()
        return lambda: torch.cuda.current_stream(self._device).wait_event(event)
