"""Seconds of prefill left, for many requests at once: Algorithm 3 of arXiv:2409.17264v5.

The paper caches SimulatePrefill at a fixed step of 1K tokens up to 1M and looks the remainder up as a difference. Here:

- The first 128 chunks are stepped through, and a prompt that ends within one of them is predicted from its start, as it
  pays for a small batch. Beyond, the seconds per token vary slowly and are summed by the trapezoid rule over ranges of
  many chunks: 10M tokens need a few hundred predictions.
- What a prompt takes in all has its last, smaller chunk in it; what is done once so many tokens are has not. Their
  difference never falls below one token's step: what has tokens left is not finished.

The seconds are at factor 1; callers multiply by the factor of the moment.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np

from medha.config import SchedulerConfig
from medha.cost.coefficients import Line
from medha.cost.predictor import Predictor, ring_or_gather_s

ChunkRule = Callable[[int], int]

_EXACT_CHUNKS = 128
_NUM_POINTS = 640
_PROMPTS = 4096  # of which is kept whether they are spread
_NEARLY = 0.85  # of full speed
_SHORT_PROMPT = 256  # tokens


class PrefillTimes:
    """Cached prefill seconds of a request that runs alone, on the slowest stage, by a rule that gives the tokens of a
    chunk from those cached before. Prompts longer than ``max_tokens`` count as this long. Over ``count`` groups chunks
    are dealt: gathered ones would leave all keys on one of them."""

    def __init__(self, predictor: Predictor, chunk: ChunkRule, *, max_tokens: int = 10_000_000, count: int = 1) -> None:
        self.max_tokens = max_tokens
        self._seconds, self._chunk = _chunk_seconds(predictor, count), chunk
        self.least_s = self._seconds(1, 0)
        starts, done, at = [0.0], [0.0], 0  # where chunks start, and the seconds done by then
        while at < max_tokens and len(starts) <= _EXACT_CHUNKS:
            size = min(max(chunk(at), 1), max_tokens - at)  # 1 where the budget is too small
            done.append(done[-1] + self._seconds(size, at))
            at += size
            starts.append(float(at))
        self._exact_end = at
        more, more_s = self._integrated(at, done[-1])
        done_s = np.maximum.accumulate([*done, *more_s]).tolist()
        self._done = Line([*starts, *more], done_s, 0.0)  # seconds by which so many tokens are done

    def total_s(self, num_prompt: int) -> float:
        """Seconds to prefill a prompt of so many tokens."""
        num_prompt = min(num_prompt, self.max_tokens)
        if num_prompt > self._exact_end:  # the last chunk is somewhere: half a step of one token in the mean
            return self._done.at(num_prompt) + self._seconds(1, num_prompt) / 2
        at = bisect_left(self._done.x, num_prompt) - 1
        if at < 0:
            return 0.0
        start = int(self._done.x[at])
        return self._done.y[at] + self._seconds(num_prompt - start, start)

    def span_s(self, start: int, end: int) -> float:
        """Seconds in which a long prompt's prefill comes from one position to another."""
        return self._done.at(end) - self._done.at(start)

    def remaining_s(self, num_computed: int, num_prompt: int) -> float:
        """Seconds to prefill what is left of a prompt of which ``num_computed`` tokens are done or in flight.

        Exact where a chunk of the rule begins there, and within one chunk elsewhere.
        """
        if num_prompt <= num_computed:
            return 0.0
        return max(self.total_s(num_prompt) - self._done.at(num_computed), self.least_s)

    def _integrated(self, start: int, start_s: float) -> tuple[list[float], list[float]]:
        """From ``start`` on, where it is not the end: lengths, and the seconds done by then."""
        points = np.unique(np.geomspace(start, self.max_tokens, _NUM_POINTS).round())
        sizes = np.array([max(self._chunk(int(kv)), 1) for kv in points])
        rate = np.array([self._seconds(int(size), int(kv)) for size, kv in zip(sizes, points, strict=True)]) / sizes
        spans = np.diff(points)
        # A chunk costs its first token's rate throughout: half a chunk behind the integral.
        lag = np.minimum((sizes[1:] + sizes[:-1]) / 2, spans)
        ranges_s = (rate[1:] + rate[:-1]) / 2 * spans - lag * (rate[1:] - rate[:-1]) / 2
        return points[1:].tolist(), (start_s + np.cumsum(ranges_s)).tolist()


