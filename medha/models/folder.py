"""The folder of a model: a local one, or a snapshot from the Hugging Face hub; and the JSON files in it.

Only safetensors, JSON, templates and tokenizer files are fetched; pickled weights never are. Offline mode
(``HF_HUB_OFFLINE``) and the cache folder are huggingface_hub's own. A file may be hostile: its size and depth are
bounded, a key given twice is refused, and messages stay short.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medha.config.fields import BOOLEAN, Check, integer
from medha.errors import ConfigError, MedhaError, ModelLoadError, short_repr

ALLOW_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")
IGNORE_PATTERNS = ("*/*.safetensors", "consolidated*")  # other formats of the same weights

_ACCEPTED = "accepted: a folder with config.json and *.safetensors, or a hub id such as org/name"
_BOOLEAN = Check("true or false", BOOLEAN.holds)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def resolve_model(model: str, *, revision: str | None = None, with_weights: bool = True) -> Path:
    """The local folder of a model; where there is none of that name and it is a hub id (``org/name``), it is fetched:
    of a ``revision`` (branch, tag or commit), ``with_weights`` or without."""
    try:
        path = Path(model).expanduser() if model.startswith("~") else Path(model)
        if path.is_dir() and model:
            with os.scandir(path):  # lists nothing; fails where the folder cannot be read
                return path
        if path.is_symlink() or path.exists():
            raise ModelLoadError(f"model {model!r} is a file or a dangling symlink, not a folder; {_ACCEPTED}")
    except (OSError, RuntimeError, UnicodeError) as error:
        raise ModelLoadError(f"model {model!r} cannot be read: {error}; {_ACCEPTED}") from error
    if not _HUB_ID.fullmatch(model):
        raise ModelLoadError(f"model {model!r}: no such folder, and not a hub id; {_ACCEPTED}")
    from huggingface_hub import snapshot_download

    patterns = ALLOW_PATTERNS if with_weights else ALLOW_PATTERNS[1:]
    wanted: dict[str, Any] = {"allow_patterns": list(patterns), "ignore_patterns": list(IGNORE_PATTERNS)}
    try:
        return Path(snapshot_download(model, revision=revision, **wanted))
    except Exception as error:  # which classes the hub raises depends on its version and its HTTP library
        at = "" if revision is None else f" at revision {revision!r}"
        what = f"model {model!r}{at}: no such folder here, and the hub did not deliver it"
        raise ModelLoadError(f"{what} ({type(error).__name__}: {error}); {_ACCEPTED}") from error


MAX_LENGTH = 2**31 - 1
"""Longest context that a field may claim, in tokens."""
LENGTH = integer(1, MAX_LENGTH)


def read_json_object(path: Path, *, max_bytes: int = 10**7, error: type[MedhaError] = ConfigError) -> dict[str, Any]:
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
    except (ValueError, RecursionError) as cause:  # no UTF-8, a key given twice, an integer of thousands of digits
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
        given = f"={short_repr(self.raw[name])}" if name in self.raw else " is missing"
        return ConfigError(f"{self.where}: {name}{given}; accepted: {accepted}")

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
        if name not in self.raw:
            return default
        return bool(self.optional(name, _BOOLEAN))  # transformers tests these for truth, so null is always false

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """One id, or a list of ids, each in the vocabulary."""
        value = self.raw.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(map(integer(0, vocab_size - 1).holds, ids)):
            raise self.wrong(name, f"token ids from 0 to {vocab_size - 1} (one, a list, or null)")
        return tuple(dict.fromkeys(ids))
