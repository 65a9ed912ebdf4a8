"""Rank 0: the loop that serves requests, and what surrounds it. :class:`Engine` is loaded on first use, with torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medha.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    if name != "Engine":
        raise AttributeError(f"module 'medha.engine' has no attribute {name!r}")
    from medha.engine.engine import Engine  # here because it loads torch

    return Engine
