"""FlashInferBackend on a substitute for the package, held to dense attention; on a GPU, the package itself."""

from __future__ import annotations

import gc
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.attention.flashinfer_backend import (
    FlashInferBackend,
    FlashInferPlan,
    PageTable,
    workspace_bytes,
)
from medha.attention.interface import LayerShape, Segment
from medha.attention.staging import Staging
from medha.attention.torch_backend import TorchBackend
from medha.errors import ConfigError
from medha.worker import shard
from medha.worker.shard import choose_backend
from tests.attention import fake_flashinfer
from tests.attention.reference import assert_segments_close
from tests.attention.test_torch_backend import Model, Shape, build, models, shapes
from tests.cuda.kernels import import_flashinfer

CPU = torch.device("cpu")


def make_backend(*, block_size: int = 256, num_sms: int = 4, has_fa3: bool = False) -> FlashInferBackend:
    return FlashInferBackend(fake_flashinfer.make_api(), block_size=block_size, num_sms=num_sms, has_fa3=has_fa3)


def run(backend: FlashInferBackend, qkv: Any, segments: list[Segment]) -> tuple[torch.Tensor, torch.Tensor]:
    return backend.run(*qkv, backend.plan(segments))


def in_blocks(lengths: list[int], block_size: int, *, q_lens: list[int] | None = None) -> list[Segment]:
    """Causal segments whose keys lie in blocks, the first half of each at the end of the pool."""
    segments, q_start, low, high = [], 0, 0, 4096
    for length, q_len in zip(lengths, q_lens or [1] * len(lengths), strict=True):
        head = length // 2 // block_size * block_size
        high -= head
        ranges = ((high, head), (low, length - head))
        low += -(-(length - head) // block_size) * block_size
        segments.append(Segment(q_start, q_len, ranges, causal=True))
        q_start += q_len
    return segments


def pools(model: Model, segments: list[Segment], *, num_tokens: int = 4096) -> Any:
    """Queries and pools that hold NaN wherever no segment points."""
    generator = torch.Generator().manual_seed(1)
    total = max(s.q_start + s.q_len for s in segments)
    q = torch.randn(total, model.num_heads, model.head_dim, generator=generator).to(model.dtype)
    kv = []
    for _ in range(2):
        pool = torch.full((num_tokens, model.num_kv_heads, model.head_dim), torch.nan, dtype=model.dtype)
        for first, count in (r for s in segments for r in s.ranges):
            pool[first : first + count] = torch.randn(count, *pool.shape[1:], generator=generator).to(model.dtype)
        kv.append(pool)
    return q, *kv


# ---------------------------------------------------------------------------------------------------------------------
# Page tables


def test_page_table_of_extents() -> None:
    segments = [Segment(0, 1, ((512, 512), (0, 100)), True), Segment(1, 9, ((1024, 256),), True)]
    table = PageTable.of(segments, 256)
    assert table.indices.tolist() == [2, 3, 0, 4]
    assert table.indptr.tolist() == [0, 3, 4]
    assert table.last_page_len.tolist() == [100, 256]
    assert {a.dtype for a in (table.indices, table.indptr, table.last_page_len)} == {np.dtype(np.int32)}


@settings(max_examples=60, derandomize=True, deadline=None)
@given(model=models, batch=st.lists(shapes(), min_size=1, max_size=3), seed=st.integers(0, 2**31))
def test_pages_name_exactly_the_tokens_of_the_ranges(model: Model, batch: list[Shape], seed: int) -> None:
    _, segments = build(model, batch, seed=seed)
    plan = FlashInferPlan(segments, 256)
    table = plan.table
    for i, segment in enumerate(plan.segments):
        pages = table.indices[table.indptr[i] : table.indptr[i + 1]]
        tokens = (pages[:, None] * table.page_size + np.arange(table.page_size)).reshape(-1)[: segment.kv_len]
        assert tokens.tolist() == [t for first, count in segment.ranges for t in range(first, first + count)]
        assert (len(pages) - 1) * table.page_size + table.last_page_len[i] == segment.kv_len


def test_pages_are_blocks_where_ranges_are_and_shorter_where_not() -> None:
    aligned = in_blocks([700, 1024, 3], 256)
    assert FlashInferPlan(aligned, 256).table.page_size == 256
    assert FlashInferPlan(aligned, 64).table.page_size == 64
    assert FlashInferPlan([Segment(0, 1, ((96, 32), (960, 5)), True)], 256).table.page_size == 32
    assert FlashInferPlan([Segment(0, 1, ((77, 1),), True)], 256).table.page_size == 1


def test_a_pool_that_is_no_whole_number_of_pages() -> None:
    model, segments = Model(head_dim=64), [Segment(0, 2, ((256, 512), (768, 100)), True)]
    qkv = pools(model, segments, num_tokens=868)
    assert_segments_close(run(make_backend(), qkv, segments), qkv, segments)


# ---------------------------------------------------------------------------------------------------------------------
# Results


@settings(max_examples=120, derandomize=True, deadline=None)
@given(
    model=models,
    batch=st.lists(shapes(), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
    has_fa3=st.booleans(),
)
def test_any_batch_matches_dense_attention(model: Model, batch: list[Shape], seed: int, has_fa3: bool) -> None:
    qkv, segments = build(model, batch, seed=seed)
    assert_segments_close(run(make_backend(has_fa3=has_fa3), qkv, segments), qkv, segments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_decodes_and_chunks_in_blocks(block_size: int, dtype: torch.dtype) -> None:
    model = Model(8, 2, 64, dtype)
    segments = in_blocks([1, 255, 700, 300, 600], block_size, q_lens=[1, 1, 1, 40, 130])
    qkv = pools(model, segments)
    assert_segments_close(run(make_backend(block_size=block_size), qkv, segments), qkv, segments)


def test_log_sum_exp_is_natural_and_empty_is_minus_infinity() -> None:
    segments = [Segment(0, 1, ((0, 128),), True), Segment(1, 3, (), False)]
    q, k, v = pools(Model(head_dim=64), segments)
    out, lse = run(make_backend(), (0 * q, k, v), segments)
    torch.testing.assert_close(lse[0], torch.full((4,), 128.0).log())
    assert bool((lse[1:] == -torch.inf).all()) and bool((out[1:] == 0).all())


def test_rows_that_no_segment_covers_lie_between_the_others() -> None:
    """As with KV parallelism, where shared rows stand among the others."""
    segments = in_blocks([40, 80, 500, 90, 300, 77], 16, q_lens=[1, 1, 1, 20, 7, 33])
    qkv = pools(Model(4, 2, 64), segments)
    covered = [segments[i] for i in (0, 2, 3, 5)]
    backend = make_backend(block_size=16)
    assert_segments_close(run(backend, qkv, covered), qkv, covered)
    assert len(backend.api.made) == 2  # the decodes and the chunks


@pytest.mark.parametrize(("q_len", "kv_len"), [(2, 1), (70, 69), (5, 0), (1, 0)])
def test_a_causal_segment_needs_as_many_keys_as_queries(q_len: int, kv_len: int) -> None:
    with pytest.raises(ValueError, match=rf"causal segment of {q_len} quer.*got {kv_len}"):
        make_backend().plan([Segment(0, q_len, ((3, kv_len),), causal=True)])


def test_an_empty_batch_has_no_rows() -> None:
    q = torch.empty(0, 4, 64)
    out, lse = make_backend().run(q, torch.empty(512, 2, 64), torch.empty(512, 2, 64), make_backend().plan([]))
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


# ---------------------------------------------------------------------------------------------------------------------
# Plans and wrappers


def test_one_plan_serves_all_layers() -> None:
    segments = in_blocks([700, 300], 256, q_lens=[1, 40])
    qkv = pools(Model(4, 2, 64), segments)
    backend = make_backend()
    plan = backend.plan(segments)
    for _ in range(5):
        backend.run(*qkv, plan)
    assert [(w.num_plans, w.num_runs) for w in backend.api.made] == [(1, 5), (1, 5)]


def test_plans_of_one_step_do_not_disturb_each_other_and_the_next_step_takes_their_wrappers() -> None:
    segments = in_blocks([700, 300, 90, 512], 256)
    qkv = pools(Model(4, 2, 64), segments)
    backend = make_backend()
    for _ in range(3):
        both = [backend.plan(segments[:2]), backend.plan(segments[2:])]
        for _ in range(2):  # layers, in which the plans run in turn
            for plan, part in zip(both, (segments[:2], segments[2:]), strict=True):
                assert_segments_close(backend.run(*qkv, plan), qkv, part)
        del both, plan
        gc.collect()
    assert [w.num_plans for w in backend.api.made] == [3, 3]


def test_a_page_table_that_is_staged_travels_with_the_rest() -> None:
    segments = in_blocks([700, 300], 256)
    qkv = pools(Model(4, 2, 64), segments)
    backend, staging = make_backend(), Staging(CPU)
    plan = backend.plan(segments)
    other = staging.add(np.arange(5, dtype=np.int64))
    plan.stage(staging)
    staging.send()
    assert_segments_close(backend.run(*qkv, plan), qkv, segments)
    indices = backend.api.made[0].indices
    assert indices.untyped_storage().data_ptr() == other.tensor.untyped_storage().data_ptr()
    assert other.tensor.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("q_lens", "has_fa3", "kernels"),
    [
        ([300, 300], False, ["fa2"]),
        ([256], True, ["fa3"]),  # 4 heads x 2 tiles fill 4 multiprocessors twice
        ([128], True, ["fa2"]),
        ([1, 1, 128, 129], True, ["decode", "fa2", "fa3"]),
        ([1, 300, 290, 60, 1], True, ["decode", "fa3", "fa2"]),  # a chunk of one token is no launch of its own
    ],
)
def test_chunks_that_fill_the_gpu_twice_run_in_fa3(q_lens: list[int], has_fa3: bool, kernels: list[str]) -> None:
    segments = in_blocks([q_len + 300 for q_len in q_lens], 64, q_lens=q_lens)
    qkv = pools(Model(4, 2, 64), segments)
    backend = make_backend(num_sms=4, has_fa3=has_fa3, block_size=64)
    assert_segments_close(run(backend, qkv, segments), qkv, segments)
    kinds = [
        "decode" if isinstance(w, fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper) else w.backend
        for w in backend.api.made
    ]
    assert kinds == kernels


def test_workspace_covers_what_flashinfer_cuts_out_of_it() -> None:
    """Its formula: query heads x tiles x rows of a tile x (H + 1) x 4 bytes, tiles at most 2 SMs / KV heads."""
    shape = LayerShape(32, 8, 128, torch.bfloat16)
    assert 0 <= workspace_bytes(shape, num_sms=132) - 32 * 33 * 128 * 129 * 4 <= 1 << 20
    wide = LayerShape(64, 8, 128, torch.bfloat16)
    assert workspace_bytes(wide, num_sms=132) > 128 << 20  # the usual 128 MiB fail there
    # In a graph each row has a tile of 16 of its own, whatever the batch.
    assert workspace_bytes(shape, num_sms=132, num_decodes=512) >= 32 * (512 + 511 * 4 // 16) * 16 * 129 * 4


def test_a_larger_layer_gets_a_larger_workspace_and_new_wrappers() -> None:
    backend = make_backend(num_sms=132)
    for model in (Model(4, 2, 64), Model(8, 1, 128), Model(4, 2, 64)):
        segments = in_blocks([700], 256)
        qkv = pools(model, segments)
        assert_segments_close(run(backend, qkv, segments), qkv, segments)
    assert len(backend.api.made) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Decodes of a CUDA graph


def test_fixed_decodes_are_planned_in_place() -> None:
    shape = LayerShape(4, 2, 64, torch.float32)
    backend = make_backend(block_size=64)
    indices = torch.full((4096 // 64 + 3,), -1, dtype=torch.int32)
    fixed = backend.fixed_decodes(shape, 3, indices, most_decodes=8)
    for lengths in ([1, 1, 1], [700, 64, 65], [300, 1, 1000]):
        segments = in_blocks(lengths, 64)
        qkv = pools(Model(4, 2, 64), segments)
        pages = torch.from_numpy(fixed.pages(segments))
        indices[: len(pages)] = pages
        fixed.plan()
        out = fixed.run(*qkv)
        want, _ = run(backend, qkv, segments)
        assert torch.equal(out, want)


# ---------------------------------------------------------------------------------------------------------------------
# Choice

SHAPE = LayerShape(8, 2, 128, torch.bfloat16)
CUDA = torch.device("cuda", 0)


def choose_on(monkeypatch: pytest.MonkeyPatch, name: str, shape: LayerShape, *, installed: bool = True) -> Any:
    """The choice as a CUDA machine would make it."""
    monkeypatch.setattr(shard.importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(shard, "_flashinfer", lambda device, block_size: make_backend(block_size=block_size))
    return choose_backend(name, shape, CUDA, block_size=128)


def test_auto_is_flashinfer_on_cuda_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, why = choose_on(monkeypatch, "auto", SHAPE)
    assert (backend.name, backend.block_size, why) == ("flashinfer", 128, "CUDA, and it is installed")
    backend, why = choose_on(monkeypatch, "torch", SHAPE)
    assert (backend.name, why) == ("torch", "as asked for")
    backend, why = choose_on(monkeypatch, "auto", SHAPE, installed=False)
    assert (backend.name, why) == (
        "torch",
        "flashinfer needs the package flashinfer-python (pip install 'medha[cuda]')",
    )
    backend, why = choose_backend("auto", SHAPE, CPU, block_size=256)
    assert (backend.name, why) == ("torch", "flashinfer needs a CUDA device, not cpu")


@pytest.mark.parametrize("name", ["auto", "flashinfer"])
def test_what_flashinfer_lacks_falls_back_and_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, why = choose_on(monkeypatch, name, LayerShape(8, 2, 80, torch.bfloat16))
    assert backend.name == "torch"
    assert why == "flashinfer has no kernel for heads of 80 (it has 64, 128, 256)"
    backend, why = choose_on(monkeypatch, name, LayerShape(8, 2, 64, torch.float32))
    assert (backend.name, why) == ("torch", "flashinfer has no kernel for float32 (it has float16, bfloat16)")


def test_flashinfer_asked_for_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"attention_backend='flashinfer' needs a CUDA device, not cpu; accepted"):
        choose_backend("flashinfer", SHAPE, CPU, block_size=256)
    with pytest.raises(ConfigError, match=r"needs the package flashinfer-python .*; accepted here: auto, torch"):
        choose_on(monkeypatch, "flashinfer", SHAPE, installed=False)


# ---------------------------------------------------------------------------------------------------------------------
# The package itself


@pytest.mark.parametrize("method", ["__init__", "plan", "run"])
@pytest.mark.parametrize("name", ["BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"])
def test_the_substitute_asks_for_what_the_package_does(name: str, method: str) -> None:
    package = import_flashinfer()
    ours = inspect.signature(getattr(getattr(fake_flashinfer, name), method)).parameters
    theirs = inspect.signature(getattr(getattr(package, name), method)).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in theirs.values())
    assert takes_any or set(ours) <= set(theirs)
    positional = [n for n, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional == [n for n, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD][: len(positional)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (32, 8), (4, 4), (8, 1)])
def test_flashinfer_on_a_gpu(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    pytest.importorskip("flashinfer")
    device = torch.device("cuda", 0)
    shape = LayerShape(num_heads, num_kv_heads, head_dim, dtype)
    backend, _ = choose_backend("flashinfer", shape, device, block_size=256)
    model = Model(num_heads, num_kv_heads, head_dim, dtype, head_major=False)
    batch = [
        *(Shape(1, (n,), True) for n in (1, 63, 64, 65, 300)),
        Shape(1, (768, 512, 2), True),
        Shape(40, (512, 256, 30), True),
        Shape(4096, (4096,), True),
        Shape(5, (), False),
        Shape(9, (256, 80), False),
    ]
    for seed in range(3):
        qkv, segments = build(model, batch, seed=seed, device=device)
        plan = backend.plan(segments)
        for _ in range(2):
            assert_segments_close(backend.run(*qkv, plan), qkv, segments)
        want = TorchBackend()
        assert_segments_close(want.run(*qkv, want.plan(segments)), qkv, segments)
