"""All figures by name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from importlib import import_module

from examples.reproduce.result import FigureSpec
from medha.errors import ConfigError

_MODULES = (
    *("requirements", "chunks", "adaptive", "stages", "versus", "kvp", "utilization", "example", "lengths"),
    *("disaggregation", "capacity", "decode_load", "schedulers", "pools", "layouts"),
)
FIGURES: dict[str, FigureSpec] = {
    figure.name: figure
    for module in _MODULES
    for figure in import_module(f"examples.reproduce.figures.{module}").FIGURES
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
            near = difflib.get_close_matches(name, ["all", *FIGURES], n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"figure {name!r} is not known; accepted: all, {', '.join(FIGURES)}{hint}")
    if "all" in wanted:
        return list(FIGURES.values())
    return [figure for name, figure in FIGURES.items() if name in wanted]
