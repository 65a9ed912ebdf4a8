"""FlashInfer's two paged wrappers in plain torch, so that what rests on them runs without a GPU.

The names, the order of parameters and what is demanded of them are those of FlashInfer 0.6.18; a test compares the
signatures where the package is installed. Where the kernels would go wrong in silence, these raise.
"""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch


class _Paged:
    """What the wrappers share: page tables, and attention over them."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str, backend: str) -> None:
        assert kv_layout == "NHD"
        assert workspace.dtype == torch.uint8 and workspace.is_contiguous()
        assert not workspace[:: max(1, len(workspace) // 64)].any(), "zeroed once"
        self.backend = backend
        self.num_plans = 0
        self.num_runs = 0

    def _plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        sizes: tuple[int, int, int, int],
        dtypes: tuple[Any, Any],
        sm_scale: float | None,
    ) -> None:
        for tensor in (indptr, indices, last_page_len):
            assert tensor.dtype == torch.int32 and tensor.ndim == 1
        assert indptr.device.type == last_page_len.device.type == "cpu", "read on the host"
        assert indptr[0] == 0 and len(indices) == indptr[-1] and len(indptr) == len(last_page_len) + 1
        self.num_qo_heads, self.num_kv_heads, self.head_dim, self.page_size = sizes
        assert bool((last_page_len >= 1).all()) and bool((last_page_len <= self.page_size).all())
        self.q_dtype, self.kv_dtype = dtypes
        self.sm_scale = 1 / math.sqrt(self.head_dim) if sm_scale is None else sm_scale
        self.num_plans += 1

    def _keys(self, i: int) -> tuple[torch.Tensor, int]:
        """Pages of request i, and its length."""
        first, last = int(self.indptr[i]), int(self.indptr[i + 1])
        return self.indices[first:last].long(), (last - first - 1) * self.page_size + int(self.last_page_len[i])

    def _attend(
        self,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.num_plans, "planned before it runs"
        assert q.is_contiguous() and q.dtype == self.q_dtype and kv[0].dtype == kv[1].dtype == self.kv_dtype
        assert q.shape == (self.qo_indptr[-1], self.num_qo_heads, self.head_dim)
        out = torch.zeros_like(q) if out is None else out
        lse = torch.empty(q.shape[:2]) if lse is None else lse
        assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
        assert lse.shape == q.shape[:2] and lse.dtype == torch.float32
        for pool in kv:
            assert pool.shape[1:] == (self.page_size, self.num_kv_heads, self.head_dim) and pool.stride(-1) == 1
        for i, (first, last) in enumerate(pairwise(self.qo_indptr)):
            pages, length = self._keys(i)
            k, v = (pool[pages].flatten(0, 1)[:length] for pool in kv)
            out[first:last], lse[first:last] = self._one(q[first:last], k, v)
        self.num_runs += 1
        return out, lse

    def _one(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention with the mask aligned to the right, and its log-sum-exp to base 2."""
        group = self.num_qo_heads // self.num_kv_heads
        exact = torch.float64 if q.dtype == torch.float32 else torch.float32
        q, k, v = q.to(exact), k.to(exact).repeat_interleave(group, 1), v.to(exact).repeat_interleave(group, 1)
        scores = torch.einsum("lnh,snh->nls", q, k) * self.sm_scale
        if self.causal:
            assert len(k) >= len(q)
            scores.masked_fill_(~torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q)), -torch.inf)
        lse = torch.logsumexp(scores, -1)
        out = torch.einsum("nls,snh->lnh", torch.softmax(scores, -1), v)
        return out, lse.transpose(0, 1) / math.log(2.0)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        both = self._attend(q, paged_kv_cache, out, lse)
        return both if return_lse else both[0]


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str = "auto") -> None:
        assert backend in ("fa2", "fa3")
        super().__init__(float_workspace_buffer, kv_layout, backend)

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        sizes = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        pages = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self._plan(*pages, sizes, (q_data_type, kv_data_type or q_data_type), sm_scale)
        assert qo_indptr.dtype == torch.int32 and qo_indptr.device.type == "cpu" and qo_indptr[0] == 0
        assert len(qo_indptr) == len(paged_kv_indptr)
        self.qo_indptr, self.causal = qo_indptr.tolist(), causal
        self.indptr, self.indices, self.last_page_len = pages


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert backend == "fa2" and use_tensor_cores
        super().__init__(float_workspace_buffer, kv_layout, backend)
        self.buffers = None
        if use_cuda_graph:
            self.buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
            assert all(buffer is not None and buffer.dtype == torch.int32 for buffer in self.buffers)

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        sm_scale: float | None = None,
    ) -> None:
        sizes = num_qo_heads, num_kv_heads, head_dim, page_size
        pages = indptr, indices, last_page_len
        self._plan(*pages, sizes, (q_data_type, kv_data_type or q_data_type), sm_scale)
        self.qo_indptr, self.causal = list(range(len(last_page_len) + 1)), False
        if self.buffers is None:
            self.indptr, self.indices, self.last_page_len = pages
            return
        assert len(last_page_len) == len(self.buffers[2]), "the batch size of a graph is fixed"
        for buffer, new in zip(self.buffers, pages, strict=True):
            assert len(new) <= len(buffer)
            buffer[: len(new)].copy_(new)
        self.indptr, self.indices, self.last_page_len = self.buffers


def make_api() -> SimpleNamespace:
    """A module ``flashinfer`` that counts its wrappers: ``api.made`` lists them."""
    made: list[_Paged] = []

    def recorded(cls: type[_Paged]) -> Any:
        def make(*args: Any, **kwargs: Any) -> _Paged:
            made.append(cls(*args, **kwargs))
            return made[-1]

        return make

    return SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=recorded(BatchPrefillWithPagedKVCacheWrapper),
        BatchDecodeWithPagedKVCacheWrapper=recorded(BatchDecodeWithPagedKVCacheWrapper),
        made=made,
    )
