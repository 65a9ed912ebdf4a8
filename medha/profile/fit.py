"""Coefficients from measured rows: what ``medha profile`` fits with, and ``tools/`` beside it.

Each size (a tile count of queries, or a number of decodes) gets its own line over KV by least squares of the relative
error, both coefficients non-negative. Over chunk sizes the lines' slopes and offsets are then made non-decreasing,
weighted by how well each is known: raw tables are not monotone (tile waves, 1 us timers), and a packer that searches
for the largest chunk needs a monotone predictor. Over decodes they stay as measured: kernels change their KV split
with the batch, and nothing searches there. Slopes that the rows of a size do not determine are left out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from medha.cost.coefficients import ChunkAttention, Curve, DecodeAttention, Floats

SHORT_KV = (64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0)  # where short decodes may part from long ones
_GAIN = 0.8  # two lines must reduce the error to this share of one line's
_NOISE = 0.03  # relative error expected of a measured row; decides which slopes are known well enough
_SLOPE_ERROR = 0.1  # largest relative standard error of a slope that is kept


def fit_curve(x: ArrayLike, seconds: ArrayLike) -> Curve:
    """A non-decreasing curve through the medians at each x; x (in any order, with repeats) and seconds are above 0."""
    x, seconds = floats(x), floats(seconds)
    points = np.unique(x)
    medians = np.array([np.median(seconds[x == point]) for point in points])
    return Curve(_plain(points), _plain(isotonic(medians, medians**-2.0)))


def fit_chunks(q_len: ArrayLike, kv_before: ArrayLike, seconds: ArrayLike, *, tile: int = 128) -> ChunkAttention:
    """Prefill attention from rows of one chunk each, some of them at KV 0 and some above; ``tile`` is the queries of an
    attention tile, and seconds are above 0."""
    tiles, kv, seconds = np.ceil(floats(q_len) / tile), floats(kv_before), floats(seconds)
    later, sizes = kv > 0, np.unique(tiles)
    own = fit_curve(tiles[~later], seconds[~later])
    a, b = _affine(sizes, tiles[later], kv[later], seconds[later])
    return ChunkAttention(_plain(sizes * tile), _plain(a), _plain(b), _plain(np.interp(sizes, own.x, own.y)), tile)


def fit_decodes(batch: ArrayLike, mean_kv: ArrayLike, seconds: ArrayLike) -> DecodeAttention:
    """Decode attention from rows of so many decodes and their mean KV length each, with two lines over KV where one
    explains the rows much worse."""
    batch, kv, seconds = floats(batch), floats(mean_kv), floats(seconds)
    rows = batch, kv, seconds
    return best_lines(np.unique(batch), *rows, scale=decode_scale(batch, seconds), beside=np.zeros_like(seconds))


def attention_of(size: ArrayLike, kv: ArrayLike, seen: ArrayLike, seconds: ArrayLike) -> Floats:
    """Seconds of attention in whole steps of one kind: what grows with the keys, from no keys on.

    ``kv`` are the keys cached before a row, ``seen`` those that its queries see in the mean. The line of a size is that
    of :func:`fit_chunks`; the rest of its steps is what its shortest context takes less what the line says of that.
    """
    size, kv, seen, seconds = map(floats, (size, kv, seen, seconds))
    found = np.zeros_like(seconds)
    for point in np.unique(size):
        rows = size == point
        shortest = rows & (kv == kv[rows].min())
        slope = _slope(seen[rows], seconds[rows], seconds[rows])[0]
        rest = np.median(seconds[shortest]) - slope * np.median(seen[shortest])
        found[rows] = seconds[rows] - rest
    return found


def isotonic(values: ArrayLike, weights: ArrayLike) -> Floats:
    """The non-decreasing sequence nearest to ``values`` in weighted squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, length
    for value, weight in zip(floats(values).tolist(), floats(weights).tolist(), strict=True):
        pools.append((value, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (before, heavy, count), (mean, total, length) = pools[-2:]
            pools[-2:] = [((before * heavy + mean * total) / (heavy + total), heavy + total, count + length)]
    return np.repeat([pool[0] for pool in pools], [pool[2] for pool in pools]).astype(np.float64)


def _affine(
    sizes: Floats, size: Floats, kv: Floats, seconds: Floats, *, scale: Floats | None = None, rising: bool = True
) -> tuple[Floats, Floats]:
    """Offsets and slopes over KV at each of ``sizes``, from rows (size, kv, seconds).

    Errors are relative to ``scale``, by default ``seconds``; ``rising`` makes both non-decreasing over the sizes.
    """
    scale = seconds if scale is None else scale
    fits = []
    for point in sizes:
        rows = size == point
        slope, weight = _slope(kv[rows], seconds[rows], scale[rows])
        if slope * np.sqrt(weight) * _SLOPE_ERROR >= _NOISE:
            fits.append((point, slope, weight))
    b = np.zeros_like(sizes)
    if fits:
        known, slopes, weights = np.transpose(fits)
        b = np.interp(sizes, known, isotonic(slopes, weights) if rising else slopes)
        # in proportion to the size beyond the largest known one
        b = np.where(sizes > known[-1], b[-1] * sizes / known[-1], b)
        if not rising:
            b = np.where(sizes < known[0], b * sizes / known[0], b)
    offsets, weights = seconds - np.interp(size, sizes, b) * kv, scale**-2.0
    present = np.unique(size)
    means = [np.average(offsets[size == p], weights=weights[size == p], returned=True) for p in present]
    a, precision = np.transpose(means)
    if rising:
        a = isotonic(a, precision)
    return np.interp(sizes, present, np.maximum(a, 0.0)), b


def best_lines(
    sizes: Floats, batch: Floats, kv: Floats, seconds: Floats, *, scale: Floats, beside: Floats
) -> DecodeAttention:
    """One line over KV for each of ``sizes`` of batches, or two where they explain the rows much better.

    ``scale`` is what errors are relative to when a line is fitted, ``beside`` seconds of the rows' launches that are
    not fitted here.
    """

    def line(rows: NDArray[np.bool_]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        a, b = _affine(sizes, batch[rows], kv[rows], seconds[rows], scale=scale[rows], rising=False)
        return _plain(a), _plain(b)

    def misfit(table: DecodeAttention) -> float:
        """Mean absolute relative error on the rows themselves."""
        return float(np.mean(np.abs((lines_s(table, batch, kv) + beside) / (seconds + beside) - 1.0)))

    best = DecodeAttention(_plain(sizes), *line(kv > 0))
    least = _GAIN * misfit(best)
    for short_kv in SHORT_KV:
        long = kv > short_kv
        if np.unique(kv[long]).size < 4 or short_kv > kv.max() / 4 or np.unique(kv[~long]).size < 2:
            continue
        candidate = DecodeAttention(_plain(sizes), *line(long), short_kv, *line(~long))
        if (error := misfit(candidate)) < least:
            best, least = candidate, error
    return best


def lines_s(table: DecodeAttention, batch: Floats, kv: Floats) -> Floats:
    """Seconds of decodes on their line."""
    seconds = np.interp(batch, table.batch, table.a_s) + np.interp(batch, table.batch, table.b_s) * kv
    if not table.short_kv:
        return seconds
    short = np.interp(batch, table.batch, table.short_a_s) + np.interp(batch, table.batch, table.short_b_s) * kv
    return np.where(kv > table.short_kv, seconds, short)


def decode_scale(batch: Floats, seconds: Floats) -> Floats:
    """What decode errors are relative to: midway between a row's time and the median of its batch size.

    Plain relative errors weigh the short rows most, whose regime says least about long ones: with one line the A100
    table extrapolates to twice the fitted KV with 7.3 % median error, and like this with 5.1 %.
    """
    usual = [float(np.median(seconds[batch == point])) for point in batch]
    return np.asarray(np.sqrt(seconds * usual), dtype=np.float64)


def _slope(kv: Floats, seconds: Floats, scale: Floats) -> tuple[float, float]:
    """Slope over KV of one size, at least 0, and its precision; precision 0 where KV does not vary."""
    if len(kv) < 2:
        return 0.0, 0.0
    weights = scale**-2.0
    centre = np.average(kv, weights=weights)
    spread = float(np.sum(weights * (kv - centre) ** 2))
    if spread <= 0:
        return 0.0, 0.0
    slope = float(np.sum(weights * (kv - centre) * seconds)) / spread
    if np.average(seconds, weights=weights) < slope * centre:  # the offset would be negative
        slope = float(np.sum(weights * kv * seconds) / np.sum(weights * kv * kv))
    return max(slope, 0.0), spread


def floats(values: ArrayLike) -> Floats:
    """As an array."""
    return np.asarray(values, dtype=np.float64)


def _plain(values: Floats) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
