"""What stands in for FlashInfer's compiled kernels below its own Python wrappers, on the emulated device or the host.

The planner follows ``PrefillPlan`` of FlashInfer's scheduler.cuh: queries in tiles, keys in chunks so that the parts
fill the GPU. It writes the work items to the wrapper's pinned buffer, from where they are copied in stream order, and
the kernel does what it finds on the device when it runs. Faults of their kind ``plan``: a graph is replayed without a
new plan, or with one whose layout is not the captured kernel's.

On tensors of the host everything runs at once, and dtypes and head dimensions may be any.
"""

import importlib.util
import math
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from tests.cuda import tensors
from tests.cuda.device import Device, DeviceError, now
from tests.cuda.tensors import Emulated, unchanged

_NEEDED = ("requests", "pynvml")  # by its import, not by what medha calls
_HEAD = 5
_FA2_BLOCKS_PER_SM = 2
_LEAST_CHUNK = 128


class Host:
    """In the place of a device: what is launched here runs at once."""

    num_sms = 4
    capturing = None

    def launch(self, name: str, kernel: Callable[[], Any], *uses: Any, **how: Any) -> None:
        kernel()

    def fault(self, kind: str, text: str) -> None:
        raise DeviceError(f"{kind}: {text}")


HOST = Host()


class Plan(NamedTuple):
    """What of a plan a captured kernel keeps: everything but the work items, which lie on the device."""

    layout: list[int]  # whether keys are split, the most items, and the rows of a tile
    sizes: list[int]
    num_plans: list[int]  # so far, one number


