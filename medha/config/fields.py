"""An option as the field of a dataclass: what it is for, what it accepts, and where a command line shows it."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any

from medha.errors import ConfigError

# Headings of options: each is a group of medha.cli.options.
MODEL = "Model"
MEMORY = "Memory"
SCHEDULING = "Scheduling"
SERVING = "Requests that share the engine"
PARALLEL = "Parallel layout"
SAMPLING = "Sampling"
DEALT = "Chunkwise dynamic sequence parallelism (cdsp)"
SIMULATED = "Simulated memory"
"""What an engine finds out itself: given to it, it could contradict the machine."""


@dataclass(frozen=True, slots=True)
class Check:
    """What a value may be: in words, and whether one is that."""

    accepted: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class OptionField:
    """What a field says of itself."""

    panel: str  # under which heading a command line lists it, with the group of that name; empty: it has none
    help: str
    check: Check | None = None  # what it accepts beside its default
    name: str = ""  # by which users give it, where it is not the field's
    kind: Any = None  # its type on a command line, where it is not the field's; str is text that is read later
    flags: tuple[str, ...] = ()  # its spellings on a command line, where they are not made from the name
    shown: str = ""  # its default in words, where it is not the value
    read: Callable[[str, Any], Any] | None = None  # what a user's value of that name means, where it may be text


def option(panel: str, default: Any, help: str, check: Check | None = None, *, repr: bool = True, **more: Any) -> Any:
    """A field with its :class:`OptionField`."""
    return dataclasses.field(default=default, repr=repr, metadata={"option": OptionField(panel, help, check, **more)})


def option_of(field: dataclasses.Field[Any]) -> OptionField | None:
    """What a field says of itself; None where users do not give it."""
    return field.metadata.get("option")


def read_option(field: dataclasses.Field[Any], value: Any, name: str = "") -> Any:
    """What a user's value means, who gave it by a name; an error names it."""
    said = option_of(field)
    if said is None or said.read is None:
        return value
    return said.read(name or said.name or field.name, value)


def _config_error(name: str, value: Any, accepted: str) -> Exception:
    return ConfigError(f"{name}={value!r}; accepted: {accepted}")


def check_options(config: Any, error: Callable[[str, Any, str], Exception] = _config_error) -> None:
    """Hold every option of a dataclass to its check, and one that is true or false to being that, None apart where its
    type has it; raises what ``error`` makes of the option's name, the value and what is accepted. Numbers and arrays of
    numpy become Python's own."""
    for field in dataclasses.fields(config):
        if (said := option_of(field)) is None:
            continue
        value, kind = getattr(config, field.name), str(field.type)
        if hasattr(value, "tolist"):
            object.__setattr__(config, field.name, value := value.tolist())
        check = BOOLEAN if kind.startswith("bool") else said.check
        is_absent = value is None and "None" in kind
        if check is not None and not is_absent and not check.holds(value):
            raise error(said.name or field.name, value, check.accepted)


