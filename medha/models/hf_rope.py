"""Read the RoPE fields of a Hugging Face ``config.json``.

Both generations are read: ``rope_theta`` with ``rope_scaling``, and the newer ``rope_parameters``. What would change
the output and is not implemented is refused. YaRN's attention factor follows transformers: arXiv 2309.00071 (v2)
equation 22 unless the file states its own. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from medha.config import RopeConfig
from medha.config.fields import finite
from medha.errors import ConfigError, UnsupportedModelError, short_repr
from medha.models.folder import LENGTH, MAX_LENGTH, Fields

ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")
_COMMON_KEYS = ("rope_type", "rope_theta", "partial_rotary_factor")
_STRETCH_KEYS = (*_COMMON_KEYS, "factor", "original_max_position_embeddings")
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": _COMMON_KEYS,
    "linear": (*_COMMON_KEYS, "factor"),
    "llama3": (*_STRETCH_KEYS, "low_freq_factor", "high_freq_factor"),
    "yarn": (*_STRETCH_KEYS, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
_ROPE_TYPES = tuple(_ROPE_KEYS)


def read_rope(
    reader: Fields, claimed: int, *, rope_scaling: str | Mapping[str, Any] | None, max_model_len: int | None
) -> tuple[RopeConfig, int]:
    """The RoPE of the model, and the longest context in tokens that it then claims, where ``config.json`` claims
    ``claimed``; the options are those of :func:`~medha.models.hf_config.load_model_config`."""
    name = "rope_scaling" if reader.raw.get("rope_parameters") is None else "rope_parameters"
    rope = Fields(_rope_parameters(reader), f"{reader.where}: {name}")
    outer = reader.optional("original_max_position_embeddings", LENGTH)
    if outer is not None and rope.raw.get("rope_type") in ("llama3", "yarn"):
        rope.raw = {**rope.raw, "original_max_position_embeddings": outer}  # as transformers: the outer one wins
    if rope_scaling is not None:
        trained = rope.number("original_max_position_embeddings", LENGTH, outer or claimed)
        rope = _replace_scaling(rope, rope_scaling, trained, max_model_len)
        if rope.raw["rope_type"] != "llama3":
            claimed = rope.number("original_max_position_embeddings", LENGTH, trained)
    _check_rope_keys(rope)
    return _build_rope(rope, claimed)


def merge_rope(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The ``rope_parameters`` of ``config.json`` under those of ``hf_overrides``, each in either generation."""
    given = _rope_parameters(Fields(overrides, "hf_overrides"))
    kept = _rope_parameters(Fields(raw, "config.json"))
    if any(name in overrides and not overrides[name] for name in ("rope_scaling", "rope_parameters")):
        kept = {name: value for name, value in kept.items() if name == "rope_theta"}
    return {**kept, **given}


def _rope_parameters(reader: Fields) -> dict[str, Any]:
    """The RoPE fields of both generations as one flat object, nulls dropped; refused where they disagree."""
    old, new = _flat_rope(reader, "rope_scaling"), _flat_rope(reader, "rope_parameters")
    thetas = [field["rope_theta"] for field in (reader.raw, old, new) if field.get("rope_theta") is not None]
    base = {"rope_theta": thetas[0]} if thetas else {}
    wholes = [{"rope_type": "default", **base, **field} for field in (old, new) if field]
    if any(theta != thetas[0] for theta in thetas[1:]) or any(whole != wholes[0] for whole in wholes[1:]):
        given = [f"{name}={short_repr(reader.raw[name])}" for name in ROPE_FIELDS if reader.raw.get(name) is not None]
        raise ConfigError(f"{reader.where}: {', '.join(given)} disagree; accepted: one of them, or the same values")
    return {**base, **old, **new}


def _flat_rope(reader: Fields, name: str) -> dict[str, Any]:
    raw = reader.raw.get(name)
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise reader.wrong(name, "an object or null")
    if objects := [short_repr(key) for key, value in raw.items() if isinstance(value, Mapping)]:
        what = f"{reader.where}: {name}: {objects[0]} holds an object: RoPE that differs by layer is not implemented"
        raise UnsupportedModelError(f"{what}; accepted: one set of parameters for all layers")
    # yarn's null factor means something (see _build_rope), and so does null truncate
    flat = {key: value for key, value in raw.items() if value is not None or key in ("factor", "truncate")}
    if "type" in flat:
        old_name = flat.pop("type")
        if flat.setdefault("rope_type", old_name) != old_name:
            what = f"{reader.where}: {name}: type={short_repr(old_name)} and rope_type={short_repr(flat['rope_type'])}"
            raise ConfigError(f"{what} disagree; accepted: one of them, or the same value")
    return flat


