"""Attention and merge on this rank's device, held to what their definition says, a dense softmax in float64.

Log-sum-exps are natural logarithms, -inf for an empty range.

Legend: T tokens of a batch, L query tokens of a row, N query heads, K KV heads, H head dimension, P tokens of the pool,
S keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch

from medha.attention.interface import AttentionBackend, AttentionRows, LayerShape
from medha.attention.merge import Partial, merge_partials
from medha.verify.rows import Row, exact, held
from medha.worker.kv_cache import KVCache

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_LSE_LIMIT = {torch.float32: 1e-5, torch.bfloat16: 2e-4, torch.float16: 2e-4}
_HEADS = ((8, 2, 128), (4, 4, 64), (8, 1, 64))  # (N, K, H)
_BLOCK = 256
_SHARD_PAGE = 4  # tokens; every shard begins with a page
_POOL_BLOCKS = 48
_EXTENTS = ((512, 2048), (4096, 1024), (2560, 512), (6144, 4096), (11008, 512))
_SEGMENTS = {
    "decode over 8,192 keys in 5 extents": (1, _EXTENTS, False),
    "decode over one key": (1, ((768, 1),), True),
    "chunk of 96 over 2,000 keys": (96, ((256, 1024), (5120, 1072)), True),
    "first chunk of 200": (200, ((8192, 200),), True),
    "33 queries over another's shard": (33, ((512, 700),), False),
    "empty shard": (3, (), False),
}


def attention_rows(backend: AttentionBackend, device: torch.device, dtype: torch.dtype) -> Iterator[Row]:
    """Output and log-sum-exp of the backend in a dtype, over decodes, chunks, shards and head counts."""
    errors: dict[str, list[tuple[float, float]]] = {"output": [], "log-sum-exp": []}  # and their limits
    plan = rows_over(list(_SEGMENTS.values()), _BLOCK)
    for N, K, H in _HEADS:
        shape = LayerShape(N, K, H, dtype)
        cache = KVCache(shape, num_layers=1, num_blocks=_POOL_BLOCKS, block_size=_BLOCK, device=device)
        generator = torch.Generator(device=device).manual_seed(0)
        k_PKH, v_PKH = (pool.normal_(generator=generator) for pool in (cache.k[0], cache.v[0]))
        q_TNH = 2 * torch.randn(plan.num_tokens, N, H, generator=generator, device=device, dtype=dtype)
        out_TNH, lse_TN = backend.run(q_TNH, k_PKH, v_PKH, backend.plan(plan))
        for (_, ranges, causal), bounds in zip(_SEGMENTS.values(), pairwise(plan.q_indptr.tolist()), strict=True):
            rows, extents = slice(*bounds), (*ranges, (0, 0))  # one at least, as nothing has no dtype
            index_S = torch.cat([torch.arange(first, first + count, device=device) for first, count in extents])
            want_out, want_lse = dense_attention(q_TNH[rows], k_PKH[index_S], v_PKH[index_S], causal=causal)
            lse_most = lse_limit(want_lse.masked_fill(want_lse == -torch.inf, 0.0), dtype, backend.name)
            errors["output"].append((largest_error(out_TNH[rows], want_out), out_limit(want_out, dtype)))
            errors["log-sum-exp"].append((largest_error(lse_TN[rows], want_lse), lse_most))
    for name, figures in errors.items():
        what = f"{name}, {str(dtype).removeprefix('torch.')}, {len(figures)} shapes"
        yield max((held("attention", what, *both) for both in figures), key=lambda row: row.strain)


def merge_rows(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype, *, num_parts: Sequence[int]
) -> Iterator[Row]:
    """Keys and values cut at block multiples, attended to in parts and merged; empty parts; the natural logarithm."""
    for count in num_parts:
        qkv = random_qkv(2 * count * _BLOCK - 156, q_len=16, device=device, dtype=dtype)
        merged = merge_partials([shard_attention(backend, qkv, *bounds) for bounds in cut(len(qkv[1]), count)])
        want = dense_attention(*qkv, causal=True)
        limits = out_limit(want[0], dtype), lse_limit(want[1], dtype, backend.name)
        yield held("merge", f"output, {count} shards as the whole", largest_error(merged[0], want[0]), limits[0])
        yield held("merge", f"log-sum-exp, {count} shards", largest_error(merged[1], want[1]), limits[1])
    yield exact("merge", "empty shards, natural logarithm", _num_wrong_edges(backend, device, dtype))


def random_qkv(num_keys: int, *, q_len: int, device: torch.device, dtype: torch.dtype) -> Tensors:
    """Queries that are the last of ``num_keys`` positions, and keys and values of all; the same numbers on every rank.

    Returns:
        (q_TNH, k_SKH, v_SKH) with 8 query heads and 2 KV heads of 64.
    """
    generator = torch.Generator().manual_seed(0)
    q_TNH = 2 * torch.randn(q_len, 8, 64, generator=generator)
    k_SKH, v_SKH = (torch.randn(num_keys, 2, 64, generator=generator) for _ in range(2))
    return q_TNH.to(device, dtype), k_SKH.to(device, dtype), v_SKH.to(device, dtype)


def cut(num_keys: int, count: int) -> list[tuple[int, int]]:
    """Positions [start, end) of shards whose ends, but for the last, are multiples of the block."""
    share = -(-num_keys // (count * _BLOCK)) * _BLOCK
    return [(i * share, min(num_keys, (i + 1) * share)) for i in range(count)]


def shard_attention(backend: AttentionBackend, qkv: Tensors, start: int, end: int) -> Partial:
    """Attention over one shard; causal on the last, which has the queries' own keys."""
    q_TNH, k_SKH, v_SKH = qkv
    row = rows_over([(len(q_TNH), ((start, end - start),), end == len(k_SKH))], _SHARD_PAGE)
    return backend.run(q_TNH, k_SKH, v_SKH, backend.plan(row))


