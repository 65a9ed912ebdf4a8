"""The backends against dense float64 attention, over every shape that a batch can take; TorchBackend's own paths.

Every pool holds NaN wherever no row points, so a read outside of its pages shows.
"""

import random
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from medha.attention import torch_backend
from medha.attention.cpu_backend import CpuBackend
from medha.attention.flashinfer_backend import FlashInferBackend
from medha.attention.interface import AttentionBackend, AttentionRows, LayerShape
from medha.attention.torch_backend import TorchBackend
from medha.verify.kernels import dense_attention, largest_error, rows_over
from medha.worker.shard import choose_backend
from tests.attention.reference import QKV, Result, assert_all_close, assert_rows_close, visible
from tests.cuda.kernels import make_api

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HEADS = [(4, 4), (4, 2), (8, 1), (6, 2)]
HEAD_DIMS = [16, 64, 80, 128]


@dataclass(frozen=True)
class Shape:
    """Query length, lengths of the runs of keys in position order, causal or full."""

    q_len: int
    runs: tuple[int, ...]
    causal: bool


@dataclass(frozen=True)
class Model:
    """What all rows of a batch share."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    head_major: bool = True
    sharpness: float = 1.0  # factor on the queries: at 4, few keys take most of the weight


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    q_len = draw(st.integers(1, 70))
    runs = draw(st.lists(st.integers(0, 150), max_size=5))
    causal = draw(st.booleans())
    missing = q_len - sum(runs)
    if causal and missing > 0:
        runs.insert(draw(st.integers(0, len(runs))), missing)
    return Shape(q_len, tuple(runs), causal)


models = st.builds(
    lambda heads, *rest: Model(*heads, *rest),
    *map(st.sampled_from, (HEADS, HEAD_DIMS, DTYPES, [False, True], [1.0, 4.0])),
)
batches = st.lists(shapes(), max_size=4)
EMPTY = [Shape(3, (), False), Shape(1, (0,), False), Shape(5, (0, 0), False), Shape(2, (0, 9, 0), False)]
seeds = st.integers(0, 2**31)


def build(
    model: Model, batch: list[Shape], *, page_size: int = 1, seed: int = 0, device: torch.device = CPU
) -> tuple[QKV, AttentionRows]:
    """Random queries and a pool in which the runs of all rows lie in random order, with gaps; all but a row's last
    are made whole pages."""
    whole = [[-(-count // page_size) * page_size for count in shape.runs] for shape in batch]
    order = [(i, j) for i, runs in enumerate(whole) for j in range(len(runs))]
    rng = random.Random(seed)
    rng.shuffle(order)
    first: dict[tuple[int, int], int] = {}
    end = rng.randrange(3) * page_size
    for i, j in order:
        first[i, j] = end
        end += whole[i][j] + rng.choice((0, 0, 1, 7)) * page_size
    rows = []
    for i, shape in enumerate(batch):
        counts = [*whole[i][:-1], *shape.runs[-1:]]
        rows.append((shape.q_len, [(first[i, j], count) for j, count in enumerate(counts)], shape.causal))

    generator = torch.Generator().manual_seed(seed)
    K, H = model.num_kv_heads, model.head_dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, model.dtype)

    def pool() -> torch.Tensor:
        empty = torch.full((K, end, H) if model.head_major else (end, K, H), torch.nan, dtype=model.dtype)
        pool_PKH = empty.to(device).transpose(0, 1) if model.head_major else empty.to(device)
        for start, count in (run for _, runs, _ in rows for run in runs):
            pool_PKH[start : start + count] = normal(count, K, H)
        return pool_PKH

    q_TNH = model.sharpness * normal(sum(shape.q_len for shape in batch), model.num_heads, H)
    return (q_TNH, pool(), pool()), rows_over(rows, page_size)


def make_flashinfer(*, block_size: int = 256, num_sms: int = 4, has_fa3: bool = False) -> FlashInferBackend:
    return FlashInferBackend(make_api(), block_size=block_size, num_sms=num_sms, has_fa3=has_fa3)


def run(qkv: QKV, rows: AttentionRows, backend: AttentionBackend | None = None) -> Result:
    backend = backend or TorchBackend()
    return backend.run(*qkv, backend.plan(rows))


# -- all backends ----------------------------------------------------------------------------------------------

BACKENDS = {
    "torch": TorchBackend,
    "cpu": CpuBackend,
    "fa2": make_flashinfer,
    "fa3": lambda: make_flashinfer(has_fa3=True),
}


def assert_dense(qkv: QKV, rows: AttentionRows) -> None:
    """Every backend computes dense attention of a batch, and leaves what it is given as it was."""
    before, results = [x.clone() for x in qkv], {}
    for name, make in BACKENDS.items():
        results[name] = run(qkv, rows, make())
        for x, y in zip(qkv, before, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True, msg=f"{name} writes")
    assert_all_close(results, qkv, rows)


@settings(max_examples=120, derandomize=True, deadline=None)
@given(model=models, batch=batches, page_size=st.sampled_from([1, 16, 64]), seed=seeds)
@example(Model(), [], 1, 0)
@example(Model(dtype=torch.float16), EMPTY, 1, 0)
@example(Model(dtype=torch.bfloat16), EMPTY, 1, 0)
@example(Model(), EMPTY, 1, 0)
def test_any_batch_is_dense_attention(model: Model, batch: list[Shape], page_size: int, seed: int) -> None:
    """Empty ranges among them, on which the CPU kernel of torch ends the process."""
    assert_dense(*build(model, batch, page_size=page_size, seed=seed))


def test_queries_may_have_any_strides() -> None:
    qkv, rows = build(Model(6, 2, 16), [Shape(9, (30,), True), Shape(1, (12,), True)])
    wide = torch.randn(10, 6, 48)
    wide[..., 16:32] = qkv[0]
    for q in (wide[..., 16:32], qkv[0].transpose(0, 1).contiguous().transpose(0, 1)):
        assert_dense((q, *qkv[1:]), rows)


# -- rows ------------------------------------------------------------------------------------------------------


def test_rows_of_runs() -> None:
    """What the kernels are planned by: pages adjacent in position order, and what fills a graph's batch up."""
    rows = rows_over([(1, [(512, 512), (0, 100)], True), (9, [(1024, 256)], False), (2, [], False)], 256)
    whole = rows.filled_up(5, 77)
    for one, q_indptr, kv_len, causal, pages, page_indptr in (
        (rows, [0, 1, 10, 12], [612, 256, 0], [True, False, False], [2, 3, 0, 4], [0, 3, 4, 4]),
        (whole, [0, 1, 10, 12, 13, 14], [612, 256, 0, 1, 1], [True, False, False, True, True],
         [2, 3, 0, 4, 77, 77], [0, 3, 4, 4, 5, 6]),
    ):  # fmt: skip
        assert (one.q_indptr.tolist(), one.kv_len.tolist(), one.causal.tolist()) == (q_indptr, kv_len, causal)
        assert (one.pages.tolist(), one.page_indptr.tolist()) == (pages, page_indptr)
        assert one.pages.dtype == "int32" and len(one) == len(kv_len) and one.num_tokens == q_indptr[-1]
    assert rows.q_len.tolist() == [1, 9, 2]


