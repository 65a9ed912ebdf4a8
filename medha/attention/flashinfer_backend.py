"""Attention with FlashInfer's paged kernels, on CUDA.

A step is cut into launches: its decodes in one, its chunks in another, since decodes that ride in a chunk's launch lose
their split over keys. Each launch is planned once, in the first layer, and the others use its plan. FA2 splits both the
queries and the KV range over the GPU, which keeps a small chunk over a long context from running on a few
multiprocessors (the paper, arXiv 2409.17264 v5 section 3.2, rests on that); FA3 is the faster kernel for Hopper and
splits queries alone, so only chunks with enough rows to fill the GPU go there. Where FA3 begins to win is a constant
that awaits a measurement.

FlashInfer counts keys in pages; a page here is a KV block. Its log-sum-exp has base 2 and is turned into a natural
logarithm before it leaves this module. Splits depend on a batch, so its company may change the last bits of a row.

Nothing here has run on a GPU yet: the tests hold it to FlashInfer's signatures and, through a substitute in torch, to
dense attention.

Legend: T query tokens of the batch, N query heads, K KV heads, H head dimension, P tokens in the pool, B decodes.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from medha.attention.interface import LayerShape, Segment
from medha.attention.staging import Staged, Staging, record_event

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
Kernel = Literal["decode", "fa2", "fa3"]

# A chunk runs in FA3 where its blocks, one a query head and tile of so many rows, fill the GPU so many times.
_FA3_TILE_ROWS = 128
_FA3_WAVES = 2

_LN2 = math.log(2.0)
_MAX_INT32 = 2**31 - 1
_FA2_BLOCKS_PER_SM = 2
_FA2_MOST_ROWS = 128
_WORKSPACE_SPARE = 1 << 20  # alignment of what FlashInfer cuts out of it


@dataclass(frozen=True, slots=True)
class PageTable:
    """Where the keys of some segments lie, as FlashInfer wants it; int32 on the CPU.

    Attributes:
        page_size: tokens a page.
        indices: pages of all segments, one after the other.
        indptr: where each segment's pages begin and, as its last entry, where the last one's end.
        last_page_len: tokens in each segment's last page, at least 1.
    """

    page_size: int
    indices: npt.NDArray[np.int32]
    indptr: npt.NDArray[np.int32]
    last_page_len: npt.NDArray[np.int32]

    @classmethod
    def of(cls, segments: Sequence[Segment], page_size: int) -> PageTable:
        """The table of segments that have keys.

        Args:
            segments: their ranges begin with a page, and all but each one's last end with one.
            page_size: tokens a page.

        Raises:
            OverflowError: a page or their number does not fit 32 bits.
        """
        pages = [
            np.arange(first // page_size, -(-(first + count) // page_size), dtype=np.int64)
            for segment in segments
            for first, count in segment.ranges
            if count
        ]
        indices = np.concatenate(pages) if pages else np.empty(0, np.int64)
        lengths = np.array([segment.kv_len for segment in segments], np.int64)
        indptr = np.concatenate([[0], np.cumsum(-(-lengths // page_size))])
        largest = max(int(indices.max(initial=0)), int(indptr[-1]))
        if largest > _MAX_INT32:
            raise OverflowError(f"a page table of {indptr[-1]} pages up to page {indices.max(initial=0)} needs 64 bits")
        last_page_len = (lengths - 1) % page_size + 1
        return cls(page_size, indices.astype(np.int32), indptr.astype(np.int32), last_page_len.astype(np.int32))


class FlashInferPlan:
    """A step's segments and their page table; planned on the device by the first run.

    Pages are ``block_size`` tokens long; shorter where a range does not begin or end with a block.
    """

    def __init__(self, segments: Sequence[Segment], block_size: int) -> None:
        for segment in segments:
            if segment.causal and segment.kv_len < segment.q_len:
                raise ValueError(
                    f"a causal segment of {segment.q_len} queries needs as many keys, got {segment.kv_len}"
                )
        self.segments = [segment for segment in segments if segment.kv_len]
        self.empty = [slice(s.q_start, s.q_start + s.q_len) for s in segments if not s.kv_len]
        self.table = PageTable.of(self.segments, _page_size(self.segments, block_size))
        has_gaps = any(a.q_start + a.q_len != b.q_start for a, b in pairwise(self.segments))
        tokens = [np.arange(s.q_start, s.q_start + s.q_len, dtype=np.int64) for s in self.segments]
        self._tokens = np.concatenate(tokens) if has_gaps else None
        self.starts = np.concatenate([[0], np.cumsum([segment.q_len for segment in self.segments])]).astype(np.int32)
        self._staged_indices: Staged | None = None
        self._staged_tokens: Staged | None = None
        self.launches: list[_Launch] | None = None
        self.shape: LayerShape | None = None

    def stage(self, staging: Staging) -> None:
        """Hand the page table in, to travel with the step's other integers."""
        self._staged_indices = staging.add(self.table.indices)
        self._staged_tokens = None if self._tokens is None else staging.add(self._tokens)

    def fit(self, num_pool_tokens: int, device: torch.device) -> None:
        """Cut the pages down until a pool is a whole number of them (of blocks it is); copy them, if nobody has."""
        if num_pool_tokens % self.table.page_size:
            self.table = PageTable.of(self.segments, math.gcd(self.table.page_size, num_pool_tokens))
            self._staged_indices = None
        if self._staged_indices is None:
            staging = Staging(device)
            self.stage(staging)
            staging.send()

    def indices_of(self, first: int, last: int) -> torch.Tensor:
        """Pages of the segments [first, last), int32 on the device."""
        assert self._staged_indices is not None, "the page table has been sent"
        return self._staged_indices.tensor[self.table.indptr[first] : self.table.indptr[last]]

    def rows_of(self, first: int, last: int) -> slice | torch.Tensor:
        """Batch tokens of the segments [first, last): a slice if they are adjacent, else int64 on the device."""
        segments = self.segments[first:last]
        if all(a.q_start + a.q_len == b.q_start for a, b in pairwise(segments)):
            return slice(segments[0].q_start, segments[-1].q_start + segments[-1].q_len)
        assert self._staged_tokens is not None, "rows with gaps have been sent"
        return self._staged_tokens.tensor[self.starts[first] : self.starts[last]]