def rows_over(rows: Sequence[tuple[int, Sequence[tuple[int, int]], bool]], page_size: int) -> AttentionRows:
    """Rows given as (queries, (first pool token, count) runs of keys, whether causal).

    Every run begins with a page, and but for a row's last one ends with one.
    """
    tables = []
    for _, runs, _ in rows:
        pages = [np.arange(at // page_size, -(-(at + count) // page_size)) for at, count in runs]
        tables.append(np.concatenate([np.empty(0, np.int32), *pages]).astype(np.int32))
    kv_len = np.array([sum(count for _, count in runs) for _, runs, _ in rows], np.int64)
    q_len, causal = np.array([row[0] for row in rows], np.int64), np.array([row[2] for row in rows], bool)
    return AttentionRows.of(q_len, kv_len, causal, tables, page_size)


def dense_attention(q_LNH: torch.Tensor, k_SKH: torch.Tensor, v_SKH: torch.Tensor, *, causal: bool) -> Partial:
    """A dense softmax over all scores at once.

    Args:
        q_LNH, k_SKH, v_SKH: any float dtype, one device.
        causal: query j sees the keys up to ``S - L + j``; otherwise all.

    Returns:
        (out_LNH, lse_LN), float64; 0 and -inf where there is no key.
    """
    L, N, H = q_LNH.shape
    k_SNH, v_SNH = (x.double().repeat_interleave(N // k_SKH.shape[1], dim=1) for x in (k_SKH, v_SKH))
    scores_NLS = torch.einsum("lnh,snh->nls", q_LNH.double(), k_SNH) * H**-0.5
    if causal:
        sees_LS = torch.ones(L, len(k_SKH), dtype=torch.bool, device=q_LNH.device).tril(len(k_SKH) - L)
        scores_NLS = scores_NLS.masked_fill(~sees_LS, -torch.inf)
    lse_NL = torch.logsumexp(scores_NLS, dim=-1)
    weights_NLS = torch.exp(scores_NLS - lse_NL.masked_fill(lse_NL == -torch.inf, 0.0)[..., None])
    return torch.einsum("nls,snh->lnh", weights_NLS, v_SNH), lse_NL.transpose(0, 1)


def out_limit(want: torch.Tensor, dtype: torch.dtype) -> float:
    """How far an output may be off: four units in the last place of the largest number in it, at least 2e-5."""
    return max(2e-5, 4 * torch.finfo(dtype).eps * float(want.abs().max()))


def lse_limit(want: torch.Tensor, dtype: torch.dtype, backend: str) -> float:
    """How far a log-sum-exp, float32 whatever ``dtype`` the inputs have, may be off: FlashInfer sums probabilities that
    are rounded to it."""
    least = torch.finfo(dtype).eps / 2 if backend == "flashinfer" else _LSE_LIMIT[dtype]
    return least + 1e-6 * float(want.abs().max())


def largest_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference; equal infinities differ by 0, anything else that is not finite by inf."""
    error = torch.where(got == want, 0.0, (got.double() - want.double()).abs())
    return float(error.max()) if bool(torch.isfinite(error).all()) else float("inf")


def _num_wrong_edges(backend: AttentionBackend, device: torch.device, dtype: torch.dtype) -> int:
    """How many of the rules of an empty part and of the logarithm's base do not hold."""
    qkv = random_qkv(_BLOCK, q_len=2, device=device, dtype=dtype)
    whole = shard_attention(backend, qkv, 0, _BLOCK)
    empty = shard_attention(backend, qkv, 0, 0)
    both, none = merge_partials([empty, whole]), merge_partials([empty, empty])
    ln_n = torch.full_like(whole[1], math.log(128))
    even_lse = merge_partials([shard_attention(backend, (0 * qkv[0], *qkv[1:]), 0, n) for n in (100, 28)])[1]
    rules = (
        torch.equal(both[0], whole[0]) and torch.equal(both[1], whole[1]),  # an empty part changes nothing
        bool((none[0] == 0).all()) and bool((none[1] == -torch.inf).all()),  # two of them are one
        largest_error(even_lse, ln_n)
        <= lse_limit(ln_n, dtype, backend.name),  # n scores of 0 have the log-sum-exp ln n
    )
    return sum(not holds for holds in rules)
