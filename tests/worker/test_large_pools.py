"""Pools beyond 2**31 elements, and beyond 2**32: what is written at the far end is read there and nowhere else.

The pools are real and larger than the memory may be: the system commits a page when it is first written, and only a few
are.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medha.attention.flashinfer_backend import FlashInferBackend, PageTable, paged
from medha.attention.interface import AttentionBackend, Segment
from medha.attention.staging import Staging
from medha.attention.torch_backend import TorchBackend
from medha.batch import Batch, Extent, Row
from medha.worker.kv_cache import BlockTables, KVCache, WritePlan
from tests.attention import fake_flashinfer
from tests.attention.reference import assert_segments_close

CPU = torch.device("cpu")
BLOCK, HEADS, DIM = 256, 2, 64
BLOCK_ELEMENTS = BLOCK * HEADS * DIM
# The last block in which an index of 31, and of 32 bits, would still do, and one far behind both.
BORDERS = (2**31 // BLOCK_ELEMENTS - 1, 2**32 // BLOCK_ELEMENTS - 1)
FAR = 2**32 // BLOCK_ELEMENTS + 77


def make_cache(*, head_major: bool) -> KVCache:
    """A pool of 4.3 billion elements each for keys and values, laid out as on the CPU or as on CUDA."""
    try:
        cache = KVCache(
            num_layers=1, num_blocks=FAR + 2, block_size=BLOCK, num_kv_heads=HEADS, head_dim=DIM,
            dtype=torch.float16, device=CPU,
        )  # fmt: skip
    except Exception as error:  # the system may promise no more memory than it has
        pytest.skip(f"no address space for the pools: {error}")
    if not head_major:
        cache.k = [pool.transpose(0, 1).view(-1, HEADS, DIM) for pool in cache.k]
        cache.v = [pool.transpose(0, 1).view(-1, HEADS, DIM) for pool in cache.v]
    return cache


def backend_of(name: str) -> AttentionBackend:
    if name == "torch":
        return TorchBackend()
    return FlashInferBackend(fake_flashinfer.make_api(), block_size=BLOCK, num_sms=4, has_fa3=False)


@pytest.mark.parametrize("backend", ["torch", "flashinfer"])
@pytest.mark.parametrize("head_major", [True, False])
def test_blocks_on_both_sides_of_the_borders(head_major: bool, backend: str) -> None:
    cache = make_cache(head_major=head_major)
    blocks = [FAR, BORDERS[0] + 1, 0, BORDERS[1], BORDERS[0], BORDERS[1] + 1]
    tables = BlockTables(BLOCK)
    length = len(blocks) * BLOCK - 100
    row = Row(0, length - 10, 10, False, True)
    tables.apply(Batch(0, (Row(0, 0, length, False, True),), tuple(Extent(0, block, 1) for block in blocks)))

    ranges = tables.ranges(0, 0, length)
    assert sum(count for _, count in ranges) == length
    assert all(first + count <= (FAR + 2) * BLOCK for first, count in ranges)
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, length, HEADS, DIM, generator=generator).half()
    spans, start = [], 0
    for first, count in ranges:
        spans.append((start, first, count))
        start += count
    cache.write(0, k, v, WritePlan(torch.empty(0, dtype=torch.int64), tuple(spans)))
    tokens = np.concatenate([np.arange(first, first + count) for first, count in ranges])
    cache.write(0, -k, -v, WritePlan(torch.from_numpy(tokens), ()))  # the same places, one by one
    got = torch.cat([cache.k[0][first : first + count] for first, count in ranges])
    assert torch.equal(got, -k)

    q = torch.randn(11, 4, DIM, generator=generator).half()
    segments = [
        Segment(0, 1, tables.ranges(0, 0, 5 * BLOCK), causal=True),
        Segment(1, 10, tables.ranges(0, 0, row.kv_len), causal=True),
    ]
    served = backend_of(backend)
    qkv = q, cache.k[0], cache.v[0]
    assert_segments_close(served.run(*qkv, served.plan(segments)), qkv, segments)


def test_page_tables_hold_any_page_that_a_pool_can_have() -> None:
    last = 2**31 - 1
    table = PageTable.of([Segment(0, 1, ((last * BLOCK, 3),), True), Segment(1, 1, ((0, 700),), True)], BLOCK)
    assert table.indices.tolist() == [last, 0, 1, 2]
    with pytest.raises(OverflowError, match=f"up to page {last + 1} needs 64 bits"):
        PageTable.of([Segment(0, 1, (((last + 1) * BLOCK, 3),), True)], BLOCK)


def test_pool_tokens_travel_as_64_bits() -> None:
    staging = Staging(CPU)
    tokens = np.array([2**31 - 1, 2**31, 2**40], np.int64)
    staged = staging.add(tokens)
    staging.send()
    assert staged.tensor.dtype == torch.int64 and staged.tensor.tolist() == tokens.tolist()


def test_pages_of_a_pool_are_where_its_tokens_are() -> None:
    """Offsets of the view that FlashInfer is given, on a device without memory: they pass 2**33 bytes."""
    pool = torch.empty((FAR + 1) * BLOCK, HEADS, DIM, dtype=torch.float16, device="meta")
    pages = paged(pool, BLOCK)
    assert pages.shape == (FAR + 1, BLOCK, HEADS, DIM)
    assert pages.stride() == (BLOCK_ELEMENTS, HEADS * DIM, DIM, 1)
    assert pages[FAR, 3].storage_offset() == pool[FAR * BLOCK + 3].storage_offset() == FAR * BLOCK_ELEMENTS + 3 * 128


def test_block_tables_of_ten_million_tokens() -> None:
    tables = BlockTables(BLOCK)
    num_blocks, first = 10_000_000 // BLOCK + 1, 2**31 - 100_000
    tables.apply(Batch(0, (Row(0, 0, 10_000_000, False, False),), (Extent(0, first, num_blocks),)))
    assert tables.ranges(0, 9_999_990, 10_000_000) == ((first * BLOCK + 9_999_990, 10),)
