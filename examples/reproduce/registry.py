"""All figures by name."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from examples.reproduce.result import FigureSpec
from medha.errors import ConfigError, hint

_MODULES = (
    *("requirements", "chunks", "adaptive", "stages", "versus", "kvp", "utilization", "example", "lengths"),
    *("disaggregation", "capacity", "decode_load", "schedulers", "pools", "layouts", "fragmentation"),
    *("tetris", "batching"),
)
FIGURES = {
    one.name: one
    for name in _MODULES
    for one in vars(import_module(f"examples.reproduce.figures.{name}")).values()
    if isinstance(one, FigureSpec)
}
SMALL = ("requirements", "adaptive-chunking", "example")
"""What is computed where nobody asks for more: within seconds."""


def find_figures(names: Sequence[str]) -> list[FigureSpec]:
    """Figures by name, each once, in the order of the registry; ``all`` is all, and none those of :data:`SMALL`.

    Raises:
        ConfigError: a name is not known.
    """
    wanted = set(names or SMALL)
    for name in names:
        if name != "all" and name not in FIGURES:
            accepted = f"all, {', '.join(FIGURES)}{hint(name, ['all', *FIGURES], cutoff=0.4)}"
            raise ConfigError(f"figure {name!r} is not known; accepted: {accepted}")
    if "all" in wanted:
        return list(FIGURES.values())
    return [figure for name, figure in FIGURES.items() if name in wanted]
