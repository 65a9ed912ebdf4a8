"""Attention with FlashInfer's paged kernels, on CUDA.

A step is cut into launches: its decodes in one, its chunks in another, since decodes that ride in a chunk's launch lose
their split over keys. Each launch is planned once, in the first layer, and the others use its plan. FA2 splits both the
queries and the KV range over the GPU, which keeps a small chunk over a long context from running on a few
multiprocessors (the paper, arXiv 2409.17264 v5 section 3.2, rests on that); how far is decided in :mod:`.kv_split`.
FA3 is the faster kernel for Hopper and splits queries alone, so only chunks with enough rows to fill the GPU go there.

FlashInfer counts keys in pages; a page here is a KV block. Its log-sum-exp has base 2 and is turned into a natural
logarithm before it leaves this module. Splits depend on a batch, so its company may change the last bits of a row.

FlashInfer sums the probabilities of a row as it has rounded them for the product with the values: a log-sum-exp is off
by up to half a unit in the last place of the dtype, as a natural logarithm, and so are the weights of merged parts.

Legend: T query tokens of the batch, N query heads, K KV heads, H head dimension, P tokens in the pool, B decodes.
"""

from __future__ import annotations

import importlib.util
import math
import weakref
from collections.abc import Callable
from itertools import count, groupby
from typing import Any, Literal

import numpy as np
import torch

from medha.attention.interface import AttentionBackend, AttentionRows, Ints, LayerShape
from medha.attention.kv_split import MOST_TILE_ROWS, KVSplit
from medha.attention.merge import Partial
from medha.attention.staging import record_event, to_device

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
Kernel = Literal["decode", "fa2", "fa3"]

# A multiprocessor runs one block of FA3, of a query head and a tile of so many rows, at a time, and so many times as
# fast as it does the same work in FA2: 525 and 345 TFLOP/s of an H200 behind 512K tokens (32 heads of 128, bfloat16).
_FA3_TILE_ROWS = 128
_FA3_SPEED = 1.5

_HOPPER = 9
_LEAST_CAPABILITY = (8, 0)
_LN2 = math.log(2.0)
_MAX_INT32 = 2**31 - 1
_PLAN_BYTES = 8 << 20  # on the device, of each of FlashInfer's wrappers
_MOST_LAUNCHES = 12  # that have a plan at a time, but for odd mixes
_WORKSPACE_SPARE = 1 << 20  # alignment of what FlashInfer cuts out of it


class FlashInferPlan:
    """A step's rows, planned on the device by the first run."""

    def __init__(self, rows: AttentionRows) -> None:
        if rows.page_indptr[-1] > _MAX_INT32:
            raise OverflowError(f"a page table of {rows.page_indptr[-1]} pages needs 64 bits")
        self.rows = rows
        # each a planned wrapper, None for rows without keys, and the queries that it attends for
        self.launches: list[tuple[Any, slice]] | None = None


class _Wrapper:
    """One of FlashInfer's wrappers, at the service of one plan as long as that plan lives."""

    def __init__(self, kernel: Kernel, wrapper: Any) -> None:
        self.kernel = kernel
        self.wrapper = wrapper
        self.owner: Callable[[], object] = lambda: None  # who runs it, if anybody still does
        self._copied: torch.cuda.Event | None = None

    def plan(self, owner: object, device: torch.device, *args: Any, **options: Any) -> None:
        """Plan it; waits until its last plan, which it copies from a pinned buffer of its own, has been copied."""
        self.owner = weakref.ref(owner)
        if self._copied is not None:
            self._copied.synchronize()
        self.wrapper.plan(*args, **options)
        self._copied = record_event(device)


