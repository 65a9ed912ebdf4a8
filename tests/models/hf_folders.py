"""A small ``config.json`` with some fields changed, and what reading it must raise."""

import json
from pathlib import Path
from typing import Any

import pytest

from medha.config import ModelConfig
from medha.errors import ConfigError
from medha.models.hf_config import load_model_config

Fields = dict[str, Any]
SHAPE: Fields = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
LLAMA: Fields = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPE}
REMOVE = type  # no JSON has it, and tests that are given it have equal names in every process
YARN: Fields = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3: Fields = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 1024,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def family(name: str, **changes: Any) -> Fields:
    return {"architectures": [f"{name.capitalize()}ForCausalLM"], "model_type": name, **changes}


def load(folder: Path, changes: Fields | None = None, **options: Any) -> ModelConfig:
    raw = {key: value for key, value in {**LLAMA, **(changes or {})}.items() if value is not REMOVE}
    (folder / "config.json").write_text(json.dumps(raw))
    return load_model_config(folder, **options)


def refused(folder: Path, error: type[ConfigError], changes: Fields, parts: list[str], **options: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder, changes, **options)
    assert type(caught.value) is error, caught.value
    for part in parts:
        assert part in str(caught.value)
    assert len(str(caught.value)) < 1000
