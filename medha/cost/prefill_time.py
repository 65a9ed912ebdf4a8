"""Seconds of prefill left, for many requests at once: Algorithm 3 of arXiv:2409.17264v5.

The paper caches SimulatePrefill at a fixed step of 1K tokens up to 1M and looks the remainder up as a difference. Here:

- About 1,000 lengths that lie where the function bends: the first 128 chunks are stepped through exactly, with points
  inside, because a prompt that ends inside a chunk pays for a small batch. Beyond, the seconds per token vary slowly
  and are summed by the trapezoid rule over ranges of many chunks: 10M tokens need a few hundred predictions.
- Two curves: what a prompt of some length takes in all, its last, smaller chunk included, and how much of that is done
  once so many tokens are. Their difference never falls below one token's step: what has tokens left is not finished.

The seconds are at factor 1; callers multiply by the factor of the moment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from medha.config import SchedulerConfig
from medha.cost.coefficients import Floats
from medha.cost.predictor import Predictor

ChunkRule = Callable[[int], int]
_Line = tuple[list[float], list[float]]

_EXACT_CHUNKS, _EXACT_POINTS = 128, 640
# Shares of a total by which it may rise between two points, or be off a straight line there, before one is put between.
_RISE, _BEND, _PROBES = 0.01, 0.0025, (0.5, 0.23, 0.79)
_NUM_POINTS, _MAX_POINTS, _REFINEMENTS = 320, 800, 8
_NEARLY = 0.85  # of full speed
_SHORT_PROMPT = 256  # tokens
_JUMP = 0.05  # of the logarithm of a token's seconds between two points, above which a point is put between them


class PrefillTimes:
    """Cached prefill seconds of a request that runs alone, on the slowest stage, by a rule that gives the tokens of a
    chunk from those cached before. Prompts longer than ``max_tokens`` count as this long."""

    def __init__(self, predictor: Predictor, chunk: ChunkRule, *, max_tokens: int = 10_000_000) -> None:
        self.max_tokens = max_tokens
        steps = _Steps(predictor.uncorrected(), chunk)
        self.least_s = steps.seconds(1, 0)
        lengths, totals, starts, done = steps.exact(max_tokens)
        if starts[-1] < max_tokens:
            more, at, last = steps.integrated(starts[-1], done[-1], max_tokens)
            lengths, totals = [*lengths, *more], [*totals, *(at + last / 2)]
            starts, done = [*starts, *more], [*done, *at]
        self._of_total: _Line = lengths, np.maximum.accumulate(totals).tolist()
        self._of_done: _Line = starts, np.maximum.accumulate(done).tolist()

    def total_s(self, num_prompt: int) -> float:
        """Seconds to prefill a prompt of so many tokens."""
        return _at(num_prompt, self._of_total)

    def span_s(self, start: int, end: int) -> float:
        """Seconds in which a long prompt's prefill comes from one position to another."""
        return _at(end, self._of_done) - _at(start, self._of_done)

    def remaining_s(self, num_computed: int, num_prompt: int) -> float:
        """Seconds to prefill what is left of a prompt of which ``num_computed`` tokens are done or in flight.

        Exact to interpolation where a chunk of the rule begins there, and within one chunk elsewhere.
        """
        if num_prompt <= num_computed:
            return 0.0
        return max(_at(num_prompt, self._of_total) - _at(num_computed, self._of_done), self.least_s)


def budgeted_chunk(
    predictor: Predictor, budget_s: float, max_tokens: int, *, granularity: int = 1, least: ChunkRule = lambda kv: 1
) -> ChunkRule:
    """The rule of a packer for a request that runs alone: the largest chunk within the budget of a batch, at factor 1;
    ``least`` where less fits."""
    tick = predictor.uncorrected().tick()

    def chunk(kv_before: int) -> int:
        return max(tick.largest_chunk(kv_before, budget_s, max_tokens, granularity), least(kv_before))

    return chunk


