"""What a request looks like in each trace format, and the unit traps of each. Both are read, ours alone is written.

``mooncake``
    JSON lines ``{"timestamp", "input_length", "output_length", "hash_ids"}`` (kvcache-ai/Mooncake, FAST'25 release), in
    **milliseconds**. ``hash_ids`` name blocks of 512 prompt tokens (others use other sizes), and may be missing.
``medha``
    JSON lines, as far as lengths go those of ``medha generate --requests``: ``id``, ``arrival_s`` (missing is 0),
    ``num_prompt_tokens`` or ``prompt_token_ids``, ``num_output_tokens`` or ``max_tokens``, ``slo`` {``ttft_s``,
    ``tpot_s``}, ``priority``, ``tenant``, and ``hash_ids`` as Mooncake's. Other fields are ignored.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Callable, Mapping
from typing import Any

from medha.errors import ValidationError
from medha.params import PRIORITIES, SLO, check_priority
from medha.workload.trace import MAX_TOKENS, Row

MAX_SECONDS = 1e10
"""A later arrival is taken for a mistake of unit: seconds since 1970 are below it, milliseconds above."""

_COUNT = re.compile(r"([0-9]{1,18})(?:\.0*)?")

Fields = Mapping[str, Any]


class RowError(ValueError):
    """What is wrong with one request; the reader adds file and line."""


def _bad(name: str, value: Any, accepted: str) -> RowError:
    return RowError(f"{name}={value!r:.80}; accepted: {accepted}")


def _get(fields: Fields, name: str) -> Any:
    value = fields.get(name)
    if value is None or value == "":
        raise RowError(f"{name} is missing; accepted: a value in every request")
    return value


def _count(fields: Fields, name: str, low: int = 1) -> int:
    """A number of tokens; a decimal point is allowed where nothing but zeros follow."""
    value = _get(fields, name)
    match = _COUNT.fullmatch(str(value).strip())
    number = int(match[1]) if match else -1
    if not low <= number <= MAX_TOKENS:
        raise _bad(name, value, f"an integer from {low} to {MAX_TOKENS}")
    return number


def _seconds(fields: Fields, name: str, unit: str = "s") -> float:
    value, per_s = _get(fields, name), {"s": 1, "ms": 1000}[unit]
    try:
        seconds = math.nan if "_" in str(value) else float(str(value)) / per_s
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_SECONDS:
        raise _bad(name, value, f"a time in {unit}, not negative, at most {MAX_SECONDS * per_s:.0e}")
    return seconds + 0.0  # -0 becomes 0


def _hashes(fields: Fields) -> array[int] | None:
    value = fields.get("hash_ids")
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(i) is int and 0 <= i < 2**63 for i in value):
        raise _bad("hash_ids", value, "a list of integers from 0 to 2**63 - 1")
    return array("q", value)


def _mooncake(fields: Fields) -> Row:
    tokens = _count(fields, "input_length"), _count(fields, "output_length")
    return Row(_seconds(fields, "timestamp", "ms"), *tokens, prefix_hashes=_hashes(fields))


def _medha(fields: Fields) -> Row:
    given = dict(fields)
    if isinstance(ids := given.get("prompt_token_ids"), list):
        given.setdefault("num_prompt_tokens", len(ids))
    if "max_tokens" in given:
        given.setdefault("num_output_tokens", given["max_tokens"])
    try:
        limits = SLO() if given.get("slo") is None else SLO.from_dict(given["slo"])
        priority = None if given.get("priority") is None else PRIORITIES.index(check_priority(given["priority"]))
    except ValidationError as error:
        raise RowError(str(error)) from error
    return Row(
        None if given.get("arrival_s") is None else _seconds(given, "arrival_s"),
        _count(given, "num_prompt_tokens"),
        _count(given, "num_output_tokens"),
        None if (request_id := given.get("id", given.get("request_id"))) is None else _text("id", request_id),
        _hashes(given),
        limits.ttft_s,
        limits.tpot_s,
        priority,
        None if given.get("tenant") is None else _text("tenant", given["tenant"]),
    )


def _text(name: str, value: Any) -> str:
    try:
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            raise ValueError
        str(value).encode()
    except ValueError:  # also a lone surrogate, and an integer of thousands of digits
        raise RowError(f"{name}={value!a:.80}; accepted: a string of Unicode characters or an integer") from None
    return str(value)


def medha_line(row: Row) -> str:
    """One request as our own format writes it."""
    fields: dict[str, Any] = {
        "id": row.request_id,
        "arrival_s": row.arrival_s or 0.0,
        "num_prompt_tokens": row.prompt_tokens,
        "num_output_tokens": row.output_tokens,
    }
    limits = (("ttft_s", row.ttft_slo_s), ("tpot_s", row.tpot_slo_s))
    if slo := {name: value for name, value in limits if value is not None}:
        fields["slo"] = slo
    if row.priority is not None:
        fields["priority"] = PRIORITIES[row.priority]
    if row.tenant:
        fields["tenant"] = row.tenant
    if row.prefix_hashes is not None:
        fields["hash_ids"] = row.prefix_hashes.tolist()
    return json.dumps(fields)


FORMATS: dict[str, Callable[[Fields], Row]] = {"mooncake": _mooncake, "medha": _medha}
"""By name, what makes the fields of a line a request, or raises RowError."""
