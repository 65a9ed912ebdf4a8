"""How the keys of FlashInfer's launches are cut: long contexts fill the GPU, whatever else runs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from medha.attention.flashinfer_backend import workspace_bytes
from medha.attention.interface import LayerShape
from medha.attention.kv_split import KVSplit, Piece, smallest_part

LLAMA_8B = LayerShape(32, 8, 128, torch.bfloat16)
H100 = KVSplit(LLAMA_8B, 132, 256)
MILLION = 4096  # pages of 256 tokens
SHORT = 8

Rows = list[tuple[int, int]]
"""(queries, pages) of each row of a launch."""


def pieces(split: KVSplit, rows: Rows) -> list[Piece]:
    q_len, pages = np.array(rows).T
    return list(split.pieces(q_len, pages))


def tiles_of(split: KVSplit, rows: Rows) -> tuple[int, np.ndarray]:
    """As FlashInfer cuts the queries of a launch: rows of a tile, and the tiles of each row."""
    packed = np.array([q_len for q_len, _ in rows]) * split.group
    mean = int(packed.sum()) // len(rows)
    head_dim = split.shape.head_dim
    tile = 128 if mean > 64 and head_dim < 256 else 64 if mean > 16 or head_dim >= 256 else 16
    return tile, -(-packed // tile)


def parts_of_longest(split: KVSplit, rows: Rows) -> int:
    longest = max(range(len(rows)), key=lambda row: rows[row][1])
    (piece,) = (piece for piece in pieces(split, rows) if piece.first <= longest < piece.last)
    _, tiles = tiles_of(split, rows[piece.first : piece.last])
    return int(tiles[longest - piece.first]) * -(-rows[longest][1] // piece.part_pages)


# Launches have decodes alone or chunks alone, some of them over long contexts.
PAGES = st.integers(1, 60) | st.integers(1, 5000) | st.just(40_000)
DECODES = st.lists(st.tuples(st.just(1), PAGES), min_size=1, max_size=240)
CHUNKS = st.lists(st.tuples(st.integers(2, 600) | st.just(2048), PAGES), min_size=1, max_size=40)
SPLITS = st.builds(
    lambda kv, group, head_dim, sms, page: KVSplit(LayerShape(kv * group, kv, head_dim, torch.float16), sms, page),
    *map(st.sampled_from, ((1, 2, 4, 8, 32), (1, 2, 4, 8, 16), (64, 128, 256), (16, 66, 108, 132), (16, 64, 256))),
)


@settings(max_examples=300, deadline=None)
@given(SPLITS, DECODES | CHUNKS)
def test_the_longest_row_fills_the_gpu(split: KVSplit, rows: Rows) -> None:
    """Or is cut as far as it can be, or its parts are short beside what the others give the GPU to do."""
    found, shape = pieces(split, rows), split.shape
    assert [piece.first for piece in found] + [len(rows)] == [0] + [piece.last for piece in found]
    assert len(found) <= 3
    longest = max(range(len(rows)), key=lambda row: rows[row][1])
    for piece in found:
        its_rows = rows[piece.first : piece.last]
        tile, tiles = tiles_of(split, its_rows)
        pages = np.array([num_pages for _, num_pages in its_rows])
        num_parts = -(-pages // piece.part_pages)
        items = int((tiles * num_parts).sum())
        if num_parts.max() > 1:  # partial results are kept
            partials = shape.num_heads * items * tile * (shape.head_dim + 1) * 4
            assert partials <= workspace_bytes(shape, num_sms=split.num_sms)
        if piece.first <= longest < piece.last:
            at = longest - piece.first
            share = float((tiles * pages).sum()) / split.slots
            fills = int(tiles[at] * num_parts[at]) * shape.num_kv_heads >= 0.8 * 2 * split.num_sms
            in_least_parts = piece.part_pages == min(max(128 // split.page_size, 1), pages[at])
            among_others = piece.part_pages <= share / 2 or pages[at] <= share
            assert fills or in_least_parts or among_others


@pytest.mark.parametrize("num_others", [0, 1, 16, 24, 32, 200])
def test_a_decode_over_a_million_tokens_beside_short_ones(num_others: int) -> None:
    """FlashInfer's planner gives it 33, 33, 17, 9, 1 and 1 parts."""
    for rows in ([(1, MILLION), *[(1, SHORT)] * num_others], [*[(1, SHORT)] * num_others, (1, MILLION)]):
        assert len(pieces(H100, rows)) == 1
        assert parts_of_longest(H100, rows) * 8 >= 0.8 * 264


def test_a_small_chunk_over_a_million_tokens_beside_prefills_has_a_launch_of_its_own() -> None:
    rows = [*[(128, 1)] * 4, (32, MILLION), *[(128, 1)] * 4]
    assert parts_of_longest(H100, rows) * 8 >= 0.8 * 264
    assert [(piece.first, piece.last) for piece in pieces(H100, rows)] == [(0, 4), (4, 5), (5, 9)]


@pytest.mark.parametrize("num_pages", range(1, 140))
def test_whole_pages_do_not_keep_the_gpu_half_empty(num_pages: int) -> None:
    """34 pages over 33 places would be 17 parts of two."""
    assert parts_of_longest(H100, [(1, num_pages)]) >= min(num_pages, 27)


def test_equal_rows_that_fill_the_gpu_are_left_whole() -> None:
    assert pieces(H100, [(1, 32)] * 64) == [Piece(0, 64, 32)]
    assert not H100.starves_in_graph(np.full(64, 32), 64)


@pytest.mark.parametrize(("num_decodes", "num_parts"), [(33, 9), (64, 16), (128, 32), (256, 64)])
def test_parts_in_a_graph(num_decodes: int, num_parts: int) -> None:
    """As many items as were captured: ceil(B * 4 / 16) + B - 1, of which the others take one each."""
    pages = np.array([100 * MILLION] + [1] * (num_decodes - 1))
    assert -(-int(pages[0]) // H100.graph_part_pages(pages, num_decodes)) == num_parts


def test_a_long_context_that_a_graph_would_starve_leaves_it() -> None:
    for num_decodes, starves in ((2, False), (33, True), (128, False)):
        pages = np.array([MILLION] + [SHORT] * (num_decodes - 1))
        assert H100.starves_in_graph(pages, num_decodes) == starves
        eager = parts_of_longest(H100, [(1, int(n)) for n in pages])
        in_graph = -(-MILLION // H100.graph_part_pages(pages, num_decodes))
        assert (2 * in_graph < eager) == starves


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 900)), min_size=1, max_size=20), st.integers(1, 200))
def test_smallest_part(rows: list[tuple[int, int]], most: int) -> None:
    tiles, pages = np.array(rows).T
    part = smallest_part(tiles, pages, most)
    assert int((tiles * -(-pages // part)).sum()) <= most or part == pages.max()
    assert part == 1 or int((tiles * -(-pages // (part - 1))).sum()) > most
