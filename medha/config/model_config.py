"""What a model is: its shape, and its rotary embedding.

Reading a Hugging Face ``config.json`` into a :class:`ModelConfig` is the work of :mod:`medha.models.hf_config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DTYPES = ("float32", "bfloat16", "float16")
RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of a model, complete: no field depends on the length of a request.

    Attributes:
        rope_type: which rule turns theta into inverse frequencies.
        theta: base of the frequencies.
        factor: how far the context is stretched (linear, llama3, yarn); 1 otherwise.
        original_max_position_embeddings: trained context in tokens (llama3, yarn).
        low_freq_factor, high_freq_factor: band limits (llama3).
        beta_fast, beta_slow: ramp limits in rotations (yarn).
        truncate: round the ramp limits to whole dimensions (yarn).
        attention_factor: cos and sin are multiplied by it (yarn); 1 otherwise.
    """

    rope_type: RopeType = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only model, independent of who wrote its ``config.json``.

    Attributes:
        architecture: name in ``config.json``, for example ``LlamaForCausalLM``.
        dtype: dtype of the checkpoint: ``float32``, ``bfloat16`` or ``float16``.
        max_position_embeddings: longest context in tokens that the model claims, stretching by RoPE included.
        qkv_bias, o_bias: whether the attention projections carry a bias.
        qk_norm: RMSNorm over each query and key head (Qwen3).
        eos_token_ids: ids that end a sequence, from ``config.json``; may be empty.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    rms_norm_eps: float = 1e-6
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token leaves in the cache, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes
