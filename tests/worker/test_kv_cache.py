"""The KV pool: its layout, and what a write touches."""

import pytest
import torch

from medha.attention.interface import LayerShape
from medha.worker import kv_cache
from medha.worker.kv_cache import KVCache


def make_cache(*, num_layers: int = 2, dtype: torch.dtype = torch.float32) -> KVCache:
    shape = {"num_layers": num_layers, "num_blocks": 12, "block_size": 4}
    return KVCache(LayerShape(2, 2, 8, dtype), **shape, device=torch.device("cpu"))


def test_pools_have_the_logical_shape_and_heads_outermost_on_the_cpu() -> None:
    cache = make_cache(num_layers=3)
    assert len(cache.k) == len(cache.v) == 3
    for pool in (*cache.k, *cache.v):
        assert pool.shape == (48, 2, 8)
        assert pool.stride() == (8, 48 * 8, 1)
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
    cache.write(1, k, v, targets, kept=kept)
    for pool, new in ((cache.k[1], k), (cache.v[1], v)):
        want = torch.full((48, 2, 8), -1.0, dtype=dtype)
        want[30], want[9], want[7:9], want[40] = new[0], new[1], new[2:4], new[6]
        assert torch.equal(pool, want)
    cache.write(1, k[:2], v[:2], torch.tensor([3, 0]))
    assert torch.equal(cache.k[1][[3, 0]], k[:2])
    assert bool((cache.k[0] == -1).all()) and bool((cache.v[0] == -1).all())
