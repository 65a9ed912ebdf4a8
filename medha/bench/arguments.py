"""Reading what benchmarks are given on the command line."""

from __future__ import annotations

from typing import Any

from medha.cli.options import parse_lengths

__all__ = ["parse_lengths", "parse_overrides"]


def parse_overrides(text: str | None) -> dict[str, Any] | None:
    """Fields of ``config.json`` given as JSON."""
    from medha.models.hf_config import parse_hf_overrides  # here because it loads torch

    return None if text is None else parse_hf_overrides(text)
