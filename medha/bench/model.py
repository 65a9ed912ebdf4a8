"""The models that benchmarks run: random Llamas of 4 layers with GQA 4, 1,024 or 512 wide."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RANDOM_LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Fields of its ``config.json``."""

NARROW_LLAMA: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
"""What differs in the narrow one: head dimension 64 as well."""


def random_llama(overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The fields with some replaced."""
    return RANDOM_LLAMA | dict(overrides or {})


def describe(shape: Mapping[str, Any]) -> str:
    """The shape in words, for a table's title."""
    sharing = shape["num_attention_heads"] // shape["num_key_value_heads"]
    return f"random Llama, {shape['num_hidden_layers']} layers, {shape['hidden_size']:,} wide, GQA {sharing}"


def write_config(folder: Path, shape: Mapping[str, Any]) -> None:
    """Write a ``config.json`` that ``load_format="dummy"`` makes a model of."""
    fields = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-6, **shape}
    fields["eos_token_id"] = 0  # an end-of-sequence id is wanted, and ignored
    (folder / "config.json").write_text(json.dumps(fields))
