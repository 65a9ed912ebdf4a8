"""Read ``config.json`` and ``generation_config.json`` of a Hugging Face model folder.

Both generations of the format are read: ``torch_dtype``, and the newer ``dtype``; RoPE, which differs more, is read by
:mod:`medha.models.hf_rope`. Absent fields take the defaults of transformers. What would change the output and is not
implemented is never skipped: a field of ``config.json`` is refused, one of the other file is named in a warning.
Standard library only; no code of the folder is imported.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from medha.config import DTYPES, EngineConfig, ModelConfig
from medha.config.fields import finite, integer
from medha.errors import ConfigError, UnsupportedModelError, hint, short_repr
from medha.models.folder import LENGTH, Fields, read_json_object
from medha.models.hf_rope import ROPE_FIELDS, merge_rope, read_rope
from medha.params import MODEL_DEFAULTS, SamplingParams

logger = logging.getLogger("medha")


class _Family(NamedTuple):
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
    "mistral": _Family("MistralForCausalLM", 131072, 8, bos_token_id=1, eos_token_id=2, sliding_window=4096),
    "qwen2": _Family("Qwen2ForCausalLM", 32768, 32, sliding_window=4096, qkv_bias=True),
    "qwen3": _Family("Qwen3ForCausalLM", 32768, 32, 128, sliding_window=4096, has_attention_bias=True, qk_norm=True),
}

_ABSENT = """
    quantization_config compression_config attn_logit_softcapping final_logit_softcapping attention_chunk_size
    no_rope_layers clip_qkv attention_multiplier
"""  # the last one is granite's softmax scale itself
# Fields that change the output of a model and are not implemented, with the values (beside null) that change nothing.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    **dict.fromkeys(_ABSENT.split(), ()),
    **dict.fromkeys(("mlp_bias", "rope_interleaved", "use_qk_norm", "alibi"), (False,)),
    "is_causal": (True,),
    **dict.fromkeys(("partial_rotary_factor", "residual_multiplier", "embedding_multiplier"), (1,)),
    **dict.fromkeys(("logits_scaling", "logit_scale"), (1,)),
    **dict.fromkeys(("num_experts", "num_local_experts"), (0, 1)),
}

_KNOWN_FIELDS = {
    *_NEUTRAL_VALUES, *ROPE_FIELDS, "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
    "original_max_position_embeddings", "rms_norm_eps", "attention_bias", "tie_word_embeddings", "dtype", "torch_dtype",
    "bos_token_id", "eos_token_id", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
    "dual_chunk_attention_config",
}  # fmt: skip

# Fields of generation_config.json that are not implemented, with the values (beside null) that change nothing.
_UNREAD: dict[str, tuple[Any, ...]] = {
    name: neutral
    for names, neutral in (
        ("suppress_tokens begin_suppress_tokens bad_words_ids sequence_bias stop_strings", ([], {}, "")),
        ("no_repeat_ngram_size min_new_tokens min_length epsilon_cutoff eta_cutoff penalty_alpha token_healing", (0,)),
        ("num_beams num_return_sequences typical_p guidance_scale encoder_repetition_penalty", (1,)),
        ("max_length", (20,)),  # of old a default of transformers
        ("top_h forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty watermarking_config", ()),
    )
    for name in names.split()
}
# Its others that count have the names and bounds of medha.SamplingParams.
_CHECKS = {field.name: field.metadata["option"].check for field in dataclasses.fields(SamplingParams)}


def load_model_config(
    folder: Path,
    *,
    hf_overrides: Mapping[str, Any] | None = None,
    rope_scaling: str | Mapping[str, Any] | None = None,
    max_model_len: int | None = None,
) -> ModelConfig:
    """The configuration of the model in a folder.

    Args:
        hf_overrides: merged over ``config.json``; objects inside it are merged key by key.
        rope_scaling: replaces the model's RoPE scaling: a type name, or a mapping as in ``rope_parameters``. Without
            a factor, ``yarn`` and ``linear`` stretch the trained context to ``max_model_len``.
        max_model_len: longest context that will be used in tokens. A sliding window at least as long has no effect
            and is accepted.
    """
    raw = read_json_object(folder / "config.json")
    if hf_overrides:
        raw = merge_overrides(raw, hf_overrides)
    reader = Fields(raw, "config.json with hf_overrides" if hf_overrides else "config.json")
    family = _family(reader)
    if raw.get("auto_map"):
        logger.warning("%s: auto_map is ignored; medha runs its own %s", folder / "config.json", family.architecture)
    _refuse_unimplemented(reader)

    claimed = reader.number("max_position_embeddings", LENGTH, family.max_position_embeddings)
    rope, max_length = read_rope(reader, claimed, rope_scaling=rope_scaling, max_model_len=max_model_len)
    vocab_size = reader.number("vocab_size", integer(1, 2**24))
    num_layers = reader.number("num_hidden_layers", integer(1, 4096))
    _refuse_windows(reader, family, num_layers, max_length=max_model_len or max_length)

    num_heads = reader.number("num_attention_heads", integer(1, 4096))
    num_kv_heads = _num_kv_heads(reader, family, num_heads)
    attention_bias = family.has_attention_bias and reader.boolean("attention_bias")
    for name, token_id in (("bos_token_id", family.bos_token_id), ("eos_token_id", family.eos_token_id)):
        if token_id is not None and token_id < vocab_size:
            reader.raw = {name: token_id, **reader.raw}
    return ModelConfig(
        architecture=family.architecture,
        vocab_size=vocab_size,
        hidden_size=reader.number("hidden_size", integer(1, 2**20)),
        intermediate_size=reader.number("intermediate_size", integer(1, 2**22)),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(reader, family, num_heads),
        max_position_embeddings=max_length,
        rope=rope,
        rms_norm_eps=reader.number("rms_norm_eps", finite(0, 1, is_open=True), default=1e-6),
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        qk_norm=family.qk_norm,
        tie_word_embeddings=reader.boolean("tie_word_embeddings"),
        dtype=_dtype(reader),
        bos_token_id=reader.optional("bos_token_id", integer(0, vocab_size - 1)),
        eos_token_ids=reader.token_ids("eos_token_id", vocab_size),
    )


def model_config_of(config: EngineConfig, folder: Path) -> ModelConfig:
    """The configuration of the model in a folder as an engine's own changes it."""
    changes = {name: getattr(config, name) for name in ("hf_overrides", "rope_scaling", "max_model_len")}
    return load_model_config(folder, **changes)


