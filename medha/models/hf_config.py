"""Read ``config.json`` and ``generation_config.json`` of a Hugging Face model folder.

Both generations of the format are read: ``rope_theta`` with ``rope_scaling`` and ``torch_dtype``, and the newer
``rope_parameters`` and ``dtype``. Absent fields take the defaults of transformers. A field that would change the
output and is not implemented is refused, never skipped. Standard library only; no code of the folder is imported.

YaRN's attention factor follows transformers: arXiv 2309.00071 (v2) equation 22 unless the file states its own.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medha.config import DTYPES, ModelConfig, RopeConfig
from medha.errors import ConfigError, UnsupportedModelError

logger = logging.getLogger("medha")

MAX_LENGTH = 2**31 - 1


# ---------------------------------------------------------------------------------------------------------------------
# JSON


def read_json_object(path: Path, *, max_bytes: int = 10_000_000) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        ConfigError: missing, unreadable, larger than ``max_bytes``, not JSON, nested too deep, a key given twice, or
            not an object.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path}: not a file; accepted: a JSON object")
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; accepted: a JSON object") from error
    if len(data) > max_bytes:
        raise ConfigError(f"{path}: larger than {max_bytes} bytes; accepted: a JSON object of at most that size")
    return parse_json_object(data, str(path))


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """The object in UTF-8 JSON text; ``where`` names its source in messages.

    Raises:
        ConfigError: not JSON, nested too deep, a key given twice, or not an object.
    """
    if not data.strip():
        raise ConfigError(f"{where}: empty; accepted: a JSON object")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique_keys)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 at byte {error.start}; accepted: a JSON object") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise ConfigError(f"{where}: not JSON: {error.msg} at {place}; accepted: a JSON object") from error
    except RecursionError as error:
        raise ConfigError(f"{where}: nested too deep; accepted: a JSON object") from error
    except ValueError as error:  # a key given twice, or an integer of thousands of digits
        raise ConfigError(f"{where}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: holds a {type(value).__name__}, {short_repr(value)}; accepted: a JSON object")
    return value


def parse_hf_overrides(text: str) -> dict[str, Any]:
    """The overrides of ``config.json`` as given on a command line: one JSON object.

    Raises:
        ConfigError: not JSON, or not an object.
    """
    return parse_json_object(text.encode(errors="replace"), f"hf_overrides {short_repr(text)}")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {short_repr(key)} is given twice in one object")
            seen.add(key)
    return result


def short_repr(value: Any) -> str:
    """``repr`` for a message, cut where a hostile file would fill the screen."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # integers of thousands of digits have no repr
        return f"<{type(value).__name__}>"
    return text if len(text) <= 100 else text[:97] + "..."


class _Reader:
    """Typed, checked access to the fields of one JSON object; null reads as absent."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def wrong(self, name: str, accepted: str) -> ConfigError:
        if name not in self.raw:
            return ConfigError(f"{self.where}: {name} is missing; accepted: {accepted}")
        return ConfigError(f"{self.where}: {name}={short_repr(self.raw[name])}; accepted: {accepted}")

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(name, f"an integer from {low} to {high}")
        return value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self.optional_integer(name, low, high)
        value = default if value is None else value
        if value is None:
            raise self.wrong(name, f"an integer from {low} to {high}")
        return value

    def optional_number(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
        """A number from low to high; ``above`` leaves low itself out."""
        value = self.raw.get(name)
        if value is None:
            return None
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low <= value <= high or (above and value == low):  # NaN fails the comparison
            raise self.wrong(
                name, f"a number {'above' if above else 'from'} {low:g} {'up ' if above else ''}to {high:g}"
            )
        return float(value)

    def number(self, name: str, low: float, high: float, *, above: bool = False, default: float | None = None) -> float:
        value = self.optional_number(name, low, high, above=above)
        value = default if value is None else value
        if value is None:
            raise self.wrong(name, f"a number of at least {low:g}")
        return value

    def boolean(self, name: str, *, default: bool = False) -> bool:
        value = self.raw.get(name, default)
        if value is None:  # transformers tests these for truth, so null is false even where absent means true
            return False
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One id, or a list of ids, each in the vocabulary."""
        value = self.raw.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for token_id in ids:
            if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
                raise self.wrong(name, f"token ids from 0 to {vocab_size - 1} (one, a list, or null)")
        return tuple(dict.fromkeys(ids))


