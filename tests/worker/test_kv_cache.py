"""The KV pool: its layout, what a write touches, and pools too large for an index of 31 or 32 bits."""

import pytest
import torch

from medha.attention.interface import LayerShape
from medha.batch import Batch, Extent, Row
from medha.worker import kv_cache
from medha.worker.kv_cache import KVCache
from medha.worker.step_input import DeviceStep, Slots
from tests.attention.reference import assert_rows_close, visible
from tests.attention.test_torch_backend import BACKENDS, CPU, run


def make_cache(*, num_layers: int = 2, dtype: torch.dtype = torch.float32) -> KVCache:
    shape = {"num_layers": num_layers, "num_blocks": 12, "block_size": 4}
    return KVCache(LayerShape(2, 2, 8, dtype), **shape, device=CPU)


def test_pools_have_the_logical_shape_and_heads_outermost_on_the_cpu() -> None:
    cache = make_cache(num_layers=3)
    assert len(cache.k) == len(cache.v) == 3
    for pool in (*cache.k, *cache.v):
        assert (pool.shape, pool.stride()) == ((48, 2, 8), (8, 48 * 8, 1))
    assert len({pool.data_ptr() for pool in (*cache.k, *cache.v)}) == 6
    assert cache.block_bytes == 3 * 2 * (4 * 2 * 8 * 4)


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_touches_only_its_targets_and_its_layer(
    dtype: torch.dtype, by_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_torch:
        monkeypatch.setattr(kv_cache, "library", lambda: (None, "a compiler"))
    cache = make_cache(dtype=dtype)
    for pool in (*cache.k, *cache.v):
        pool.fill_(-1.0)
    k, v = torch.rand(7, 32).to(dtype).split(16, dim=-1)
    k, v = k.unflatten(-1, (2, 8)), v.unflatten(-1, (2, 8))
    # Tokens 4 and 5 of the batch are written nowhere.
    targets, kept = torch.tensor([30, 9, 7, 8, 40]), torch.tensor([0, 1, 2, 3, 6])
    cache.write(1, k, v, cache.places(targets, kept))
    for pool, new in ((cache.k[1], k), (cache.v[1], v)):
        want = torch.full((48, 2, 8), -1.0, dtype=dtype)
        want[30], want[9], want[7:9], want[40] = new[0], new[1], new[2:4], new[6]
        assert torch.equal(pool, want)
    cache.write(1, k[:2], v[:2], cache.places(torch.tensor([3, 0])))
    assert torch.equal(cache.k[1][[3, 0]], k[:2])
    assert bool((cache.k[0] == -1).all()) and bool((cache.v[0] == -1).all())


# -- pools beyond 2**31 elements, and beyond 2**32 -----------------------------------------------------------
# What is written at the far end is read there and nowhere else. The pools are real and larger than the memory may be:
# the system commits a page when it is first written, and only a few are.

BLOCK, HEADS, DIM = 256, 2, 64
BLOCK_ELEMENTS = BLOCK * HEADS * DIM
# The last block in which an index of 31, and of 32 bits, would still do, and one far behind both.
BORDERS = (2**31 // BLOCK_ELEMENTS - 1, 2**32 // BLOCK_ELEMENTS - 1)
FAR = 2**32 // BLOCK_ELEMENTS + 77


def make_large_cache(*, head_major: bool) -> KVCache:
    """A pool of 4.3 billion elements each for keys and values, laid out as on the CPU or as on CUDA."""
    try:
        shape = LayerShape(HEADS, HEADS, DIM, torch.float16)
        cache = KVCache(shape, num_layers=1, num_blocks=FAR + 2, block_size=BLOCK, device=CPU)
    except Exception as error:  # the system may promise no more memory than it has
        pytest.skip(f"no address space for the pools: {error}")
    if not head_major:
        cache.k = [pool.transpose(0, 1).view(-1, HEADS, DIM) for pool in cache.k]
        cache.v = [pool.transpose(0, 1).view(-1, HEADS, DIM) for pool in cache.v]
    return cache


@pytest.mark.parametrize("backend", ["torch", "fa2"])
@pytest.mark.parametrize("head_major", [True, False])
def test_blocks_on_both_sides_of_the_borders(head_major: bool, backend: str) -> None:
    cache, slots = make_large_cache(head_major=head_major), Slots(BLOCK)
    blocks = [FAR, BORDERS[0] + 1, 0, BORDERS[1], BORDERS[0], BORDERS[1] + 1]
    length = len(blocks) * BLOCK - 100
    row = Row(0, 0, length, False, True)
    step = slots.prepare(Batch(0, (row,), tuple(Extent(0, block, 1) for block in blocks)))
    tokens, _ = visible(step.own, 0)
    assert step.targets.tolist() == tokens.tolist() and int(tokens.max()) < (FAR + 2) * BLOCK

    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, length, HEADS, DIM, generator=generator).half()
    sent = DeviceStep.of(step, CPU)
    cache.write(0, k, v, cache.places(sent.targets, sent.kept))
    assert torch.equal(cache.k[0][tokens], k)
    cache.write(0, -k, -v, cache.places(torch.from_numpy(step.targets)))  # the same places, one by one
    assert torch.equal(torch.cat([cache.k[0][token : token + 1] for token in tokens]), -k)

    rows = slots.prepare(Batch(1, (Row(0, length, 1, True, True),))).own
    for pool in (*cache.k, *cache.v):
        pool[rows.pages[-1] * BLOCK + rows.kv_len[0] % BLOCK - 1] = 1.0
    for one, q_len in ((rows, 1), (step.own, length)):
        qkv = torch.randn(q_len, 4, DIM, generator=generator).half(), cache.k[0], cache.v[0]
        assert_rows_close(run(qkv, one, BACKENDS[backend]()), qkv, one)


def test_targets_of_ten_million_tokens_at_the_last_blocks_that_there_can_be() -> None:
    slots, first = Slots(BLOCK), 2**31 - 100_000
    num_blocks, start = 10_000_000 // BLOCK + 1, 10_000_000 - 10
    blocks = (Extent(0, first, num_blocks),)
    slots.prepare(Batch(0, (Row(0, 0, start, False, False),), blocks))
    step = slots.prepare(Batch(1, (Row(0, start, 10, False, False),)))
    assert step.targets.tolist() == [first * BLOCK + position for position in range(start, start + 10)]
