"""Read a JSON object from a file of a model folder, and check its fields one by one.

The file may be hostile: its size and depth are bounded, a key given twice is refused, and messages stay short.
Standard library only.
"""

from __future__ import annotations

import json
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medha.config.fields import Check, integer
from medha.errors import ConfigError, MedhaError, short_repr

MAX_LENGTH = 2**31 - 1
"""Longest context that a field may claim, in tokens."""
LENGTH = integer(1, MAX_LENGTH)


def read_json_object(
    path: Path, *, max_bytes: int = 10_000_000, error: type[MedhaError] = ConfigError
) -> dict[str, Any]:
    """The object that a JSON file holds; raises ``error`` where it is missing, no file, too large, or no object."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise error(f"{path}: not a file; accepted: a JSON object")
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as cause:
        raise error(f"{path}: cannot be read: {cause.strerror}; accepted: a JSON object") from cause
    if len(data) > max_bytes:
        raise error(f"{path}: larger than {max_bytes} bytes; accepted: a JSON object of at most that size")
    return parse_json_object(data, str(path), error=error)


def parse_json_object(data: bytes, where: str, *, error: type[MedhaError] = ConfigError) -> dict[str, Any]:
    """The object in UTF-8 JSON text; raises ``error``, which begins with ``where``, if it is none."""
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as cause:
        reason = f"not JSON: {cause.msg} at line {cause.lineno} column {cause.colno}" if data.strip() else "empty"
        raise error(f"{where}: {reason}; accepted: a JSON object") from cause
    except RecursionError as cause:
        raise error(f"{where}: nested too deep; accepted: a JSON object") from cause
    except ValueError as cause:  # no UTF-8, a key given twice, or an integer of thousands of digits
        raise error(f"{where}: {cause}") from cause
    if not isinstance(value, dict):
        raise error(f"{where}: holds a {type(value).__name__}, {short_repr(value)}; accepted: a JSON object")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = Counter(key for key, _ in pairs)
    if len(keys) < len(pairs):
        raise ValueError(f"key {short_repr(keys.most_common(1)[0][0])} is given twice in one object")
    return dict(pairs)


class Fields:
    """Typed, checked access to the fields of one JSON object: null reads as absent, a wrong one is a ConfigError."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where

    def wrong(self, name: str, accepted: str) -> ConfigError:
        """The error to raise for a field that is missing, or whose value is not accepted."""
        if name not in self.raw:
            return ConfigError(f"{self.where}: {name} is missing; accepted: {accepted}")
        return ConfigError(f"{self.where}: {name}={short_repr(self.raw[name])}; accepted: {accepted}")

    def optional(self, name: str, check: Check) -> Any:
        """A value that passes a check, or None where absent."""
        value = self.raw.get(name)
        if value is not None and not check.holds(value):
            raise self.wrong(name, check.accepted)
        return value

    def number(self, name: str, check: Check, default: float | None = None) -> Any:
        """As :meth:`optional`; where absent the default, and without one an error."""
        value = self.optional(name, check)
        value = default if value is None else value
        if value is None:
            raise self.wrong(name, check.accepted)
        return value

    def boolean(self, name: str, *, default: bool = False) -> bool:
        """True or false; the default where absent."""
        value = self.raw.get(name, default)
        if value is None:  # transformers tests these for truth, so null is false even where absent means true
            return False
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One id, or a list of ids, each in the vocabulary."""
        value = self.raw.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(map(integer(0, vocab_size - 1).holds, ids)):
            raise self.wrong(name, f"token ids from 0 to {vocab_size - 1} (one, a list, or null)")
        return tuple(dict.fromkeys(ids))
