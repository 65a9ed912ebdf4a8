"""Coefficients made ready for look-ups: the tables behind :mod:`medha.cost.predictor`.

Plain Python lists: the packer asks for one number at a time, where numpy costs more than the arithmetic.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from medha.cost.coefficients import ChunkAttention, Curve, DecodeAttention, Link

Floats = NDArray[np.float64]

_MAX_TILES = 1 << 15
"""Longest table; for larger batches the tile is doubled until it fits."""


class Line:
    """A curve with what collectives add per token, ready for look-ups both ways."""

    __slots__ = ("slope", "x", "y")

    def __init__(self, curve: Curve, links: Sequence[Link | None] = ()) -> None:
        token_s = sum(link.token_s for link in links if link is not None)
        self.x: list[float] = [0.0, *curve.x]
        self.y = [value + token_s * x for x, value in zip(self.x, [curve.y[0], *curve.y], strict=True)]
        rises = np.diff(self.y) / np.diff(self.x)
        self.slope: list[float] = [*rises.tolist(), curve.tail_slope + token_s]

    def at(self, tokens: float) -> float:
        """Seconds for this many tokens."""
        i = bisect_right(self.x, tokens) - 1
        return self.y[i] + self.slope[i] * (tokens - self.x[i])

    def inverse(self, seconds: float) -> int:
        """The most tokens within ``seconds``; 0 where none are."""
        i = bisect_right(self.y, seconds) - 1
        if i < 0:
            return 0
        if self.slope[i] <= 0:
            return 1 << 62
        return int(min(self.x[i] + (seconds - self.y[i]) / self.slope[i], 1e18))


class Tiles:
    """Chunk attention by number of tiles, from 0 to that of the largest chunk."""

    __slots__ = ("a", "b", "first", "max_tokens", "tile")

    def __init__(self, table: ChunkAttention, max_tokens: int) -> None:
        tile = table.tile
        while max_tokens > tile * _MAX_TILES:
            tile *= 2
        self.tile, self.max_tokens = tile, max_tokens
        sizes, columns = _extended(table, max_tokens + tile)
        tiles = np.ceil(sizes / tile)
        last = np.append(tiles[1:] > tiles[:-1], True)  # of several sizes in a tile, the largest
        wanted = np.arange(1, -(-max_tokens // tile) + 1)
        a, b, first = (_monotone_cubic(wanted, tiles[last], column[last]) for column in columns)
        self.first: list[float] = [0.0, *first.tolist()]
        self.a: list[float] = [0.0, *np.maximum(a, first).tolist()]  # cached keys never make a chunk cheaper
        self.b: list[float] = [0.0, *b.tolist()]


def _extended(table: ChunkAttention, max_tokens: int) -> tuple[Floats, tuple[Floats, Floats, Floats]]:
    """Sizes, and A, B and KV 0 up to ``max_tokens``: a longer chunk costs what its parts cost one after another."""
    size, a, b, first = table.tokens[-1], table.a_s[-1], table.b_s[-1], table.first_s[-1]
    parts = np.unique(np.geomspace(2.0, max(2.0, max_tokens / size + 1), 256).round())
    own = b * size * parts * (parts - 1) / 2
    return (
        np.concatenate([table.tokens, size * parts]),
        (
            np.concatenate([table.a_s, a * parts + own]),
            np.concatenate([table.b_s, b * parts]),
            np.concatenate([table.first_s, first + a * (parts - 1) + own]),
        ),
    )


def _monotone_cubic(at: NDArray[np.int64], x: Floats, y: Floats) -> Floats:
    """Piecewise cubic through points, non-decreasing where they are (Fritsch and Butland's slopes); flat before them.

    Attention of a chunk is a quadratic in its size, which straight lines between few sizes overestimate by up to 12 %.
    """
    if len(x) < 2:
        return np.full(len(at), y[0])
    width = np.diff(x)
    rise = np.diff(y) / width
    inner = np.zeros(len(x) - 2)
    before, after = rise[:-1], rise[1:]
    climbing = before * after > 0
    w1, w2 = (width[1:] + 2 * width[:-1])[climbing], (2 * width[1:] + width[:-1])[climbing]
    inner[climbing] = (w1 + w2) / (w1 / after[climbing] + w2 / before[climbing])
    slope = np.concatenate([[_end_slope(width, rise)], inner, [_end_slope(width[::-1], rise[::-1])]])
    inside = np.clip(at, x[0], x[-1])
    i = np.clip(np.searchsorted(x, inside, side="right") - 1, 0, len(rise) - 1)
    t = (inside - x[i]) / width[i]
    curve = (
        y[i] * (1 + 2 * t) * (1 - t) ** 2
        + width[i] * slope[i] * t * (1 - t) ** 2
        + y[i + 1] * t**2 * (3 - 2 * t)
        - width[i] * slope[i + 1] * t**2 * (1 - t)
    )
    return np.asarray(np.maximum.accumulate(curve), dtype=np.float64)


def _end_slope(width: Floats, rise: Floats) -> float:
    """Of the parabola through the three outermost points, within what keeps the first interval monotone."""
    if len(rise) < 2:
        return float(rise[0])
    slope = ((2 * width[0] + width[1]) * rise[0] - width[0] * rise[1]) / (width[0] + width[1])
    return float(min(max(slope, 0.0), 3 * rise[0]))


class DecodeLine(NamedTuple):
    """Attention of some number of decodes over their mean KV length: a straight line, and another for short ones."""

    a_s: float
    b_s: float
    short_kv: float
    short_a_s: float
    short_b_s: float
    beyond: float

    def at(self, mean_kv: float) -> float:
        """Seconds."""
        seconds = self.a_s + self.b_s * max(mean_kv, self.short_kv)
        if mean_kv < self.short_kv:
            seconds = min(seconds, self.short_a_s + self.short_b_s * mean_kv)
        return seconds * self.beyond


def decode_line(table: DecodeAttention, count: int) -> DecodeLine:
    """The line of so many decodes; more than the table holds cost in proportion."""

    def at(values: tuple[float, ...]) -> float:
        return float(np.interp(count, table.batch, values))

    short = (at(table.short_a_s), at(table.short_b_s)) if table.short_kv else (0.0, 0.0)
    beyond = max(1.0, count / table.batch[-1])
    return DecodeLine(at(table.a_s), at(table.b_s), table.short_kv, *short, beyond)


def decode_seconds(table: DecodeAttention, count: int, mean_kv: float) -> float:
    """Attention of some decodes."""
    return decode_line(table, count).at(mean_kv)
