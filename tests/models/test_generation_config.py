"""generation_config.json: what is read, and what each wrong field says (case A18)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from medha.errors import ConfigError
from medha.models.hf_config import GenerationDefaults, load_generation_config


def test_generation_defaults(tmp_path: Path) -> None:
    assert load_generation_config(tmp_path, 128) == GenerationDefaults()
    assert GenerationDefaults().sampling_defaults() == {}
    raw = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0,
        "repetition_penalty": 1.05,
        "eos_token_id": [5, 6],
        "max_new_tokens": 99,
        "transformers_version": "4.1",
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    defaults = load_generation_config(tmp_path, 128)
    assert defaults == GenerationDefaults(0.6, 0.9, 20, 0.0, 1.05, True, (5, 6), 99)
    assert defaults.sampling_defaults() == {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.05,
    }


@pytest.mark.parametrize(
    ("raw", "temperature"),
    [
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"do_sample": None, "temperature": 0.7}, 0.7),
        ({"temperature": 0}, 0.0),
        ({"temperature": None}, None),
    ],
)
def test_greedy_default(tmp_path: Path, raw: dict[str, Any], temperature: float | None) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    assert load_generation_config(tmp_path, 128).temperature == temperature


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", "1.0"),
        ("temperature", True),
        ("temperature", 2.5),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1.0),
        ("do_sample", "yes"),
        ("do_sample", 1),
        ("eos_token_id", 128),
        ("eos_token_id", [1, 128]),
        ("eos_token_id", "2"),
        ("max_new_tokens", 0),
    ],
)
def test_wrong_generation_field(tmp_path: Path, field: str, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(ConfigError) as caught:
        load_generation_config(tmp_path, 128)
    assert f"generation_config.json: {field}={value!r}; accepted: " in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"top_k": 1, "top_k": 2}'])
def test_wrong_generation_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json: "):
        load_generation_config(tmp_path, 128)


def test_dangling_generation_file(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").symlink_to("gone")
    with pytest.raises(ConfigError, match=r"generation_config\.json: cannot be read"):
        load_generation_config(tmp_path, 128)
