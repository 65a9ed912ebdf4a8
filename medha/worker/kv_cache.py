"""The paged KV cache: one pool of keys and values a layer, addressed by token.

Which blocks belong to whom is decided by the scheduler (:mod:`medha.sched.blocks`); a rank's replica of those decisions
is :class:`BlockTables`. Logical layout of a layer's pool is [P tokens, K heads, H], block b holding the tokens from
``b * block_size``; in memory the CPU keeps heads outermost (its kernels read one head at a time), CUDA tokens
outermost (the layout of paged kernels).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from medha.attention.interface import Segment
from medha.batch import Batch, Extent, Row, append_extent
from medha.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Where a batch's new keys and values go.

    Attributes:
        singles: pool tokens of the decodes, int64 on the pool's device: one write for all of them.
        spans: (first batch token, first pool token, count) of each adjacent run among the rest.
        sources: batch tokens of the decodes, int64; None where they are the batch's first.
    """

    singles: torch.Tensor
    spans: tuple[tuple[int, int, int], ...]
    sources: torch.Tensor | None = None


class KVCache:
    """Pools of keys and values; on the CPU the system commits pages as they are first written.

    Args:
        num_layers, num_kv_heads: held here.
        num_blocks, block_size: size of each pool.
        has_scratch: whether one more block lies behind the pool, which no table names: what rows that only fill a batch
            up read and write.

    Raises:
        ConfigError: the memory cannot be had.

    Attributes:
        k, v: one tensor [num_blocks * block_size, num_kv_heads, head_dim] a layer, with the scratch block behind.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        has_scratch: bool = False,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.has_scratch = has_scratch
        tokens = (num_blocks + has_scratch) * block_size

        def pool() -> torch.Tensor:
            if device.type == "cpu":
                return torch.empty(num_kv_heads, tokens, head_dim, dtype=dtype).transpose(0, 1)
            return torch.empty(tokens, num_kv_heads, head_dim, dtype=dtype, device=device)

        try:
            self.k = [pool() for _ in range(num_layers)]
            self.v = [pool() for _ in range(num_layers)]
        except RuntimeError as error:
            token_bytes = 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
            raise ConfigError(
                f"a KV pool of {num_blocks} blocks takes {num_blocks * block_size * token_bytes} bytes, and the system "
                f"does not give them ({error}); accepted: fewer, with num_kv_blocks or kv_memory"
            ) from error

    @property
    def scratch_token(self) -> int:
        """First pool token of the scratch block, where there is one."""
        return self.num_blocks * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's keys and values over all layers held here."""
        return sum(2 * pool[: self.block_size].nbytes for pool in self.k)

    def write(self, layer: int, k_TKH: torch.Tensor, v_TKH: torch.Tensor, plan: WritePlan) -> None:
        """Copy new keys and values into a layer's pool, in place.

        Args:
            layer: index among the layers held here.
            k_TKH, v_TKH: of the batch's tokens.
            plan: where they go; the same for every layer of a step.
        """
        for pool, new in ((self.k[layer], k_TKH), (self.v[layer], v_TKH)):
            if len(plan.singles):
                pool[plan.singles] = new[: len(plan.singles)] if plan.sources is None else new[plan.sources]
            for source, target, count in plan.spans:
                pool[target : target + count] = new[source : source + count]