def plan(
    float_workspace: torch.Tensor, workspace: torch.Tensor, pinned: torch.Tensor, qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor, kv_lens: torch.Tensor, num_rows: int, batch: int, num_heads: int, num_kv_heads: int,
    page: int, is_graph: bool, head_dim: int, head_dim_vo: int, causal: bool, window: int, split_pages: int = -1,
    may_not_split: bool = True, *rest: Any,
) -> Plan:  # fmt: skip
    """Cut a batch into work items, (request, query tile, key chunk); FA3, which gives no split, into whole rows."""
    device = now() if isinstance(workspace, Emulated) else HOST
    if device.capturing is not None:
        device.fault("capture", "attention is planned inside")
    for tensor in (qo_indptr, kv_indptr, kv_lens):
        assert tensor.device.type == "cpu" and tensor.dtype == torch.int32, "index pointers are int32 of the host"
        assert tensor[0] == 0 or tensor is kv_lens
    assert float_workspace.device == workspace.device
    assert num_heads % num_kv_heads == 0 and window == -1 and head_dim == head_dim_vo
    group = num_heads // num_kv_heads
    lengths, pages = (torch.diff(x).tolist() for x in (qo_indptr, kv_indptr))
    assert min(lengths) >= 0 and min(pages) >= 0
    packed = [length * group for length in lengths]
    most_parts = _FA2_BLOCKS_PER_SM * device.num_sms // num_kv_heads
    longest = (num_rows - batch + 1) * group if is_graph else sum(packed) // batch
    tile = 16 if longest <= 16 else 64 if longest <= 64 or head_dim >= 256 else 128
    tiles = [-(-rows // tile) for rows in packed]

    def parts(chunk: int) -> list[int]:
        return [-(-max(n, 1) // chunk) for n in pages]

    largest = max(1, *pages)
    chunk, splits = largest, False
    if split_pages > 0:
        chunk = split_pages
        splits = max(parts(chunk)) > 1
    elif not may_not_split:
        enough = (n for n in range(max(_LEAST_CHUNK // page, 1), largest)
                  if sum(t * p for t, p in zip(tiles, parts(n), strict=True)) <= most_parts)  # fmt: skip
        chunk = next(enough, max(largest, _LEAST_CHUNK // page))
        splits = is_graph or chunk < largest
    items = [(r, t, p) for r, n in enumerate(parts(chunk)) for t in range(tiles[r]) for p in range(n)]
    most = max(most_parts, -(-num_rows * group // tile) + batch - 1) if is_graph else len(items)
    if len(items) > most:
        raise RuntimeError("new batch size should not exceed padded batch size")
    if splits and num_heads * most * tile * (head_dim + 1) * 4 > float_workspace.nbytes:
        raise RuntimeError("Buffer overflow when allocating memory for batch_prefill_tmp_v")
    num_plans = workspace.__dict__.setdefault("num_plans", [0])
    num_plans[0] += 1
    made = Plan([int(splits), most, tile], [num_heads, head_dim, page, num_kv_heads, head_dim], num_plans)
    ints = [*made.layout, chunk * page, len(items), *(i for item in items for i in item)]
    seen = torch.tensor(ints, dtype=torch.int32).view(torch.uint8)
    source, target = pinned[: len(seen)], raw(workspace)[: len(seen)]
    source.copy_(seen)  # on the host, which so is seen to overwrite it

    def send() -> None:
        unchanged(device, seen, source)
        target.copy_(source)

    device.launch("plan", send, (source,), (workspace,))
    return made


def run(
    float_workspace: torch.Tensor, workspace: torch.Tensor, made: Plan, q: torch.Tensor, k: torch.Tensor,
    v: torch.Tensor, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, indices: torch.Tensor,
    last_page_len: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, mask_mode: int, layout: int,
    window: int, enable_pdl: bool, custom_mask: Any, mask_indptr: Any, alibi: Any, prefix_len: Any, token_pos: Any,
    max_item_len: Any, soft_cap: float, sm_scale: float, *rest: Any, name: str = "fa2",
) -> None:  # fmt: skip
    """Attention over pages as the plan says, with the log-sum-exp to base 2."""
    device = now() if isinstance(workspace, Emulated) else HOST
    reads = [workspace, q, k, v, qo_indptr, kv_indptr, indices, last_page_len]
    writes = [float_workspace, out, *([] if lse is None else [lse])]
    assert {x.device for x in (*reads, *writes)} == {q.device}, "what a kernel reads and writes is on the device"
    assert all(x.dtype == torch.int32 for x in (qo_indptr, kv_indptr, indices, last_page_len))
    assert q.dtype == k.dtype == v.dtype == out.dtype and q.shape == out.shape and k.shape == v.shape
    assert device is HOST or (q.dtype in (torch.float16, torch.bfloat16) and q.shape[2] in (64, 128, 256))
    assert [*q.shape[1:], *k.shape[1:]] == made.sizes
    assert q.stride(-1) == k.stride(-1) == 1 and out.is_contiguous() and layout == 0
    assert k.stride() == v.stride() and (lse is None or (lse.is_contiguous() and lse.dtype == torch.float32))
    if device.capturing is not None:
        device.capturing.num_plans[id(made.num_plans)] = made.num_plans, [0]
    raws = [raw(x) for x in (*reads, out, lse)]
    late = lambda: _of_pages((k, v), raw(indices)[: int(raw(kv_indptr)[-1])], False)  # noqa: E731
    others = [x for x in reads if x is not k and x is not v]
    device.launch(name, lambda: _attend(device, made, mask_mode == 1, sm_scale, raws), others, writes, late=late)


def _of_pages(pools: Sequence[Any], pages: torch.Tensor, writes: bool) -> list[tuple[Any, int, int, bool]]:
    """Uses of some pages of pools."""
    sizes = [(pool, raw(pool).stride(0) * pool.element_size()) for pool in pools if isinstance(pool, Emulated)]
    return [(pool, at * size, (at + 1) * size, writes) for pool, size in sizes for at in pages.unique().tolist()]


def raw(x: Any) -> Any:
    """A tensor with the bytes on the host; what is none, as it is."""
    return x.raw if isinstance(x, Emulated) else x


def _attend(device: Device | Host, made: Plan, causal: bool, scale: float, raws: Sequence[Any]) -> None:
    """The kernel: partial attention of every work item, then the merge of each tile's parts."""
    w, q, k, v, qo, kv, pages, last, out, lse = raws
    ints = w[: w.numel() // 4 * 4].view(torch.int32)
    *layout, chunk, num_items = ints[:_HEAD].tolist()
    if layout != made.layout:
        device.fault("plan", f"its layout is {layout}, the kernel was launched or captured with {made.layout}")
    items = ints[_HEAD : _HEAD + 3 * num_items].view(-1, 3).tolist()
    splits, _, size = layout
    page, K = k.shape[1:3]
    group = q.shape[1] // K
    exact = torch.float64 if q.dtype == torch.float32 else torch.float32
    parts: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    starts, kv_starts, lasts = qo.tolist(), kv.tolist(), last.tolist()
    for request, tile, part in items:
        first, end = starts[request : request + 2]
        length = (kv_starts[request + 1] - kv_starts[request] - 1) * page + lasts[request]
        assert 1 <= lasts[request] <= page and (length >= end - first or not causal)
        tokens = torch.arange(part * chunk, min((part + 1) * chunk, length)) if splits else torch.arange(length)
        at = pages[kv_starts[request] + tokens // page].long()
        if len(at) and not 0 <= int(at.min()) <= int(at.max()) < len(k):
            device.fault("address", f"page {int(at.max())} of a pool of {len(k)}")
        keys, values = (pool[at, tokens % page].to(exact).transpose(0, 1) for pool in (k, v))
        rows = torch.arange(tile * size, min((tile + 1) * size, (end - first) * group))
        queries = q[first:end].to(exact).unflatten(1, (K, group)).transpose(0, 1).flatten(1, 2)[:, rows]
        scores = queries @ keys.transpose(1, 2) * scale
        if causal:
            sees = tokens <= (length - (end - first) + rows // group)[:, None]
            scores = scores.masked_fill(~sees, -math.inf)
        outs = torch.softmax(scores, -1).nan_to_num() @ values  # nan where a row sees no key of this part
        parts[request, tile].append((torch.logsumexp(scores, -1), outs))
    for (request, tile), found in parts.items():
        sums, outs = (torch.stack(x) for x in zip(*found, strict=True))
        total = torch.logsumexp(sums, 0)
        merged = (torch.exp(sums - total)[..., None] * outs).sum(0)
        first, end = starts[request : request + 2]
        rows = torch.arange(tile * size, tile * size + total.shape[1])
        heads = torch.arange(K)[:, None] * group + rows % group
        out[first + rows // group, heads] = merged.to(out.dtype)
        if lse is not None:
            lse[first + rows // group, heads] = total.float() / math.log(2.0)


def rmsnorm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, enable_pdl: bool) -> None:
    """Over the last dimension, which is contiguous."""
    _check_16_bits(out, x, weight)
    to, start, scale = raw(out), raw(x), raw(weight)
    now().launch("rmsnorm", lambda: to.copy_(_normed(start.float(), scale, eps)), (x, weight), (out,))


def fused_add_rmsnorm(x: torch.Tensor, rest: torch.Tensor, weight: torch.Tensor, eps: float, enable_pdl: bool) -> None:
    """The sum goes to ``rest``, its norm, from before it is rounded, to ``x``."""
    _check_16_bits(x, rest, weight)
    assert x.is_contiguous() and rest.is_contiguous() and x.shape == rest.shape and x.dim() == 2
    one, other, scale = raw(x), raw(rest), raw(weight)

    def kernel() -> None:
        total = one.float() + other.float()
        other.copy_(total)
        one.copy_(_normed(total, scale, eps))

    now().launch("fused_add_rmsnorm", kernel, (x, rest, weight), (x, rest))


def silu_and_mul(out: torch.Tensor, gate_up: torch.Tensor, enable_pdl: bool) -> None:
    _check_16_bits(out, gate_up)
    assert out.is_contiguous() and gate_up.is_contiguous()
    to, both = raw(out), raw(gate_up)

    def kernel() -> None:
        gate, up = both.float().chunk(2, -1)
        to.copy_(torch.nn.functional.silu(gate) * up)

    now().launch("silu_and_mul", kernel, (gate_up,), (out,))


def apply_rope_pos_ids_cos_sin_cache(
    q: torch.Tensor, k: torch.Tensor, q_out: torch.Tensor, k_out: torch.Tensor, cos_sin: torch.Tensor,
    positions: torch.Tensor, interleave: bool,
) -> None:  # fmt: skip
    """The halves of each head against each other, by the cosines and then sines of the row that a position names."""
    _check_16_bits(q, k)
    assert q.dim() == k.dim() == 3 and q.stride(-1) == k.stride(-1) == 1 and not interleave
    assert cos_sin.dtype == torch.float32 and cos_sin.is_contiguous() and cos_sin.shape[1] == q.shape[2]
    assert positions.dtype in (torch.int32, torch.int64) and positions.is_contiguous()
    heads, table, at = [(raw(q), raw(q_out)), (raw(k), raw(k_out))], raw(cos_sin), raw(positions)

    def kernel() -> None:
        cos, sin = table[at.long()][:, None].chunk(2, -1)
        for start, to in heads:
            first, second = start.float().chunk(2, -1)
            to.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], -1))

    now().launch("apply_rope", kernel, (q, k, cos_sin, positions), (q_out, k_out))


def append_paged_kv_cache(
    k: torch.Tensor, v: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor, k_pages: torch.Tensor,
    v_pages: torch.Tensor, indices: torch.Tensor, indptr: torch.Tensor, last_page_len: torch.Tensor, layout: int,
) -> None:  # fmt: skip
    """Each token to the place in its request's pages that its position names."""
    _check_16_bits(k, v, k_pages, v_pages)
    assert len(k), "a launch of no blocks fails"
    assert k.shape == v.shape and k.shape[1:] == k_pages.shape[2:] and k.stride(-1) == v.stride(-1) == 1
    assert k_pages.shape == v_pages.shape and k_pages.stride() == v_pages.stride() and layout == 0
    assert requests.shape == positions.shape == k.shape[:1] and len(indptr) == len(last_page_len) + 1
    ints = requests, positions, indices, indptr, last_page_len
    assert all(x.dtype == torch.int32 and x.is_contiguous() for x in ints)
    rows, at, pages, starts, _ = map(raw, ints)
    pairs = [(raw(k), raw(k_pages)), (raw(v), raw(v_pages))]

    def targets() -> tuple[torch.Tensor, torch.Tensor]:
        size = k_pages.shape[1]
        entries = starts[rows.long()].long() * size + at
        return pages[entries // size].long(), entries % size

    def kernel() -> None:
        for new, pool in pairs:
            pool[targets()] = new

    late = lambda: _of_pages((k_pages, v_pages), targets()[0], True)  # noqa: E731
    now().launch("append_kv", kernel, (k, v, *ints), late=late)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _check_16_bits(*tensors: torch.Tensor) -> None:
    (dtype,) = {x.dtype for x in tensors}
    assert dtype in (torch.float16, torch.bfloat16) and all(x.is_cuda for x in tensors)


def import_flashinfer() -> ModuleType:
    """The package; skips where it is not installed. What only its import needs is stood in for meanwhile."""
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", tempfile.gettempdir())  # its import makes a folder
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    sys.modules.update({name: ModuleType(name) for name in missing})
    try:
        reason = "flashinfer-python is not installed (make test installs it)"
        return pytest.importorskip("flashinfer", reason=reason)  # type: ignore[no-any-return]
    finally:
        for name in missing:
            del sys.modules[name]


def _stand_in(patch: pytest.MonkeyPatch, flashinfer: ModuleType) -> None:
    """Put the kernels of this module below FlashInfer's wrappers."""

    def module(backend: str, *args: Any) -> SimpleNamespace:
        return SimpleNamespace(plan=plan, paged_run=partial(run, name=backend), workspace_size=None)

    for part in (flashinfer.prefill, flashinfer.decode):
        patch.setattr(part, "get_batch_prefill_module", module)
    patch.setattr(flashinfer.norm, "_use_cuda_norm", lambda device: True)
    kernels = sys.modules[__name__]
    patch.setattr(flashinfer.norm, "get_norm_module", lambda: kernels)
    patch.setattr(flashinfer.activation, "get_act_and_mul_module", lambda name: kernels)
    patch.setattr(flashinfer.page, "get_page_module", lambda: kernels)
    patch.setattr(flashinfer.rope, "get_rope_module", lambda: kernels)
    patch.setattr(flashinfer.prefill, "_eagle_verify_fp8kv_sm90_prepare", lambda *args, **kwargs: None)


def install(patch: pytest.MonkeyPatch, **options: Any) -> Device:
    """An emulated device, with FlashInfer's wrappers on it."""
    _stand_in(patch, import_flashinfer())
    return tensors.install(patch, **options)


def make_api() -> SimpleNamespace:
    """FlashInfer's wrappers on tensors of the host, none of which is pinned; ``made`` lists those that were made."""
    flashinfer, made, empty = import_flashinfer(), [], torch.empty

    def on_host(cls: type) -> type:
        class OnHost(cls):  # type: ignore[misc]
            def __init__(self, workspace: torch.Tensor, *args: Any, **kwargs: Any) -> None:
                assert workspace.dtype == torch.uint8 and not workspace.any(), "zeroed once"
                with mock.patch.object(torch, "empty", lambda *size, pin_memory=False, **how: empty(*size, **how)):
                    super().__init__(workspace, *args, **kwargs)
                made.append(self)

            def plan(self, *args: Any, **kwargs: Any) -> None:
                with pytest.MonkeyPatch.context() as patch:
                    _stand_in(patch, flashinfer)
                    super().plan(*args, **kwargs)

        return OnHost

    names = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"
    return SimpleNamespace(made=made, **{name: on_host(getattr(flashinfer, name)) for name in names})
