"""Models that a simulation knows by name; their figures are those of the public ``config.json`` on the hub."""

from __future__ import annotations

import difflib
import re
from dataclasses import replace
from pathlib import Path

from medha.config import ModelConfig, RopeConfig
from medha.errors import ConfigError
from medha.models.hf_config import load_model_config

_LLAMA_3_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    rope=RopeConfig(theta=500000.0),
    rms_norm_eps=1e-5,
    dtype="bfloat16",
    bos_token_id=128000,
    eos_token_ids=(128001,),
)
_LLAMA_3_1_8B = replace(
    _LLAMA_3_8B,
    max_position_embeddings=131072,
    rope=RopeConfig("llama3", 500000.0, 8.0, 8192, low_freq_factor=1.0, high_freq_factor=4.0),
)
_LLAMA_3_70B = replace(_LLAMA_3_8B, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64)
_QWEN_2_5_14B_1M = replace(
    _LLAMA_3_8B,
    architecture="Qwen2ForCausalLM",
    vocab_size=152064,
    hidden_size=5120,
    intermediate_size=13824,
    num_layers=48,
    num_heads=40,
    max_position_embeddings=1010000,
    rope=RopeConfig(theta=10000000.0),
    qkv_bias=True,
    bos_token_id=151643,
    eos_token_ids=(151645,),
)

KNOWN_MODELS = {
    "llama-3-8b": _LLAMA_3_8B,
    "llama-3-70b": _LLAMA_3_70B,
    "llama-3.1-8b": _LLAMA_3_1_8B,
    "qwen2.5-14b-1m": _QWEN_2_5_14B_1M,
}
_AROUND = re.compile(r"^(meta-llama|qwen)/(meta-)?|-instruct")
"""What ids on the hub have around or in these names."""


def find_model(name_or_path: str | Path) -> ModelConfig:
    """A known model by name or id on the hub, in any case, or that of a ``config.json`` or its folder.

    A simulation takes the shape alone, so contexts may be longer than ``max_position_embeddings``.
    """
    name = _AROUND.sub("", str(name_or_path).lower()).replace("llama3", "llama-3")
    if name in KNOWN_MODELS:
        return KNOWN_MODELS[name]
    path = Path(name_or_path)
    folder = path.parent if path.name == "config.json" else path
    if (folder / "config.json").is_file():
        return load_model_config(folder)
    near = difflib.get_close_matches(name, KNOWN_MODELS, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigError(
        f"model {str(name_or_path)!r} is not known; accepted: {', '.join(KNOWN_MODELS)}, or the path of a config.json"
        f"{hint}"
    )
