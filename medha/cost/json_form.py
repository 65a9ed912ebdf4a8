"""Frozen dataclasses as JSON files and back, with errors that name the field: hardware specs and measured profiles."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from medha.errors import ConfigError

_VERSION = 1
T = TypeVar("T")


def to_json(thing: Any, format: str) -> str:
    """The text of a file of some format, which :func:`from_json` reads."""
    return json.dumps({"format": format, "version": _VERSION, **asdict(thing)}, indent=2) + "\n"


def from_json(kind: type[T], text: str, *, formats: tuple[str, ...], source: str) -> T:
    """Read a file.

    Args:
        kind: the dataclass to make; it checks its own values.
        text: JSON.
        formats: names of the format; the first is the present one, the others are what it was called before.
        source: how a message names the file.

    Raises:
        ConfigError: not such a file, or naming the field that is unknown, missing or wrong.
    """
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not JSON: {error}") from error
    head = (tree.pop("format", None), tree.pop("version", None)) if isinstance(tree, dict) else None
    if head not in [(name, _VERSION) for name in formats]:
        raise ConfigError(f"{source}; accepted: a file of format {formats[0]!r}, version {_VERSION}")
    try:
        found: T = _value(kind, tree, "the file")
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return found


def _value(kind: Any, tree: Any, where: str) -> Any:
    """A decoded value as its declared type: objects become dataclasses, lists tuples; others stay as they are."""
    if isinstance(kind, UnionType):
        return None if tree is None else _value(get_args(kind)[0], tree, where)
    if get_origin(kind) is tuple and isinstance(tree, list):
        return tuple(_value(get_args(kind)[0], item, where) for item in tree)
    if not is_dataclass(kind):
        return tree
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{where} is {tree!r}; accepted: an object")
    types = get_type_hints(kind)
    if unknown := sorted(set(tree) - set(types)):
        raise ConfigError(f"{where} has unknown fields {', '.join(unknown)}; known: {', '.join(sorted(types))}")
    needed = {item.name for item in fields(kind) if item.default is MISSING or item.name not in _MAY_LACK}
    if missing := sorted(needed - set(tree)):
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    return kind(**{name: _value(types[name], value, name) for name, value in tree.items()})  # type: ignore[operator]


_MAY_LACK = ("tiles",)
"""Fields that files of before do not have."""


def check_number(name: str, value: object, least: float | None = None, most: float = math.inf) -> None:
    """Refuse what is not a finite number above 0, or of at least ``least``, and at most ``most``.

    Raises:
        ConfigError: it is not.
    """
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    above = number > 0 if least is None else number >= least
    if not math.isfinite(number) or not above or number > most:
        bound = "above 0" if least is None else f"of at least {least:g}"
        raise ConfigError(
            f"{name}={value!r}; accepted: a finite number {bound}" + f", at most {most:g}" * (most < math.inf)
        )


def check_int(name: str, value: object, *, least: int = 1) -> None:
    """Refuse what is not a whole number of at least ``least``.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r}; accepted: a whole number of at least {least}")