def efficient_chunk(predictor: Predictor, max_tokens: int, least: int) -> ChunkRule:
    """The rule of the smallest chunk, ``least`` times a power of two, whose tokens a second are nearly those of the
    best that ``max_tokens`` allow, behind the same cached tokens."""
    tick, most = predictor.uncorrected().tick(), min(max_tokens, predictor.max_tokens)
    sizes = [least << i for i in range((most // least).bit_length())] if least < most else [most]

    @cache
    def chunk_at(kv_before: int) -> int:
        rates = [size / tick.with_chunk(size, kv_before) for size in sizes]
        return next(size for size, rate in zip(sizes, rates, strict=True) if rate >= _NEARLY * max(rates))

    def chunk(kv_before: int) -> int:
        low_bits = max(kv_before.bit_length() - 3, 0)  # few lengths are asked about
        return chunk_at(kv_before >> low_bits << low_bits)

    return chunk


def chunk_rules(config: SchedulerConfig, predictor: Predictor) -> tuple[float, ChunkRule]:
    """Seconds of a batch that no TPOT objective bounds, and the least tokens of a chunk for which it may take longer.

    Where no quantum is set it follows from the machine: the time of a short prompt alone, or of the least chunk that is
    read at nearly full speed if that takes longer; behind a long context too no chunk is read more slowly.
    """
    most, least = config.max_batch_tokens, min(config.min_chunk, config.max_batch_tokens, predictor.max_tokens)
    budget_s = config.t_target_s or config.quantum_s
    if budget_s is not None:
        return budget_s, lambda kv_before: least
    efficient = efficient_chunk(predictor, most, least)
    size = efficient_chunk(predictor, most, min(_SHORT_PROMPT, most))(0)
    return predictor.uncorrected().tick().with_chunk(size, 0), efficient


@dataclass(frozen=True)
class _Steps:
    """The prefill of one endless prompt, step by step or in ranges of steps."""

    predictor: Predictor
    chunk: ChunkRule

    def seconds(self, q_len: int, kv_before: int) -> float:
        """Of one chunk alone; one longer than the predictor's largest batch runs as several."""
        largest = self.predictor.max_tokens
        total_s = 0.0
        while q_len > largest:
            total_s += self.predictor.tick().with_chunk(largest, kv_before)
            q_len, kv_before = q_len - largest, kv_before + largest
        return total_s + self.predictor.tick().with_chunk(q_len, kv_before)

    def size(self, kv_before: int) -> int:
        """The rule's chunk; 1 where it yields nothing, as the budget is too small."""
        return max(self.chunk(kv_before), 1)

    def exact(self, max_tokens: int) -> tuple[list[float], list[float], list[float], list[float]]:
        """The first chunks: lengths and their totals; chunk starts and the seconds done by then."""
        lengths, totals, starts, done = [0.0], [0.0], [0.0], [0.0]
        at, at_s = 0, 0.0
        for _ in range(_EXACT_CHUNKS):
            size = min(self.size(at), max_tokens - at)
            inside = self._inside(size, at, at_s, _EXACT_POINTS - len(lengths))
            lengths += [float(at + part) for part, _ in inside]
            totals += [at_s + part_s for _, part_s in inside]
            at, at_s = at + size, totals[-1]
            starts.append(float(at))
            done.append(at_s)
            if at >= max_tokens:
                break
        return lengths, totals, starts, done

    def _inside(self, size: int, at: int, at_s: float, spare: int) -> list[tuple[int, float]]:
        """Sizes up to that of a chunk and their seconds: halved where no straight line will do, to ``spare`` points."""
        known = {part: self.seconds(part, at) for part in (1, size)}
        ranges = deque([(1, size)])
        while ranges and len(known) < spare:
            low, high = ranges.popleft()
            middle = (low + high) // 2
            if middle > low and not self._is_straight(low, high, known, at=at, at_s=at_s):
                known[middle] = self.seconds(middle, at)
                ranges += [(low, middle), (middle, high)]
        return sorted(known.items())

    def _is_straight(self, low: int, high: int, known: dict[int, float], *, at: int, at_s: float) -> bool:
        """Whether totals between two sizes are on a line: they hardly rise, or points at uneven places lie on it."""
        start_s, rise_s = known[low], known[high] - known[low]

        def is_near(part: int) -> bool:
            line_s = start_s + rise_s * (part - low) / (high - low)
            return abs(self.seconds(part, at) - line_s) <= _BEND * (at_s + line_s)

        return rise_s <= _RISE * (at_s + start_s) or all(is_near(low + round((high - low) * p)) for p in _PROBES)

    def integrated(self, start: float, start_s: float, max_tokens: int) -> tuple[list[float], Floats, Floats]:
        """From ``start`` on: lengths, seconds done by then, and what one more token would take."""
        points, sizes, steps_s = self._sampled(np.unique(np.geomspace(start, max_tokens, _NUM_POINTS).round()))
        rate = steps_s / sizes
        spans = np.diff(points)
        # A chunk costs its first token's rate throughout: half a chunk behind the integral.
        lag = np.minimum((sizes[1:] + sizes[:-1]) / 2, spans)
        ranges_s = (rate[1:] + rate[:-1]) / 2 * spans - lag * (rate[1:] - rate[:-1]) / 2
        last_s = np.array([self.seconds(1, int(kv)) for kv in points[1:]])
        return points[1:].tolist(), start_s + np.cumsum(ranges_s), last_s

    def _sampled(self, points: Floats) -> Floats:
        """[3, points]: KV lengths, chunks and their seconds; more points where the cost of a token jumps."""
        rows = self._at(points)
        for _ in range(_REFINEMENTS):
            points, sizes, steps_s = rows
            jumps = np.abs(np.diff(np.log(steps_s / sizes))) > _JUMP
            middles = np.setdiff1d(((points[1:] + points[:-1]) / 2).round()[jumps], points)
            if not len(middles) or len(points) + len(middles) > _MAX_POINTS:
                break
            rows = np.concatenate([rows, self._at(middles)], axis=1)
            rows = rows[:, np.argsort(rows[0])]
        return rows

    def _at(self, points: Floats) -> Floats:
        """[3, points]: these KV lengths, chunks of the rule there, and their seconds."""
        sizes = [self.size(int(kv)) for kv in points]
        return np.array([points, sizes, [self.seconds(n, int(kv)) for n, kv in zip(sizes, points, strict=True)]])


def _at(at: int, line: _Line) -> float:
    """As numpy.interp of one number, no less than the first ``x``; much faster."""
    x, y = line
    i = bisect_right(x, at) - 1
    if i + 1 == len(x):
        return y[-1]
    return (y[i + 1] - y[i]) / (x[i + 1] - x[i]) * (at - x[i]) + y[i]
