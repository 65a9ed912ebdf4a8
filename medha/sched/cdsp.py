"""Chunkwise dynamic sequence parallelism (CDSP): on how many groups, and which, each part of a prompt is read.

Source: Tetris ("Optimizing Long-context LLM Serving via Fine-grained Sequence Parallelism"), section 5.1, Algorithms 1
to 3. A plan is a list of chunks, each dealt evenly to a *run*, neighbouring KVP groups, that contains the one before
and is larger: the first begins on groups that are idle while others are busy. The queue time of a group is the seconds
until what it was given is done.

- :meth:`Planner.plan` is Algorithm 1: the prompt as a single chunk bounds the SP size; then each pair of a size for the
  next chunk and a larger one for what follows is tried, and what follows is planned likewise.
- ``_Search._single`` is Algorithm 2: the sizes in ascending order, a larger one only where it saves more than the share
  ``rate`` of the time to the first token (the improvement rate).
- ``_Search._solve`` is Algorithm 3: the chunk is as long as its run computes until the larger one is free, the root of
  the latency model (Eq. 1) in closed form.

Departures, and why:

- Instances are neighbouring groups, within a node while they fit and else whole nodes, not any set: rows and process
  groups are of runs. Where only one size is allowed, runs begin at its multiples, as fixed groups do.
- After a chunk of e seconds Eq. 2 lessens every queue by e and empties its own run's: for any run that contains those
  of all chunks before, that is its queue at arrival less their seconds, at least 0. So one table of the queues serves
  the whole search. Of runs that are equally soon free, the one that was at arrival is taken.
- The least chunk, which the paper leaves open, has two tokens for each of its groups: the pieces of a zigzag.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from medha.batch import PIECES
from medha.config import ParallelConfig, SchedulerConfig
from medha.config.fields import are_sp_sizes
from medha.cost.chunk_times import ChunkTimes
from medha.cost.improvement import RateTable, read_rates
from medha.errors import ConfigError


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
        rates: improvement rates.

    Raises:
        ConfigError: the sizes are not ascending powers of two, or one is above the number of groups.
    """

    def __init__(
        self, times: ChunkTimes, num_groups: int, *, max_chunks: int | None = None, rates: float | RateTable = 0.0
    ) -> None:
        if not are_sp_sizes(times.sizes) or times.sizes[-1] > num_groups:
            sizes = ",".join(map(str, times.sizes))
            raise ConfigError(f"sp_sizes={sizes!r}; accepted: ascending powers of two up to kvp={num_groups}")
        self.times = times
        self.num_groups = num_groups
        self.max_chunks = math.inf if max_chunks is None else max_chunks
        self.rates = rates
        self.starts = [self._starts(size) for size in times.sizes]  # of the runs of each size

    @classmethod
    def of(
        cls, config: SchedulerConfig, parallel: ParallelConfig, times: Callable[[Sequence[int]], ChunkTimes], **its: str
    ) -> Planner:
        """As configured, for a ``hardware`` and a ``model``; ``times`` gives the latency model of some SP sizes.
        ConfigError for SP sizes that the layout does not have, or rates of something else."""
        sizes = tuple(config.sp_sizes or (1 << power for power in range(parallel.kvp.bit_length())))
        planner = cls(times(sizes), parallel.kvp, max_chunks=config.max_chunks)
        planner.rates = read_rates(config.improvement_rate, **its, layout=planner.layout(parallel.tp))
        return planner

    def layout(self, tp: int) -> str:
        """It in words, as improvement rates are for it."""
        sizes = ",".join(map(str, self.times.sizes))
        most = "any number of" if self.max_chunks == math.inf else self.max_chunks
        return f"tp {tp}, kvp {self.num_groups}, SP {sizes}, {most} chunks"

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
        return Plan(*search.best(_Rest(num_tokens, 0, None, 0.0), low, len(self.times.sizes) - 1, self.max_chunks))

    def occupy(self, queue_s: list[float], chunks: Sequence[Chunk]) -> None:
        """Let the chunks of a plan take their time, as predicted, of ``queue_s``, in place."""
        history = 0
        for num_tokens, first, size in chunks:
            end_s = max(queue_s[first : first + size]) + self.times.seconds(size, history, num_tokens)
            queue_s[first : first + size] = [end_s] * size
            history += num_tokens


