"""TorchBackend against dense float64 attention, over every shape that a batch can take.

Every pool holds NaN wherever no segment points, so a read outside the ranges shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.attention import torch_backend
from medha.attention.interface import Segment
from medha.attention.torch_backend import TorchBackend
from tests.attention.reference import assert_attention_close, assert_segments_close, visible

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [(4, 4), (4, 2), (8, 1), (6, 2)]
HEAD_DIMS = [16, 64, 80, 128]


@dataclass(frozen=True)
class Shape:
    """Query length, lengths of the extents in position order, causal or full."""

    q_len: int
    extents: tuple[int, ...]
    causal: bool


@dataclass(frozen=True)
class Model:
    """What all segments of a batch share."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    head_major: bool = True
    sharpness: float = 1.0  # factor on the queries: at 4, few keys take most of the weight


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    q_len = draw(st.integers(1, 70))
    extents = draw(st.lists(st.integers(0, 150), max_size=5))
    causal = draw(st.booleans())
    missing = q_len - sum(extents)
    if causal and missing > 0:
        extents.insert(draw(st.integers(0, len(extents))), missing)
    return Shape(q_len, tuple(extents), causal)


models = st.builds(
    lambda heads, *rest: Model(*heads, *rest),
    st.sampled_from(HEADS),
    st.sampled_from(HEAD_DIMS),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.sampled_from([1.0, 4.0]),
)


def build(
    model: Model, batch: list[Shape], *, seed: int = 0, device: torch.device = CPU
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], list[Segment]]:
    """Random queries and a pool in which the extents of all segments lie in random order, with gaps."""
    order = [(i, j) for i, shape in enumerate(batch) for j in range(len(shape.extents))]
    rng = random.Random(seed)
    rng.shuffle(order)
    first: dict[tuple[int, int], int] = {}
    end = rng.randrange(3)
    for i, j in order:
        first[i, j] = end
        end += batch[i].extents[j] + rng.choice((0, 0, 1, 7))

    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, model.dtype)

    def pool() -> torch.Tensor:
        K, H = model.num_kv_heads, model.head_dim
        empty = torch.full((K, end, H) if model.head_major else (end, K, H), torch.nan, dtype=model.dtype)
        pool_PKH = empty.to(device).transpose(0, 1) if model.head_major else empty.to(device)
        for (i, j), start in first.items():
            count = batch[i].extents[j]
            pool_PKH[start : start + count] = normal(count, K, H)
        return pool_PKH

    segments, q_start = [], 0
    for i, shape in enumerate(batch):
        ranges = tuple((first[i, j], count) for j, count in enumerate(shape.extents))
        segments.append(Segment(q_start, shape.q_len, ranges, shape.causal))
        q_start += shape.q_len
    q_TNH = model.sharpness * normal(q_start, model.num_heads, model.head_dim)
    return (q_TNH, pool(), pool()), segments


def run(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], segments: list[Segment]
) -> tuple[torch.Tensor, torch.Tensor]:
    backend = TorchBackend()
    return backend.run(*qkv, backend.plan(segments))