# ---------------------------------------------------------------------------------------------------------------------
# config.json


@dataclass(frozen=True, slots=True)
class _Family:
    """What transformers assumes for a model type where ``config.json`` is silent."""

    architecture: str
    max_position_embeddings: int
    num_kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    sliding_window: int | None = None
    has_attention_bias: bool = False  # the field attention_bias means something
    qkv_bias: bool = False
    qk_norm: bool = False


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", 2048, bos_token_id=1, eos_token_id=2, has_attention_bias=True),
    "mistral": _Family(
        "MistralForCausalLM", 131072, num_kv_heads=8, bos_token_id=1, eos_token_id=2, sliding_window=4096
    ),
    "qwen2": _Family("Qwen2ForCausalLM", 32768, num_kv_heads=32, sliding_window=4096, qkv_bias=True),
    "qwen3": _Family(
        "Qwen3ForCausalLM",
        32768,
        num_kv_heads=32,
        head_dim=128,
        sliding_window=4096,
        has_attention_bias=True,
        qk_norm=True,
    ),
}

SUPPORTED_ARCHITECTURES = tuple(family.architecture for family in _FAMILIES.values())

# Fields that change the output of a model and are not implemented, with the values (beside null) that change nothing.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False,),
    "quantization_config": (),
    "compression_config": (),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "attention_multiplier": (),  # granite: the softmax scale itself, so no value is neutral
    "residual_multiplier": (1,),
    "embedding_multiplier": (1,),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "use_qk_norm": (False,),
    "attention_chunk_size": (),
    "no_rope_layers": (),
    "clip_qkv": (),
    "alibi": (False,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
}

_FIELDS_READ = (
    *_NEUTRAL_VALUES,
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "original_max_position_embeddings",
    "rms_norm_eps",
    "attention_bias",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "bos_token_id",
    "eos_token_id",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "dual_chunk_attention_config",
)


def load_model_config(
    folder: Path,
    *,
    hf_overrides: Mapping[str, Any] | None = None,
    rope_scaling: str | Mapping[str, Any] | None = None,
    max_model_len: int | None = None,
) -> ModelConfig:
    """The configuration of the model in a folder.

    Args:
        folder: holds ``config.json``.
        hf_overrides: merged over ``config.json``; objects inside it are merged key by key.
        rope_scaling: replaces the model's RoPE scaling: a type name, or a mapping as in ``rope_parameters``. Without
            a factor, ``yarn`` and ``linear`` stretch the trained context to ``max_model_len``.
        max_model_len: longest context that will be used in tokens. A sliding window at least as long has no effect
            and is accepted.

    Raises:
        ConfigError: a file or field is missing or wrong.
        UnsupportedModelError: the architecture, or the value of a field, is not implemented.
    """
    raw = read_json_object(folder / "config.json")
    where = "config.json"
    if hf_overrides:
        raw = _merge_overrides(raw, hf_overrides)
        where = "config.json with hf_overrides"
    reader = _Reader(raw, where)
    family = _family(reader)
    if raw.get("auto_map"):
        logger.warning("%s: auto_map is ignored; medha runs its own %s", folder / "config.json", family.architecture)
    _refuse_unimplemented(reader, family)

    claimed = reader.integer("max_position_embeddings", 1, MAX_LENGTH, family.max_position_embeddings)
    rope, max_length = _read_rope(reader, claimed, rope_scaling=rope_scaling, max_model_len=max_model_len)
    vocab_size = reader.integer("vocab_size", 1, 2**24)
    num_layers = reader.integer("num_hidden_layers", 1, 4096)
    _refuse_windows(reader, family, num_layers, max_length=max_model_len or max_length)

    num_heads = reader.integer("num_attention_heads", 1, 4096)
    num_kv_heads = _num_kv_heads(reader, family, num_heads)
    attention_bias = family.has_attention_bias and reader.boolean("attention_bias")
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=vocab_size,
        hidden_size=reader.integer("hidden_size", 1, 2**20),
        intermediate_size=reader.integer("intermediate_size", 1, 2**22),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(reader, family, num_heads),
        max_position_embeddings=max_length,
        rope=rope,
        rms_norm_eps=reader.number("rms_norm_eps", 0, 1, above=True, default=1e-6),
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        qk_norm=family.qk_norm,
        tie_word_embeddings=reader.boolean("tie_word_embeddings"),
        dtype=_dtype(reader),
        bos_token_id=_bos_token_id(reader, family, vocab_size),
        eos_token_ids=_eos_token_ids(reader, family, vocab_size),
    )


