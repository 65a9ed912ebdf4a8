"""config.json and generation_config.json: what is read, and what each wrong field says (cases A2 to A5, A18, A19)."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from medha.config import RopeConfig
from medha.errors import ConfigError, UnsupportedModelError, WeightsError
from medha.models.folder import read_json_object
from medha.models.hf_config import _NEUTRAL_VALUES, load_generation_config, load_model_config
from tests.models.hf_folders import REMOVE, YARN, Fields, family, load, refused

MISTRAL = family("mistral", sliding_window=None)
TWO_KINDS = ["full_attention", "sliding_attention"]
NO_WINDOW = {"max_position_embeddings": 8192}  # which a window in effect would refuse


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, lambda path: path.symlink_to("gone"), os.mkfifo])
def test_no_such_file(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "config.json")
    with pytest.raises(ConfigError, match=r"config\.json: (cannot be read|not a file)"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"{", "not JSON: Expecting property name enclosed in double quotes at line 1 column 2"),
        (b'{\n "a": 1,\n "b" 2}', "at line 3 column 6"),
        (b"[]", "holds a list, []"),
        (b'{"a": "\xff"}', "can't decode byte 0xff in position 7"),
        (b'{"x": {"deep": 1, "b": 2, "deep": 3}}', "key 'deep' is given twice"),
        (b'{"a":' * 100_000, "recursion"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "integer"),
        (b'{"a": "' + b"x" * 10_000_000 + b'"}', "larger than 10000000 bytes"),
    ],
)
def test_wrong_json(tmp_path: Path, data: bytes, reason: str) -> None:
    """In any file that is read as an object, by the error that its reader asks for."""
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(WeightsError) as caught:
        read_json_object(path, error=WeightsError)
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)


# -- families (A3, A5) and dimensions (A4) ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rope": RopeConfig()}),
        ({}, {"vocab_size": 128, "intermediate_size": 96, "dtype": "float32"}),
        ({}, {"bos_token_id": 1, "eos_token_ids": (2,), "rms_norm_eps": 1e-6}),
        ({"num_key_value_heads": REMOVE}, {"num_kv_heads": 4}),
        ({"num_key_value_heads": None}, {"num_kv_heads": 4}),
        (MISTRAL | {"num_key_value_heads": None}, {"num_kv_heads": 4}),
        (MISTRAL | {"num_key_value_heads": REMOVE, "num_attention_heads": 16}, {"num_kv_heads": 8}),
        ({"max_position_embeddings": REMOVE}, {"max_position_embeddings": 2048}),
        (family("qwen2"), {"qkv_bias": True, "o_bias": False, "qk_norm": False, "head_dim": 16, "eos_token_ids": ()}),
        (family("qwen2", head_dim=32), {"head_dim": 32}),
        (family("qwen3"), {"qkv_bias": False, "qk_norm": True, "head_dim": 128, "bos_token_id": None}),
        (family("qwen3", attention_bias=True), {"qkv_bias": True, "o_bias": True}),
        ({"attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
        ({"architectures": REMOVE}, {"architecture": "LlamaForCausalLM"}),
        ({"architectures": [], "model_type": "qwen3"}, {"architecture": "Qwen3ForCausalLM"}),
        ({"head_dim": 20, "hidden_size": 63}, {"head_dim": 20, "hidden_size": 63}),
        ({"rms_norm_eps": 1e-5, "tie_word_embeddings": True}, {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}),
        ({"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"dtype": "torch.float16"}, {"dtype": "float16"}),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, {"dtype": "float16"}),
        ({"bos_token_id": None, "eos_token_id": None}, {"bos_token_id": None, "eos_token_ids": ()}),
        ({"eos_token_id": [5, 7, 5], "bos_token_id": 0}, {"bos_token_id": 0, "eos_token_ids": (5, 7)}),
        ({"vocab_size": 2}, {"bos_token_id": 1, "eos_token_ids": ()}),
        (MISTRAL, NO_WINDOW),
        (family("mistral", sliding_window=8192), NO_WINDOW),
        ({"sliding_window": 8192}, NO_WINDOW),
        ({"sliding_window": 512, "layer_types": ["full_attention"] * 2}, NO_WINDOW),
        (family("qwen2", use_sliding_window=False, sliding_window=512), NO_WINDOW),
        (family("qwen2", use_sliding_window=True, sliding_window=None), NO_WINDOW),
        (family("qwen2", use_sliding_window=True, sliding_window=512, max_window_layers=2), NO_WINDOW),
        (family("qwen3", use_sliding_window=True, sliding_window=512, layer_types=["full_attention"] * 2), NO_WINDOW),
    ],
)
def test_fields_and_defaults(tmp_path: Path, changes: Fields, expected: Fields) -> None:
    config = load(tmp_path, changes)
    assert {name: getattr(config, name) for name in expected} == expected


def test_another_model_type(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for model_type in ("llama", None, REMOVE):
        load(tmp_path, {"model_type": model_type})
    assert not caplog.text
    assert load(tmp_path, {"model_type": "gemma"}).architecture == "LlamaForCausalLM"
    assert "architectures=['LlamaForCausalLM'] and model_type='gemma': medha goes by the former" in caplog.text


def test_fields_that_would_change_the_output(tmp_path: Path) -> None:
    for field, neutral in _NEUTRAL_VALUES.items():
        refused(tmp_path, UnsupportedModelError, {field: 0.7}, [f"{field}=0.7 changes the model's output", "null"])
        for value in (*neutral, None):
            assert load(tmp_path, {field: value}) == load(tmp_path)


SIZES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]


@pytest.mark.parametrize("field", [*SIZES, "num_key_value_heads", "head_dim", "max_position_embeddings"])
def test_wrong_dimension(tmp_path: Path, field: str) -> None:
    for value in (0, True, "64", 64.0, 2**40, 10**400):
        parts = [f"config.json: {field}={repr(value)[:90]}", "accepted: an integer from 1 to"]
        refused(tmp_path, ConfigError, {field: value}, parts)


REFUSED: dict[type[ConfigError], list[tuple[Fields, list[str]]]] = {
    UnsupportedModelError: [
        ({"architectures": ["GPT2LMHeadModel"]}, ["'GPT2LMHeadModel'", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": REMOVE, "model_type": "gpt2"}, ["model_type='gpt2'", "llama, mistral, qwen2, qwen3"]),
        ({"architectures": REMOVE, "model_type": REMOVE}, ["model_type=None", "supported"]),
        ({"layer_types": ["full_attention", "linear_attention"]}, ["layer_types", "'linear_attention'", "accepted"]),
        ({"layer_types": TWO_KINDS, "sliding_window": None}, ["layer_types", "sliding_window=None"]),
    ],
    ConfigError: [
        ({"hidden_size": REMOVE}, ["hidden_size is missing", "accepted: an integer"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
        ({"head_dim": 15}, ["head_dim=15 is odd"]),
        ({"hidden_size": 60}, ["head_dim=15 is odd"]),
        ({"hidden_size": 66}, ["hidden_size=66", "num_attention_heads=4"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps=0", "above 0"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps=nan"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings='yes'", "true or false"]),
        ({"attention_bias": 1}, ["attention_bias=1"]),
        ({"dtype": "float64"}, ["dtype='float64'", "float32, bfloat16, float16"]),
        ({"dtype": ""}, ["dtype=''", "float32, bfloat16, float16"]),
        ({"model_type": "qwen2"}, ["architectures=['LlamaForCausalLM']", "model_type='qwen2'"]),
        ({"dual_chunk_attention_config": 4096}, ["dual_chunk_attention_config=4096", "an object or null"]),
        ({"bos_token_id": 128}, ["bos_token_id=128", "from 0 to 127"]),
        ({"eos_token_id": 128}, ["eos_token_id=128", "from 0 to 127"]),
        ({"eos_token_id": [1, -1]}, ["eos_token_id=[1, -1]"]),
        ({"layer_types": ["full_attention"]}, ["layer_types=", "a list of 2 names"]),
    ],
}


@pytest.mark.parametrize(("error", "changes", "parts"), [(e, *row) for e, rows in REFUSED.items() for row in rows])
def test_refused(tmp_path: Path, error: type[ConfigError], changes: Fields, parts: list[str]) -> None:
    length = {"max_model_len": 1} if error is UnsupportedModelError else {}
    refused(tmp_path, error, changes, ["config.json", *parts], **length)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        (family("mistral", sliding_window=4096), 4096),
        (family("mistral"), 4096),  # absent: the default of transformers
        ({"sliding_window": 512}, 512),
        (family("qwen2", use_sliding_window=True, sliding_window=1024, max_window_layers=1), 1024),
        (family("qwen3", use_sliding_window=True, max_window_layers=0), 4096),
        (family("qwen3", sliding_window=512, layer_types=TWO_KINDS), 512),
        ({"layer_types": TWO_KINDS, "sliding_window": 512}, 512),
        ({"dual_chunk_attention_config": {"chunk_size": 4096}}, 4096),
    ],
)
def test_window_in_effect(tmp_path: Path, changes: Fields, window: int) -> None:
    refused(tmp_path, UnsupportedModelError, changes, [str(window), f"--max-model-len {window} or less", "8192"])
    refused(tmp_path, UnsupportedModelError, changes, ["window"], max_model_len=window + 1)
    assert load(tmp_path, changes, max_model_len=window).max_position_embeddings == 8192
    load(tmp_path, {**changes, "max_position_embeddings": window})


# -- hf_overrides (A19) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "overrides", "expected"),
    [
        ({}, {"rms_norm_eps": 1e-3}, {"rms_norm_eps": 1e-3}),
        ({"quantization_config": {"bits": 4}}, {"quantization_config": None}, {}),
        ({}, {"rope_theta": 5e5}, {"rope": RopeConfig(theta=5e5)}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, {"rope_theta": 5e5}, {"theta": 5e5}),
        ({"rope_theta": 1e6}, {"rope_parameters": YARN}, {"theta": 1e6, "factor": 4.0}),
        ({"rope_theta": 1e6, "rope_scaling": YARN}, {"rope_parameters": {"factor": 8}}, {"theta": 1e6, "factor": 8}),
        ({"rope_parameters": YARN}, {"rope_scaling": {"type": "yarn", "factor": 8.0}}, {"factor": 8.0}),
        ({"rope_theta": 1e6, "rope_scaling": YARN}, {"rope_scaling": None}, {"rope": RopeConfig(theta=1e6)}),
        (family("mistral"), {"sliding_window": None}, {"architecture": "MistralForCausalLM"}),
        ({"architectures": ["CustomForCausalLM"]}, {"architectures": ["LlamaForCausalLM"]}, {}),
    ],
)
def test_overrides(tmp_path: Path, changes: Fields, overrides: Fields, expected: Fields) -> None:
    config = load(tmp_path, changes, hf_overrides=overrides)
    for name, value in expected.items():
        assert getattr(config if hasattr(config, name) else config.rope, name) == value


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"max_position_embedings": 5}, ["'max_position_embedings'=5", "did you mean max_position_embeddings?"]),
        ({"zzz": 1}, ["'zzz'=1", "accepted: a field of config.json"]),
        ({"vocab_size": "128"}, ["config.json with hf_overrides: vocab_size='128'"]),
        ({"rope_parameters": {"rope_type": "yarn"}}, ["hf_overrides: rope_parameters: factor is missing"]),
    ],
)
def test_wrong_overrides(tmp_path: Path, overrides: Fields, parts: list[str]) -> None:
    refused(tmp_path, ConfigError, {}, ["hf_overrides", *parts], hf_overrides=overrides)


# -- generation_config.json (A18) ------------------------------------------------------------------------------


def generation(folder: Path, raw: Fields) -> tuple[dict[str, float | int], tuple[int, ...]]:
    (folder / "generation_config.json").write_text(json.dumps(raw))
    return load_generation_config(folder, 128)


DRAWS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("raw", "sampling", "eos"),
    [
        ({"do_sample": True, "eos_token_id": [5, 6], "max_new_tokens": 99}, {"max_tokens": 99}, (5, 6)),
        (DRAWS, DRAWS, ()),
        ({"do_sample": False}, {"temperature": 0.0}, ()),
        ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}, ()),
        ({"do_sample": None, "temperature": 0.7}, {"temperature": 0.7}, ()),
        ({"temperature": 0}, {"temperature": 0.0}, ()),
    ],
)
def test_generation_defaults(tmp_path: Path, raw: Fields, sampling: dict[str, float], eos: Any) -> None:
    assert load_generation_config(tmp_path, 128) == ({}, ())
    assert generation(tmp_path, raw) == (sampling, eos)


def test_wrong_generation_field(tmp_path: Path) -> None:
    wrong = {"temperature": float("nan"), "top_p": 0, "repetition_penalty": 0, "do_sample": "yes", "max_new_tokens": 0}
    for field, value in [*wrong.items(), ("temperature", -1), ("top_p", 1.01), ("eos_token_id", 128)]:
        with pytest.raises(ConfigError) as caught:
            generation(tmp_path, {field: value})
        assert f"generation_config.json: {field}={value!r}; accepted: " in str(caught.value)


def test_generation_fields_that_are_not_implemented_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields = {  # with a value, beside null, that changes nothing and one that does
        **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"), ([], [5])),
        "stop_strings": ("", "x"),
        **dict.fromkeys(("no_repeat_ngram_size", "min_new_tokens", "min_length", "epsilon_cutoff"), (0, 1)),
        **dict.fromkeys(("eta_cutoff", "penalty_alpha"), (0.0, 0.6)),
        **dict.fromkeys(("num_beams", "num_return_sequences"), (1, 2)),
        **dict.fromkeys(("typical_p", "guidance_scale", "encoder_repetition_penalty"), (1.0, 0)),
        "max_length": (20, 45),
        **dict.fromkeys(("top_h", "forced_bos_token_id", "forced_eos_token_id"), (None, 0)),
        "exponential_decay_length_penalty": (None, [5, 1.1]),
    }
    generation(tmp_path, {name: neutral for name, (neutral, _) in fields.items()})
    generation(tmp_path, dict.fromkeys(fields))
    assert not caplog.text
    generation(tmp_path, {name: value for name, (_, value) in fields.items()})
    assert f"not implemented, and left out: {', '.join(fields)}" in caplog.text
