"""Fair shares: how much compute each tenant has had, and whose requests therefore wait.

A tenant's account is the predicted seconds of its chunks and decodes over its weight: 1M tokens of one prompt cost what
they take, far more than a thousand prompts of 1K. Where several tenants wait, the requests of one that has had
``LEAD_S`` more than the least served of them come after the others of their class. So whoever stays below its share is
served as if alone, in the policy's order; nothing is held back where nobody else wants it; and no account falls behind
by more than the lead and a batch. A tenant that comes back after a pause starts level with the least served of those
that are there (as in start-time fair queueing), so that nobody saves up.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

LEAD_S = 1.0
"""Seconds of compute, over its weight, by which a tenant may be ahead before its requests wait for those of others."""


class Tenants:
    """The accounts of those that have unfinished requests; ``weights`` by name, 1 for others."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {}
        self._index: dict[str, int] = {}
        self._names: list[str] = []
        self._num_requests: list[int] = []
        self._had_s = np.zeros(4)

    @property
    def are_several(self) -> bool:
        """Whether more than one has unfinished requests."""
        return len(self._index) > 1

    def enter(self, name: str) -> int:
        """A request of a tenant arrives; returns the tenant's number, good until its last request has left."""
        index = self._index.get(name)
        if index is None:
            least_s = min((self._had_s[other] for other in self._index.values()), default=0.0)
            index = self._index[name] = self._free(name)
            self._had_s[index] = least_s
        self._num_requests[index] += 1
        return index

    def leave(self, index: int) -> None:
        """A request of a tenant is closed."""
        self._num_requests[index] -= 1
        if not self._num_requests[index]:
            del self._index[self._names[index]]

    def charge(self, index: int, seconds: float) -> None:
        """A tenant is served for so many predicted seconds."""
        self._had_s[index] += seconds / self._weights.get(self._names[index], 1.0)

    def ahead(self, tenants: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which requests, given by the tenants' numbers, wait for those of others."""
        had_s = self._had_s[tenants]
        is_ahead: NDArray[np.bool_] = had_s > had_s.min(initial=np.inf) + LEAD_S
        return is_ahead

    def _free(self, name: str) -> int:
        """A number that is not in use."""
        used = set(self._index.values())
        index = next(number for number in range(len(self._names) + 1) if number not in used)
        if index == len(self._names):
            self._names.append(name)
            self._num_requests.append(0)
            if index == self._had_s.size:
                self._had_s = np.concatenate((self._had_s, np.zeros(index)))
        self._names[index] = name
        return index