@dataclass(frozen=True, slots=True)
class _Launch:
    """A planned wrapper and the batch tokens that it attends for."""

    wrapper: Any
    rows: slice | torch.Tensor

    def run(
        self,
        q_TNH: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        out_TNH: torch.Tensor,
        lse_TN: torch.Tensor,
    ) -> None:
        """Attend; the log-sum-exp has base 2."""
        if isinstance(self.rows, slice):
            self.wrapper.run(q_TNH[self.rows], kv, out=out_TNH[self.rows], lse=lse_TN[self.rows], return_lse=True)
            return
        out, lse = self.wrapper.run(q_TNH[self.rows], kv, return_lse=True)
        out_TNH[self.rows], lse_TN[self.rows] = out, lse


class _Wrapper:
    """One of FlashInfer's wrappers, at the service of one plan as long as that plan lives."""

    def __init__(self, kernel: Kernel, wrapper: Any) -> None:
        self.kernel = kernel
        self.wrapper = wrapper
        self._owner: weakref.ref[FlashInferPlan] | None = None
        self._copied: torch.cuda.Event | None = None

    @property
    def is_free(self) -> bool:
        """Whether nobody runs it any more."""
        return self._owner is None or self._owner() is None

    def plan(self, owner: FlashInferPlan, device: torch.device, *args: Any, **options: Any) -> None:
        """Plan it; waits until its last plan, which it copies from a pinned buffer of its own, has been copied."""
        self._owner = weakref.ref(owner)
        if self._copied is not None:
            self._copied.synchronize()
        self.wrapper.plan(*args, **options)
        self._copied = record_event(device)


