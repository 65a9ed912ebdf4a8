"""Frozen dataclasses as JSON files and back, values checked by their declared types, with errors that name them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, is_dataclass
from types import UnionType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from medha.config.fields import check_number
from medha.errors import ConfigError

_VERSION = 1
_WORDS = {bool: "true or false", str: "a text", dict: "an object", tuple: "a list"}
_MAY_BE_0 = (
    *("wave_share", "host_s", "sample_s", "alpha_s", "bytes_per_token", "calls", "num_threads", "short_kv", "y"),
    *("a_s", "b_s", "first_s", "short_a_s", "short_b_s", "prefill_factor", "straggler_a_s", "straggler_b_s"),
    *("control_s", "step_s", "ring_step_s", "qps"),
)
_LEAST: dict[str, float] = {**dict.fromkeys(_MAY_BE_0, 0), "overlap_power": 1, "ranks": 2}


class JsonFile:
    """A dataclass that is a file of some format."""

    __slots__ = ()
    format: ClassVar[str]

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps({"format": self.format, "version": _VERSION, **asdict(self)}, indent=2) + "\n"  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str, *, source: str = "the file") -> Self:
        """Read what :meth:`to_json` gave, or was written by hand; ``source`` names it in messages.

        ConfigError where it is no such file; where a field is unknown, missing or wrong, with its name.
        """
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{source} is not JSON: {error}") from error
        head = (tree.pop("format", None), tree.pop("version", None)) if isinstance(tree, dict) else None
        if head != (cls.format, _VERSION):
            raise ConfigError(f"{source}; accepted: a file of format {cls.format!r}, version {_VERSION}")
        try:
            found: Self = _value(cls, tree, "")
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error
        return found


def _value(kind: Any, tree: Any, where: str) -> Any:
    """A decoded value as its declared type: objects become dataclasses, lists tuples."""
    if isinstance(kind, UnionType):
        return None if tree is None else _value(get_args(kind)[0], tree, where)
    if is_dataclass(kind):
        return _dataclass(kind, tree, where)
    plain, least = get_origin(kind) or kind, _LEAST.get(where.rpartition(".")[2])
    if plain is float:
        check_number(where, tree, least, 1.0 if where.endswith("wave_share") else math.inf)
    elif plain is int and (type(tree) is not int or tree < (1 if least is None else least)):
        raise ConfigError(f"{where}={tree!r}; accepted: a whole number of at least {least or 1:g}")
    elif plain in _WORDS and not isinstance(tree, list if plain is tuple else plain):
        raise ConfigError(f"{where}={tree!r}; accepted: {_WORDS[plain]}")
    if plain is not tuple:
        return tree
    kinds = get_args(kind)
    if kinds[-1] is not ... and len(tree) != len(kinds):
        raise ConfigError(f"{where}={tree!r}; accepted: a list of {len(kinds)}")
    return tuple(_value(kinds[0], item, where) for item in tree)


def _dataclass(kind: Any, tree: Any, where: str) -> Any:
    if not isinstance(tree, dict):
        raise ConfigError(f"{where} is {tree!r}; accepted: an object")
    types = {name: hint for name, hint in get_type_hints(kind).items() if name in kind.__dataclass_fields__}
    what = where or "the file"
    if unknown := sorted(set(tree) - set(types)):
        raise ConfigError(f"{what} has unknown fields {', '.join(unknown)}; known: {', '.join(sorted(types))}")
    if missing := sorted(set(types) - set(tree)):
        raise ConfigError(f"{what} lacks {', '.join(missing)}")
    return kind(**{name: _value(types[name], value, f"{where}.{name}".lstrip(".")) for name, value in tree.items()})
