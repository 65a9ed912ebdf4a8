"""RoPE against transformers, and against exact arithmetic where transformers' float32 angles are wrong."""

import math
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from medha.config import RopeConfig
from medha.models.layers import cos_sin, inverse_frequencies, rotate

LLAMA3 = {"rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 4096}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "llama3", **LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192},
    {
        "rope_type": "llama3",
        **LLAMA3,
        "factor": 2.0,
        "high_freq_factor": 20.0,
        "original_max_position_embeddings": 1024,
    },
    {"rope_type": "yarn", **YARN},
    {"rope_type": "yarn", **YARN, "truncate": False},
    {"rope_type": "yarn", **YARN, "rope_theta": 1000000.0, "original_max_position_embeddings": 32768},
    {"rope_type": "yarn", **YARN, "beta_fast": 64.0, "beta_slow": 2.0},
    {"rope_type": "yarn", **YARN, "beta_fast": 8.0, "beta_slow": 8.0, "truncate": False},  # a ramp of no width
    {"rope_type": "yarn", **YARN, "original_max_position_embeddings": 2**20},  # the ramp ends beyond the last dimension
    {"rope_type": "yarn", **YARN, "original_max_position_embeddings": 8},  # every dimension is interpolated
    {"rope_type": "yarn", **YARN, "original_max_position_embeddings": 2**40},  # none is
]


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("rope", ROPES, ids=str)
def test_frequencies_cos_and_sin_of_transformers(rope: dict[str, Any], head_dim: int) -> None:
    config = transformers.LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim, rope_parameters=dict(rope)
    )
    reference = LlamaRotaryEmbedding(config)
    fields = {name: value for name, value in rope.items() if name != "rope_theta"}
    inv_freq = inverse_frequencies(RopeConfig(theta=rope["rope_theta"], **fields), head_dim)
    # A power of theta in float32 is off by about ln(theta) units in the last place.
    torch.testing.assert_close(inv_freq, reference.inv_freq.double(), rtol=3e-6, atol=0)
    positions = torch.arange(0, 300)
    wanted = reference(torch.empty(0), positions[None])
    for got, want in zip(cos_sin(positions, inv_freq, reference.attention_scaling), wanted, strict=True):
        assert (got.dtype, got.shape) == (torch.float32, (300, head_dim // 2))
        # transformers' angles are float32: 300 rad times what its inverse frequencies are off by.
        torch.testing.assert_close(torch.cat([got, got], dim=-1), want[0], rtol=0, atol=2e-4)


# -- far positions ---------------------------------------------------------------------------------------------


def exact_angle(position: int, theta: float, i: int, head_dim: int) -> float:
    """Position times theta ** (-2 i / head_dim) modulo a whole turn, in 60 digits."""
    with localcontext() as context:
        context.prec = 60
        turn = 2 * Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
        angle = position * Decimal(theta) ** (Decimal(-2 * i) / Decimal(head_dim))
        return float(angle % turn)


@pytest.mark.parametrize("position", [10_000_000, 9_999_999, 8_388_609, 2**31 - 1])
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000000.0])
def test_angles_are_exact_at_ten_million(theta: float, position: int) -> None:
    positions = torch.tensor([position])
    inv_freq = inverse_frequencies(RopeConfig(theta=theta), 128)
    cos, sin = cos_sin(positions, inv_freq)
    angles = [exact_angle(position, theta, i, 128) for i in range(64)]
    assert max(abs(float(c) - math.cos(a)) for c, a in zip(cos[0], angles, strict=True)) < 1e-6
    assert max(abs(float(s) - math.sin(a)) for s, a in zip(sin[0], angles, strict=True)) < 1e-6
    # Why the angles are float64: products in float32 are off by far more than any rounding of the model.
    product = positions.float()[:, None] * inv_freq.float()
    assert max(abs(float(c) - math.cos(a)) for c, a in zip(product.cos()[0], angles, strict=True)) > 0.05


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
    parts = [cos_sin(piece, inv_freq, 1.1) for piece in positions.split(pieces)]
    for i in range(2):
        assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])


# -- rotation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotate_rounds_once(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x = torch.randn(20, 4, 32).to(dtype)
    before = x.clone()
    cos, sin = cos_sin(torch.arange(20), inverse_frequencies(RopeConfig(), 32))
    out = rotate(x, cos, sin)
    assert out.dtype == dtype
    assert torch.equal(out, rotate(x.float(), cos, sin).to(dtype))
    assert torch.equal(x, before)
