"""Frozen dataclasses as JSON files and back, and checks of their values, with errors that name the field."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from types import UnionType
from typing import Any, ClassVar, TypeVar, cast, get_args, get_origin, get_type_hints

from medha.errors import ConfigError

_VERSION = 1
T = TypeVar("T", bound="JsonFile")


class JsonFile:
    """A dataclass that is a file of some format; it checks its own values."""

    __slots__ = ()
    format: ClassVar[str]

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps({"format": self.format, "version": _VERSION, **asdict(self)}, indent=2) + "\n"  # type: ignore[call-overload]

    @classmethod
    def from_json(cls: type[T], text: str, *, source: str = "the file") -> T:
        """Read what :meth:`to_json` gave, or was written by hand; ``source`` names it in messages.

        Raises:
            ConfigError: not such a file, or naming the field that is unknown, missing or wrong.
        """
        try:
            tree = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{source} is not JSON: {error}") from error
        head = (tree.pop("format", None), tree.pop("version", None)) if isinstance(tree, dict) else None
        if head != (cls.format, _VERSION):
            raise ConfigError(f"{source}; accepted: a file of format {cls.format!r}, version {_VERSION}")
        try:
            return cast(T, _value(cls, tree, "the file"))
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error


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
    hints = get_type_hints(kind)
    types = {item.name: hints[item.name] for item in fields(kind)}
    if unknown := sorted(set(tree) - set(types)):
        raise ConfigError(f"{where} has unknown fields {', '.join(unknown)}; known: {', '.join(sorted(types))}")
    if missing := sorted(set(types) - set(tree)):
        raise ConfigError(f"{where} lacks {', '.join(missing)}")
    return kind(**{name: _value(types[name], value, name) for name, value in tree.items()})  # type: ignore[operator]


_OTHERS: dict[Any, tuple[type, str]] = {"bool": (bool, "true or false"), "str": (str, "a text")}
_MAY_BE_0 = (
    *("wave_share", "host_s", "sample_s", "alpha_s", "bytes_per_token", "calls", "num_threads"),
    *("short_kv", "prefill_factor", "straggler_a_s", "straggler_b_s"),
)
_LEAST: dict[str, float] = {**dict.fromkeys(_MAY_BE_0, 0), "overlap_power": 1, "ranks": 2}


def check_fields(where: str, thing: Any) -> None:
    """Refuse a field that is not of its declared type, or a number that is not finite and above 0 (or its least)."""
    for item in fields(thing):
        name, value, least = f"{where}.{item.name}", getattr(thing, item.name), _LEAST.get(item.name)
        if item.type == "int":
            whole = 1 if least is None else int(least)
            if not isinstance(value, int) or isinstance(value, bool) or value < whole:
                raise ConfigError(f"{name}={value!r}; accepted: a whole number of at least {whole}")
        elif item.type == "float":
            check_number(name, value, least, 1.0 if item.name == "wave_share" else math.inf)
        elif item.type in _OTHERS and not isinstance(value, _OTHERS[item.type][0]):
            raise ConfigError(f"{name}={value!r}; accepted: {_OTHERS[item.type][1]}")


def check_number(name: str, value: object, least: float | None = None, most: float = math.inf) -> None:
    """Refuse what is not a finite number above 0, or of at least ``least``, and at most ``most``."""
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    above = number > 0 if least is None else number >= least
    if not math.isfinite(number) or not above or number > most:
        bound = "above 0" if least is None else f"of at least {least:g}"
        bound += f", at most {most:g}" * (most < math.inf)
        raise ConfigError(f"{name}={value!r}; accepted: a finite number {bound}")
