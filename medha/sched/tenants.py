"""Fair shares: how much compute each tenant has had, and whose requests therefore wait.

A tenant's account is the predicted seconds of its chunks and decodes over its weight: 1M tokens of one prompt cost what
they take, far more than a thousand prompts of 1K. Where several tenants wait, the requests of one that has had
``LEAD_S`` more than the least served of its class come after its others. So whoever stays below its share is
served as if alone, in the policy's order; nothing is held back where nobody else wants it; and but for the guard's
share, which goes by arrival, no account falls behind by more than the lead and a batch. A tenant that comes back after
a pause starts level with the least served of those that are there (as in start-time fair queueing), so that nobody
saves up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from medha.params import PRIORITIES

LEAD_S = 1.0
"""Seconds of compute, over its weight, by which a tenant may be ahead before its requests wait for those of others."""


class Tenants:
    """The accounts, by number, of all that have a request or are ahead of the least served of these; ``weights`` are by
    name, 1 for others."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {}
        self._numbers: dict[str | None, int] = {}
        self._names: list[str | None] = [None] * 4  # by number, as what follows
        self._weight_of = [1.0] * 4
        self._had_s, self._num_requests = np.zeros(4), np.zeros(4, np.int64)  # the latter that are not closed

    @property
    def are_several(self) -> bool:
        """Whether more than one has requests that are not closed."""
        return bool(np.count_nonzero(self._num_requests) > 1)

    def enter(self, name: str) -> int:
        """A request of a tenant arrives; returns the tenant's number."""
        number = self._numbers.get(name)
        if number is None or not self._num_requests[number]:
            is_present = self._num_requests > 0
            least_s = self._had_s[is_present].min(initial=math.inf)
            if number is None:
                gone = np.flatnonzero(~is_present & (self._had_s <= least_s))  # coming back they start at the least
                number = self._named(int(gone[0]) if gone.size else is_present.size, name)
            self._had_s[number] = max(self._had_s[number], least_s if is_present.any() else 0.0)
        self._num_requests[number] += 1
        return number

    def _named(self, number: int, name: str) -> int:
        """Give a tenant a number, which nobody has or needs."""
        if number == len(self._names):
            self._names, self._weight_of = self._names + [None] * number, self._weight_of + [1.0] * number
            self._had_s = np.append(self._had_s, np.zeros(number))
            self._num_requests = np.append(self._num_requests, np.zeros(number, np.int64))
        self._numbers.pop(self._names[number], None)
        self._names[number], self._weight_of[number] = name, self._weights.get(name, 1.0)
        self._numbers[name] = number
        return number

    def leave(self, number: int) -> None:
        """A request of a tenant is closed."""
        self._num_requests[number] -= 1
        if not self._num_requests.any():  # else who asked little before would be served alone until it has had as much
            self._had_s[:] = 0.0

    def charge(self, number: int, seconds: float) -> None:
        """A tenant is served for so many predicted seconds."""
        self._had_s[number] += seconds / self._weight_of[number]

    def ahead(self, tenants: NDArray[np.int64], classes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which requests, given by the tenants' numbers, wait for those of others of their class (or half a class)."""
        had_s, least_s = self._had_s[tenants], np.full(2 * len(PRIORITIES), np.inf)
        np.minimum.at(least_s, classes, had_s)
        is_ahead: NDArray[np.bool_] = had_s > least_s[classes] + LEAD_S
        return is_ahead
