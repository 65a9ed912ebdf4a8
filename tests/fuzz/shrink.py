"""A failing case made smaller."""

import time
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from typing import Any

from tests.fuzz.cases import Ask, Case

_KEPT = ("temperature", "seed", "max_tokens")  # without them there is more, or what no reference tells


def shrink(case: Case, fails: Callable[[Case], bool], *, limit_s: float) -> Case:
    """The smallest case found, within the time, that still ``fails`` in the same way."""
    end_s = time.monotonic() + limit_s
    index, is_smaller = 0, False
    while time.monotonic() < end_s:
        candidates = [candidate for candidate in smaller(case) if candidate != case]
        if index >= len(candidates):
            if not is_smaller:
                break
            index, is_smaller = 0, False
        elif fails(candidates[index]):
            case, is_smaller = candidates[index], True
        else:
            index += 1
    return case


def smaller(value: Any) -> Iterator[Any]:
    """The same with a little less in it: fewer requests or names, a field as it is by default, less in one part; some
    of it may be no case that can run, which fails in another way."""
    if is_dataclass(value):
        plain = type(value)()
        for name, its in sorted(vars(value).items(), key=lambda field: field[0] != "asks"):
            default = () if name in ("length", "params") else (getattr(plain, name),)  # of which there is more
            yield from (replace(value, **{name: less}) for less in (*default, *smaller(its)))
    elif isinstance(value, dict):
        names = [name for name in value if name not in _KEPT]
        yield from ({other: its for other, its in value.items() if other != name} for name in names)
        yield from (value | {name: less} for name in value if name != "seed" for less in smaller(value[name]))
    elif isinstance(value, tuple):
        sizes = [len(value) // 2**n for n in range(1, len(value).bit_length())] if Ask in map(type, value) else []
        yield from (value[:at] + value[at + size :] for size in sizes for at in range(0, len(value), size))
        for at, one in enumerate(value):
            yield from ((*value[:at], less, *value[at + 1 :]) for less in smaller(one))
    elif isinstance(value, int) and value > 1:
        yield from (value // 2, value - 1)
