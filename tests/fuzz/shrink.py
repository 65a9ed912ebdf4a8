"""A failing case made smaller."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tests.fuzz.cases import Ask, Case, Model

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


def smaller(case: Case) -> Iterator[Case]:
    """Cases with a little less in them: requests, ranks, options, the model, parts of requests."""
    asks = case.asks
    size = len(asks) // 2
    while size:
        for start in range(0, len(asks), size):
            if rest := asks[:start] + asks[start + size :]:
                yield replace(case, asks=rest)
        size //= 2
    for axis, degree in enumerate(case.layout):
        for less in {1, degree // 2} if degree > 1 else ():
            yield replace(case, layout=tuple(less if a == axis else d for a, d in enumerate(case.layout)))
    yield from (replace(case, decode=less) for less in ((0, 0), (1, 1)) if less < case.decode)
    yield replace(case, abandon=None, step_s=1e-3, token_s=1e-5, spike=1.0)
    yield from (replace(case, options=_without(case.options, name)) for name in case.options)
    yield from (replace(case, model=model) for model in _smaller_models(case))
    for index, ask in enumerate(asks):
        yield from (replace(case, asks=(*asks[:index], less, *asks[index + 1 :])) for less in _smaller_asks(ask))


def _smaller_models(case: Case) -> Iterator[Model]:
    model, plain = case.model, Model()
    for name in ("family", "tied", "stored", "shard_size", "num_textless", "eos"):
        yield replace(model, **{name: getattr(plain, name)})
    yield replace(model, shape=model.shape | {"num_hidden_layers": case.layout[1]})
    yield from (replace(model, shape=_without(model.shape, name)) for name in model.shape if "layers" not in name)


def _smaller_asks(ask: Ask) -> Iterator[Ask]:
    yield replace(ask, at=0, abort=None, priority="normal", slo=None)
    yield from (replace(ask, **{name: getattr(Ask(), name)}) for name in ("at", "abort", "priority", "slo"))
    yield from (replace(ask, params=_without(ask.params, name)) for name in ask.params if name not in _KEPT)
    for tokens in (ask.max_tokens // 2, ask.max_tokens - 1):
        if tokens >= max(1, ask.params.get("min_tokens", 0)):
            yield replace(ask, params=ask.params | {"max_tokens": tokens})
    yield from (replace(ask, length=length) for length in (ask.length // 2, ask.length - 1) if length)


def _without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}
