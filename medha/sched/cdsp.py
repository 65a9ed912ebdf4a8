"""Chunkwise dynamic sequence parallelism (CDSP): on how many groups, and which, each part of a prompt is read.

Source: Tetris ("Optimizing Long-context LLM Serving via Fine-grained Sequence Parallelism"), section 5.1, Algorithms 1
to 3. A chunk is dealt to a *run*, neighbouring KVP groups, each of which computes an even share of its tokens. A plan
is a list of chunks, each on a run that contains the one before and is larger: the first begins on groups that are idle
while others are busy. Groups have a queue time, the seconds until what they were given is done.

- :meth:`Planner.plan` is Algorithm 1: the prompt as a single chunk bounds the SP size; then each pair of a size for the
  next chunk and a larger one for what follows is tried, and what follows is planned likewise.
- ``_Search._single`` is Algorithm 2: the sizes in ascending order, a larger one only where it saves more than the share
  ``rate`` of the time to the first token (the improvement rate).
- ``_Search._solve`` is Algorithm 3: the chunk is as long as its run computes until the larger one is free, the root of
  the latency model (Eq. 1) in closed form.

Departures, and why:

- Instances are neighbouring groups, within a node while they fit and else whole nodes, not any set: rows and process
  groups are of runs. Where only one size is allowed, runs begin at its multiples, as fixed groups do.
- After a chunk of e seconds Eq. 2 lessens every queue by e and empties its own run's. That is the queue at arrival less
  the seconds of all chunks before, at least 0, for any run that contains theirs; so one table of the queues serves the
  whole search. Of runs that are equally soon free, the one that was at arrival is taken.
- The least chunk, which the paper leaves open, has two tokens for each of its groups: the pieces of a zigzag.
- What cannot be better than the best so far is not searched. That is exact: no plan that ends on a size takes less than
  that size's constant, with the least coefficients of it and of all smaller ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from medha.batch import PIECES
from medha.cost.chunk_times import ChunkTimes, check_sizes


class Chunk(NamedTuple):
    """Tokens of a prompt that are dealt to the groups ``first``, ..., ``first + size - 1``."""

    num_tokens: int
    first: int
    size: int

    @property
    def groups(self) -> range:
        """The run."""
        return range(self.first, self.first + self.size)


class Plan(NamedTuple):
    """How a prompt is read."""

    ttft_s: float  # predicted, from now
    chunks: tuple[Chunk, ...]


class Planner:
    """Plans prompts over so many groups.

    Args:
        times: the latency model; its sizes are those that may be used.
        num_groups: KVP groups.
        max_chunks: of a plan; 1 is request-level SP, None sets no bound.

    Raises:
        ConfigError: a size above the number of groups.
    """

    def __init__(self, times: ChunkTimes, num_groups: int, *, max_chunks: int | None = None) -> None:
        check_sizes(times.sizes, num_groups)
        self.times = times
        self.num_groups = num_groups
        self.max_chunks = math.inf if max_chunks is None else max_chunks
        self.starts = [np.array(self._starts(size), np.intp) for size in times.sizes]  # of the runs of each size
        rows = np.array(times.coefficients)
        b, c, d = rows[:, 1], rows[:, 2], np.minimum(rows[:, 3], rows[:, 2] / 2)
        least = [np.minimum.accumulate(column) for column in (b, c, d)]
        self.least = list(zip(rows[:, 0].tolist(), *(c.tolist() for c in least), rows[:, 4].tolist(), strict=True))

    def _starts(self, size: int) -> list[int]:
        node, sizes = self.times.groups_per_node, self.times.sizes
        step = max(node if size > node else 1, size if len(sizes) == 1 else 1)
        firsts = range(0, self.num_groups - size + 1, step)
        return [first for first in firsts if size > node or first // node == (first + size - 1) // node]

    def plan(self, num_tokens: int, queue_s: Sequence[float], rate: float, *, least_size: int = 1) -> Plan:
        """The plan of a prompt.

        Args:
            num_tokens: of the prompt, at least 1.
            queue_s: seconds until each group is free.
            rate: the improvement rate, from 0 to below 1.
            least_size: groups that the KV of the prompt needs.

        Raises:
            ValueError: no run has so many groups.
        """
        low = next((k for k, size in enumerate(self.times.sizes) if size >= least_size), None)
        if low is None:
            raise ValueError(f"no run has {least_size} groups; sizes are {self.times.sizes}, groups {self.num_groups}")
        search = _Search(self, np.asarray(queue_s, dtype=np.float64), 1.0 - rate)
        top = len(self.times.sizes) - 1
        ttft_s, chunks = search.best(num_tokens, 0, None, 0.0, low, top, self.max_chunks, math.inf)
        return Plan(ttft_s, chunks)

    def finish_s(self, queue_s: list[float], chunks: Sequence[Chunk]) -> list[tuple[float, float]]:
        """When each chunk of a plan begins and ends, as predicted; ``queue_s`` is updated in place."""
        spans, history = [], 0
        for num_tokens, first, size in chunks:
            start_s = max(queue_s[first : first + size])
            end_s = start_s + self.times.seconds(size, history, num_tokens)
            queue_s[first : first + size] = [end_s] * size
            spans.append((start_s, end_s))
            history += num_tokens
        return spans


class _Search:
    """One search; sizes are by their index."""

    def __init__(self, planner: Planner, queue_s: NDArray[np.float64], keep: float) -> None:
        self.planner, self.keep = planner, keep
        self.sizes, self.coefficients, self.least = planner.times.sizes, planner.times.coefficients, planner.least
        self.node = planner.times.groups_per_node
        self.peaks: list[list[float]] = []  # by size and first group of a run: seconds until all of it is free
        self._at_first: list[tuple[int, float]] = []  # where a first chunk goes
        self._runs: dict[tuple[int, int, int], tuple[int, float] | None] = {}
        width, peak = 1, queue_s
        for size, starts in zip(self.sizes, planner.starts, strict=True):
            while width < size:
                peak = np.maximum(peak[:-width], peak[width:])
                width *= 2
            self.peaks.append(peak.tolist())
            first = int(starts[peak[starts].argmin()])
            self._at_first.append((first, self.peaks[-1][first]))

    def best(
        self,
        left: int,
        done: int,
        run: tuple[int, int] | None,
        elapsed_s: float,
        low: int,
        high: int,
        max_chunks: float,
        limit_s: float,
    ) -> tuple[float, tuple[Chunk, ...]]:
        """Algorithm 1 for the rest of a prompt: seconds from now on, and chunks; inf if that is not below ``limit_s``.

        ``run`` is the first group and the size (index) of the chunk before; sizes from ``low`` to ``high`` are used.
        """
        if limit_s < math.inf and self._bound(left, done, low, high) >= limit_s:
            return math.inf, ()
        found = self._single(left, done, run, elapsed_s, low, high)
        if found is None:
            return math.inf, ()
        best_s, top, first = found
        chunks: tuple[Chunk, ...] = (Chunk(left, first, self.sizes[top]),)
        if max_chunks <= 1:
            return best_s, chunks
        for k in range(low, top):
            place = self._extended(run, k)
            if place is None:
                continue
            first, peak_s = place
            wait_s = max(peak_s - elapsed_s, 0.0)
            for next_k in range(k + 1, top + 1):
                solved = self._solve(left, done, (first, k), wait_s, elapsed_s, next_k)
                if solved is None:
                    continue
                tokens, chunk_s = solved
                end_s = wait_s + chunk_s
                args = left - tokens, done + tokens, (first, k), elapsed_s + end_s, next_k, top, max_chunks - 1
                rest_s, rest = self.best(*args, best_s - end_s)
                if end_s + rest_s < best_s:
                    best_s = end_s + rest_s
                    chunks = (Chunk(tokens, first, self.sizes[k]), *rest)
        return best_s, chunks

    def _single(
        self, left: int, done: int, run: tuple[int, int] | None, elapsed_s: float, low: int, high: int
    ) -> tuple[float, int, int] | None:
        """Algorithm 2: seconds, size and first group of the rest as one chunk; None where no run contains ``run``."""
        best: tuple[float, int, int] | None = None
        least_s = math.inf
        for k in range(low, high + 1):
            place = self._extended(run, k)
            if place is None or (best is not None and left < PIECES * self.sizes[k]):
                continue
            a, b, c, d, e = self.coefficients[k]
            seconds = a + e * done + left * (b + c * done + d * left)
            if place[1] > elapsed_s:
                seconds += place[1] - elapsed_s
            if best is None or seconds < least_s:
                best, least_s = (seconds, k, place[0]), self.keep * seconds
        return best

    def _solve(
        self, left: int, done: int, run: tuple[int, int], wait_s: float, elapsed_s: float, next_k: int
    ) -> tuple[int, float] | None:
        """Algorithm 3: tokens and seconds of a chunk on ``run`` that ends when a larger run is free; None for none."""
        place = self._extended(run, next_k)
        if place is None:
            return None
        k = run[1]
        a, b, c, d, e = self.coefficients[k]
        fixed_s, token_s = a + e * done, b + c * done
        budget_s = max(place[1] - elapsed_s, 0.0) - wait_s - fixed_s
        if budget_s <= 0.0:
            return None
        slope = token_s + math.sqrt(token_s * token_s + 4.0 * d * budget_s)
        if slope <= 0.0:
            return None
        tokens = int(2.0 * budget_s / slope)  # of the two forms of the root the one without cancellation
        if not PIECES * self.sizes[k] <= tokens < left:
            return None
        return tokens, fixed_s + tokens * (token_s + d * tokens)

    def _extended(self, run: tuple[int, int] | None, k: int) -> tuple[int, float] | None:
        """The run of a size that contains another and is soonest free: its first group, and when; None for none."""
        if run is None:
            return self._at_first[k]
        key = (*run, k)
        if key not in self._runs:
            self._runs[key] = self._extend(*run, k)
        return self._runs[key]

    def _extend(self, first: int, k: int, next_k: int) -> tuple[int, float] | None:
        size, peaks, node = self.sizes[next_k], self.peaks[next_k], self.node
        low, high, step = first + self.sizes[k] - size, min(first, len(peaks) - 1), 1
        if size <= node:
            low, high = max(low, first - first % node), min(high, first - first % node + node - size)
        else:
            low, step = -(-max(low, 0) // node) * node, node
        if low > high:
            return None
        best_s = min(peaks[low : high + 1 : step])
        return low + step * peaks[low : high + 1 : step].index(best_s), best_s

    def _bound(self, left: int, done: int, low: int, high: int) -> float:
        """Seconds below which no plan of the rest is."""
        least = self.least[low : high + 1]
        bound_s: float = min(a + e * done + left * (b + c * done + d * left) for a, b, c, d, e in least)
        return bound_s