def load_generation_config(folder: Path, vocab_size: int) -> tuple[dict[str, float | int], tuple[int, ...]]:
    """The sampling parameters that ``generation_config.json`` sets, and the ids that end a sequence, if any."""
    path = folder / "generation_config.json"
    if not path.exists() and not path.is_symlink():
        return {}, ()
    reader = Fields(read_json_object(path), path.name)
    unread = [name for name, neutral in _UNREAD.items() if reader.raw.get(name) not in (None, *neutral)]
    if unread:
        logger.warning("%s: not implemented, and left out: %s", path, ", ".join(unread))
    names = {name: name for name in MODEL_DEFAULTS} | {"max_tokens": "max_new_tokens"}
    defaults = {name: reader.optional(its, _CHECKS[name]) for name, its in names.items()}
    if reader.raw.get("do_sample") is not None and not reader.boolean("do_sample"):
        defaults["temperature"] = 0.0
    given = {name: value for name, value in defaults.items() if value is not None}
    return given, reader.token_ids("eos_token_id", vocab_size)


def merge_overrides(raw: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """``config.json`` with fields over it; objects inside it are merged key by key. ConfigError for an unknown field.

    The RoPE fields of either generation are merged as one ``rope_parameters``.
    """
    known = sorted({*raw, *_KNOWN_FIELDS})
    merged = dict(raw)
    for name, value in overrides.items():
        if name not in known:
            meant = hint(str(name), known) or "; accepted: a field of config.json"
            raise ConfigError(f"hf_overrides: unknown field {short_repr(name)}={short_repr(value)}{meant}")
        old = raw.get(name)
        merged[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value
    if any(name in overrides for name in ROPE_FIELDS):
        merged |= {**dict.fromkeys(ROPE_FIELDS), "rope_parameters": merge_rope(raw, overrides)}
    return merged


def _family(reader: Fields) -> _Family:
    """What ``architectures`` names, or where it is empty ``model_type``."""
    names, model_type = reader.raw.get("architectures") or [None], reader.raw.get("model_type")
    name = names[0] if isinstance(names, list) else names
    families, given, value = _FAMILIES, "model_type", model_type
    if name is not None:
        families, given, value = {family.architecture: family for family in _FAMILIES.values()}, "architecture", name
    if not isinstance(value, str) or value not in families:
        what = f"{reader.where}: {given}={short_repr(value)} is not supported"
        raise UnsupportedModelError(f"{what}; supported: {', '.join(families)}")
    family = families[value]
    if isinstance(model_type, str) and (other := _FAMILIES.get(model_type)) is not family:
        what = f"{reader.where}: architectures={short_repr(names)} and model_type={short_repr(model_type)}"
        if other is not None:
            raise ConfigError(f"{what} name different models; accepted: two that agree, or one of them")
        logger.warning("%s: medha goes by the former, transformers by the latter", what)
    return family


def _refuse_unimplemented(reader: Fields) -> None:
    for name, neutral in _NEUTRAL_VALUES.items():
        value = reader.raw.get(name)
        if value is not None and value not in neutral:
            what = f"{reader.where}: {name}={short_repr(value)} changes the model's output and is not implemented"
            raise UnsupportedModelError(f"{what}; accepted: {' or '.join([*map(repr, neutral), 'null'])}")


def _num_kv_heads(reader: Fields, family: _Family, num_heads: int) -> int:
    # null means one for each query head
    default = num_heads if "num_key_value_heads" in reader.raw else (family.num_kv_heads or num_heads)
    num_kv_heads: int = reader.number("num_key_value_heads", integer(1, 4096), default)
    if num_heads % num_kv_heads:
        what = f"{reader.where}: num_key_value_heads={num_kv_heads}"
        raise ConfigError(f"{what}; accepted: a divisor of num_attention_heads={num_heads}")
    return num_kv_heads


def _head_dim(reader: Fields, family: _Family, num_heads: int) -> int:
    hidden_size = reader.number("hidden_size", integer(1, 2**20))
    head_dim: int = reader.number("head_dim", integer(1, 4096), family.head_dim or max(1, hidden_size // num_heads))
    if reader.raw.get("head_dim") is None and family.head_dim is None and hidden_size % num_heads:
        raise reader.wrong("hidden_size", f"a multiple of num_attention_heads={num_heads}, or an explicit head_dim")
    if head_dim % 2:
        raise ConfigError(f"{reader.where}: head_dim={head_dim} is odd; accepted: an even number (RoPE turns pairs)")
    return head_dim


def _dtype(reader: Fields) -> str:
    name = "torch_dtype" if reader.raw.get("dtype") is None else "dtype"
    value = reader.raw.get(name)
    dtype = "float32" if value is None else str(value).removeprefix("torch.")
    if dtype not in DTYPES:
        raise reader.wrong(name, ", ".join(DTYPES))
    return dtype


def _refuse_windows(reader: Fields, family: _Family, num_layers: int, *, max_length: int) -> None:
    """Refuse attention that some context of at most ``max_length`` tokens would outgrow."""
    window = reader.optional("sliding_window", integer(1, 2**62))
    if "sliding_window" not in reader.raw:
        window = family.sliding_window
    causes = [(_window_cause(reader, family, num_layers, window), window)]
    if (chunks := reader.raw.get("dual_chunk_attention_config")) is not None:
        if not isinstance(chunks, Mapping):
            raise reader.wrong("dual_chunk_attention_config", "an object or null")
        chunk = Fields(chunks, reader.where).number("chunk_size", integer(1, 2**62), 262144)
        causes.append((f"dual_chunk_attention_config (chunk_size={chunk})", chunk))
    for cause, limit in causes:
        if cause and (limit is None or limit < max_length):
            within = f"; within it both agree: --max-model-len {limit} or less" if limit is not None else ""
            what = f"medha attends over the whole context, of up to {max_length} tokens here"
            raise UnsupportedModelError(f"{reader.where}: {cause}: {what}, which differs beyond the window{within}")


def _window_cause(reader: Fields, family: _Family, num_layers: int, window: int | None) -> str | None:
    """Which field asks for windowed attention in any layer, or None."""
    layer_types = reader.raw.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            raise reader.wrong("layer_types", f"a list of {num_layers} names, one for each layer")
        if unknown := [item for item in layer_types if item not in ("full_attention", "sliding_attention")]:
            what = f"{reader.where}: layer_types holds {short_repr(unknown[0])}, which is not implemented"
            raise UnsupportedModelError(f"{what}; accepted: full_attention")
        if "sliding_attention" in layer_types:
            return f"layer_types with sliding_attention (sliding_window={window})"
    if window is None:
        return None
    # The KV cache of transformers keeps a window of a Llama too.
    if family.architecture == "MistralForCausalLM" or (family.sliding_window is None and layer_types is None):
        absent = "" if "sliding_window" in reader.raw else ", the default of this architecture"
        return f"sliding_window={window}{absent}"
    first = reader.number("max_window_layers", integer(0, 2**31), 28)
    if reader.boolean("use_sliding_window") and layer_types is None and first < num_layers:
        return f"use_sliding_window=True (sliding_window={window})"
    return None
