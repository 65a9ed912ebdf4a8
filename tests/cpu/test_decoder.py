"""The CPU's own kernels around attention against plain torch, and what a row's result depends on."""

import pytest
import torch
import torch.nn.functional as F

from medha.cpu import decoder, library
from medha.models.layers import RMSNorm, rotate
from tests.engines import on_threads

DTYPES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}  # relative to the largest number


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=0, atol=DTYPES[dtype] * float(want.abs().max()))


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_in", "num_out"), [(1, 1), (70, 50), (512, 96), (2048, 64), (3104, 40), (300, 257)])
def test_products(dtype: torch.dtype, num_in: int, num_out: int) -> None:
    weight, gate = (normal(num_out, num_in, dtype=dtype, seed=seed) / num_in**0.5 for seed in (1, 2))
    bias = normal(num_out, dtype=dtype, seed=3)
    plain, gated = decoder.PackedLinear(weight, bias), decoder.PackedLinear(weight, gate=4 * gate)
    for rows in (0, 1, 5, 6, 7, 96, 300):
        x = normal(rows, 2 * num_in, dtype=dtype)[:, :num_in]  # its rows are not adjacent
        wide, up = x.double(), weight.double().T
        assert plain(x).shape == gated(x).shape == (rows, num_out)
        if rows:
            assert_close(plain(x), wide @ up + bias.double(), dtype)
            assert_close(gated(x), F.silu(wide @ (4 * gate).double().T) * (wide @ up), dtype)


@pytest.mark.parametrize("width", [4, 8, 16])
def test_every_width_of_vector(width: int, anew: pytest.MonkeyPatch) -> None:
    anew.setattr(library, "_FLAGS", (*library._FLAGS, f"-DMEDHA_WIDTH={width}"))
    for dtype in DTYPES:
        weight, gate, x = (normal(rows, 150, dtype=dtype, seed=rows) for rows in (70, 70, 31))
        wide = x.double()
        want = F.silu(wide @ gate.double().T) * (wide @ weight.double().T)
        assert_close(decoder.PackedLinear(weight, gate=gate)(x), want, dtype)
        weight = normal(150, dtype=dtype)
        assert_close(decoder.rmsnorm(x, weight, 1e-6), F.rms_norm(wide, (150,), weight.double(), 1e-6), dtype)


def test_silu_at_its_ends() -> None:
    one, zeros = torch.ones(1, 1), torch.zeros(1, 1)
    gated = decoder.PackedLinear(one, gate=one)
    for x in (-1e4, -100.0, -1.0, 0.0, 50.0, 1e4):
        got = gated(torch.tensor([[x]]))
        torch.testing.assert_close(got, F.silu(torch.tensor([[x]])) * x)
    assert decoder.PackedLinear(zeros, gate=one)(torch.full((1, 1), float("nan"))).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_company_nor_threads_change_a_bit(dtype: torch.dtype) -> None:
    weight, gate, x = (normal(rows, 300, dtype=dtype, seed=rows) for rows in (130, 130, 250))
    linear, gated = decoder.PackedLinear(weight), decoder.PackedLinear(weight, gate=gate)
    norm = normal(300, dtype=dtype)
    parts = [slice(0, 1), slice(1, 7), slice(7, 150), slice(150, 250)]
    for compute in (linear, gated, lambda x: decoder.rmsnorm(x, norm, 1e-6)):
        whole = compute(x)
        for _ in on_threads(1, 2, 3):
            assert torch.equal(compute(x), whole)
            assert torch.equal(torch.cat([compute(x[part]) for part in parts]), whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_out", [1, 64, 257])
def test_parts_of_the_outputs_are_those_of_the_whole(dtype: torch.dtype, num_out: int) -> None:
    weight, gate, x = (normal(rows, 300, dtype=dtype, seed=rows) for rows in (num_out, num_out, 9))
    bias = normal(num_out, dtype=dtype)
    for linear in (decoder.PackedLinear(weight, bias), decoder.PackedLinear(weight, gate=gate)):
        for count in (1, 2, 3, 8):
            parts = [linear(x, linear.outputs_of(index, count)) for index in range(count)]
            assert torch.equal(torch.cat(parts, dim=1), linear(x))
            assert max(part.size(1) for part in parts) == parts[0].size(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    norm = RMSNorm(96, 1e-5).to(dtype).requires_grad_(False)
    norm.weight.data = normal(96, dtype=dtype, seed=1)
    for shape in ((1, 96), (300, 96), (5, 3, 96)):
        x, residual = normal(*shape, dtype=dtype, seed=2), 3 * normal(*shape, dtype=dtype, seed=3)
        assert_close(decoder.rmsnorm(x, norm.weight.data, 1e-5), norm(x).double(), dtype)
        want_norm, want_sum = norm.of_sum(x, residual)
        decoder.fused_add_rmsnorm(x, residual, norm.weight.data, 1e-5)
        assert torch.equal(residual, want_sum)
        assert_close(x, want_norm.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_in_place_in_the_middle_of_a_product(dtype: torch.dtype) -> None:
    both = normal(70, 6 * 32, dtype=dtype)
    q, k, v = (part.unflatten(-1, (-1, 32)) for part in both.split([4 * 32, 32, 32], dim=-1))
    angles = torch.rand(70, 16) * 7
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
    want, untouched = [rotate(x, cos_sin) for x in (q, k)], v.clone()
    decoder.apply_rope(None, q, k, 32, cos_sin)
    for got, one in zip((q, k), want, strict=True):
        assert_close(got, one.double(), dtype)
    assert torch.equal(v, untouched)
