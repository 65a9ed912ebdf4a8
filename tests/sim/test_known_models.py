"""Models by name, alias and path."""

import json
import re
from pathlib import Path

import pytest

from medha.errors import ConfigError
from medha.sim.replica import KNOWN_MODELS, find_model
from tests.models.hf_folders import LLAMA


def test_names_aliases_and_shapes() -> None:
    assert set(KNOWN_MODELS) == {"llama-3-8b", "llama-3-70b", "llama-3.1-8b", "qwen2.5-14b-1m"}
    for name in KNOWN_MODELS:
        assert find_model(name) == find_model(name.upper())
    assert find_model("meta-llama/Meta-Llama-3-70B-Instruct") == find_model("llama3-70b") == find_model("llama-3-70b")
    assert find_model("Qwen/Qwen2.5-14B-Instruct-1M") == find_model("qwen2.5-14b-1m")
    shapes = [(one.num_layers, one.hidden_size, one.max_position_embeddings) for one in map(find_model, KNOWN_MODELS)]
    assert shapes == [(32, 4096, 8192), (80, 8192, 8192), (32, 4096, 131072), (48, 5120, 1010000)]
    stretched, biased = find_model("llama-3.1-8b"), find_model("qwen2.5-14b-1m")
    assert (stretched.rope.rope_type, stretched.rope.factor, biased.qkv_bias) == ("llama3", 8.0, True)


def test_a_folder_or_its_config(tmp_path: Path) -> None:
    config = LLAMA | {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0, "rms_norm_eps": 1e-5}
    config |= {"torch_dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": 128001}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert find_model(tmp_path) == find_model(str(tmp_path / "config.json")) == find_model("llama-3-8b")


def test_an_unknown_name_names_the_nearest(tmp_path: Path) -> None:
    message = (
        "model 'llama-3-80b' is not known; accepted: llama-3-8b, llama-3-70b, llama-3.1-8b, qwen2.5-14b-1m, or the "
        "path of a config.json; did you mean llama-3-8b?"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        find_model("llama-3-80b")
    with pytest.raises(ConfigError, match=r"or the path of a config\.json$"):
        find_model(tmp_path / "q")