def _merge_overrides(raw: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A new object; the RoPE fields of either generation are merged as one ``rope_parameters``."""
    known = sorted({*raw, *_FIELDS_READ})
    for name, value in overrides.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]}?" if near else "accepted: a field of config.json"
            raise ConfigError(f"hf_overrides: unknown field {short_repr(name)}={short_repr(value)}; {hint}")
    merged = dict(raw)
    for name, value in overrides.items():
        old = raw.get(name)
        merged[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value
    if any(name in overrides for name in _ROPE_FIELDS):
        given = _rope_parameters(_Reader(overrides, "hf_overrides"))
        kept = _rope_parameters(_Reader(raw, "config.json"))
        if any(name in overrides and not overrides[name] for name in ("rope_scaling", "rope_parameters")):
            kept = {name: value for name, value in kept.items() if name == "rope_theta"}
        for name in _ROPE_FIELDS:
            merged.pop(name, None)
        merged["rope_parameters"] = {**kept, **given}
    return merged


def _family(reader: _Reader) -> _Family:
    names = reader.raw.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise reader.wrong("architectures", "a list of names")
    model_type = reader.raw.get("model_type")
    if model_type is not None and not isinstance(model_type, str):
        raise reader.wrong("model_type", f"one of {', '.join(_FAMILIES)}")
    by_type = _FAMILIES.get(model_type or "")
    if not names:
        if by_type is None:
            raise UnsupportedModelError(
                f"{reader.where}: model_type={short_repr(model_type)} (no architectures given) is not supported; "
                f"supported: {', '.join(_FAMILIES)}"
            )
        return by_type
    for family in _FAMILIES.values():
        if family.architecture == names[0]:
            if by_type not in (None, family):
                raise ConfigError(
                    f"{reader.where}: architectures={short_repr(names)} and model_type={model_type!r} name different models"
                )
            return family
    raise UnsupportedModelError(
        f"{reader.where}: architecture {short_repr(names[0])} is not supported; "
        f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _refuse_unimplemented(reader: _Reader, family: _Family) -> None:
    for name, neutral in _NEUTRAL_VALUES.items():
        value = reader.raw.get(name)
        if value is not None and value not in neutral:
            accepted = " or ".join([*(repr(item) for item in neutral), "null"])
            raise UnsupportedModelError(
                f"{reader.where}: {name}={short_repr(value)} changes the model's output and is not implemented; "
                f"accepted: {accepted}"
            )
    if family.architecture == "MistralForCausalLM" and reader.boolean("attention_bias"):
        raise UnsupportedModelError(
            f"{reader.where}: attention_bias=True: {family.architecture} has no attention biases; accepted: False"
        )


def _num_kv_heads(reader: _Reader, family: _Family, num_heads: int) -> int:
    absent = num_heads if family.num_kv_heads is None else family.num_kv_heads
    default = num_heads if "num_key_value_heads" in reader.raw else absent  # null means one for each query head
    num_kv_heads = reader.integer("num_key_value_heads", 1, 4096, default)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{reader.where}: num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}; "
            "accepted: a divisor of num_attention_heads"
        )
    return num_kv_heads


def _head_dim(reader: _Reader, family: _Family, num_heads: int) -> int:
    hidden_size = reader.integer("hidden_size", 1, 2**20)
    head_dim = reader.integer("head_dim", 1, 4096, family.head_dim or max(1, hidden_size // num_heads))
    if reader.raw.get("head_dim") is None and family.head_dim is None and hidden_size % num_heads:
        raise ConfigError(
            f"{reader.where}: hidden_size={hidden_size} is not a multiple of num_attention_heads={num_heads}; "
            "accepted: a multiple of it, or an explicit head_dim"
        )
    if head_dim % 2:
        raise ConfigError(f"{reader.where}: head_dim={head_dim} is odd; accepted: an even number (RoPE turns pairs)")
    return head_dim


def _dtype(reader: _Reader) -> str:
    name = "torch_dtype" if reader.raw.get("dtype") is None else "dtype"
    value = reader.raw.get(name)
    if value is None:
        return "float32"
    short = value.removeprefix("torch.") if isinstance(value, str) else None
    if short not in DTYPES:
        raise reader.wrong(name, ", ".join(DTYPES))
    return short


def _bos_token_id(reader: _Reader, family: _Family, vocab_size: int) -> int | None:
    if "bos_token_id" not in reader.raw:
        default = family.bos_token_id
        return default if default is not None and default < vocab_size else None
    return reader.optional_integer("bos_token_id", 0, vocab_size - 1)


def _eos_token_ids(reader: _Reader, family: _Family, vocab_size: int) -> tuple[int, ...]:
    if "eos_token_id" not in reader.raw:
        default = family.eos_token_id
        return (default,) if default is not None and default < vocab_size else ()
    return reader.token_ids("eos_token_id", vocab_size)


# ---------------------------------------------------------------------------------------------------------------------
# Attention that does not see the whole context


def _refuse_windows(reader: _Reader, family: _Family, num_layers: int, *, max_length: int) -> None:
    """Refuse a window that some context of at most ``max_length`` tokens would outgrow."""
    window = reader.optional_integer("sliding_window", 1, 2**62)
    if "sliding_window" not in reader.raw:
        window = family.sliding_window
    cause = _window_cause(reader, family, num_layers, window)
    if cause is not None and (window is None or window < max_length):
        raise _window_error(reader, cause, window, max_length)

    chunked = reader.raw.get("dual_chunk_attention_config")
    if chunked is not None:
        if not isinstance(chunked, Mapping):
            raise reader.wrong("dual_chunk_attention_config", "an object or null")
        chunk = _Reader(chunked, f"{reader.where}: dual_chunk_attention_config").integer("chunk_size", 1, 2**62, 262144)
        if chunk < max_length:
            raise _window_error(reader, f"dual_chunk_attention_config (chunk_size={chunk})", chunk, max_length)


def _window_cause(reader: _Reader, family: _Family, num_layers: int, window: int | None) -> str | None:
    """Which field asks for windowed attention in any layer, or None."""
    layer_types = reader.raw.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            raise reader.wrong("layer_types", f"a list of {num_layers} names, one for each layer")
        others = [item for item in layer_types if item != "full_attention"]
        if any(item != "sliding_attention" for item in others):
            raise UnsupportedModelError(
                f"{reader.where}: layer_types holds {short_repr(others[0])}, which is not implemented; "
                "accepted: full_attention"
            )
        if others:
            return f"layer_types with sliding_attention (sliding_window={window})"
    if window is None or family.sliding_window is None:
        return None
    if family.architecture == "MistralForCausalLM":
        absent = "" if "sliding_window" in reader.raw else ", the default of this architecture"
        return f"sliding_window={window}{absent}"
    first = reader.integer("max_window_layers", 0, 2**31, 28)
    if reader.boolean("use_sliding_window") and layer_types is None and first < num_layers:
        return f"use_sliding_window=True (sliding_window={window})"
    return None


def _window_error(reader: _Reader, cause: str, window: int | None, max_length: int) -> UnsupportedModelError:
    hint = f"; within it both agree: --max-model-len {window} or less" if window is not None else ""
    return UnsupportedModelError(
        f"{reader.where}: {cause}: medha attends over the whole context, of up to {max_length} tokens here, "
        f"which differs beyond the window{hint}"
    )


# ---------------------------------------------------------------------------------------------------------------------
# RoPE

_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_COMMON_KEYS = ("rope_type", "rope_theta", "partial_rotary_factor")
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": _COMMON_KEYS,
    "linear": (*_COMMON_KEYS, "factor"),
    "llama3": (*_COMMON_KEYS, "factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        *(*_COMMON_KEYS, "factor", "original_max_position_embeddings", "attention_factor"),
        *("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
_INERT_KEYS = ("finetuned",)  # written by the first YaRN checkpoints, read by nobody
_KNOWN_ROPE_KEYS = {*_INERT_KEYS, *(key for keys in _ROPE_KEYS.values() for key in keys)}


def _read_rope(
    reader: _Reader, claimed: int, *, rope_scaling: str | Mapping[str, Any] | None, max_model_len: int | None
) -> tuple[RopeConfig, int]:
    """The RoPE of the model, and the longest context in tokens that it then claims.

    Args:
        claimed: ``max_position_embeddings``.
    """
    name = "rope_scaling" if reader.raw.get("rope_parameters") is None else "rope_parameters"
    rope = _Reader(_rope_parameters(reader), f"{reader.where}: {name}")
    outer = reader.optional_integer("original_max_position_embeddings", 1, MAX_LENGTH)
    if outer is not None and rope.raw.get("rope_type") in ("llama3", "yarn"):
        rope.raw = {**rope.raw, "original_max_position_embeddings": outer}  # as transformers: the outer one wins
    if rope_scaling is not None:
        trained = rope.integer("original_max_position_embeddings", 1, MAX_LENGTH, outer or claimed)
        rope = _replace_scaling(rope, rope_scaling, trained, max_model_len)
        if rope.raw["rope_type"] != "llama3":
            claimed = rope.integer("original_max_position_embeddings", 1, MAX_LENGTH, trained)
    _check_rope_keys(rope)
    return _build_rope(rope, claimed)


def _rope_parameters(reader: _Reader) -> dict[str, Any]:
    """The RoPE fields of both generations as one flat object, nulls dropped.

    Raises:
        ConfigError: the two generations, or two spellings of one key, disagree.
        UnsupportedModelError: parameters that differ by layer type.
    """
    old = _flat_rope(reader, "rope_scaling")
    new = _flat_rope(reader, "rope_parameters")
    theta = reader.raw.get("rope_theta")
    for other in (old, new):
        if theta is not None and other.get("rope_theta", theta) != theta:
            raise ConfigError(
                f"{reader.where}: rope_theta={short_repr(theta)} and rope_theta={short_repr(other['rope_theta'])} inside "
                "rope_scaling or rope_parameters disagree; accepted: one of them, or the same value"
            )
    theta = old.get("rope_theta") if theta is None else theta
    if old and new:
        theta = new.get("rope_theta") if theta is None else theta
        if {"rope_type": "default", "rope_theta": theta, **old} != {"rope_type": "default", "rope_theta": theta, **new}:
            raise ConfigError(
                f"{reader.where}: rope_scaling={short_repr(old)} and rope_parameters={short_repr(new)} disagree; "
                "accepted: one of them, or the same values"
            )
    return {**({} if theta is None else {"rope_theta": theta}), **old, **new}


def _flat_rope(reader: _Reader, name: str) -> dict[str, Any]:
    raw = reader.raw.get(name)
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        raise reader.wrong(name, "an object or null")
    for key, value in raw.items():
        if isinstance(value, Mapping):
            raise UnsupportedModelError(
                f"{reader.where}: {name}: {short_repr(key)} holds an object: RoPE that differs by layer is not "
                "implemented; accepted: one set of parameters for all layers"
            )
    # yarn's null factor means something (see _build_rope), and so does null truncate
    flat = {key: value for key, value in raw.items() if value is not None or key in ("factor", "truncate")}
    if "type" in flat:
        old_name = flat.pop("type")
        if flat.setdefault("rope_type", old_name) != old_name:
            raise ConfigError(
                f"{reader.where}: {name}: type={short_repr(old_name)} and rope_type={short_repr(flat['rope_type'])} disagree"
            )
    return flat


def _replace_scaling(
    rope: _Reader, scaling: str | Mapping[str, Any], trained: int, max_model_len: int | None
) -> _Reader:
    """The parameters under the scaling that the caller asks for; theta stays unless it is given."""
    given: Any = {"rope_type": scaling} if isinstance(scaling, str) else scaling
    flat = _flat_rope(_Reader({"rope_scaling": given}, "option"), "rope_scaling")
    if "rope_type" not in flat:
        raise ConfigError(f"rope_scaling={short_repr(scaling)} has no rope_type; accepted: {', '.join(_ROPE_TYPES)}")
    if "rope_theta" in rope.raw:
        flat.setdefault("rope_theta", rope.raw["rope_theta"])
    result = _Reader(flat, "rope_scaling")
    if flat["rope_type"] in ("llama3", "yarn"):
        flat.setdefault("original_max_position_embeddings", trained)
    if flat["rope_type"] in ("linear", "yarn") and flat.get("factor") is None:
        if max_model_len is None:
            raise ConfigError(
                f"rope_scaling={short_repr(scaling)} needs max_model_len, the length to stretch to; "
                "accepted: max_model_len in tokens, or a mapping with a factor"
            )
        trained = result.integer("original_max_position_embeddings", 1, MAX_LENGTH, trained)
        flat["factor"] = max(1.0, max_model_len / trained)
    return result


def _check_rope_keys(rope: _Reader) -> None:
    rope_type = rope.raw.get("rope_type")
    if rope_type is None and not set(rope.raw) <= set(_COMMON_KEYS):
        raise rope.wrong("rope_type", ", ".join(_ROPE_TYPES))
    if rope_type in ("dynamic", "longrope"):
        raise UnsupportedModelError(
            f"{rope.where}: rope_type={rope_type!r} is not implemented: its inverse frequencies change with the length "
            "of the sequence, so keys written by earlier chunks of a prompt would be wrong; "
            f"accepted: {', '.join(_ROPE_TYPES)}"
        )
    if rope_type is not None and rope_type not in _ROPE_TYPES:
        raise rope.wrong("rope_type", ", ".join(_ROPE_TYPES))
    if rope.raw.get("partial_rotary_factor", 1) != 1:
        raise UnsupportedModelError(
            f"{rope.where}: partial_rotary_factor={short_repr(rope.raw['partial_rotary_factor'])} is not implemented; "
            "accepted: 1"
        )
    used = _ROPE_KEYS[rope_type or "default"]
    unused = sorted(str(key) for key in rope.raw if key not in used and key not in _INERT_KEYS)
    for key in unused:
        if key not in _KNOWN_ROPE_KEYS:
            near = difflib.get_close_matches(key, used, n=1)
            hint = f"did you mean {near[0]}?" if near else f"accepted: {', '.join(used)}"
            raise ConfigError(f"{rope.where}: unknown key {short_repr(key)}={short_repr(rope.raw.get(key))}; {hint}")
    if unused:
        logger.warning("%s: %s have no effect with rope_type=%r", rope.where, ", ".join(unused), rope_type or "default")


def _build_rope(rope: _Reader, claimed: int) -> tuple[RopeConfig, int]:
    theta = rope.number("rope_theta", 1, 1e30, above=True, default=10000.0)
    rope_type = rope.raw.get("rope_type", "default")
    if rope_type == "default":
        return RopeConfig(theta=theta), claimed
    if rope_type == "linear":
        factor = rope.number("factor", 1, MAX_LENGTH)
        return RopeConfig("linear", theta=theta, factor=factor), _length(rope, claimed * factor)
    explicit = rope.optional_integer("original_max_position_embeddings", 1, MAX_LENGTH)
    original = claimed if explicit is None else explicit
    if rope_type == "llama3":
        return _build_llama3(rope, theta, original), claimed
    if "factor" in rope.raw and rope.raw["factor"] is None:
        rope.raw = {**rope.raw, "factor": claimed / original}
    yarn = _build_yarn(rope, theta, original)
    return yarn, claimed if explicit is None else max(claimed, _length(rope, original * yarn.factor))


def _build_llama3(rope: _Reader, theta: float, original: int) -> RopeConfig:
    low = rope.number("low_freq_factor", 0, 1e9, above=True)
    high = rope.number("high_freq_factor", 0, 1e9, above=True)
    if high <= low:
        raise ConfigError(
            f"{rope.where}: high_freq_factor={high:g} with low_freq_factor={low:g}; accepted: a larger one"
        )
    return RopeConfig(
        "llama3",
        theta=theta,
        factor=rope.number("factor", 1, MAX_LENGTH),
        original_max_position_embeddings=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _build_yarn(rope: _Reader, theta: float, original: int) -> RopeConfig:
    factor = rope.number("factor", 1, MAX_LENGTH)
    beta_fast = rope.optional_number("beta_fast", 0, 1e9) or 32.0  # 0 means the default, as in transformers
    beta_slow = rope.optional_number("beta_slow", 0, 1e9) or 1.0
    if beta_fast < beta_slow:
        raise ConfigError(
            f"{rope.where}: beta_fast={beta_fast:g} is below beta_slow={beta_slow:g}; accepted: at least it"
        )
    return RopeConfig(
        "yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=rope.boolean("truncate", default=True),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _yarn_attention_factor(rope: _Reader, factor: float) -> float:
    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    explicit = rope.optional_number("attention_factor", 0, 1e9, above=True)
    mscale = rope.optional_number("mscale", 0, 1e9)
    mscale_all_dim = rope.optional_number("mscale_all_dim", 0, 1e9)
    if explicit is not None:
        return explicit
    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def _length(rope: _Reader, tokens: float) -> int:
    if tokens > MAX_LENGTH:
        raise rope.wrong("factor", f"one that stretches the context to at most {MAX_LENGTH} tokens")
    return round(tokens)


# ---------------------------------------------------------------------------------------------------------------------
# generation_config.json


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling defaults that a model folder brings; None where it is silent.

    Attributes:
        temperature: 0.0 (greedy) when ``do_sample`` is false.
        top_k: 0 or -1 turn it off.
        eos_token_ids: ids that end a sequence, beside those of ``config.json``; may be empty.
        max_new_tokens: output length in tokens.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    do_sample: bool | None = None
    eos_token_ids: tuple[int, ...] = ()
    max_new_tokens: int | None = None

    def sampling_defaults(self) -> dict[str, float | int]:
        """The sampling parameters that the folder sets, by their names in :class:`medha.SamplingParams`."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def load_generation_config(folder: Path, vocab_size: int) -> GenerationDefaults:
    """Read ``generation_config.json``; a folder without one has no defaults.

    Raises:
        ConfigError: not JSON, or a value out of range.
    """
    path = folder / "generation_config.json"
    if not path.exists() and not path.is_symlink():
        return GenerationDefaults()
    reader = _Reader(read_json_object(path), path.name)
    temperature = reader.optional_number("temperature", 0, 2)  # the bound of SamplingParams
    do_sample = None if reader.raw.get("do_sample") is None else reader.boolean("do_sample")
    return GenerationDefaults(
        temperature=0.0 if do_sample is False else temperature,
        top_p=reader.optional_number("top_p", 0, 1, above=True),
        top_k=reader.optional_integer("top_k", -1, 2**31 - 1),
        min_p=reader.optional_number("min_p", 0, 1),
        repetition_penalty=reader.optional_number("repetition_penalty", 0, 1e6, above=True),
        do_sample=do_sample,
        eos_token_ids=reader.token_ids("eos_token_id", vocab_size),
        max_new_tokens=reader.optional_integer("max_new_tokens", 1, MAX_LENGTH),
    )