@pytest.mark.parametrize(
    ("name", "q_len", "num_keys"), [("torch", 1, 2 << 20), ("auto", 1, 2 << 20), ("auto", 33, 1 << 20)]
)
def test_attention_over_millions_of_keys_is_as_exact_as_over_few(name: str, q_len: int, num_keys: int) -> None:
    """Sums that are kept in float32 from the first key to the last would be off by 7e-5 and more."""
    k_PKH, v_PKH = torch.randn(2, num_keys, 1, 16, generator=torch.Generator().manual_seed(1))
    v_PKH += 2.0
    q_TNH = torch.randn(q_len, 1, 16, generator=torch.Generator().manual_seed(2))
    rows = rows_over([(q_len, [(0, num_keys)], True)], 256)
    backend, _ = choose_backend(name, LayerShape(1, 1, 16, torch.float32), torch.device("cpu"), block_size=256)
    got = run((q_TNH, k_PKH, v_PKH), rows, backend)
    for found, wanted in zip(got, dense_attention(q_TNH, k_PKH, v_PKH, causal=True), strict=True):
        assert largest_error(found, wanted) < 2e-5


@pytest.mark.parametrize(("q_len", "kv_len"), [(2, 1), (70, 69), (5, 0), (1, 0)])
def test_a_causal_row_needs_as_many_keys_as_queries(q_len: int, kv_len: int) -> None:
    with pytest.raises(ValueError, match=rf"causal row of {q_len} quer.*got {kv_len}"):
        rows_over([(1, [(0, 3)], True), (q_len, [(3, kv_len)], True)], 1)


