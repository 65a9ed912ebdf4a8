"""Rotary position embedding: inverse frequencies of each type, and the angles of a step's own positions.

Angles are computed in float64 for the positions of the step and only then rounded to float32, so they stay accurate at
position 10,000,000, where float32 products are off by up to 0.4 rad (theta 5e5). No table is kept. Everything depends
on the configuration and the position alone, never on a request's length, so chunks of any size agree.

Sources: RoPE, arXiv 2104.09864; linear interpolation, arXiv 2306.15595; YaRN, arXiv 2309.00071; llama3 as in the Llama
3.1 release. Conventions follow Hugging Face (dimension i pairs with i + H / 2).

Legend: T tokens, H head dimension, N heads.
"""

from __future__ import annotations

import math

import torch

from medha.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians a position for each pair of dimensions: float64 [H / 2] on the CPU."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    inv_freq = rope.theta**-exponents
    if rope.rope_type == "default":
        return inv_freq
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, inv_freq)
    return _yarn(rope, inv_freq, head_dim)


def cos_sin(
    positions_T: torch.Tensor, inv_freq: torch.Tensor, attention_factor: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine, float32 [T, H / 2], of the rotation at each position, computed in float64.

    ``positions_T`` is int64 or float64, on the device of ``inv_freq``; both are multiplied by YaRN's attention factor.
    """
    angles = positions_T.to(torch.float64)[:, None] * inv_freq
    return (angles.cos() * attention_factor).float(), (angles.sin() * attention_factor).float()


def rotate(x_TNH: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor) -> torch.Tensor:
    """Rotate each head's pairs (i, i + H / 2), in float32; a new tensor in the dtype of x."""
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    first, second = x_TNH.float().chunk(2, dim=-1)
    out = torch.empty(x_TNH.shape, dtype=torch.float32, device=x_TNH.device)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out.to(x_TNH.dtype)


def _llama3(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Slow frequencies divided by the factor, fast ones kept, a linear blend between the two bands."""
    assert rope.low_freq_factor is not None and rope.high_freq_factor is not None
    assert rope.original_max_position_embeddings is not None
    rotations = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = ((rotations - rope.low_freq_factor) / span).clamp(0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / rope.factor


def _yarn(rope: RopeConfig, inv_freq: torch.Tensor, head_dim: int) -> torch.Tensor:
    """NTK by parts: dimensions that turn often are kept, those that turn seldom are interpolated (section 3.2)."""
    assert rope.original_max_position_embeddings is not None
    context = rope.original_max_position_embeddings

    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as Hugging Face does, so that the ramp has a slope
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    return ramp * inv_freq / rope.factor + (1 - ramp) * inv_freq
