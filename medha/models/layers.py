"""The layers of a decoder: norms, attention projections, MLP, linear weights packed for the machine, and RoPE.

Modules keep the parameter names of Hugging Face checkpoints. Attention itself is handed in as a callable, so the same
layer serves a plain, a sharded or a captured forward. After loading, :meth:`pack_` of a module fuses the projections
that read the same input and packs them for the CPU's matrix library; until then the forward is plain ``nn.Linear``.

Legend: T tokens, D model dimension, N query heads, K KV heads, H head dimension, R = H / 2, F MLP dimension.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from medha.config import ModelConfig, RopeConfig
from medha.cpu import decoder as cpu

LinearFn = Callable[[torch.Tensor], torch.Tensor]
AttendFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(q_TNH, k_TKH, v_TKH), rotated, of the batch's tokens -> out_TNH."""

RotateFn = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(q_TNH, k_TKH) -> the same, each turned by its position."""

_LEAST_ROWS = 4
"""That a packed linear layer computes; see :func:`packed_weight`."""


class TensorShard(NamedTuple):
    """This rank's place in a tensor-parallel group, and the collectives that the packed forward uses."""

    rank: int
    size: int
    all_reduce: LinearFn  # sums a tensor over the group, in place, and returns it
    all_gather: LinearFn  # [S, W] of every rank, side by side: [S, size * W]


class FusedKernels(NamedTuple):
    """Functions that do at once what modules do in several: FlashInfer's for 16 bits on CUDA, our own on the CPU. The
    plain modules are the reference."""

    rmsnorm: Callable[..., torch.Tensor]
    fused_add_rmsnorm: Callable[..., None]
    silu_and_mul: LinearFn | None  # None where the product does it
    apply_rope: Callable[..., None]  # apply_rope_with_cos_sin_cache_inplace
    packed_linear: Callable[..., LinearFn] | None = None  # of a weight, with a gate too; None where it is torch's
    append_kv: Callable[..., None] | None = None  # append_paged_kv_cache


OWN_KERNELS = FusedKernels(cpu.rmsnorm, cpu.fused_add_rmsnorm, None, cpu.apply_rope, cpu.PackedLinear)
"""Of the CPU, where :func:`medha.cpu.library.library` is; without the products that torch has faster."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32 (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.fused: FusedKernels | None = None

    def of_sum(self, x_TD: torch.Tensor, more_TD: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of the sum of two tensors, or of the one, and that sum; fused, it takes their memory."""
        if more_TD is not None and self.fused is not None:
            self.fused.fused_add_rmsnorm(more_TD, x_TD, self.weight, self.eps)
            return more_TD, x_TD
        total_TD = x_TD if more_TD is None else x_TD + more_TD
        return self(total_TD), total_TD

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fused is not None:
            return self.fused.rmsnorm(x, self.weight, self.eps)
        x32 = x.float()
        norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)  # one pass, where a mean of squares takes two
        scale = torch.rsqrt(norm.square() / x.shape[-1] + self.eps)
        return (x32 * scale).to(x.dtype).mul_(self.weight)


