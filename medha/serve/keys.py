"""API keys: who may ask for what. A file names each key, what its requests have by default, and what they may have.

[alice]                      # the tenant, whose requests share the machine fairly with those of others
key = "sk-..."
priority = "high"            # the most urgent class that it may ask for, and what it gets (default: normal)
ttft_s = 2.0                 # objectives of a request that brings none ...
least_ttft_s = 0.5           # ... and the tightest that it may bring
max_prompt_tokens = 200000
max_concurrent = 16
"""

from __future__ import annotations

import hmac
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from medha.config.fields import POSITIVE, Check, check_options, choice, integer, option
from medha.errors import ConfigError, ValidationError, hint, not_accepted
from medha.params import PRIORITIES, check_seconds

_TEXT = Check("text that is not empty", lambda value: isinstance(value, str) and value.strip() != "")
_COUNT = integer(1, 2**31 - 1)


@dataclass(frozen=True)
class Key:
    """What the requests of one API key have and may have; without keys, everybody's."""

    tenant: str = ""
    key: str = field(default="", repr=False)
    priority: str | None = option("", None, "", choice(*PRIORITIES))
    ttft_s: float | None = option("", None, "", POSITIVE)
    tpot_s: float | None = option("", None, "", POSITIVE)
    least_ttft_s: float | None = option("", None, "", POSITIVE)
    least_tpot_s: float | None = option("", None, "", POSITIVE)
    max_prompt_tokens: int | None = option("", None, "", _COUNT)
    max_concurrent: int | None = option("", None, "", _COUNT)

    def objectives(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """``slo``, ``priority`` and ``tenant`` of a request; headers in milliseconds where the body has none.

        Raises:
            ValidationError: it asks for more than the key allows.
        """
        given = body.get("slo")
        if given is not None and not isinstance(given, dict):
            raise not_accepted("slo", given, "an object with ttft_s and tpot_s")
        slo: dict[str, Any] = dict(given or {})
        for name in ("ttft", "tpot"):
            value = slo.get(f"{name}_s")
            if value is None and (text := headers.get(f"x-slo-{name}-ms")) is not None:
                value = _milliseconds(f"x-slo-{name}-ms", text)
            if value is None:
                value = getattr(self, f"{name}_s")
            elif (least := getattr(self, f"least_{name}_s")) is not None and check_seconds(name, value) < least:
                raise not_accepted(f"slo.{name}_s", value, f"at least {least:g}, with this API key")
            if value is not None:
                slo[f"{name}_s"] = value
        most = self.priority or ("normal" if self.key else PRIORITIES[0])
        priority = body.get("priority") or self.priority
        if priority in PRIORITIES and PRIORITIES.index(priority) < PRIORITIES.index(most):
            raise not_accepted("priority", priority, f"{most} or less urgent, with this API key")
        return {"slo": slo or None, "priority": priority, "tenant": self.tenant}


def _milliseconds(name: str, text: str) -> float:
    try:
        return float(text) / 1e3
    except ValueError:
        raise not_accepted(name, text, "milliseconds") from None


ANYBODY = Key()


class Keys:
    """The API keys of a server; without any, everybody is let in."""

    def __init__(self, keys: Sequence[Key]) -> None:
        self._keys = [(key.key.strip().encode(), key) for key in keys]

    def of(self, authorization: str | None) -> Key | None:
        """Who a header ``Authorization`` is of; None where nobody is. All keys are compared, each in constant time."""
        if not self._keys:
            return ANYBODY
        kind, _, given = (authorization or "").partition(" ")
        secret = given.strip().encode("latin-1", "replace") if kind.lower() == "bearer" else b""  # as headers come
        found = [key for known, key in self._keys if hmac.compare_digest(known, secret)]
        return found[0] if found else None


def load_keys(plain: Sequence[str], file: Path | None) -> Keys:
    """Keys of a command line, which have no limits, and of a TOML file; raises ConfigError."""
    if not all(text.strip() for text in plain):
        raise ConfigError("an API key is empty; accepted: one that is not, or none at all")
    keys = [Key(key=text, priority=PRIORITIES[0]) for text in plain]
    if file is not None:
        try:
            tables = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"key file {file}: {error}") from error
        keys += [_key(file, name, table) for name, table in tables.items()]
        if not tables:
            raise ConfigError(f"key file {file} has no keys; accepted: a table for each, or no file")
    if len({key.key for key in keys}) < len(keys):
        raise ConfigError("two API keys are the same; accepted: one for each tenant")
    return Keys(keys)


def _key(file: Path, tenant: str, table: Any) -> Key:
    names = [one.name for one in fields(Key) if one.name != "tenant"]
    if not isinstance(table, dict) or not _TEXT.holds(table.get("key")):
        raise ConfigError(f'key file {file}: [{tenant}] has no key; accepted: a table with key = "..."')
    for name in table:
        if name not in names:
            raise ConfigError(f"key file {file}: [{tenant}] {name}{hint(name, names)}; accepted: {', '.join(names)}")
    try:
        key = Key(tenant, **table)
        check_options(key)
    except (ConfigError, ValidationError) as error:
        raise ConfigError(f"key file {file}: [{tenant}] {error}") from error
    return key
