"""A Llama forward written as plainly as it goes, and random checkpoints for it: what ``medha verify`` compares with.

It shares no line with the model that serves: float64 on the CPU, one whole sequence, a dense softmax head by head, no
KV cache, no batch, no chunks, no splits. Configuration and weights go by their Hugging Face names.

Legend: T tokens, D model dimension, N query heads, K KV heads, H head dimension, V vocabulary.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save

Weights = Mapping[str, torch.Tensor]


def llama_config(**fields: Any) -> dict[str, Any]:
    """The content of a small ``config.json`` with these fields, which give it layers, heads, an inner size and a
    dtype."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 128,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 131072,
        "bos_token_id": None,
        "eos_token_id": 0,
    } | fields


def parameter_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of each weight by its name."""
    D, H = config["hidden_size"], config["head_dim"]
    q, kv, inner = config["num_attention_heads"] * H, config["num_key_value_heads"] * H, config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], D)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj": (q, D), "self_attn.k_proj": (kv, D), "self_attn.v_proj": (kv, D),
            "self_attn.o_proj": (D, q), "mlp.gate_proj": (inner, D), "mlp.up_proj": (inner, D),
            "mlp.down_proj": (D, inner), "input_layernorm": (D,), "post_attention_layernorm": (D,),
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes | {"model.norm.weight": (D,), "lm_head.weight": (config["vocab_size"], D)}


def random_weights(config: Mapping[str, Any], *, seed: int) -> dict[str, torch.Tensor]:
    """Seeded weights in the dtype of the configuration, large enough that attention is far from an average."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, config["dtype"])
    return {name: _random(shape, generator).to(dtype) for name, shape in parameter_shapes(config).items()}


def write_checkpoint(folder: Path, config: Mapping[str, Any], weights: Weights, **others: Any) -> Path:
    """Write a Hugging Face folder, which is created, and return it: weights, what ``others`` say of further JSON files
    by their names, and ``config.json`` last. Files of an earlier one are replaced, each at once."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"model.safetensors": save(dict(weights), metadata={"format": "pt"})}
    files |= {f"{name}.json": json.dumps(x, indent=2).encode() for name, x in {**others, "config": config}.items()}
    for name, content in files.items():
        part = folder / f"{name}.{os.getpid()}.part"
        part.write_bytes(content)
        os.replace(part, folder / name)
    return folder


@torch.inference_mode()
def next_token_logprobs(config: Mapping[str, Any], weights: Weights, ids: list[int]) -> torch.Tensor:
    """Natural-log probabilities of what follows each token of a sequence: float64 [T, V] on the CPU."""
    doubles = {name: weight.double() for name, weight in weights.items()}
    eps = config["rms_norm_eps"]
    x_TD = doubles["model.embed_tokens.weight"][torch.tensor(ids)]
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        layer = {n[len(prefix) : -len(".weight")]: w for n, w in doubles.items() if n.startswith(prefix)}
        x_TD = x_TD + _attention(config, layer, _norm(x_TD, layer["input_layernorm"], eps))
        y_TD = _norm(x_TD, layer["post_attention_layernorm"], eps)
        gated = F.silu(y_TD @ layer["mlp.gate_proj"].T) * (y_TD @ layer["mlp.up_proj"].T)
        x_TD = x_TD + gated @ layer["mlp.down_proj"].T
    return torch.log_softmax(_norm(x_TD, doubles["model.norm.weight"], eps) @ doubles["lm_head.weight"].T, dim=-1)


def _random(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A norm's weight from 0.5 to 1.5; a matrix whose product with unit inputs has a spread of 1.5."""
    if len(shape) == 1:
        return torch.rand(shape, generator=generator).add_(0.5)
    return torch.randn(shape, generator=generator) * (1.5 / math.sqrt(shape[1]))


def _norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    return x_TD * torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + eps) * weight_D


def _attention(config: Mapping[str, Any], layer: Weights, x_TD: torch.Tensor) -> torch.Tensor:
    """Causal grouped-query attention, one head after the other."""
    T, H = len(x_TD), config["head_dim"]
    q_TNH, k_TKH, v_TKH = ((x_TD @ layer[f"self_attn.{name}_proj"].T).view(T, -1, H) for name in ("q", "k", "v"))
    q_TNH, k_TKH = _rotated(q_TNH, config["rope_theta"]), _rotated(k_TKH, config["rope_theta"])
    future_TT = torch.ones(T, T, dtype=torch.bool).triu(1)
    group = q_TNH.shape[1] // k_TKH.shape[1]
    heads = []
    for n in range(q_TNH.shape[1]):
        scores_TT = q_TNH[:, n] @ k_TKH[:, n // group].T / H**0.5
        heads.append(torch.softmax(scores_TT.masked_fill(future_TT, -torch.inf), dim=-1) @ v_TKH[:, n // group])
    return torch.cat(heads, dim=-1) @ layer["self_attn.o_proj"].T


def _rotated(x_TNH: torch.Tensor, theta: float) -> torch.Tensor:
    """RoPE (arXiv 2104.09864): dimension i and i + H / 2 turn by the position times ``theta ** (-2 i / H)``."""
    T, _, H = x_TNH.shape
    angles_TR = torch.arange(T).double()[:, None] * theta ** (-torch.arange(0, H, 2).double() / H)
    cos, sin = angles_TR.cos()[:, None], angles_TR.sin()[:, None]
    first, second = x_TNH.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