class BlockTables:
    """A rank's replica of the block tables, kept by applying each batch's delta.

    With KV parallelism a rank holds one shard of a request: adjacent positions whose keys and values its group took.

    Args:
        block_size: tokens a block.
        group: this rank's KV-parallel group; blocks of other groups are not noted.
    """

    def __init__(self, block_size: int, group: int = 0) -> None:
        self.block_size = block_size
        self._group = group
        self._extents: dict[int, list[tuple[int, int]]] = {}
        self._shards: dict[int, tuple[int, int]] = {}  # positions [start, end) that lie here, or will after the batch

    def apply(self, batch: Batch) -> None:
        """Apply the frees, then the new extents of a batch, in place; its rows extend the shards.

        What is swapped in begins a shard at position 0; what is swapped out is to be asked for before
        (:meth:`swap_runs`).
        """
        for slot in batch.frees:
            self._extents.pop(slot, None)
            self._shards.pop(slot, None)
        for extent in batch.extents:
            if extent.group == self._group:
                append_extent(self._extents.setdefault(extent.slot, []), extent.first, extent.count)
        for extent in batch.swaps_in:
            if extent.group == self._group:
                self._shards[extent.slot] = (0, 0)
        for row in batch.rows:
            if row.writer == self._group:
                start, _ = self._shards.get(row.slot, (row.position, 0))
                self._shards[row.slot] = (start, row.kv_len)

    def swap_runs(self, host: Sequence[Extent]) -> list[tuple[int, int, int]]:
        """Where host blocks and the first blocks of their slots' tables face each other.

        Args:
            host: of a batch's swaps, in position order for each slot; those of other groups are left out.

        Returns:
            (first pool token, first token of the host's pool, count) runs.
        """
        runs = []
        done: dict[int, int] = {}  # tokens by slot
        for extent in host:
            if extent.group != self._group:
                continue
            start, on_host = done.get(extent.slot, 0), extent.first * self.block_size
            done[extent.slot] = end = start + extent.count * self.block_size
            for first, count in self.ranges(extent.slot, start, end):
                runs.append((first, on_host, count))
                on_host += count
        return runs

    @property
    def num_blocks(self) -> int:
        """Blocks of all requests that lie here."""
        return sum(count for extents in self._extents.values() for _, count in extents)

    def clear(self) -> None:
        """Forget every table."""
        self._extents.clear()
        self._shards.clear()

    def shard(self, slot: int) -> tuple[int, int]:
        """Positions [start, end) of a request that lie here once the last applied batch has run."""
        return self._shards[slot]

    def ranges(self, slot: int, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Where positions [start, end) of a request lie: (first pool token, count) runs in position order.

        Raises:
            IndexError: a position is not of the shard that lies here.
        """
        offset = self._shards.get(slot, (0, 0))[0]  # position of the extent's first token
        if start < offset:
            raise IndexError(f"slot {slot} has positions from {offset} here, position {start} is asked for")
        runs: list[tuple[int, int]] = []
        for first, count in self._extents.get(slot, ()):
            low = max(start, offset)
            high = min(end, offset + count * self.block_size)
            if low < high:
                runs.append((first * self.block_size + low - offset, high - low))
            offset += count * self.block_size
        if end > offset:
            raise IndexError(f"slot {slot} has blocks for {offset} tokens, position {end - 1} is asked for")
        return tuple(runs)

    def segment(self, row: Row, start: int) -> Segment:
        """What a row, whose first token is ``start`` in the batch, sees here.

        Of a shared row that is this group's shard, whose last part is the row's own on the group that takes its keys.
        """
        if not row.is_shared:
            return Segment(start, row.q_len, self.ranges(row.slot, 0, row.kv_len), causal=True)
        return Segment(start, row.q_len, self.ranges(row.slot, *self.shard(row.slot)), row.writer == self._group)

    def targets(
        self, located: Sequence[tuple[Row, int]], *, in_pieces: bool
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None, tuple[tuple[int, int, int], ...]]:
        """Where a batch's new keys go: singles, sources and spans as in :class:`WritePlan`, on the host.

        Args:
            located: each row, and the index of its first token in the batch.
            in_pieces: a chunk is copied in one piece, as on the CPU; elsewhere every token is one of the singles, so
                that a layer's keys are one launch.
        """
        singles: list[int] = []
        sources: list[int] = []
        spans: list[tuple[int, int, int]] = []
        for row, start in located:
            if row.writer != self._group:
                continue
            for first, count in self.ranges(row.slot, row.position, row.kv_len):
                if in_pieces and not row.is_decode:
                    spans.append((start, first, count))
                else:
                    singles.extend(range(first, first + count))
                    sources.extend(range(start, start + count))
                start += count
        are_first = sources == list(range(len(sources)))
        return np.array(singles, np.int64), None if are_first else np.array(sources, np.int64), tuple(spans)