def _is_number(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def check_number(name: str, value: object, least: float | None = None, most: float = math.inf) -> None:
    """Refuse what is not a finite number above 0, or of at least ``least``, and at most ``most``."""
    number: Any = value.tolist() if hasattr(value, "tolist") else value  # of numpy
    number = number if _is_number(number, int, float) else math.nan
    above = number > 0 if least is None else number >= least
    if not math.isfinite(number) or not above or number > most:
        bound = "above 0" if least is None else f"of at least {least:g}"
        bound += f", at most {most:g}" * (most < math.inf)
        raise _config_error(name, value, f"a finite number {bound}")


def integer(low: int, high: int, accepted: str = "") -> Check:
    """An integer within bounds."""
    accepted = accepted or f"an integer from {low} to {high}"
    return Check(accepted, lambda value: _is_number(value, int) and low <= value <= high)


def number(accepted: str, holds: Callable[[float], bool]) -> Check:
    """A number, whole or not."""
    return Check(accepted, lambda value: _is_number(value, int, float) and holds(value))


def choice(*choices: str) -> Check:
    """One of some words."""
    return Check(", ".join(choices), lambda value: value in choices)


def finite(low: float, high: float = math.inf, *, is_open: bool = False) -> Check:
    """A finite number from ``low``, or above it where that end is open, to ``high``."""
    accepted = f"a finite number {'above' if is_open else 'from'} {low:g}" + f" to {high:g}" * math.isfinite(high)
    most = min(high, sys.float_info.max)
    return number(accepted, lambda value: (low < value if is_open else low <= value) and value <= most)


def are_weights(value: Any) -> bool:
    """Whether it is a mapping of names to finite numbers above 0."""
    return isinstance(value, dict) and all(isinstance(n, str) and POSITIVE.holds(v) for n, v in value.items())


def text_read(read: Callable[[str], Any]) -> Callable[[str, Any], Any]:
    """What reads text alone; a value of another type means itself."""
    return lambda _, value: read(value) if isinstance(value, str) else value


def words(text: str) -> tuple[str, ...]:
    """Comma separated ones."""
    return tuple(filter(None, map(str.strip, text.split(","))))


def number_or_text(text: str) -> float | str:
    """A number, where it is one."""
    try:
        return float(text)
    except ValueError:
        return text


def are_sp_sizes(value: Any) -> bool:
    """Whether they are ascending powers of two."""
    sizes = list(value) if isinstance(value, (tuple, list)) else []
    are_powers = all(type(size) is int and size > 0 and size & (size - 1) == 0 for size in sizes)
    return bool(sizes) and are_powers and sizes == sorted(set(sizes))


COUNT, FEW = integer(1, 2**31 - 1), integer(1, 65536)
POSITIVE = finite(0, is_open=True)
SHARE = number("a number from 0 to below 1", lambda value: 0 <= value < 1)
BOOLEAN = Check("True or False", lambda value: isinstance(value, bool))
TEXT = Check("a string", lambda value: isinstance(value, str) and value != "")


def parse_size(text: str) -> int:
    """A size in bytes or a length in tokens, in any of its spellings.

    As in vLLM ``1k`` is 1,000 and ``1K`` 1,024, likewise m, g and t; with a B (``KB``) they are 1,000s and with an i
    (``KiB``, ``Ki``) 1,024s in either case.
    """
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*(?:([kmgt])(i?))?(b?)\s*", text, flags=re.IGNORECASE)
    if not match:
        raise ConfigError(f"size {text!r}; accepted: a number, alone or with k, K, KB, KiB (or M, G, T so)")
    unit = match[2] or ""
    is_binary = match[3] or (unit.isupper() and not match[4])
    size = int(Decimal(match[1]) * (1024 if is_binary else 1000) ** " kmgt".index(unit.lower() or " "))
    if size < 1:
        raise ConfigError(f"size {text!r}; accepted: at least 1")
    return size


as_rate = text_read(number_or_text)
"""A number, or the name of a file."""


def as_sp_sizes(_: str, value: Any) -> Any:
    """A tuple of a list, or of text as ``1,2,4``: 0 for a part that is no integer, which no check accepts."""
    if isinstance(value, str):
        value = [int(size) if size.isdecimal() else 0 for size in words(value)]
    return tuple(value) if isinstance(value, list) else value


def as_size(name: str, value: Any, example: str = "4GiB") -> Any:
    """The number of a size that is text; anything else is left to its check."""
    try:
        return parse_size(value) if isinstance(value, str) else value
    except ConfigError as error:
        raise ConfigError(f"{name}={value!r}; accepted: as in {example!r} ({error})") from None


as_length = partial(as_size, example="128K")
"""The same of a length in tokens."""


def as_gib(name: str, value: Any) -> Any:
    """Bytes of a size that is text; a number, be it text, is GiB as in vLLM."""
    try:
        gib = float(value) if _is_number(value, str, int, float) else math.nan
    except (ValueError, OverflowError):
        return as_size(name, value)
    if not 0 <= gib <= 2**30:
        raise ConfigError(f"{name}={value!r}; accepted: GiB from 0 to {2**30}, or text as in '512MiB'")
    return int(gib * 2**30)
