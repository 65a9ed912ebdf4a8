"""RoPE against finer arithmetic where float32 angles of transformers are wrong; else tests/models/test_hf_rope.py."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from medha.config import RopeConfig
from medha.models.layers import cos_sin, inverse_frequencies, rotate


@pytest.mark.parametrize("position", [10_000_000, 9_999_999, 8_388_609, 2**31 - 1])
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000000.0])
def test_angles_are_exact_at_ten_million(theta: float, position: int) -> None:
    positions = torch.tensor([position])
    inv_freq = inverse_frequencies(RopeConfig(theta=theta), 128)
    angles = position * np.longdouble(theta) ** (np.arange(64, dtype=np.longdouble) / -64)  # off by 1e-10
    exact = np.concatenate([np.cos(angles), np.sin(angles)]).astype(float)
    assert np.abs(cos_sin(positions, inv_freq)[0].numpy() - exact).max() < 1e-6
    # Why the angles are float64: products in float32 are off by far more than any rounding of the model.
    product = positions.float()[:, None] * inv_freq.float()
    assert np.abs(product.cos()[0].numpy() - exact[:64]).max() > 0.05


@settings(max_examples=50, derandomize=True, deadline=None)
@given(
    start=st.integers(0, 10_000_000),
    pieces=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    head_dim=st.sampled_from([16, 80, 128]),
)
def test_chunks_of_any_size_agree_to_the_bit(start: int, pieces: list[int], head_dim: int) -> None:
    inv_freq = inverse_frequencies(RopeConfig(theta=500000.0), head_dim)
    positions = torch.arange(start, start + sum(pieces))
    whole = cos_sin(positions, inv_freq, 1.1)
    assert torch.equal(torch.cat([cos_sin(piece, inv_freq, 1.1) for piece in positions.split(pieces)]), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotate_rounds_once(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.randn(20, 4, 32).to(dtype)
    before = x.clone()
    angles = cos_sin(torch.arange(20), inverse_frequencies(RopeConfig(), 32))
    out = rotate(x, angles)
    assert out.dtype == dtype
    assert torch.equal(out, rotate(x.float(), angles).to(dtype))
    assert torch.equal(x, before)
