"""API keys: who may ask for what. A file names each key, what its requests have by default, and what they may have at
most; docs/serving.md has one."""

from __future__ import annotations

import hmac
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medha.config.fields import COUNT, POSITIVE, Check, check_options, choice, option
from medha.errors import ConfigError, ValidationError, not_accepted
from medha.params import PRIORITIES, SLO, names_checked

_TEXT = Check("text that is not empty", lambda value: isinstance(value, str) and value.strip() != "")


@names_checked
@dataclass(frozen=True)
class Key:
    """What the requests of one API key have and may have; without keys, everybody's."""

    tenant: str = ""
    key: str | None = option("", None, "", _TEXT, repr=False)
    priority: str | None = option("", None, "", choice(*PRIORITIES))
    ttft_s: float | None = option("", None, "", POSITIVE)
    tpot_s: float | None = option("", None, "", POSITIVE)
    least_ttft_s: float | None = option("", None, "", POSITIVE)
    least_tpot_s: float | None = option("", None, "", POSITIVE)
    max_prompt_tokens: int | None = option("", None, "", COUNT)
    max_concurrent: int | None = option("", None, "", COUNT)

    def __post_init__(self) -> None:
        check_options(self, not_accepted)

    def objectives(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
        """``slo``, ``priority`` and ``tenant`` of a request: what its body has, else its headers, in milliseconds, else
        the key; a key's tenant is fixed. :meth:`check` follows when they have been read."""
        slo = {} if body.get("slo") is None else body["slo"]
        if isinstance(slo, dict):  # else it is refused where it is read
            texts = {name: headers.get(f"x-slo-{name[:4]}-ms") for name in ("ttft_s", "tpot_s")}
            try:
                own = {name: getattr(self, name) if ms is None else float(ms) / 1e3 for name, ms in texts.items()}
            except ValueError:
                raise not_accepted("slo", None, "milliseconds in x-slo-ttft-ms and x-slo-tpot-ms") from None
            slo = own | {name: value for name, value in slo.items() if value is not None}
        priority = self.priority if body.get("priority") is None else body["priority"]
        return {"slo": slo, "priority": priority, "tenant": self.tenant or body.get("tenant")}

    def check(self, slo: SLO | None, priority: str) -> None:
        """Raise ValidationError where a request asks for more than the key allows."""
        for name in ("ttft_s", "tpot_s"):
            value, least = getattr(slo, name, None), getattr(self, f"least_{name}")
            if value is not None and least is not None and value < least:
                raise not_accepted(f"slo.{name}", value, f"at least {least:g}, with this API key")
        most = self.priority or ("normal" if self.tenant else PRIORITIES[0])
        if PRIORITIES.index(priority) < PRIORITIES.index(most):
            raise not_accepted("priority", priority, f"{most} or less urgent, with this API key")


def key_of(keys: Sequence[Key], authorization: str) -> Key | None:
    """Whose a header ``Authorization`` is, None where it is nobody's. All keys are compared, each in constant time."""
    kind, _, given = authorization.partition(" ")
    secret = given.strip(" \t").encode("latin-1", "replace") if kind.lower() == "bearer" else b""  # as headers come
    found = [key for key in keys if key.key and hmac.compare_digest(key.key.strip().encode(), secret)]
    return found[0] if found else None


def load_keys(plain: Sequence[str], file: Path | None) -> list[Key]:
    """Keys of a command line, which have no limits, and of a TOML file; raises ConfigError."""
    keys = [Key(key=text) for text in plain]
    if file is not None:
        try:
            tables = tomllib.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"key file {file}: {error}") from error
        if not tables:
            raise ConfigError(f"key file {file} has no keys; accepted: a table for each, or no file")
        for tenant, table in tables.items():
            try:
                keys.append(key := Key(tenant, **table))
                key.check(SLO(key.ttft_s, key.tpot_s), key.priority or "normal")
                if key.key is None or not tenant:
                    raise ConfigError('has no key or no name; accepted: a table with a name and key = "..."')
            except (TypeError, ConfigError, ValidationError) as error:
                raise ConfigError(f"key file {file}: [{tenant}] {error}") from error
    if len({(key.key or "").strip() for key in keys}) < len(keys):
        raise ConfigError("two API keys are the same; accepted: one for each tenant")
    return keys