def _replace_scaling(rope: Fields, scaling: str | Mapping[str, Any], trained: int, max_model_len: int | None) -> Fields:
    """The parameters under the scaling that the caller asks for; theta stays unless it is given."""
    given: Any = {"rope_type": scaling} if isinstance(scaling, str) else scaling
    flat = _flat_rope(Fields({"rope_scaling": given}, "option"), "rope_scaling")
    if "rope_type" not in flat:
        raise ConfigError(f"rope_scaling={short_repr(scaling)} has no rope_type; accepted: {', '.join(_ROPE_TYPES)}")
    if "rope_theta" in rope.raw:
        flat.setdefault("rope_theta", rope.raw["rope_theta"])
    result = Fields(flat, "rope_scaling")
    if flat["rope_type"] in ("llama3", "yarn"):
        flat.setdefault("original_max_position_embeddings", trained)
    if flat["rope_type"] in ("linear", "yarn") and flat.get("factor") is None:
        if max_model_len is None:
            raise ConfigError(f"rope_scaling={short_repr(scaling)} needs max_model_len, or a mapping with a factor")
        trained = result.number("original_max_position_embeddings", LENGTH, trained)
        flat["factor"] = max(1.0, max_model_len / trained)
    return result


def _check_rope_keys(rope: Fields) -> None:
    rope_type = rope.raw.get("rope_type", "default" if set(rope.raw) <= set(_COMMON_KEYS) else None)
    if rope_type in ("dynamic", "longrope"):
        why = "its frequencies change with the length of the sequence, so keys of earlier chunks would be wrong"
        accepted = f"accepted: {', '.join(_ROPE_TYPES)}"
        raise UnsupportedModelError(f"{rope.where}: rope_type={rope_type!r} is not implemented: {why}; {accepted}")
    if rope_type not in _ROPE_TYPES:
        raise rope.wrong("rope_type", ", ".join(_ROPE_TYPES))
    if (share := rope.raw.get("partial_rotary_factor", 1)) != 1:
        raise UnsupportedModelError(f"{rope.where}: partial_rotary_factor={short_repr(share)}; accepted: 1")
    known = {"finetuned"}.union(*_ROPE_KEYS.values())  # that one was written by the first YaRN checkpoints
    if unknown := sorted(str(key) for key in rope.raw if key not in known):
        key, value = short_repr(unknown[0]), short_repr(rope.raw.get(unknown[0]))
        raise ConfigError(f"{rope.where}: unknown key {key}={value}; accepted: {', '.join(_ROPE_KEYS[rope_type])}")


def _build_rope(rope: Fields, claimed: int) -> tuple[RopeConfig, int]:
    """The RoPE, and the longest context in tokens, once the keys are checked; ``claimed`` is that of the file."""
    rope_type = rope.raw.get("rope_type", "default")
    config = RopeConfig(rope_type, theta=rope.number("rope_theta", finite(1, 1e30, is_open=True), default=10000.0))
    if rope_type == "default":
        return config, claimed
    explicit = None
    if rope_type != "linear":
        explicit = rope.optional("original_max_position_embeddings", LENGTH)
        config = replace(config, original_max_position_embeddings=explicit or claimed)
    if rope_type == "yarn" and rope.raw.get("factor", 0) is None:
        rope.raw = {**rope.raw, "factor": claimed / (explicit or claimed)}
    factor = rope.number("factor", finite(1, MAX_LENGTH))
    config = replace(config, factor=factor)
    if rope_type == "llama3":
        low = rope.number("low_freq_factor", finite(0, 1e9, is_open=True))
        high = rope.number("high_freq_factor", finite(low, 1e9, is_open=True))
        return replace(config, low_freq_factor=low, high_freq_factor=high), claimed
    length = (claimed if rope_type == "linear" else explicit or 0) * factor
    if length > MAX_LENGTH:
        raise rope.wrong("factor", f"one that stretches the context to at most {MAX_LENGTH} tokens")
    if rope_type == "yarn":
        config = _read_yarn(rope, config)
    return config, max(claimed, round(length))


def _read_yarn(rope: Fields, config: RopeConfig) -> RopeConfig:
    """The same with the fields that YaRN alone has."""
    beta_slow = rope.optional("beta_slow", finite(0, 1e9)) or 1.0  # 0 means the default, as in transformers
    beta_fast = rope.optional("beta_fast", finite(0, 1e9)) or 32.0
    if beta_fast < beta_slow:
        raise rope.wrong("beta_fast", f"at least beta_slow={beta_slow:g}")

    def scale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    mscale = rope.optional("mscale", finite(0, 1e9))
    mscale_all_dim = rope.optional("mscale_all_dim", finite(0, 1e9))
    implied = scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)
    attention_factor = rope.number("attention_factor", finite(0, 1e9, is_open=True), default=implied)
    scaled = replace(config, truncate=rope.boolean("truncate", default=True), attention_factor=attention_factor)
    return replace(scaled, beta_fast=beta_fast, beta_slow=beta_slow)
