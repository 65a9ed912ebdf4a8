"""Reading what benchmarks are given on the command line."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from medha.config import parse_size
from medha.errors import ConfigError


def parse_overrides(text: str | None) -> dict[str, Any] | None:
    """Fields of ``config.json`` given as JSON."""
    from medha.models.hf_config import parse_hf_overrides  # here because it loads torch

    return None if text is None else parse_hf_overrides(text)


def parse_lengths(name: str, text: str) -> tuple[int, ...]:
    """``2048,16K`` as integers.

    Raises:
        ConfigError: not a list of positive integers.
    """
    parts = text.replace("_", "").split(",")
    with suppress(ConfigError):
        if all(part.strip().isdecimal() or part.strip()[-1:].isalpha() for part in parts):
            return tuple(parse_size(part) for part in parts)
    raise ConfigError(f"{name}={text!r}; accepted: positive integers such as 2048 or 16K, comma separated")