class SpreadTimes:
    """Prefill seconds of each prompt, in chunks as the packer takes them; with a ring those of more than ``most_kv``
    tokens, which need several groups, may lie on all of these from their first chunk on."""

    def __init__(self, config: SchedulerConfig, predictor: Predictor, *, max_tokens: int, most_kv: int) -> None:
        chunk = budgeted_chunk(config, predictor)

        @cache
        def over(count: int) -> PrefillTimes:
            rule = chunk
            if count > 1:
                least = least_chunk(config, predictor, count)
                rule = lambda kv_before: max(count * chunk(kv_before), least(kv_before))  # noqa: E731
            return PrefillTimes(predictor, rule, max_tokens=max_tokens, count=count)

        self._of = over
        over(1)  # takes some milliseconds, which no request is to wait for
        self._most_kv = most_kv if config.ring else math.inf
        # whether a prompt is read sooner on so many groups than on one
        self.pays = lru_cache(_PROMPTS)(lambda prompt, count: over(count).total_s(prompt) < over(1).total_s(prompt))

    def __call__(self, num_prompt: int) -> PrefillTimes:
        """Those of a prompt of so many tokens."""
        count = -(-num_prompt // self._most_kv)
        return self._of(count if count > 1 and self.pays(num_prompt, count) else 1)


def budgeted_chunk(config: SchedulerConfig, predictor: Predictor) -> ChunkRule:
    """The rule of the packer for a request that runs alone: the largest chunk within the budget of a batch, at factor
    1; the least that may exceed it where less fits."""
    budget_s, least = chunk_rules(config, predictor)
    most, step, tick = config.max_batch_tokens, config.chunk_granularity, predictor.uncorrected().tick()
    return lambda kv_before: max(tick.largest_chunk(kv_before, budget_s, most, step), least(kv_before))


def least_chunk(
    config: SchedulerConfig, predictor: Predictor, count: int = 1, *, nearly: float = _NEARLY, least: int | None = None
) -> ChunkRule:
    """The least tokens of a chunk for which a batch may take longer: ``least``, else ``min_chunk``, times the smallest
    power of two with which the tokens a second are ``nearly`` those of the best that a batch allows, behind the same
    cached tokens. Of a chunk that is dealt to ``count`` groups each step of a ring costs the same however small it is;
    tokens are of each of them, the chunk of all."""
    seconds, most = _chunk_seconds(predictor, count), count * min(config.max_batch_tokens, predictor.max_tokens)
    least = count * (least or config.min_chunk)
    sizes = [least << i for i in range((most // least).bit_length())] or [most]

    @cache
    def chunk_at(kv_before: int) -> int:
        rates = [size / seconds(size, kv_before) for size in sizes]
        return next(size for size, rate in zip(sizes, rates, strict=True) if rate >= nearly * max(rates))

    def chunk(kv_before: int) -> int:
        low_bits = max(kv_before.bit_length() - 3, 0)  # few lengths are asked about
        return chunk_at(kv_before >> low_bits << low_bits)

    return chunk


def _chunk_seconds(predictor: Predictor, count: int) -> Callable[[int, int], float]:
    """Uncorrected seconds of a chunk alone behind cached tokens; over several groups dealt, if it is long enough."""
    tick = predictor.uncorrected().tick()
    if count == 1:
        return tick.with_chunk

    def dealt_s(q_len: int, kv_before: int) -> float:
        ring_s, gather_s = ring_or_gather_s([tick] * count, kv_before, q_len)
        return ring_s if ring_s < math.inf else gather_s

    return dealt_s


def chunk_rules(config: SchedulerConfig, predictor: Predictor) -> tuple[float, ChunkRule]:
    """Seconds of a batch that no TPOT objective bounds, and the least tokens of a chunk for which it may take longer.

    Where no quantum is set it follows from the machine: the time of a short prompt alone, or of the least chunk that is
    read at nearly full speed if that takes longer; behind a long context too no chunk is read more slowly.
    """
    budget_s = config.t_target_s or config.quantum_s
    if budget_s is not None:
        least = min(config.min_chunk, config.max_batch_tokens, predictor.max_tokens)
        return budget_s, lambda kv_before: least
    size = least_chunk(config, predictor, least=_SHORT_PROMPT)(0)
    return predictor.uncorrected().tick().with_chunk(size, 0), least_chunk(config, predictor)
