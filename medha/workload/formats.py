"""What a request looks like in each trace format, and the unit traps of each. All are read, ours alone is written.

``mooncake``
    JSON lines ``{"timestamp", "input_length", "output_length", "hash_ids"}`` (kvcache-ai/Mooncake, FAST'25 release), in
    **milliseconds**. ``hash_ids`` name blocks of 512 prompt tokens (others use other sizes), and may be missing.
``azure``
    CSV ``TIMESTAMP,ContextTokens,GeneratedTokens`` (Azure/AzurePublicDataset, 2023 and 2024). ISO date and time, read
    to the microsecond; without a time zone UTC is taken. Times count from the earliest request.
``burstgpt``
    CSV ``Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`` and more (HPMLL/BurstGPT). Seconds from
    midnight of the first day. A row with 0 response tokens failed, and is dropped and counted.
``vidur``
    CSV ``arrived_at,num_prefill_tokens,num_decode_tokens`` (microsoft/vidur, sarathi-serve). Seconds; files of lengths
    alone lack ``arrived_at``.
``sharegpt``
    JSON ``[{"conversations": [{"value"}, ...]}]``, text: prompt and output are the first two turns, as in vLLM. Shorter
    conversations and empty turns are dropped and counted. Tokens are estimated from characters. No arrival times.
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
from datetime import UTC, datetime
from typing import Any, NamedTuple

from medha.config.fields import number_or_text
from medha.errors import ValidationError
from medha.params import PRIORITIES, SLO, check_priority
from medha.workload.trace import MAX_TOKENS, Row

MAX_SECONDS = 1e10
"""A later arrival is taken for a mistake of unit: seconds since 1970 are below it, milliseconds above."""

CHARS_PER_TOKEN = 4.0  # an estimate for English text and vocabularies of 32K to 128K tokens

_COUNT = re.compile(r"([0-9]{1,18})(?:\.0*)?")

Fields = Mapping[str, Any]


class RowError(ValueError):
    """What is wrong with one request; the reader adds file and line."""


class Format(NamedTuple):
    """One format."""

    name: str  # as ``--from`` spells it
    needs: tuple[str, ...]  # columns of the header, or keys of the first object, by which a file is recognised
    parse: Callable[[Fields], Row | None]  # makes fields a request, None for one to drop, or raises RowError
    is_csv: bool = False  # columns below a header; else JSON


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
    number = math.nan if "_" in str(value) else number_or_text(str(value))
    seconds = number / per_s if isinstance(number, float) else math.nan
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


def _azure(fields: Fields) -> Row:
    text = _get(fields, "TIMESTAMP").strip()
    try:
        moment = datetime.fromisoformat(text if "-" in text else "")
    except ValueError:
        raise _bad("TIMESTAMP", text, "an ISO date and time as 2023-11-16 18:15:46.6805900") from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return Row(moment.timestamp(), _count(fields, "ContextTokens"), _count(fields, "GeneratedTokens"))


def _burstgpt(fields: Fields) -> Row | None:
    arrival_s = _seconds(fields, "Timestamp")
    output_tokens = _count(fields, "Response tokens", low=0)
    prompt_tokens = _count(fields, "Request tokens", low=1 if output_tokens else 0)
    return Row(arrival_s, prompt_tokens, output_tokens) if output_tokens else None


def _vidur(fields: Fields) -> Row:
    arrival_s = _seconds(fields, "arrived_at") if "arrived_at" in fields else None
    return Row(arrival_s, _count(fields, "num_prefill_tokens"), _count(fields, "num_decode_tokens"))


def _sharegpt(fields: Fields) -> Row | None:
    name = "conversation" if "conversation" in fields else "conversations"
    turns = _get(fields, name)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns[:2]):
        raise _bad(name, turns, "a list of objects with 'value'")
    texts = [turn.get("value") for turn in turns[:2]]
    if not all(isinstance(text, str) for text in texts):
        raise _bad("value", texts, "a string in each of the first two turns")
    if len(texts) < 2 or not all(texts):
        return None
    prompt_tokens, output_tokens = (math.ceil(len(text) / CHARS_PER_TOKEN) for text in texts)
    return Row(None, prompt_tokens, output_tokens)


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
        None if (tenant := given.get("tenant")) in (None, "") else _text("tenant", tenant),
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
    limits = {"ttft_s": row.ttft_slo_s, "tpot_s": row.tpot_slo_s}
    fields = {
        "id": row.request_id,
        "arrival_s": row.arrival_s or 0.0,
        "num_prompt_tokens": row.prompt_tokens,
        "num_output_tokens": row.output_tokens,
        "slo": {name: value for name, value in limits.items() if value is not None} or None,
        "priority": None if row.priority is None else PRIORITIES[row.priority],
        "tenant": row.tenant or None,
        "hash_ids": None if row.prefix_hashes is None else row.prefix_hashes.tolist(),
    }
    return json.dumps({name: value for name, value in fields.items() if value is not None})


_ALL = (
    Format("sharegpt", ("conversations",), _sharegpt),
    Format("medha", ("num_prompt_tokens",), _medha),
    Format("mooncake", ("timestamp", "input_length"), _mooncake),
    Format("azure", ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure, is_csv=True),
    Format("burstgpt", ("Timestamp", "Request tokens", "Response tokens"), _burstgpt, is_csv=True),
    Format("vidur", ("num_prefill_tokens", "num_decode_tokens"), _vidur, is_csv=True),
)
FORMATS = {one.name: one for one in _ALL}  # the formats by name


_ALSO = {"conversation": "conversations", "prompt_token_ids": "num_prompt_tokens"}  # in place of what a format needs


def recognised(head: str) -> Format | None:
    """The format of a file that begins so, if it is one."""
    first = head.split("\n", 1)[0]
    if head[:1] == "[":
        return FORMATS["sharegpt"]
    if is_json := head[:1] == "{":
        names = {_ALSO.get(key, key) for key in re.findall(r'"(\w+)"\s*:', first)}
    else:
        names = {name.strip().strip('"') for name in first.split(",")}
    return next((f for f in FORMATS.values() if f.is_csv != is_json and names.issuperset(f.needs)), None)