class FlashInferBackend:
    """Partial attention through FlashInfer.

    Args:
        api: the module ``flashinfer``.
        block_size: tokens of a KV block, which is a page.
        num_sms: multiprocessors of the GPU.
        has_fa3: whether it runs FA3, as Hopper does.
    """

    name = "flashinfer"

    def __init__(self, api: Any, *, block_size: int, num_sms: int, has_fa3: bool) -> None:
        self.api = api
        self.block_size = block_size
        self.num_sms = num_sms
        self.has_fa3 = has_fa3
        self._wrappers: list[_Wrapper] = []
        self._workspace: torch.Tensor | None = None

    def plan(self, segments: Sequence[Segment], staging: Staging | None = None) -> FlashInferPlan:
        """Make the page table of a step; see :meth:`medha.attention.interface.AttentionBackend.plan`.

        Raises:
            ValueError: a causal segment has more queries than keys.
        """
        plan = FlashInferPlan(segments, self.block_size)
        if staging is not None:
            plan.stage(staging)
        return plan

    def run(
        self, q_TNH: torch.Tensor, k_PKH: torch.Tensor, v_PKH: torch.Tensor, plan: FlashInferPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`medha.attention.interface.AttentionBackend.run`."""
        q_TNH = q_TNH.contiguous()
        shape = LayerShape.of(q_TNH, k_PKH)
        if plan.launches is None or plan.shape != shape:
            plan.fit(len(k_PKH), q_TNH.device)
            plan.launches = self._launches(plan, shape, q_TNH.device)
            plan.shape = shape
        out_TNH = torch.empty_like(q_TNH)
        lse_TN = q_TNH.new_empty(q_TNH.shape[:2], dtype=torch.float32)
        kv = paged(k_PKH, plan.table.page_size), paged(v_PKH, plan.table.page_size)
        for launch in plan.launches:
            launch.run(q_TNH, kv, out_TNH, lse_TN)
        lse_TN.mul_(_LN2)  # every row of a launch sees a key, so FlashInfer's marks of empty rows do not occur
        for rows in plan.empty:
            out_TNH[rows] = 0.0
            lse_TN[rows] = -torch.inf
        return out_TNH, lse_TN

    def workspace(self, shape: LayerShape, device: torch.device, *, num_decodes: int = 0) -> torch.Tensor:
        """Zeroed memory for partial results of split KV, shared by every launch of one stream.

        Args:
            shape: of a layer.
            device: where.
            num_decodes: rows of the largest decode in a CUDA graph, which reserves a tile for each.
        """
        size = workspace_bytes(shape, num_sms=self.num_sms, num_decodes=num_decodes)
        if self._workspace is None or self._workspace.nbytes < size or self._workspace.device != device:
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=device)
            self._wrappers.clear()  # they keep the memory that they were made with
        return self._workspace

    def kernel_of(self, segment: Segment, num_heads: int) -> Kernel:
        """What a chunk runs in."""
        num_blocks = num_heads * -(-segment.q_len // _FA3_TILE_ROWS)
        return "fa3" if self.has_fa3 and num_blocks >= _FA3_WAVES * self.num_sms else "fa2"

    def _launches(self, plan: FlashInferPlan, shape: LayerShape, device: torch.device) -> list[_Launch]:
        """Plan a wrapper for each run of neighbouring segments that one launch can take."""
        bounds = [0]
        kinds: list[tuple[Kernel, bool]] = []
        for index, segment in enumerate(plan.segments):
            kind: tuple[Kernel, bool] = self.kernel_of(segment, shape.num_heads), segment.causal
            if segment.q_len == 1 and (not kinds or kinds[-1][0] == "decode"):
                kind = "decode", False
            if not kinds or kinds[-1] != kind:
                kinds.append(kind)
                bounds.append(index)
            bounds[-1] = index + 1
        ranges = zip(kinds, pairwise(bounds), strict=True)
        return [self._launch(plan, shape, device, kind, first, last) for kind, (first, last) in ranges]

    def _launch(
        self,
        plan: FlashInferPlan,
        shape: LayerShape,
        device: torch.device,
        kind: tuple[Kernel, bool],
        first: int,
        last: int,
    ) -> _Launch:
        """A wrapper planned for the segments [first, last)."""
        kernel, causal = kind
        leased = self._lease(kernel, shape, device)
        indptr = _part(plan.table.indptr, first, last)
        last_page_len = torch.from_numpy(plan.table.last_page_len[first:last])
        pages = indptr, plan.indices_of(first, last), last_page_len
        sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim, plan.table.page_size
        dtypes = {"q_data_type": shape.dtype, "kv_data_type": shape.dtype, "sm_scale": shape.head_dim**-0.5}
        if kernel == "decode":
            leased.plan(plan, device, *pages, *sizes, **dtypes)
        else:
            leased.plan(plan, device, _part(plan.starts, first, last), *pages, *sizes, causal=causal, **dtypes)
        return _Launch(leased.wrapper, plan.rows_of(first, last))

    def _lease(self, kernel: Kernel, shape: LayerShape, device: torch.device) -> _Wrapper:
        """A wrapper that no living plan uses: the one that has been free for longest, or a new one."""
        workspace = self.workspace(shape, device)
        free = [wrapper for wrapper in self._wrappers if wrapper.kernel == kernel and wrapper.is_free]
        if free:
            self._wrappers.remove(free[0])
            self._wrappers.append(free[0])
            return free[0]
        if kernel == "decode":
            made = self.api.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend="fa2")
        else:
            made = self.api.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernel)
        self._wrappers.append(_Wrapper(kernel, made))
        return self._wrappers[-1]

    def fixed_decodes(
        self, shape: LayerShape, batch_size: int, indices: torch.Tensor, *, most_decodes: int
    ) -> FixedDecodes:
        """Decodes of one batch size in buffers that stay where they are, for a CUDA graph.

        Args:
            shape: of a layer.
            batch_size: rows.
            indices: int32 on the device, where the page table will lie.
            most_decodes: the largest batch size that this is called with; first, so that they share one workspace.
        """
        workspace = self.workspace(shape, indices.device, num_decodes=most_decodes)
        return FixedDecodes(self.api, workspace, shape, batch_size, indices, page_size=self.block_size)


class FixedDecodes:
    """Attention of so many decodes that a CUDA graph can hold; planned anew before each replay, outside of it."""

    def __init__(
        self,
        api: Any,
        workspace: torch.Tensor,
        shape: LayerShape,
        batch_size: int,
        indices: torch.Tensor,
        *,
        page_size: int,
    ) -> None:
        self._shape = shape
        self._batch_size = batch_size
        self._indices = indices
        self._page_size = page_size
        self._table: PageTable | None = None
        self._copied: torch.cuda.Event | None = None
        self._wrapper = api.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            backend="fa2",
            paged_kv_indptr_buffer=torch.zeros(batch_size + 1, dtype=torch.int32, device=indices.device),
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=torch.ones(batch_size, dtype=torch.int32, device=indices.device),
        )

    def pages(self, segments: Sequence[Segment]) -> npt.NDArray[np.int32]:
        """The page table of a step, to be copied into the buffer before :meth:`plan`; one segment a row, with keys."""
        assert len(segments) == self._batch_size, f"{len(segments)} decodes in a graph of {self._batch_size}"
        self._table = PageTable.of(segments, self._page_size)
        return self._table.indices

    def plan(self) -> None:
        """Spread the step over the GPU; a replay with an old plan would be silently wrong."""
        table, shape = self._table, self._shape
        assert table is not None, "the pages of the step are known"
        if self._copied is not None:
            self._copied.synchronize()
        self._wrapper.plan(
            torch.from_numpy(table.indptr), self._indices[: len(table.indices)], torch.from_numpy(table.last_page_len),
            shape.num_heads, shape.num_kv_heads, shape.head_dim, table.page_size,
            q_data_type=shape.dtype, kv_data_type=shape.dtype, sm_scale=shape.head_dim**-0.5,
        )  # fmt: skip
        self._copied = record_event(self._indices.device)

    def run(self, q_BNH: torch.Tensor, k_PKH: torch.Tensor, v_PKH: torch.Tensor) -> torch.Tensor:
        """Attention of every row, out_BNH; can be captured."""
        q_BNH = q_BNH.contiguous()
        out_BNH = torch.empty_like(q_BNH)
        self._wrapper.run(q_BNH, (paged(k_PKH, self._page_size), paged(v_PKH, self._page_size)), out=out_BNH)
        return out_BNH


def workspace_bytes(shape: LayerShape, *, num_sms: int, num_decodes: int = 0) -> int:
    """Bytes that FA2 needs for partial outputs and log-sum-exps, float32, when KV is split.

    Read off FlashInfer's ``PrefillSplitQOKVIndptr``: at most two tiles a multiprocessor, shared by the KV heads; in a
    CUDA graph at least one for every tile of queries.

    Args:
        shape: of a layer.
        num_sms: multiprocessors.
        num_decodes: most rows of a decode in a CUDA graph; 0 for none.
    """
    row_bytes = 4 * (shape.head_dim + 1)
    tiles = max(_FA2_BLOCKS_PER_SM * num_sms // shape.num_kv_heads, 1)
    eager = tiles * _FA2_MOST_ROWS
    group = shape.num_heads // shape.num_kv_heads
    tile_rows = _FA2_MOST_ROWS
    if group <= 64:  # with wide heads the smallest tile may not be had
        tile_rows = 16 if group <= 16 and shape.head_dim < 256 else 64
    graph = max(tiles, -(-num_decodes * group // tile_rows) + num_decodes) * tile_rows
    return int(shape.num_heads * max(eager, graph) * row_bytes) + _WORKSPACE_SPARE


def paged(pool_PKH: torch.Tensor, page_size: int) -> torch.Tensor:
    """A pool as pages [P / page_size, page_size, K, H], a view."""
    return pool_PKH.view(-1, page_size, *pool_PKH.shape[1:])


def _page_size(segments: Sequence[Segment], block_size: int) -> int:
    """The longest page that all ranges begin with, and all but a segment's last end with."""
    page_size = block_size
    for segment in segments:
        ranges = [(first, count) for first, count in segment.ranges if count]
        page_size = math.gcd(page_size, *(first for first, _ in ranges), *(count for _, count in ranges[:-1]))
    return page_size


def _part(indptr: npt.NDArray[np.int32], first: int, last: int) -> torch.Tensor:
    """The entries of an index pointer for [first, last), from 0."""
    return torch.from_numpy(indptr[first : last + 1] - indptr[first])
