"""What a model is: its shape, and its rotary embedding; :mod:`medha.models.hf_config` reads it from a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DTYPES = ("float32", "bfloat16", "float16")
RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of a model, complete: no field depends on the length of a request."""

    rope_type: RopeType = "default"  # which rule turns theta into inverse frequencies
    theta: float = 10000.0  # base of the frequencies
    factor: float = 1.0  # how far the context is stretched (linear, llama3, yarn); 1 otherwise
    original_max_position_embeddings: int | None = None  # trained context in tokens (llama3, yarn)
    low_freq_factor: float | None = None  # band limits (llama3)
    high_freq_factor: float | None = None
    beta_fast: float = 32.0  # ramp limits in rotations (yarn)
    beta_slow: float = 1.0
    truncate: bool = True  # round the ramp limits to whole dimensions (yarn)
    attention_factor: float = 1.0  # cos and sin are multiplied by it (yarn); 1 otherwise


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only model, independent of who wrote its ``config.json``."""

    architecture: str  # name in config.json, for example LlamaForCausalLM
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # longest context in tokens that the model claims, stretching by RoPE included
    rope: RopeConfig
    rms_norm_eps: float = 1e-6
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each query and key head (Qwen3)
    tie_word_embeddings: bool = False
    dtype: str = "float32"  # of the checkpoint: float32, bfloat16 or float16
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # that end a sequence, from config.json

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one token leaves in the cache, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes

    def layer_parameters(self, tp: int = 1) -> int:
        """Parameters of a layer on one of ``tp`` ranks: norms whole, all else its share; a KV head at least."""
        D, H, inner = self.hidden_size, self.head_dim, self.intermediate_size // tp
        heads, kv_heads = self.num_heads // tp, max(1, self.num_kv_heads // tp)
        qkv = (heads + 2 * kv_heads) * H
        biases = self.qkv_bias * qkv + self.o_bias * D
        return D * qkv + heads * H * D + 3 * D * inner + 2 * D + biases + self.qk_norm * 2 * H

    def num_parameters(self, layers: range, tp: int = 1) -> int:
        """Parameters on one of ``tp`` ranks that hold some layers, with embedding and head where they have the ends."""
        is_first, is_last = layers.start == 0, layers.stop == self.num_layers
        tables = 1 if is_first and is_last and self.tie_word_embeddings else is_first + is_last
        vocabulary = self.vocab_size * self.hidden_size // tp
        return len(layers) * self.layer_parameters(tp) + tables * vocabulary + is_last * self.hidden_size
