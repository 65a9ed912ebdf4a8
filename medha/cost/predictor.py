"""Busy seconds of one stage of one group for a batch, before it runs.

The packer (Algorithms 1 and 2 of arXiv:2409.17264v5) searches for the largest chunk that fits a time budget, by
bisection over what is predicted of each size: attention depends on the chunk through its number of query tiles alone,
which is found in a table. Everything is non-decreasing in tokens and in KV, and affine in KV, so that 10M tokens are
predicted by the same line as 16K.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

from medha.batch import PIECES, Row
from medha.cost.coefficients import Coefficients, Line, Tiles

MIN_SECONDS = 1e-6  # no batch is predicted to take less
_TYPICAL_CHUNK, _TYPICAL_KV = 512, 8192

Kind = Literal["decode", "mixed", "prefill"]
KINDS: tuple[Kind, ...] = ("decode", "mixed", "prefill")
"""A batch of decodes alone, of decodes and chunks, of chunks alone."""
Run = tuple[int, int]

# How a correction learns: the share of the present observation once there are many (a slow-down is followed with a time
# constant of 7 steps), the largest change of a factor's logarithm at one then (a stall of a minute is no new speed),
# and the ratio to the uncorrected prediction, either way, beyond which an observation is ignored.
_GAIN, _MAX_STEP, _MAX_RATIO = 0.15, 0.05, 1e4


class Work(NamedTuple):
    """One row of a batch as a group sees it."""

    q_len: int  # query tokens, at least 1, of a decode 1
    kv_before: int  # tokens cached before them on this group
    is_decode: bool  # otherwise a chunk of a prompt
    run: Run | None = None  # first and last group of a request on several, each charged the causal part; else None
    samples: bool = False  # a chunk that ends its prompt, so that the head runs on it; a decode always samples
    ring: int = 1  # groups to which a chunk is dealt: q_len is one's share, kv_before what its tokens see in the mean


@dataclass(frozen=True, slots=True)
class Decodes:
    """At least one decode of a batch, summed up as a group sees them."""

    count: int  # with a query token each
    total_kv: float  # tokens cached before them
    max_kv: int  # of the longest
    runs: tuple[Run, ...] = ()  # of each that is spread over several groups

    @classmethod
    def of(cls, rows: Sequence[Work]) -> Decodes:
        """Sum up at least one decode."""
        _, kvs, _, runs, *_ = zip(*rows, strict=True)
        return cls(len(rows), sum(kvs), max(kvs), tuple(run for run in runs if run is not None))


class Predictor:
    """Predicts one stage, in batches of at most ``max_tokens`` query tokens, and corrects itself.

    What running teaches is one factor a kind, on every prediction, fed by a stage's own busy time. The logarithm of the
    ratio of busy to uncorrected time is averaged: plainly over the first observations, then exponentially. As the
    target does not contain the factor itself, batches in flight cause no feedback, and a change of speed is approached
    from one side. A kind that has not been seen borrows the factor of the kind seen most.
    """

    def __init__(self, coefficients: Coefficients, *, max_tokens: int = 16384) -> None:
        self.coefficients = coefficients
        self.max_tokens = max_tokens
        self.learned: dict[str, tuple[float, int]] = dict.fromkeys(KINDS, (0.0, 0))
        """Of each kind the logarithm of its factor, and how many batches taught it: what predictions go by."""
        links = coefficients.tp, coefficients.spp
        self._line = Line.of(coefficients.linear, links)
        self._fixed_s = coefficients.host_s + sum(link.fixed_s for link in links if link)  # whatever a step contains
        self._tiles = Tiles(coefficients.chunks, max_tokens)
        self._head = None if coefficients.head is None else Line.of(coefficients.head)
        self._decode_line = cache(coefficients.decodes.line)

    def tick(self, decodes: Sequence[Work] | Decodes | None = (), chunks: Sequence[Work] = ()) -> Tick:
        """A batch of these decodes and chunks, to which chunks can be added."""
        if not isinstance(decodes, Decodes):
            decodes = Decodes.of(decodes) if decodes else None
        tick = Tick(self, decodes)
        for chunk in chunks:
            tick.add(chunk)
        return tick

    def predict(self, rows: Sequence[Work]) -> float:
        """Corrected seconds of a batch; 0.0 for no rows."""
        return self.tick(*split(rows)).seconds

    def uncorrected(self) -> Predictor:
        """The same coefficients at factor 1 for good, as prefill times want them."""
        return Predictor(self.coefficients, max_tokens=self.max_tokens)

    def factor(self, kind: Kind) -> float:
        """What predictions of a kind are multiplied by."""
        return math.exp(self._log(kind))

    def _log(self, kind: Kind) -> float:
        log, num_seen = self.learned[kind]
        return log if num_seen else max(self.learned.values(), key=lambda one: one[1])[0]

    def observe(self, kind: Kind, predicted_s: float, busy_s: float, *, factor: float | None = None) -> bool:
        """Learn from one batch; False if that was ignored: not finite, not above 0 or absurd.

        ``predicted_s`` is as predicted before dispatch, corrected by ``factor`` (None is the present one), ``busy_s``
        what the stage took, waits excluded.
        """
        start = self._log(kind)
        within = math.exp(start) if factor is None else factor
        if not (0 < predicted_s < math.inf and 0 < busy_s < math.inf and 0 < within < math.inf):
            return False
        target = math.log(busy_s) - math.log(predicted_s) + math.log(within)
        if abs(target) > math.log(_MAX_RATIO):
            return False
        num_seen = self.learned[kind][1] + 1
        share = 1.0 / num_seen
        step, most = max(_GAIN, share) * (target - start), max(_MAX_STEP, share)
        self.learned[kind] = start + min(max(step, -most), most), num_seen
        return True


def slowest_of(stages: Sequence[Predictor]) -> Predictor:
    """The stage that computes longest on a chunk behind a context."""
    chunk = min(_TYPICAL_CHUNK, *(stage.max_tokens for stage in stages))
    return max(stages, key=lambda stage: stage.predict([Work(chunk, _TYPICAL_KV, False, None, True)]))


def dealt_work(row: Row, group: int | None = None) -> Work:
    """A dealt row as a group of its run sees it, by default the one that samples: its tokens lie in a zigzag, so they
    see half of the chunk's others in the mean."""
    own = -(-row.q_len // row.num_groups)
    samples = row.samples and group in (None, row.group)
    return Work(own, row.position + (row.q_len - own) // 2, False, None, samples, row.num_groups)


def ring_or_gather_s(ticks: Sequence[Tick], position: int, q_len: int, *, first: int = 0) -> tuple[float, float]:
    """Corrected seconds of the slowest of some neighbouring groups, of which these are the batches so far, if a chunk
    of a dealt request were dealt to them, and if all of them computed it; inf where that cannot be. ``first`` is the
    first group."""
    count = len(ticks)
    row = Row(0, position, q_len, False, False, first, count)
    ring_s = gather_s = math.inf
    if q_len >= PIECES * count:
        work = dealt_work(row)
        ring_s = max(tick.with_chunk(work.q_len, work.kv_before, ring=work.ring) for tick in ticks)
    if q_len <= ticks[0]._tiles.max_tokens:
        gather_s = max(tick.with_chunk(q_len, position // count, run=row.span) for tick in ticks)
    return ring_s, gather_s


def largest_dealt(ticks: Sequence[Tick], position: int, limits_s: Sequence[float], most: int, step: int) -> int:
    """The most tokens of a chunk, all of ``most`` or a multiple of ``step``, that is dealt to neighbouring groups, of
    which these are the batches so far, and fits the time of each; 0 where none does."""
    count, least = len(ticks), PIECES * len(ticks)
    most = min(most, ticks[0]._tiles.max_tokens * count)

    def fits(q_len: int) -> bool:
        work = dealt_work(Row(0, position, q_len, False, False, 0, count))
        take_s = (tick.with_chunk(work.q_len, work.kv_before, ring=work.ring) for tick in ticks)
        return all(seconds <= limit_s for seconds, limit_s in zip(take_s, limits_s, strict=True))

    if most < least or fits(most):
        return most if most >= least else 0
    return step * bisect_left(range(1, most // step + 1), True, key=lambda steps: not fits(steps * step))


def split(rows: Sequence[Work]) -> tuple[list[Work], list[Work]]:
    """The decodes and the chunks of a batch."""
    return [row for row in rows if row.is_decode], [row for row in rows if not row.is_decode]


class Tick:
    """One batch while it is packed: its decodes, and the chunks added so far, with the factors of when it was made."""

    def __init__(self, predictor: Predictor, decodes: Decodes | None) -> None:
        coefficients = predictor.coefficients
        self._line, self._tiles, self._head = predictor._line, predictor._tiles, predictor._head
        self._kvp, self._ring = coefficients.kvp, coefficients.ring
        self._decode_factor = predictor.factor("decode")
        self._chunk_factor = predictor.factor("prefill" if decodes is None else "mixed")
        self._num_decodes = self._num_samples = 0 if decodes is None else decodes.count
        self._num_chunks = 0
        self.num_tokens = 0
        self._runs: set[Run] = set()
        self._chunks_s = 0.0
        self._fixed_s = predictor._fixed_s
        self._alpha, self._beside_s, self._floor_s = 1.0, 0.0, 0.0
        self.seconds = 0.0
        if decodes is None:
            return
        # their attention alone, beside a chunk, and the least that any mixed batch takes
        count, max_kv = decodes.count, decodes.max_kv
        mean_kv = decodes.total_kv / count
        alone_s = predictor._decode_line(count)(mean_kv)
        if not predictor.coefficients.splits_kv:
            alone_s = max(alone_s, predictor._decode_line(1)(max_kv))
        self._beside_s = self._floor_s = alone_s
        if (mixed := predictor.coefficients.mixed) is not None:
            self._alpha = mixed.prefill_factor
            self._beside_s = mixed.decodes.line(count)(mean_kv)
            self._floor_s = max(alone_s, mixed.straggler_a_s + mixed.straggler_b_s * max_kv)
        if self._head is not None:
            self._fixed_s += self._head.at(count)
        for run in decodes.runs:
            *_, merge_s, fixed_s = self._of_chunk(0, run, False)
            self._fixed_s += fixed_s + merge_s / self._tiles.tile
            self._runs.add(run)
        self.num_tokens = count
        raw_s = self._fixed_s + self._line.at(self.num_tokens) + alone_s
        self.seconds = max(raw_s * self._decode_factor, MIN_SECONDS)

    @property
    def kind(self) -> Kind:
        """What the batch is by now; an empty one counts as prefill."""
        if not self._num_decodes:
            return "prefill"
        return "mixed" if self._num_chunks else "decode"

    @property
    def factor(self) -> float:
        """The correction within :attr:`seconds`, to be handed back with the observation."""
        return self._decode_factor if self.kind == "decode" else self._chunk_factor

    def with_chunk(
        self, q_len: int, kv_before: int, *, run: Run | None = None, samples: bool = False, ring: int = 1
    ) -> float:
        """Corrected seconds of the batch if this chunk, of at most ``max_tokens`` of the predictor, were added."""
        return self._with(q_len, *self._of_chunk(kv_before, run, samples, ring, q_len))

    def add(self, chunk: Work) -> None:
        """Add a chunk."""
        q_len, kv_before, _, run, samples, ring = chunk
        parts = a, kv, merge_s, fixed_s = self._of_chunk(kv_before, run, samples, ring, q_len)
        self.seconds = self._with(q_len, *parts)
        tile = -(-q_len // self._tiles.tile)
        self._chunks_s += a[tile] + kv * self._tiles.b[tile]
        self._fixed_s += fixed_s + merge_s * tile
        self._num_chunks += 1
        self._num_samples += samples
        self.num_tokens += q_len
        if run is not None:
            self._runs.add(run)

    def largest_chunk(
        self, kv_before: int, limit_s: float, most: int, step: int = 1, *, run: Run | None = None, samples: bool = False
    ) -> int:
        """The most tokens of one more chunk with which the whole batch takes at most ``limit_s``; 0 where none do.

        The chunk is a multiple of ``step``, unless it is all of ``most``, which ``samples`` if that would end the
        prompt.
        """
        if most > self._tiles.max_tokens:
            most, samples = self._tiles.max_tokens, False
        if most < 1 or not self.seconds <= limit_s or limit_s < MIN_SECONDS:
            return 0
        if self.with_chunk(most, kv_before, run=run, samples=samples) <= limit_s:
            return most
        parts = self._of_chunk(kv_before, run, False)
        return step * bisect_right(range(step, most, step), limit_s, key=lambda q_len: self._with(q_len, *parts))

    def _of_chunk(
        self, kv_before: int, run: Run | None, samples: bool, ring: int = 1, q_len: int = 0
    ) -> tuple[list[float], float, float, float]:
        """Offsets by tile, the KV that slopes are multiplied by, merge seconds a tile, and seconds once."""
        tiles = self._tiles
        merge_s = fixed_s = 0.0
        if samples and self._head is not None:
            done = self._num_samples
            fixed_s = self._head.at(done + 1) - (self._head.at(done) if done else 0.0)
        if run is not None and self._kvp is not None:
            merge_s = (run[1] - run[0]) * self._kvp.token_s * tiles.tile
            fixed_s += 0.0 if run in self._runs else self._kvp.fixed_s
        if ring > 1 and self._ring is not None:
            slope_s, others = tiles.b[-(-q_len // tiles.tile)], q_len * (ring - 1)
            fixed_s += self._ring.seconds(slope_s, size=ring, history=kv_before - others / 2, tokens=q_len + others)
        return tiles.a if kv_before > 0 else tiles.first, kv_before, merge_s, fixed_s

    def _with(self, q_len: int, a: list[float], kv: float, merge_s: float, fixed_s: float) -> float:
        """Corrected seconds with one more chunk, never less than without."""
        tiles = self._tiles
        tile = -(-q_len // tiles.tile)
        attention_s = self._alpha * (self._chunks_s + a[tile] + tiles.b[tile] * kv) + self._beside_s
        if attention_s < self._floor_s:
            attention_s = self._floor_s
        raw_s = self._fixed_s + fixed_s + merge_s * tile + attention_s + self._line.at(self.num_tokens + q_len)
        return max(raw_s * self._chunk_factor, self.seconds, MIN_SECONDS)