@settings(max_examples=250, derandomize=True, deadline=None)
@given(model=models, batch=st.lists(shapes(), min_size=1, max_size=3), seed=st.integers(0, 2**31))
def test_any_batch_matches_dense_attention(model: Model, batch: list[Shape], seed: int) -> None:
    qkv, segments = build(model, batch, seed=seed)
    assert_segments_close(run(qkv, segments), qkv, segments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_major", [True, False])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_decode_and_chunk_in_every_shape(
    num_heads: int, num_kv_heads: int, head_dim: int, head_major: bool, dtype: torch.dtype
) -> None:
    model = Model(num_heads, num_kv_heads, head_dim, dtype, head_major)
    # A decode, a chunk whose own keys lie across an extent border, and a first chunk.
    batch = [Shape(1, (64, 33), True), Shape(40, (50, 20, 9, 30), True), Shape(17, (17,), True)]
    qkv, segments = build(model, batch)
    assert_segments_close(run(qkv, segments), qkv, segments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cut", range(1, 24))
def test_every_border_between_past_and_chunk(cut: int, dtype: torch.dtype) -> None:
    qkv, segments = build(Model(dtype=dtype), [Shape(8, (cut, 24 - cut), True)], seed=cut)
    assert_segments_close(run(qkv, segments), qkv, segments)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("q_len", [127, 128, 129, 192, 500, 512, 513, 1000, 1024, 1025])
def test_chunks_about_the_length_that_is_cut_into_tiles(q_len: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
    # A first chunk, and one behind a past whose own keys lie across an extent border.
    batch = [Shape(q_len, (q_len,), True), Shape(q_len, (40, q_len - 7, 9), True)]
    qkv, segments = build(Model(*heads, dtype=dtype), batch)
    assert_segments_close(run(qkv, segments), qkv, segments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_ranges_give_zero_and_minus_infinity(dtype: torch.dtype) -> None:
    # The CPU kernel ends the process on an empty range, so this test passing is itself the point.
    batch = [Shape(3, (), False), Shape(1, (0,), False), Shape(5, (0, 0), False), Shape(2, (0, 9, 0), False)]
    qkv, segments = build(Model(dtype=dtype), batch)
    out, lse = run(qkv, segments)
    assert torch.equal(out[:9], torch.zeros_like(out[:9]))
    assert torch.equal(lse[:9], torch.full_like(lse[:9], -torch.inf))
    assert_segments_close((out, lse), qkv, segments)


def test_a_batch_of_nothing_has_no_rows() -> None:
    qkv, segments = build(Model(), [])
    out, lse = run(qkv, segments)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (0, 4)


def test_many_segments_and_uncovered_rows() -> None:
    rng = random.Random(5)
    batch = [Shape(1, (rng.randrange(1, 200),), True) for _ in range(24)]
    batch += [Shape(n, (rng.randrange(60), n + rng.randrange(60)), True) for n in (1, 2, 31, 32, 33, 70)]
    batch += [Shape(7, (), False), Shape(13, (40, 1), False)]
    qkv, segments = build(Model(8, 1, 64), batch, seed=5)
    covered = [s for i, s in enumerate(segments) if i % 5 != 3]
    for segment in (s for s in segments if s not in covered):
        qkv[0][segment.q_start : segment.q_start + segment.q_len] = torch.nan
    before = [x.clone() for x in qkv]
    assert_segments_close(run(qkv, covered), qkv, covered)
    for x, y in zip(qkv, before, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_decodes_are_those_of_the_common_path_to_the_bit(heads: tuple[int, int], dtype: torch.dtype) -> None:
    qkv, segments = build(Model(*heads, dtype=dtype), [Shape(1, (kv_len,), True) for kv_len in (1, 7, 300, 64)])
    out, lse = run(qkv, segments)
    for segment in segments:
        ((first, count),) = segment.ranges
        row, keys = slice(segment.q_start, segment.q_start + 1), slice(first, first + count)
        common_out, common_lse = torch_backend._cpu_flash(qkv[0][row], qkv[1][keys], qkv[2][keys], False)
        assert torch.equal(out[row], common_out)
        assert torch.equal(lse[row], common_lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_company_and_order_do_not_change_a_bit(dtype: torch.dtype) -> None:
    batch = [Shape(1, (90,), True), Shape(33, (20, 40), True), Shape(4, (), False), Shape(6, (11, 5), False)]
    qkv, segments = build(Model(dtype=dtype), batch)
    out, lse = run(qkv, segments)
    assert all(torch.equal(x, y) for x, y in zip((out, lse), run(qkv, segments[::-1]), strict=True))
    for segment in segments:
        rows = slice(segment.q_start, segment.q_start + segment.q_len)
        alone = Segment(0, segment.q_len, segment.ranges, segment.causal)
        alone_out, alone_lse = run((qkv[0][rows], qkv[1], qkv[2]), [alone])
        assert torch.equal(out[rows], alone_out)
        assert torch.equal(lse[rows], alone_lse)


def test_queries_may_have_any_strides() -> None:
    qkv, segments = build(Model(6, 2, 16), [Shape(9, (30,), True), Shape(1, (12,), True)])
    wide = torch.randn(10, 6, 48)
    wide[..., 16:32] = qkv[0]
    strided = (wide[..., 16:32], qkv[1], qkv[2])
    assert_segments_close(run(strided, segments), strided, segments)
    turned = (qkv[0].transpose(0, 1).contiguous().transpose(0, 1), qkv[1], qkv[2])
    assert_segments_close(run(turned, segments), turned, segments)


@pytest.mark.parametrize(("q_len", "kv_len"), [(2, 1), (70, 69), (5, 0), (1, 0)])
def test_a_causal_segment_needs_as_many_keys_as_queries(q_len: int, kv_len: int) -> None:
    with pytest.raises(ValueError, match=rf"causal segment of {q_len} quer.*got {kv_len}"):
        TorchBackend().plan([Segment(0, q_len, ((3, kv_len),), causal=True)])


# ---------------------------------------------------------------------------------------------------------------------
# The plain fallback


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "name"),
    [
        ((7, 5), torch.float16, 64, "_math"),
        ((7, 0), torch.bfloat16, 64, "_math"),
        ((8, 0), torch.float16, 64, "_cuda_flash"),
        ((12, 0), torch.bfloat16, 256, "_cuda_flash"),
        ((9, 0), torch.float32, 64, "_math"),
        ((9, 0), torch.float16, 257, "_math"),
    ],
)
def test_a_gpu_gets_a_kernel_that_it_has(
    capability: tuple[int, int], dtype: torch.dtype, head_dim: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    q = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=dtype, shape=(1, 4, head_dim))
    assert torch_backend._kernel(q) is getattr(torch_backend, name)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_scores", [None, 1, 3000, 20000])
def test_math_fallback(max_scores: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if max_scores is not None:  # keys in pieces of 1 to 70
        monkeypatch.setattr(torch_backend, "_MATH_SCORES", max_scores)
    for heads in HEADS:
        for q_len, kv_len, causal in [(1, 70, False), (33, 50, False), (33, 33, True), (1, 1, True)]:
            qkv, segments = build(Model(*heads, 80, dtype), [Shape(q_len, (kv_len,), causal)])
            index, mask = visible(segments[0], CPU)
            q, k, v = qkv[0], qkv[1][index], qkv[2][index]
            assert_attention_close(*torch_backend._math(q, k, v, causal), (q, k, v), mask)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from(HEAD_DIMS),
    batch=st.lists(shapes(), min_size=1, max_size=2),
    max_scores=st.integers(1000, 30000),
)
def test_backend_on_the_fallback(heads: tuple[int, int], head_dim: int, batch: list[Shape], max_scores: int) -> None:
    qkv, segments = build(Model(*heads, head_dim), batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "_MATH_SCORES", max_scores)
        patch.setattr(torch_backend, "_kernel", lambda q: torch_backend._math)
        assert_segments_close(run(qkv, segments), qkv, segments)


# ---------------------------------------------------------------------------------------------------------------------
# CUDA


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
def test_cuda_kernels(num_heads: int, num_kv_heads: int, head_dim: int, head_major: bool, dtype: torch.dtype) -> None:
    model = Model(num_heads, num_kv_heads, head_dim, dtype, head_major)
    batch = [
        *(Shape(1, (n,), True) for n in (1, 63, 64, 65, 300)),
        Shape(1, (700, 41, 2), True),
        Shape(40, (50, 20, 9, 30), True),
        Shape(128, (128,), True),
        Shape(70, (1000, 200), True),
        Shape(5, (), False),
        Shape(9, (0, 33, 80), False),
    ]
    for seed in range(3):
        qkv, segments = build(model, batch, seed=seed, device=torch.device("cuda"))
        assert_segments_close(run(qkv, segments), qkv, segments)