class _Rest(NamedTuple):
    """What is left of a prompt behind some chunks."""

    tokens: int
    history: int  # tokens of those chunks
    run: tuple[int, int] | None  # first group and size of the last of them
    elapsed_s: float  # when that ends


class _Search:
    """One search; sizes are by their index."""

    def __init__(self, planner: Planner, queue_s: NDArray[np.float64], keep: float) -> None:
        self.keep, self.starts = keep, planner.starts
        self.sizes, self.coefficients = planner.times.sizes, planner.times.coefficients
        self.peaks: list[list[float]] = []  # by size and first group of a run: seconds until all of it is free
        width, peak = 1, queue_s
        for size in self.sizes:
            while width < size:
                peak = np.maximum(peak[:-width], peak[width:])
                width *= 2
            self.peaks.append(peak.tolist())

    def best(self, rest: _Rest, low: int, high: int, max_chunks: float) -> tuple[float, tuple[Chunk, ...]]:
        """Algorithm 1 for the rest of a prompt, on sizes from ``low`` to ``high``: seconds from now on, and chunks; inf
        where no run is large enough."""
        best_s, top, first = self._single(rest, low, high)
        chunks: tuple[Chunk, ...] = (Chunk(rest.tokens, first, self.sizes[top]),)
        for k in range(low, top) if max_chunks > 1 else ():
            first, free_s = self._extended(rest.run, k)
            run, wait_s = (first, k), max(free_s - rest.elapsed_s, 0.0)
            for next_k in range(k + 1, top + 1):
                tokens, chunk_s = self._solve(rest, run, wait_s, next_k)
                if not tokens:
                    continue
                end_s = wait_s + chunk_s
                after = _Rest(rest.tokens - tokens, rest.history + tokens, run, rest.elapsed_s + end_s)
                after_s, others = self.best(after, next_k, top, max_chunks - 1)
                if end_s + after_s < best_s:
                    best_s = end_s + after_s
                    chunks = (Chunk(tokens, run[0], self.sizes[k]), *others)
        return best_s, chunks

    def _single(self, rest: _Rest, low: int, high: int) -> tuple[float, int, int]:
        """Algorithm 2: seconds, size and first group of the rest as one chunk; inf where no run contains the last."""
        best, least_s = (math.inf, low, -1), math.inf
        left, done, run, elapsed_s = rest
        for k in range(low, high + 1):
            if left < PIECES * self.sizes[k] and least_s < math.inf:
                break
            first, free_s = self._extended(run, k)
            a, b, c, d, e = self.coefficients[k]
            seconds = a + e * done + left * (b + c * done + d * left)
            if free_s > elapsed_s:
                seconds += free_s - elapsed_s
            if seconds < least_s:
                best, least_s = (seconds, k, first), self.keep * seconds
        return best

    def _solve(self, rest: _Rest, run: tuple[int, int], wait_s: float, next_k: int) -> tuple[int, float]:
        """Algorithm 3: tokens and seconds of a chunk on ``run`` that ends when a larger run is free; 0 for none."""
        (_, free_s), (_, k) = self._extended(run, next_k), run
        a, b, c, d, e = self.coefficients[k]
        fixed_s, token_s = a + e * rest.history, b + c * rest.history
        budget_s = max(free_s - rest.elapsed_s, 0.0) - wait_s - fixed_s
        slope = token_s + math.sqrt(token_s * token_s + 4.0 * d * budget_s) if 0.0 < budget_s < math.inf else 0.0
        tokens = int(2.0 * budget_s / slope) if slope > 0.0 else 0  # of the root's two forms that without cancellation
        if not PIECES * self.sizes[k] <= tokens < rest.tokens:
            return 0, 0.0
        return tokens, fixed_s + tokens * (token_s + d * tokens)

    def _extended(self, run: tuple[int, int] | None, k: int) -> tuple[int, float]:
        """The run of a size that contains another and is soonest free: its first group, and when; inf for none."""
        starts, peaks = self.starts[k], self.peaks[k]
        if run is not None:
            low = bisect_left(starts, run[0] + self.sizes[run[1]] - self.sizes[k])
            starts = starts[low : bisect_right(starts, run[0])]
        first = min(starts, key=peaks.__getitem__, default=None)
        return (-1, math.inf) if first is None else (first, peaks[first])
