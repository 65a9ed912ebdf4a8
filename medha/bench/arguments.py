"""Reading what benchmarks are given on the command line."""

from __future__ import annotations

from typing import Any

from medha.errors import ConfigError


def parse_overrides(text: str | None) -> dict[str, Any] | None:
    """Fields of ``config.json`` given as JSON."""
    from medha.models.hf_config import parse_hf_overrides  # here because it loads torch

    return None if text is None else parse_hf_overrides(text)


def parse_lengths(name: str, text: str) -> tuple[int, ...]:
    """``2048,16384`` as integers.

    Raises:
        ConfigError: not a list of positive integers.
    """
    parts = text.replace("_", "").split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(f"{name}={text!r}; accepted: positive integers, comma separated")
    return tuple(int(part) for part in parts)