class Attention(nn.Module):
    """Grouped-query attention: projections, optional q/k norm, RoPE; the attention proper is handed in."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, H = config.hidden_size, config.head_dim
        self.head_dim = H
        self.q_proj = nn.Linear(D, config.num_heads * H, bias=config.qkv_bias)
        self.k_proj = nn.Linear(D, config.num_kv_heads * H, bias=config.qkv_bias)
        self.v_proj = nn.Linear(D, config.num_kv_heads * H, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * H, D, bias=config.o_bias)
        self.q_norm = RMSNorm(H, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(H, config.rms_norm_eps) if config.qk_norm else None
        self._qkv: Callable[[torch.Tensor], Sequence[torch.Tensor]] | None = None
        self._out: LinearFn | None = None

    def forward(self, x_TD: torch.Tensor, rotate_both: RotateFn, attend: AttendFn) -> torch.Tensor:
        parts = [self.q_proj(x_TD), self.k_proj(x_TD), self.v_proj(x_TD)] if self._qkv is None else self._qkv(x_TD)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return (self._out or self.o_proj)(attend(*rotate_both(q, k), v).flatten(-2))

    def pack_(self, shard: TensorShard | None = None, fused: FusedKernels | None = None) -> None:
        """As :meth:`~medha.models.decoder.Decoder.pack_`."""
        sizes = [len(local_part(linear.weight)) for linear in (self.q_proj, self.k_proj, self.v_proj)]
        qkv = packed_linear(self.q_proj, self.k_proj, self.v_proj, fused=fused)
        self._qkv = lambda x_TD: torch.split(qkv(x_TD), sizes, dim=-1)
        self._out = packed_row_linear(self.o_proj, shard, fused)
        del self.q_proj, self.k_proj, self.v_proj, self.o_proj


class MLP(nn.Module):
    """SwiGLU feed-forward (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        D, F_ = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(D, F_, bias=False)
        self.up_proj = nn.Linear(D, F_, bias=False)
        self.down_proj = nn.Linear(F_, D, bias=False)
        self._gated: LinearFn | None = None
        self._down: LinearFn | None = None

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        gated = F.silu(self.gate_proj(x_TD)).mul_(self.up_proj(x_TD)) if self._gated is None else self._gated(x_TD)
        out: torch.Tensor = (self._down or self.down_proj)(gated)
        return out

    def pack_(self, shard: TensorShard | None = None, fused: FusedKernels | None = None) -> None:
        """As :meth:`~medha.models.decoder.Decoder.pack_`."""
        self._gated = packed_swiglu(self.gate_proj, self.up_proj, fused)
        self._down = packed_row_linear(self.down_proj, shard, fused)
        del self.gate_proj, self.up_proj, self.down_proj


class DecoderLayer(nn.Module):
    """Pre-norm residual block: attention, then MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x_TD: torch.Tensor, more_TD: torch.Tensor | None, rotate_both: RotateFn, attend: AttendFn
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer on the sum of two tensors, or on the one; returns the two whose sum is the layer's output."""
        normed_TD, x_TD = self.input_layernorm.of_sum(x_TD, more_TD)
        more_TD = self.self_attn(normed_TD, rotate_both, attend)
        normed_TD, x_TD = self.post_attention_layernorm.of_sum(x_TD, more_TD)
        return x_TD, self.mlp(normed_TD)


def decoder_layers(config: ModelConfig, layers: range) -> nn.ModuleDict:
    """Those layers of a model, by their index in the whole of it."""
    return nn.ModuleDict({str(i): DecoderLayer(config) for i in layers})


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a parameter: its shard if it is a DTensor, the whole otherwise."""
    local: torch.Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach()


def packed_linear(*linears: nn.Linear, fused: FusedKernels | None = None) -> LinearFn:
    """One callable that computes this rank's part of the given layers' outputs side by side."""
    weight = torch.cat([local_part(linear.weight) for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([local_part(linear.bias) for linear in linears])
    return packed_weight(weight, bias, fused=fused)


def packed_swiglu(gate_proj: nn.Linear, up_proj: nn.Linear, fused: FusedKernels | None = None) -> LinearFn:
    """``silu(gate(x)) * up(x)`` of this rank's part: within our own products on the CPU, else of one product."""
    if fused is not None and fused.packed_linear is not None:
        return fused.packed_linear(local_part(up_proj.weight), gate=local_part(gate_proj.weight))
    gate_up = packed_linear(gate_proj, up_proj)
    if fused is not None and (silu_and_mul := fused.silu_and_mul) is not None:
        return lambda x: silu_and_mul(gate_up(x))

    def swiglu(x: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up(x).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    return swiglu


def packed_row_linear(linear: nn.Linear, shard: TensorShard | None, fused: FusedKernels | None) -> LinearFn:
    """A layer whose input features are split over the group: partial products, summed, then the bias once."""
    weight, bias = local_part(linear.weight), None if linear.bias is None else local_part(linear.bias)
    if shard is None:
        return packed_weight(weight, bias, fused=fused)
    partial_product = packed_weight(weight, fused=fused)

    def row_linear(x: torch.Tensor) -> torch.Tensor:
        out = shard.all_reduce(partial_product(x))
        return out if bias is None else out.add_(bias)

    return row_linear


# oneDNN keeps what it has compiled for each number of rows, and so does the layer by which PyTorch calls it: 1,024 each
# if not told otherwise by the first product. Chunks of 300 lengths took 640 MB so; with 128, 120 MB and no more time.
_KEPT_KERNELS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def packed_weight(
    weight: torch.Tensor, bias: torch.Tensor | None = None, *, fused: FusedKernels | None = None
) -> LinearFn:
    """``F.linear`` with a weight [out, in] that is prepared once for the machine.

    On the CPU our own kernel takes it, if ``fused`` has it, 1 to 1.6 times as fast as oneDNN's (float32, AVX2, 1 to
    2,048 rows). Otherwise oneDNN takes it if it has the dtype: 1.1 times as fast as ``F.linear`` at 2,048 rows and 2 to
    4 times at 16. It reads a weight from memory fastest at 4 to 6 rows (1.1 to 1.4 times as fast as at 1 row, 1.2 to
    1.6 times as fast as at 2), so fewer are padded.
    """
    if fused is not None and fused.packed_linear is not None:
        return fused.packed_linear(weight, bias)
    if weight.device.type != "cpu" or weight.dtype == torch.float16 or not onednn_has(weight.dtype):
        return partial(F.linear, weight=weight, bias=bias)
    for name in _KEPT_KERNELS:
        os.environ.setdefault(name, "128")
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    linear_pointwise = torch.ops.mkldnn._linear_pointwise

    def linear(x: torch.Tensor) -> torch.Tensor:
        missing = _LEAST_ROWS - x.size(0)
        if missing > 0:
            x = F.pad(x, (0, 0, 0, missing))
        out: torch.Tensor = linear_pointwise(x, packed, bias, "none", [], "")
        return out[:-missing] if missing > 0 else out

    return linear


def onednn_has(dtype: torch.dtype) -> bool:
    """Whether torch's library has products of a dtype for this CPU."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


# Rotary position embedding, as in Hugging Face: dimension i pairs with i + H / 2. Sources: RoPE, arXiv 2104.09864;
# linear interpolation, arXiv 2306.15595; YaRN, arXiv 2309.00071; llama3 as in the Llama 3.1 release. Angles are made in
# float64 for the positions of a step and only then rounded, so they stay accurate at position 10,000,000, where
# float32 products are off by up to 0.4 rad (theta 5e5). They depend on configuration and position alone, so chunks of
# any size agree.


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


def cos_sin(positions_T: torch.Tensor, inv_freq: torch.Tensor, attention_factor: float = 1.0) -> torch.Tensor:
    """Cosines and behind them sines, float32 [T, H], of the rotation at each position, computed in float64.

    ``positions_T`` is int64 or float64, on the device of ``inv_freq``; both are multiplied by YaRN's attention factor.
    """
    angles = positions_T.to(torch.float64)[:, None] * inv_freq
    both = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return (both if attention_factor == 1.0 else both * attention_factor).float()


def rotate(x_TNH: torch.Tensor, cos_sin_TH: torch.Tensor) -> torch.Tensor:
    """Rotate each head's pairs (i, i + H / 2), in float32; a new tensor in the dtype of x."""
    cos, sin = cos_sin_TH[:, None].chunk(2, dim=-1)
    first, second = x_TNH.float().chunk(2, dim=-1)
    out = torch.empty(x_TNH.shape, dtype=torch.float32, device=x_TNH.device)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out.to(x_TNH.dtype)


def rotation(cos_sin_TH: torch.Tensor, fused: FusedKernels | None) -> RotateFn:
    """The rotation of a step's queries and keys, by what :func:`cos_sin` returns; fused, in place."""
    if fused is None:
        return lambda q_TNH, k_TKH: (rotate(q_TNH, cos_sin_TH), rotate(k_TKH, cos_sin_TH))
    rows_T = torch.arange(len(cos_sin_TH), dtype=torch.int32, device=cos_sin_TH.device)  # a token's angles are its own

    def rotate_both(q_TNH: torch.Tensor, k_TKH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        fused.apply_rope(rows_T, q_TNH, k_TKH, q_TNH.shape[-1], cos_sin_TH)
        return q_TNH, k_TKH

    return rotate_both


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
