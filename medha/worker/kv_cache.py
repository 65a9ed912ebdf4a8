"""The paged KV cache: one pool of keys and values a layer, addressed by token.

Which blocks belong to whom is decided by the scheduler (:mod:`medha.sched.blocks`); a rank's replica of those decisions
is :class:`medha.worker.step_input.Slots`. Logical layout of a layer's pool is [P tokens, K heads, H], block b holding
the tokens from ``b * block_size``; in memory the CPU keeps heads outermost (its kernels read one head at a time), CUDA
tokens outermost (the layout of paged kernels).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass

import torch
import torch.nn.functional as F

from medha.attention.interface import LayerShape
from medha.cpu import decoder as cpu
from medha.cpu.library import library
from medha.errors import ConfigError

Run = tuple[int, int, int]
"""Tokens that move together: (the first of them in the pool, the first in what faces it, count)."""
Places = tuple[torch.Tensor, torch.Tensor | None]
"""What :meth:`KVCache.places` returns."""


def copy_tokens(pool: torch.Tensor, other: torch.Tensor, runs: Sequence[Run], *, is_back: bool = False) -> None:
    """Copy tokens of a pool to what faces it, or back, in place and in order; on CUDA the host does not wait."""
    for here, there, count in runs:
        mine, theirs = pool[here : here + count], other[there : there + count]
        source, target = (theirs, mine) if is_back else (mine, theirs)
        target.copy_(source, non_blocking=True)


def new_pool(num_tokens: int, shape: LayerShape, device: torch.device, *, is_pinned: bool = False) -> torch.Tensor:
    """Memory of a layer's keys or values; pinned memory of the host is laid out as that of CUDA."""
    K, H = shape.num_kv_heads, shape.head_dim
    if device.type == "cpu" and not is_pinned:
        return torch.empty(K, num_tokens, H, dtype=shape.dtype).transpose(0, 1)
    return torch.empty(num_tokens, K, H, dtype=shape.dtype, device=device, pin_memory=is_pinned)


@dataclass(eq=False, repr=False)
class KVCache:
    """Pools of keys and values, ``k`` and ``v``: one tensor [num_blocks * block_size, num_kv_heads, head_dim] a layer.

    On the CPU the system commits pages as they are first written. With ``has_scratch`` one more block lies behind the
    pool, which no table names: what rows that only fill a batch up read and write. ConfigError where the memory cannot
    be had.
    """

    shape: LayerShape  # of the heads of one rank
    _: KW_ONLY
    num_layers: InitVar[int]
    num_blocks: int
    block_size: int
    device: InitVar[torch.device]
    has_scratch: bool = False

    def __post_init__(self, num_layers: int, device: torch.device) -> None:
        self.append: Callable[..., None] | None = None  # FlashInfer's append_paged_kv_cache, with its table of pages
        shape, num_blocks = self.shape, self.num_blocks
        # of a block's keys and values over all layers held here
        self.block_bytes = num_layers * self.block_size_of(self.block_size) * shape.dtype.itemsize
        num_tokens = (num_blocks + self.has_scratch) * self.block_size
        try:
            self.k, self.v = ([new_pool(num_tokens, shape, device) for _ in range(num_layers)] for _ in range(2))
        except RuntimeError as error:
            what = f"a KV pool of {num_blocks} blocks takes {num_blocks * self.block_bytes} bytes"
            accepted = "fewer, with num_kv_blocks or kv_memory"
            raise ConfigError(f"{what}, and the system does not give them ({error}); accepted: {accepted}") from error

    def append_by(self, append_paged_kv_cache: Callable[..., None]) -> None:
        """Let :meth:`write` take a launch: the pool is to FlashInfer one request, whose pages are all there are."""
        size, pool, pools = self.block_size, self.k[0], (self.k, self.v)
        num_pages, head = len(pool) // size, pool.shape[1:]
        last = torch.tensor([0, num_pages, size], dtype=torch.int32, device=pool.device)
        table = torch.arange(num_pages, dtype=torch.int32, device=pool.device), last[:2], last[2:]

        def append(layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor, places: torch.Tensor) -> None:
            pages = tuple(x[layer].view(num_pages, size, *head) for x in pools)
            append_paged_kv_cache(k_TKH, v_TKH, *places, pages, *table)

        self.append = append  # which does not hold this object: its memory would stay until garbage is collected

    def places(self, targets: torch.Tensor, kept: torch.Tensor | None = None) -> Places:
        """Where the new keys and values of a batch go, for :meth:`write`; once a step.

        Args:
            targets: the pool tokens, int64 on the pool's device.
            kept: index of each of these in the batch, int64; None if they are all of it.
        """
        return targets if self.append is None else F.pad(targets.to(torch.int32)[None], (0, 0, 1, 0)), kept

    def write(self, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor, places: Places) -> None:
        """Copy a batch's new keys and values into a layer's pool, in place; on the CPU they may have any strides
        between tokens, alike, and have heads and dimensions beside each other."""
        targets, kept = places
        if kept is not None and not len(kept):
            return  # other groups have the new keys; a kernel is not launched for nothing
        if targets.device.type == "cpu" and library()[0] is not None:
            cpu.write(((self.k[layer], k_TKH), (self.v[layer], v_TKH)), targets, kept)
            return
        new = (k_TKH, v_TKH) if kept is None else (k_TKH[kept], v_TKH[kept])
        if self.append is not None:
            self.append(layer, *new, targets)
        else:
            self.k[layer][targets], self.v[layer][targets] = new

    def block(self, memory: torch.Tensor, num_heads: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [P, ``num_heads``, head_dim] in contiguous memory of their numbers, laid out as the pools;
        None is all heads of this rank."""
        heads, dim = num_heads or self.shape.num_kv_heads, self.shape.head_dim
        both = memory.view(2, heads, -1, dim).transpose(1, 2) if memory.is_cpu else memory.view(2, -1, heads, dim)
        return both[0], both[1]

    def block_size_of(self, num_tokens: int, num_heads: int | None = None) -> int:
        """Numbers of the memory of :meth:`block` for so many tokens."""
        return 2 * num_tokens * (num_heads or self.shape.num_kv_heads) * self.shape.head_dim

    def pack(
        self, layer: int, runs: Sequence[Run], memory: torch.Tensor, heads: range | None = None, is_back: bool = False
    ) -> torch.Tensor:
        """Copy tokens of a layer's pool into a :meth:`block`, in place, or back, of some of this rank's heads, None is
        all; returns the block's memory."""
        heads = heads or range(self.shape.num_kv_heads)
        for pool, block in zip((self.k[layer], self.v[layer]), self.block(memory, len(heads)), strict=True):
            copy_tokens(pool[:, heads.start : heads.stop], block, runs, is_back=is_back)
        return memory