class FlashInferBackend(AttentionBackend):
    """Partial attention through FlashInfer."""

    name = "flashinfer"
    device_type = "cuda"

    def __init__(self, api: Any, *, block_size: int, num_sms: int, has_fa3: bool) -> None:
        self.api = api  # the module flashinfer
        self.block_size = block_size  # tokens of a KV block, which is a page
        self.num_sms = num_sms  # multiprocessors of the GPU
        self.no_fa3 = None if has_fa3 else "no Hopper GPU"  # why FA3 is not used
        self._wrappers: list[_Wrapper] = []
        self._workspace: torch.Tensor | None = None

    @classmethod
    def build(cls, device: torch.device, block_size: int) -> FlashInferBackend:
        """See :meth:`medha.attention.interface.AttentionBackend.build`."""
        import flashinfer  # here because it is optional, and makes a cache folder when it is imported

        gpu = torch.cuda.get_device_properties(device)
        return cls(flashinfer, block_size=block_size, num_sms=gpu.multi_processor_count, has_fa3=gpu.major == _HOPPER)

    @classmethod
    def needs(cls, device: torch.device) -> str | None:
        """See :meth:`medha.attention.interface.AttentionBackend.needs`."""
        if device.type != "cuda":
            return f"a CUDA device, not {device}"
        if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
            return "a GPU of compute capability 8.0 or later"
        is_installed = importlib.util.find_spec("flashinfer") is not None
        return None if is_installed else "the package flashinfer-python (pip install 'medha[cuda]')"

    @classmethod
    def lacks(cls, shape: LayerShape) -> str | None:
        """See :meth:`medha.attention.interface.AttentionBackend.lacks`."""
        if shape.head_dim not in HEAD_DIMS:
            return f"heads of {shape.head_dim} (it has {', '.join(map(str, HEAD_DIMS))})"
        wanted, *has = (str(dtype).removeprefix("torch.") for dtype in (shape.dtype, *DTYPES))
        return None if wanted in has else f"{wanted} (it has {', '.join(has)})"

    def build_kernels(self, shape: LayerShape, device: torch.device) -> str | None:
        """See :meth:`medha.attention.interface.AttentionBackend.build_kernels`; FA3 is done without where it fails."""
        no_fa3, self.no_fa3 = self.no_fa3, "not tried yet"
        failed = self._try_out(shape, device, q_len=2)
        if failed is None and no_fa3 is None:
            self.no_fa3 = None
            no_fa3 = self._try_out(shape, device, q_len=self._fa3_tokens(shape))
        self.no_fa3 = no_fa3
        return failed

    def _try_out(self, shape: LayerShape, device: torch.device, *, q_len: int) -> str | None:
        """Attend for a decode and a chunk of so many tokens; returns what went wrong."""
        pages, lens = np.arange(-(-q_len // self.block_size), dtype=np.int32), np.array([1, q_len])
        rows = AttentionRows.of(lens, lens, np.array([True, True]), [pages, pages], self.block_size)

        def attend() -> None:
            q_TNH = torch.zeros(1 + q_len, shape.num_heads, shape.head_dim, dtype=shape.dtype, device=device)
            pool_PKH = q_TNH.new_zeros(len(pages) * self.block_size, shape.num_kv_heads, shape.head_dim)
            self.run(q_TNH, pool_PKH, pool_PKH.clone(), self.plan(rows))

        return wrong_with(attend, device)

    def describe(self, shape: LayerShape) -> str:
        """See :meth:`medha.attention.interface.AttentionBackend.describe`."""
        split = KVSplit(shape, self.num_sms, self.block_size)
        fa2 = f"FA2 with a long context in some {split.slots} parts a KV head, for {self.num_sms} multiprocessors"
        no_fa3, least = self.no_fa3, self._fa3_tokens(shape)
        return f"{fa2}; no FA3: {no_fa3}" if no_fa3 else f"{fa2}; FA3 for chunks of {least:,} tokens on"

    def _fa3_tokens(self, shape: LayerShape) -> int:
        """Tokens of the shortest chunks that run in FA3."""
        num_tiles = next(n for n in count(1) if self._suits_fa3(n * shape.num_heads, 1, n * shape.num_heads))
        return max(_FA3_TILE_ROWS * (num_tiles - 1) + 1, 2)

    def _suits_fa3(self, num_blocks: int, longest: int, total: float) -> bool:
        """Whether so many blocks, by the keys of the longest and of all, take no longer than in FA2."""
        share, waves = total / self.num_sms, -(-num_blocks // self.num_sms)
        return min(waves * longest, share + longest) <= _FA3_SPEED * share

    def plan(self, rows: AttentionRows) -> FlashInferPlan:
        """See :meth:`medha.attention.interface.AttentionBackend.plan`."""
        return FlashInferPlan(rows)

    def run(self, q_TNH: torch.Tensor, k_PKH: torch.Tensor, v_PKH: torch.Tensor, plan: FlashInferPlan) -> Partial:
        """See :meth:`medha.attention.interface.AttentionBackend.run`."""
        lse_TN = q_TNH.new_empty(q_TNH.shape[:2], dtype=torch.float32)
        out_TNH = self.attend(q_TNH, k_PKH, v_PKH, plan, lse_TN)
        lse_TN.mul_(_LN2)  # every row of a launch sees a key, so FlashInfer's marks of empty rows do not occur
        return out_TNH, lse_TN

    def attend(
        self,
        q_TNH: torch.Tensor,
        k_PKH: torch.Tensor,
        v_PKH: torch.Tensor,
        plan: FlashInferPlan,
        lse_TN: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :meth:`medha.attention.interface.AttentionBackend.attend`; the kernels write the log-sum-exp, to base 2,
        only where ``lse_TN`` is given."""
        if plan.launches is None:
            shape = LayerShape(q_TNH.shape[1], k_PKH.shape[1], q_TNH.shape[2], q_TNH.dtype)
            plan.launches = self._launches(plan, shape, q_TNH.device)
        out_TNH = q_TNH.new_empty(q_TNH.shape)
        kv = paged(k_PKH, plan.rows.page_size), paged(v_PKH, plan.rows.page_size)
        for wrapper, at in plan.launches:
            lse = None if lse_TN is None else lse_TN[at]
            if wrapper is not None:
                wrapper.run(q_TNH[at], kv, out=out_TNH[at], lse=lse, return_lse=lse is not None)
                continue
            out_TNH[at] = 0.0
            if lse is not None:
                lse.fill_(-torch.inf)
        return out_TNH

    def workspace(self, shape: LayerShape, device: torch.device, *, num_decodes: int = 0) -> torch.Tensor:
        """Zeroed memory for partial results of split KV, shared by every launch of one stream.

        A CUDA graph reserves a tile for each row of its largest decode, ``num_decodes``.
        """
        size = workspace_bytes(shape, num_sms=self.num_sms, num_decodes=num_decodes)
        if self._workspace is None or self._workspace.nbytes < size or self._workspace.device != device:
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=device)
            self._wrappers.clear()  # they keep the memory that they were made with
        return self._workspace

    def wrapper_bytes(self, num_graphs: int) -> int:
        """Bytes that the plans of so many graphs, and of a step's launches, will take beside those there are."""
        return (num_graphs + max(_MOST_LAUNCHES - len(self._wrappers), 0)) * _PLAN_BYTES

    def kernels_of(self, rows: AttentionRows, num_heads: int) -> list[Kernel | None]:
        """What each row runs in; None where it sees no keys.

        Chunks run in FA3 where that takes no longer than FA2, which spreads all work over the GPU; those of the longest
        contexts, whose few blocks would end last, do not.
        """
        kinds = np.select([rows.kv_len == 0, rows.q_len == 1], [0, 1], 2)
        if self.no_fa3 is None:
            num_blocks = num_heads * -(-rows.q_len // _FA3_TILE_ROWS)
            left = np.flatnonzero(kinds == 2)
            left = left[np.argsort(-rows.kv_len[left], kind="stable")]
            while len(left):
                total = float(num_blocks[left] @ rows.kv_len[left])
                if self._suits_fa3(int(num_blocks[left].sum()), int(rows.kv_len[left[0]]), total):
                    kinds[left] = 3
                    break
                left = left[1:]
        kernels: tuple[Kernel | None, ...] = None, "decode", "fa2", "fa3"
        return [kernels[kind] for kind in kinds.tolist()]

    def _launches(self, plan: FlashInferPlan, shape: LayerShape, device: torch.device) -> list[tuple[Any, slice]]:
        """Plan a wrapper for each run of neighbouring rows that one launch can take."""
        rows, launches, last = plan.rows, [], 0
        if rows.device_pages is None:
            (rows.device_pages,) = to_device([rows.pages], device)
        sizes, dtypes = _sizes(shape, rows.page_size)
        kinds = zip(self.kernels_of(rows, shape.num_heads), (rows.causal & (rows.q_len > 1)).tolist(), strict=True)
        split, num_pages = KVSplit(shape, self.num_sms, rows.page_size), np.diff(rows.page_indptr)
        for (kernel, causal), its_rows in groupby(kinds):
            first, last = last, last + len(list(its_rows))
            at = slice(first, last)
            if kernel is None or kernel == "fa3":
                pieces: list[tuple[int, int, dict[str, int]]] = [(first, last, {})]
            else:
                found = split.pieces(rows.q_len[at], num_pages[at])
                pieces = [(first + p.first, first + p.last, {"fixed_split_size": p.part_pages}) for p in found]
            for start, end, how in pieces:
                wrapper = None
                if kernel is not None:
                    leased = self._lease(kernel, shape, device)
                    tables, wrapper = _tables(rows, rows.device_pages, start, end), leased.wrapper
                    if kernel != "decode":
                        tables.insert(0, _part(rows.q_indptr, start, end))
                        how["causal"] = causal
                    leased.plan(plan, device, *tables, *sizes, **dtypes, **how)
                launches.append((wrapper, slice(int(rows.q_indptr[start]), int(rows.q_indptr[end]))))
        return launches

    def _lease(self, kernel: Kernel, shape: LayerShape, device: torch.device) -> _Wrapper:
        """A wrapper that no living plan uses: the one that has been free for longest, or a new one."""
        workspace = self.workspace(shape, device)
        free = [wrapper for wrapper in self._wrappers if wrapper.kernel == kernel and wrapper.owner() is None]
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


class FixedDecodes:
    """Attention of so many decodes that a CUDA graph can hold; planned anew before each replay, outside of it.

    The largest is made first, whose workspace the others share.

    Args:
        indices: int32 on the device, where the page table will lie.
    """

    def __init__(self, backend: FlashInferBackend, shape: LayerShape, size: int, indices: torch.Tensor) -> None:
        self._size, self._indices = size, indices
        self._split = KVSplit(shape, backend.num_sms, backend.block_size)
        workspace = backend.workspace(shape, indices.device, num_decodes=size)
        made = backend.api.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            backend="fa2",
            paged_kv_indptr_buffer=torch.zeros(size + 1, dtype=torch.int32, device=indices.device),
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=torch.ones(size, dtype=torch.int32, device=indices.device),
        )
        self._wrapper = _Wrapper("decode", made)

    def plan(self, rows: AttentionRows) -> None:
        """Spread a step over the GPU; a replay with an old plan would be silently wrong.

        The rows have one query each and keys, and are as many as the graph has; their pages lie in the buffer.
        """
        assert len(rows) == self._size, f"{len(rows)} decodes in a graph of {self._size}"
        tables, (sizes, dtypes) = _tables(rows, self._indices, 0, len(rows)), _sizes(self._split.shape, rows.page_size)
        pages = np.diff(rows.page_indptr)
        part = self._split.graph_part_pages(pages, self._size)
        # Where no row is cut, a plan of ours would not be one with parts, which is what was captured.
        how = {"fixed_split_size": part} if part < pages.max() else {}
        self._wrapper.plan(self, self._indices.device, *tables, *sizes, **dtypes, **how)

    def starves(self, rows: AttentionRows) -> bool:
        """Whether decodes, at most as many as the graph has, should run without it: it cuts the longest of them into
        less than half of the parts."""
        return self._split.starves_in_graph(np.diff(rows.page_indptr), self._size)

    def run(self, q_BNH: torch.Tensor, k_PKH: torch.Tensor, v_PKH: torch.Tensor) -> torch.Tensor:
        """Attention of every row, out_BNH; can be captured."""
        out_BNH = q_BNH.new_empty(q_BNH.shape)
        kv = paged(k_PKH, self._split.page_size), paged(v_PKH, self._split.page_size)
        self._wrapper.wrapper.run(q_BNH, kv, out=out_BNH)
        return out_BNH


def wrong_with(run: Callable[[], object], device: torch.device) -> str | None:
    """Run kernels, which may have to be compiled; returns what went wrong, in one line."""
    try:
        run()
        torch.cuda.synchronize(device)
    except Exception as error:  # a compiler may be missing, or fail, in many ways
        return (str(error).splitlines() or [repr(error)])[0]
    return None


def workspace_bytes(shape: LayerShape, *, num_sms: int, num_decodes: int = 0) -> int:
    """Bytes that FA2 needs for partial outputs and log-sum-exps, float32, when KV is split.

    Read off FlashInfer's ``PrefillSplitQOKVIndptr``: a tile an item, of which :mod:`.kv_split` makes so many; in a CUDA
    graph, of at most ``num_decodes``, as many as the GPU holds, and at least one for every tile of queries.
    """
    row_bytes = 4 * (shape.head_dim + 1)
    split = KVSplit(shape, num_sms, 1)
    # with wide heads the smallest tile may not be had
    tile_rows = split.tile_rows(split.group) if split.group <= 64 else MOST_TILE_ROWS
    graph = max(split.slots, -(-num_decodes * split.group // tile_rows) + num_decodes) * tile_rows
    return int(shape.num_heads * max(split.most_rows, graph) * row_bytes) + _WORKSPACE_SPARE


def paged(pool_PKH: torch.Tensor, page_size: int) -> torch.Tensor:
    """A pool as pages [P / page_size, page_size, K, H], a view."""
    return pool_PKH.view(-1, page_size, *pool_PKH.shape[1:])


def _sizes(shape: LayerShape, page_size: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Arguments of every plan."""
    dtypes = {"q_data_type": shape.dtype, "kv_data_type": shape.dtype, "sm_scale": shape.head_dim**-0.5}
    return (shape.num_heads, shape.num_kv_heads, shape.head_dim, page_size), dtypes


def _part(indptr: Ints, first: int, last: int) -> torch.Tensor:
    """The entries of an index pointer for [first, last), from 0, int32."""
    return torch.from_numpy((indptr[first : last + 1] - indptr[first]).astype(np.int32))


def _tables(rows: AttentionRows, pages: torch.Tensor, first: int, last: int) -> list[torch.Tensor]:
    """Of the rows [first, last), which have keys: index pointer, ``pages``, and tokens in their last pages, int32."""
    last_page_len = torch.from_numpy(((rows.kv_len[first:last] - 1) % rows.page_size + 1).astype(np.int32))
    of_them = pages[int(rows.page_indptr[first]) : int(rows.page_indptr[last])]
    return [_part(rows.page_indptr, first, last), of_them, last_page_len]