# -- torchBackend ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [191, 513, 769])  # of each size of the tiles that torch cuts queries into
def test_long_chunks(q_len: int, dtype: torch.dtype) -> None:
    # A first chunk, and one behind a past whose own keys lie across the border of two runs.
    batch = [Shape(q_len, (q_len,), True), Shape(q_len, (40, q_len - 7, 9), True)]
    qkv, rows = build(Model(6, 2, dtype=dtype), batch)
    assert_rows_close(run(qkv, rows), qkv, rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_company_does_not_change_a_bit(dtype: torch.dtype) -> None:
    batch = [Shape(1, (90,), True), Shape(33, (20, 40), True), Shape(4, (), False), Shape(6, (11, 5), False)]
    qkv, rows = build(Model(dtype=dtype), batch)
    together = run(qkv, rows)
    for row, shape in enumerate(batch):
        at = slice(*rows.q_indptr[row : row + 2].tolist())
        keys = [(token, 1) for token in visible(rows, row)[0].tolist()]
        alone = run((qkv[0][at], *qkv[1:]), rows_over([(shape.q_len, keys, shape.causal)], 1))
        assert all(torch.equal(x[at], y) for x, y in zip(together, alone, strict=True))


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


@settings(max_examples=20, derandomize=True, deadline=None)
@given(model=models, batch=batches, seed=seeds)
def test_the_plain_fallback(model: Model, batch: list[Shape], seed: int) -> None:
    qkv, rows = build(model, batch, seed=seed)
    results = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "_kernel", lambda q: torch_backend._math)
        for most in (torch_backend._MATH_SCORES, 1, 3000, 20000):  # keys in one piece, or in pieces of 1 to 70
            patch.setattr(torch_backend, "_MATH_SCORES", most)
            results[f"{most} scores"] = run(qkv, rows)
    assert_all_close(results, qkv, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("heads", HEADS)
def test_cuda_kernels(heads: tuple[int, int], head_dim: int, head_major: bool, dtype: torch.dtype) -> None:
    batch = [Shape(1, runs, True) for runs in ((1,), (63,), (64,), (65,), (300,), (700, 41, 2))]
    batch += [Shape(40, (50, 20, 9, 30), True), Shape(128, (128,), True), Shape(70, (1000, 200), True)]
    batch += [Shape(5, (), False), Shape(9, (0, 33, 80), False)]
    for seed in range(3):
        model = Model(*heads, head_dim, dtype, head_major)
        qkv, rows = build(model, batch, seed=seed, device=torch.device("cuda"))
        assert_rows_close(run(qkv, rows), qkv, rows)


def test_the_plain_fallback_holds_results_of_few_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, merge = list[int](), torch_backend.merge_partials
    monkeypatch.setattr(torch_backend, "_MATH_SCORES", 1 << 14)
    monkeypatch.setattr(torch_backend, "merge_partials", lambda parts: sizes.append(len(parts[0][0])) or merge(parts))
    q, kv = torch.randn(256, 4, 16), torch.randn(2, 4096, 2, 16)
    out, lse = torch_backend._math(q, *kv, False)
    assert out.shape == q.shape and lse.shape == q.shape[:2] and max(sizes) <= 64
