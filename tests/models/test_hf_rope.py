"""The RoPE fields of config.json and the rope_scaling option: what is read, and what each wrong one says (A6 to A8)."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from medha.config import RopeConfig
from medha.errors import ConfigError, UnsupportedModelError
from medha.models.layers import cos_sin, inverse_frequencies
from tests.models.hf_folders import LLAMA, LLAMA3, YARN, Fields, family, load, refused


def test_both_generations_read_alike(tmp_path: Path) -> None:
    for rope in (YARN, LLAMA3, {"rope_type": "linear", "factor": 2.0}, {"rope_type": "default"}):
        whole = {"rope_parameters": {**rope, "rope_theta": 5e5}}
        new = load(tmp_path, whole)
        assert new.rope.theta == 5e5
        old = {"rope_scaling": {"type" if key == "rope_type" else key: value for key, value in rope.items()}}
        for written in ({"rope_scaling": rope}, {"rope_parameters": rope}, old, old | whole):
            assert load(tmp_path, {**written, "rope_theta": 5e5}) == new


NO_ORIGINAL = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
PARITY: dict[str, Fields] = {
    "default": {},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.5}, "rope_theta": 1e6},
    "llama3": {"rope_scaling": LLAMA3, "rope_theta": 5e5},
    "llama3 v5, no original": {"rope_parameters": {"rope_theta": 5e5, **NO_ORIGINAL}},
    "yarn": {"rope_scaling": YARN},
    "yarn, no original": {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "yarn, outer original": {"rope_scaling": YARN, "original_max_position_embeddings": 1024},
    "yarn, factor 1": {"rope_scaling": {**YARN, "factor": 1.0}},
    "yarn, null factor": {"rope_scaling": {**YARN, "factor": None}},
    "yarn, mscale": {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}},
    "yarn, mscale alone": {"rope_scaling": {**YARN, "mscale": 0.707}},
    "yarn, mscale 0": {"rope_scaling": {**YARN, "mscale": 0.0, "mscale_all_dim": 1.0}},
    "yarn, attention factor": {"rope_scaling": {**YARN, "attention_factor": 1.25, "mscale": 2.0}},
    "yarn v5": {"rope_parameters": {**YARN, "rope_theta": 1e6, "beta_fast": 64.0, "beta_slow": 2.0}},
    "llama3, all of it turned": {"rope_scaling": {**LLAMA3, "factor": 2.0, "high_freq_factor": 20.0}},
    "yarn, not truncated": {"rope_scaling": {**YARN, "truncate": False}},
    "yarn, a ramp of no width": {"rope_scaling": {**YARN, "beta_fast": 8.0, "beta_slow": 8.0, "truncate": False}},
    **{  # the ramp ends beyond the last dimension; every dimension is interpolated; none is
        f"yarn, original {length}": {"rope_scaling": {**YARN, "original_max_position_embeddings": length}}
        for length in (2**20, 8, 2**28)
    },
}

LENGTHS = {"linear": 20480, "yarn, original 1048576": 2**22, "yarn, original 268435456": 2**30}  # others claim 8192


@pytest.mark.parametrize("case", PARITY)
@pytest.mark.filterwarnings("ignore")
def test_parity_with_transformers(tmp_path: Path, case: str) -> None:
    changes = PARITY[case]
    ours = load(tmp_path, changes).rope
    given = copy.deepcopy(changes)  # transformers writes into it
    if case == "yarn, null factor":  # 5.x compares the null before it replaces it; give it what it would compute
        given["rope_scaling"]["factor"] = LLAMA["max_position_embeddings"] / YARN["original_max_position_embeddings"]
    theirs = transformers.LlamaConfig(**{**LLAMA, **given})
    assert load(tmp_path, changes).max_position_embeddings == LENGTHS.get(case, 8192)
    positions = torch.arange(0, 300)
    for head_dim in (16, 64, 128):
        theirs.head_dim = head_dim
        reference = LlamaRotaryEmbedding(theirs)  # completes rope_parameters too
        assert ours.attention_factor == pytest.approx(reference.attention_scaling, rel=1e-12)
        inv_freq = inverse_frequencies(ours, head_dim)
        # A power of theta in float32 is off by about ln(theta) units in the last place.
        torch.testing.assert_close(inv_freq, reference.inv_freq.double(), rtol=3e-6, atol=0)
        wanted = reference(torch.empty(0), positions[None])
        for got, want in zip(cos_sin(positions, inv_freq, ours.attention_factor).chunk(2, dim=-1), wanted, strict=True):
            assert (got.dtype, got.shape) == (torch.float32, (300, head_dim // 2))
            # transformers' angles are float32: 300 rad times what its inverse frequencies are off by.
            torch.testing.assert_close(torch.cat([got, got], dim=-1), want[0], rtol=0, atol=2e-4)
    parameters: Fields = dict(theirs.rope_parameters or {})
    assert ours.rope_type == parameters["rope_type"]
    assert ours.theta == parameters["rope_theta"]
    for name in ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "beta_fast"):
        if name in parameters:
            assert getattr(ours, name) == parameters[name], name


@pytest.mark.parametrize("rope", [YARN, LLAMA3, {"rope_type": "linear"}], ids=lambda rope: rope["rope_type"])
def test_wrong_factor(tmp_path: Path, rope: Fields) -> None:
    for factor in (0.5, True, "4", float("nan"), 10**400):
        parts = [f"rope_scaling: factor={repr(factor)[:90]}", "accepted: a finite number from 1"]
        refused(tmp_path, ConfigError, {"rope_scaling": {**rope, "factor": factor}}, parts)


REFUSED: dict[type[ConfigError], list[tuple[Fields, list[str]]]] = {
    UnsupportedModelError: [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["'dynamic'", "length of the sequence"]),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, ["'longrope'", "earlier chunks"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, ["partial_rotary_factor=0.5"]),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["'full_attention'", "by layer"]),
    ],
    ConfigError: [
        ({"rope_scaling": {"rope_type": "bogus"}}, ["rope_type='bogus'", "default, linear, llama3, yarn"]),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, ["rope_type='mrope'"]),
        ({"rope_scaling": {"factor": 2.0}}, ["rope_type is missing"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["factor is missing"]),
        ({"rope_scaling": {"type": "linear", "factor": 1e9}}, ["factor=1000000000.0", "at most 2147483647 tokens"]),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, ["low_freq_factor is missing"]),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, ["high_freq_factor=1", "above 1"]),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 0}}, ["original_max_position_embeddings=0"]),
        ({"rope_scaling": {**YARN, "attention_factor": -1.0}}, ["attention_factor=-1.0"]),
        ({"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 2}}, ["beta_fast=1", "beta_slow=2"]),
        ({"rope_scaling": {**YARN, "truncate": 1}}, ["truncate=1"]),
        ({"rope_scaling": {**YARN, "beta_fst": 1}}, ["unknown key 'beta_fst'=1", "accepted: ", "beta_fast"]),
        ({"rope_scaling": {"rope_theta": 0}}, ["rope_theta=0", "above 1"]),
        ({"rope_scaling": {**YARN, "type": "linear"}}, ["type='linear'", "rope_type='yarn'", "disagree"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling='yarn'", "an object or null"]),
        ({"rope_scaling": YARN, "rope_parameters": {**YARN, "factor": 8.0}}, ["disagree"]),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, ["disagree"]),
        ({"rope_scaling": {**YARN, "rope_theta": 1e4}, "rope_parameters": {**YARN, "rope_theta": 1e6}}, ["disagree"]),
    ],
}


@pytest.mark.parametrize(("error", "changes", "parts"), [(e, *row) for e, rows in REFUSED.items() for row in rows])
def test_refused(tmp_path: Path, error: type[ConfigError], changes: Fields, parts: list[str]) -> None:
    refused(tmp_path, error, changes, [f"config.json: {next(iter(changes))}", *parts])


def test_keys_of_another_type_have_no_effect(tmp_path: Path) -> None:
    config = load(tmp_path, {"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32, "mscale": None}})
    assert config.rope == RopeConfig("linear", factor=2.0)


# -- rope_scaling as an option ---------------------------------------------------------------------------------

MISTRAL = family("mistral", sliding_window=None, max_position_embeddings=32768)


@pytest.mark.parametrize(
    ("changes", "scaling", "max_model_len", "expected"),
    [
        ({}, "default", None, ("default", 1.0, None, 8192)),
        ({"rope_scaling": YARN}, "default", None, ("default", 1.0, None, 2048)),
        ({}, "yarn", 10_000_000, ("yarn", 10_000_000 / 8192, 8192, 10_000_000)),
        ({}, "yarn", 1000, ("yarn", 1.0, 8192, 8192)),
        ({}, "linear", 16384, ("linear", 2.0, None, 16384)),
        ({"rope_scaling": YARN}, "yarn", 65536, ("yarn", 32.0, 2048, 65536)),
        ({"rope_scaling": LLAMA3}, "yarn", 65536, ("yarn", 64.0, 1024, 65536)),
        ({"original_max_position_embeddings": 4096}, "linear", 8192, ("linear", 2.0, None, 8192)),
        ({}, {"rope_type": "yarn", "factor": 4.0}, None, ("yarn", 4.0, 8192, 32768)),
        ({}, {"type": "yarn"}, 32768, ("yarn", 4.0, 8192, 32768)),
        ({}, LLAMA3, None, ("llama3", 8.0, 1024, 8192)),
        (MISTRAL, "yarn", 10_000_000, ("yarn", 10_000_000 / 32768, 32768, 10_000_000)),
    ],
)
def test_scaling_option(
    tmp_path: Path, changes: Fields, scaling: Any, max_model_len: int | None, expected: tuple[Any, ...]
) -> None:
    config = load(tmp_path, {"rope_theta": 5e5, **changes}, rope_scaling=scaling, max_model_len=max_model_len)
    rope = config.rope
    assert rope.theta == 5e5
    actual = (rope.rope_type, rope.factor, rope.original_max_position_embeddings, config.max_position_embeddings)
    assert actual == expected


@pytest.mark.parametrize(
    ("scaling", "parts"),
    [
        ("yarn", ["rope_scaling='yarn'", "needs max_model_len"]),
        ("llama3", ["rope_scaling: factor is missing"]),
        ("bogus", ["rope_type='bogus'", "default, linear, llama3, yarn"]),
        ({"factor": 4.0}, ["has no rope_type"]),
        ({"rope_type": "linear", "factr": 2.0}, ["factr", "needs max_model_len"]),
        (7, ["rope_scaling=7"]),
    ],
)
def test_wrong_scaling_option(tmp_path: Path, scaling: Any, parts: list[str]) -> None:
    refused(tmp_path, ConfigError, {}, parts, rope_scaling=scaling)
