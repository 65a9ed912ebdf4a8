"""Read ``generation_config.json`` of a Hugging Face model folder: its sampling defaults and stop ids.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from medha.models.json_fields import MAX_LENGTH, Fields, read_json_object


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
    reader = Fields(read_json_object(path), path.name)
    temperature = reader.optional_number("temperature", 0, 2)  # the bound of SamplingParams
    do_sample = None if reader.raw.get("do_sample") is None else reader.boolean("do_sample")
    return GenerationDefaults(
        temperature=0.0 if do_sample is False else temperature,
        top_p=reader.optional_number("top_p", 0, 1, above=True),
        top_k=reader.optional_integer("top_k", -1, 2**31 - 1),
        min_p=reader.optional_number("min_p", 0, 1),
        repetition_penalty=reader.optional_number("repetition_penalty", 1e-6, 1e6),
        do_sample=do_sample,
        eos_token_ids=reader.token_ids("eos_token_id", vocab_size),
        max_new_tokens=reader.optional_integer("max_new_tokens", 1, MAX_LENGTH),
    )
