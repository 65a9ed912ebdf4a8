"""Arithmetic and bytes of a prefill and a decode, from the shape of a model alone.

Source: arXiv:2409.17264, v4 eqs. 1 to 3 (per layer; here over all layers) and v5 eq. 1.
"""

from __future__ import annotations

from medha.config import ModelConfig

DTYPE_BYTES = 2


def attention_flops(model: ModelConfig, tokens: float, *, causal: bool = True) -> float:
    """FLOPs of attention over a prompt, all layers: v4 eq. 1, or twice that where the mask is not made use of."""
    full = 4 * tokens**2 * model.head_dim * model.num_heads * model.num_layers
    return full / 2 if causal else full


def linear_parameters(model: ModelConfig) -> int:
    """Parameters that every token is multiplied by: all layers, without embedding and head."""
    width, kv_width = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = model.hidden_size * (2 * width + 2 * kv_width)
    return model.num_layers * (attention + 3 * model.hidden_size * model.intermediate_size)


def prefill_flops(model: ModelConfig, tokens: float, *, causal: bool = True) -> float:
    """FLOPs of a prefill: attention and linear layers."""
    return attention_flops(model, tokens, causal=causal) + 2 * linear_parameters(model) * tokens


def kv_bytes(model: ModelConfig, tokens: float) -> float:
    """Bytes of keys and values, all layers: v4 eq. 2."""
    return tokens * model.kv_bytes_per_token(DTYPE_BYTES)


def weight_bytes(model: ModelConfig) -> float:
    """Bytes that a decode reads of the weights: layers and head."""
    return DTYPE_BYTES * (linear_parameters(model) + model.vocab_size * model.hidden_size)


def chunk_intensity(model: ModelConfig, chunk: float) -> float:
    """FLOPs per byte of the attention of a chunk: v5 eq. 1, v4 eq. 3; the context length cancels."""
    return chunk * model.num_heads / model.num_kv_heads
