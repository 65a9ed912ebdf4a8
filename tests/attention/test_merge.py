"""Merging attention over shards of the keys equals attention over all of them.

Which keys a query sees in which shard is drawn for each query on its own, so a shard may be empty for some queries, as
in a chunk's causal tail.
"""

import math
from typing import Any

import torch
from hypothesis import given, settings, strategies as st

from medha.attention.merge import merge_partials
from medha.cpu.library import library
from tests.attention.reference import Result, masked_attention

# Outputs of at most 4 and one rounding of each part and of the sum; log-sum-exps stay float32.
OUT_ATOL = {torch.float32: 2e-6, torch.bfloat16: 2.5e-2, torch.float16: 3e-3}
LSE_ATOL = 2e-6
DTYPES = list(OUT_ATOL)


def shards(
    num_shards: int, num_keys: int, *, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> tuple[list[Result], Result]:
    """Attention of 12 queries over each shard of their keys, in ``dtype``, and over the union in float64."""
    generator = torch.Generator().manual_seed(seed)
    q = scale * torch.randn(12, 4, 16, generator=generator)
    k, v = torch.randn(2, num_keys, 2, 16, generator=generator).clamp(-4, 4)
    shard_of = torch.randint(0, num_shards + 1, (12, num_keys), generator=generator)  # the last number: seen nowhere
    shard_of[0] = num_shards  # sees nothing
    shard_of[1] = 0  # all keys in one shard
    parts = [masked_attention(q, k, v, shard_of == i) for i in range(num_shards)]
    whole = masked_attention(q, k, v, shard_of < num_shards)
    return [(out.to(dtype).contiguous(), lse.float().contiguous()) for out, lse in parts], whole


def merged(parts: list[Result]) -> list[Result]:
    """By torch, and by the CPU's kernel where there is one."""
    return [merge_partials(parts, by_kernel=by_kernel) for by_kernel in (False, True)[: 1 + (library()[0] is not None)]]


def check(parts: list[Result], whole: Result) -> None:
    """The property: the merge is attention over the union."""
    dtype = parts[0][0].dtype
    # What a float32 log-sum-exp as large as the largest here is rounded by; relative weights are off by as much.
    largest = torch.stack([lse for _, lse in parts]).nan_to_num(neginf=0.0).abs().max()
    rounding = float(largest) * torch.finfo(torch.float32).eps
    for out, lse in merged(parts):
        assert (out.dtype, lse.dtype) == (dtype, torch.float32)
        torch.testing.assert_close(out.double(), whole[0], rtol=0, atol=OUT_ATOL[dtype] + 8 * rounding)
        torch.testing.assert_close(lse.double(), whole[1], rtol=0, atol=LSE_ATOL + rounding)


@settings(max_examples=150, derandomize=True, deadline=None)
@given(
    num_shards=st.integers(1, 5),
    num_keys=st.integers(0, 40),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.3, 1.0, 8.0, 100.0]),
    offset=st.sampled_from([0.0, 0.0, -1e4, -200.0, 200.0, 1e4]),
)
def test_any_split_is_the_whole(num_shards: int, num_keys: int, offset: float, **options: Any) -> None:
    """In any nesting; log-sum-exps that are large neither overflow nor vanish."""
    parts, (out, lse) = shards(num_shards, num_keys, **options)
    parts, whole = [(part, its_lse + offset) for part, its_lse in parts], (out, lse + offset)
    check(parts, whole)
    for cut in range(1, num_shards):
        check([merge_partials(parts[:cut]), merge_partials(parts[cut:])], whole)


def test_an_empty_part_changes_no_bit() -> None:
    parts, _ = shards(3, 30, seed=2)
    empty = (torch.zeros(12, 4, 16), torch.full((12, 4), -math.inf))
    for place in range(4):
        padded = [*parts[:place], empty, *parts[place:]]
        for mine, theirs in zip(merged(padded), merged(parts), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))
