"""How the keys of FlashInfer's FA2 launches are cut into parts.

A launch computes work items, each a tile of a row's queries over one part of its keys; every KV head has a thread block
for each, and the GPU holds two blocks a multiprocessor. All parts of a launch have one length. FlashInfer's own planner
(``PrefillSplitQOKVIndptr`` in its scheduler.cuh) cuts only while all items together fit the GPU at once, so short rows
that fill it leave a long context in one part: its keys are then read by as few blocks as there are KV heads. Here the
longest row decides, and what does not fit runs in waves.

Legend: R rows of a launch. Pages are those of the page table.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from medha.attention.interface import Ints, LayerShape

MOST_TILE_ROWS = 128
_BLOCKS_PER_SM = 2
_LEAST_PART = 128  # tokens
_FILLED = 0.8  # of the GPU by the longest row
# A thread block reads so many tokens of one KV head in 0.22 ms (73 a microsecond on an H200), less than what a layer of
# a decode takes longer without its graph: 0.3 ms.
_NEGLIGIBLE_PART = 16384


class Piece(NamedTuple):
    """Adjacent rows of one launch, [first, last), and how many pages a part of their keys has."""

    first: int
    last: int
    part_pages: int


@dataclass(frozen=True, slots=True)
class KVSplit:
    """The cut for layers of one shape on a GPU of so many multiprocessors, with pages of so many tokens."""

    shape: LayerShape
    num_sms: int
    page_size: int

    @property
    def group(self) -> int:
        """Query heads of a KV head, which share a tile."""
        return self.shape.num_heads // self.shape.num_kv_heads

    @property
    def slots(self) -> int:
        """Items that the GPU holds at once."""
        return max(_BLOCKS_PER_SM * self.num_sms // self.shape.num_kv_heads, 1)

    @property
    def wanted(self) -> int:
        """Items that fill the GPU well enough."""
        return -int(-_FILLED * _BLOCKS_PER_SM * self.num_sms // self.shape.num_kv_heads)

    @property
    def most_rows(self) -> int:
        """Rows of tiles, of queries times heads, for whose items there is memory: one row of a batch never has more."""
        return 2 * self.wanted * MOST_TILE_ROWS

    def tile_rows(self, num_rows: int) -> int:
        """Rows, of queries times heads, of a tile where a row of the batch has so many on average."""
        if num_rows <= 16:
            return 16 if self.shape.head_dim < 256 else 64
        return 64 if num_rows <= 64 or self.shape.head_dim >= 256 else MOST_TILE_ROWS

    def pieces(self, q_len: Ints, pages: Ints) -> Iterator[Piece]:
        """The launches of rows that one could take [R]: at most three, where the longest row is alone in one because
        the parts of all would be more than there is memory for."""
        tile, tiles = self._tiles(q_len)
        part = self.part_pages(tiles, pages)
        if len(pages) == 1 or not _items(tiles, pages, part) > max(self.most_rows // tile, tiles.sum()):
            yield Piece(0, len(pages), part)
            return
        longest = int(pages.argmax())
        for first, last in ((0, longest), (longest, longest + 1), (longest + 1, len(pages))):
            if first < last:
                tile, tiles = self._tiles(q_len[first:last])
                part = self.part_pages(tiles, pages[first:last])
                if last - first > 1:
                    part = max(part, smallest_part(tiles, pages[first:last], self.most_rows // tile))
                yield Piece(first, last, part)

    def part_pages(self, tiles: Ints, pages: Ints) -> int:
        """Pages of a part, where rows have so many tiles and pages [R].

        The longest row is cut so that it fills the GPU, or as far as it can be cut. Where others give the GPU work too,
        its parts may be as long as half of what a slot has to do in all; a row no longer than that whole work is left
        whole, as the others fill the GPU.
        """
        longest = int(pages.argmax())
        its_pages, its_tiles = int(pages[longest]), int(tiles[longest])
        share = int((tiles * pages).sum()) / self.slots
        if its_pages <= share:
            return max(its_pages, 1)
        part = -(-its_pages // max(self.slots // its_tiles, 1))
        num_parts = -(-its_pages // part)
        if its_tiles * num_parts < self.wanted:  # rather one wave and a little more
            part = min(part - 1, -(-its_pages // (num_parts + 1)))
        return min(its_pages, max(part, int(share / 2), self._least_pages))

    def graph_part_pages(self, pages: Ints, num_decodes: int) -> int:
        """Pages of a part in a CUDA graph of so many decodes, of which those with keys have so many pages [R].

        The number of items is the captured one, of which every decode takes its tiles.
        """
        tiles = np.full(len(pages), -(-self.group // self.tile_rows(self.group)))
        most = max(self.slots, -(-num_decodes * self.group // self.tile_rows(self.group)) + num_decodes - 1)
        spare = most - (num_decodes - len(pages)) * int(tiles[0])
        return max(smallest_part(tiles, pages, spare), self._least_pages)

    def starves_in_graph(self, pages: Ints, num_decodes: int) -> bool:
        """Whether the longest of some decodes would have less than half as many parts in a graph as without one, and
        long ones."""
        part = self.graph_part_pages(pages, num_decodes)
        if part * self.page_size <= _NEGLIGIBLE_PART:
            return False
        tiles = np.full(len(pages), -(-self.group // self.tile_rows(self.group)))
        longest = int(pages.max())
        eager = -(-longest // self.part_pages(tiles, pages))
        return eager > 2 and 2 * -(-longest // part) < eager

    @property
    def _least_pages(self) -> int:
        return max(_LEAST_PART // self.page_size, 1)

    def _tiles(self, q_len: Ints) -> tuple[int, Ints]:
        """Rows of a tile in a launch of such rows, and the tiles of each [R]."""
        rows = q_len * self.group
        tile = self.tile_rows(int(rows.sum()) // len(rows))
        return tile, -(-rows // tile)


def _items(tiles: Ints, pages: Ints, part: int) -> int:
    return int((tiles * -(-pages // part)).sum())


def smallest_part(tiles: Ints, pages: Ints, most_items: int) -> int:
    """The fewest pages of a part for which there are at most so many items; whole rows where that cannot be."""
    shorter = range(1, int(pages.max()))  # than the longest row
    return 1 + bisect_left(shorter, True, key=lambda part: _items(tiles, pages, part) <= most_items)
