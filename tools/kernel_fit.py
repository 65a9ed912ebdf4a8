"""What kernel tables are fitted with beyond :mod:`medha.profile.fit`: the tile of a kernel, and mixed batches."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from medha.cost.coefficients import Floats, MixedAttention
from medha.profile.fit import at, best_lines, decode_scale, fit_chunks, floats, lines_s

TILES = (16, 32, 64, 128, 256)
"""Query tiles that :func:`best_tile` tries."""
_NEAR_BEST = 1.1
"""A larger tile, which makes shorter tables, may err this much more than the best."""


def best_tile(q_len: ArrayLike, kv_before: ArrayLike, seconds: ArrayLike) -> int:
    """The tile of :func:`fit_chunks` that predicts every fourth chunk size from the others: the largest of the good.

    With too few sizes to tell, it is the largest tile that no chunk falls short of.

    Args:
        q_len, kv_before, seconds: as for :func:`fit_chunks`.
    """
    q_len, kv, seconds = floats(q_len), floats(kv_before), floats(seconds)
    held = np.isin(q_len, np.unique(q_len)[2:-1:4])
    if not held.any():
        return max((tile for tile in TILES if tile <= q_len.min()), default=TILES[0])
    errors = {}
    for tile in TILES:
        table = fit_chunks(q_len[~held], kv[~held], seconds[~held], tile=tile)
        sizes, tiles = floats(table.tokens), np.ceil(q_len[held] / tile) * tile
        line_s = at(tiles, sizes, floats(table.a_s)) + at(tiles, sizes, floats(table.b_s)) * kv[held]
        own_s = at(tiles, sizes, floats(table.first_s))
        predicted = np.where(kv[held] > 0, line_s, own_s)
        errors[tile] = float(np.mean(np.abs(predicted / seconds[held] - 1.0)))
    return max(tile for tile in TILES if errors[tile] <= _NEAR_BEST * min(errors.values()))


def fit_mixed(
    chunk_s: ArrayLike, batch: ArrayLike, mean_kv: ArrayLike, seconds: ArrayLike, *, rounds: int = 6
) -> MixedAttention:
    """Attention of mixed batches whose decodes are equally long.

    The larger of two pieces, the work of all and the longest decode: rows are given to the piece that explains them,
    both pieces are fitted, and again. The decodes have two lines over KV where one explains the rows much worse, as 128
    decodes on an RTX PRO 6000, whose keys at 4,096 tokens take six times as long as at 1,024.

    Args:
        chunk_s: predicted seconds of the chunks alone.
        batch: number of decodes.
        mean_kv: their KV length.
        seconds: measured, above 0.
        rounds: how often rows are given out.
    """
    chunk_s, batch, kv, seconds = floats(chunk_s), floats(batch), floats(mean_kv), floats(seconds)
    ones, scale = np.ones_like(seconds), decode_scale(batch, seconds)
    lone = (batch == batch.min()) & (chunk_s <= np.quantile(chunk_s, 0.25))
    straggler = _least_squares([ones[lone], kv[lone]], seconds[lone])
    work = seconds > 1.1 * (straggler[0] + straggler[1] * kv)
    sizes = np.unique(batch)
    for _ in range(rounds):
        if not work.any():
            work = ones > 0
        factor = float(_least_squares([c[work] for c in (chunk_s, batch * kv, batch)], seconds[work])[0])
        of_chunks = factor * chunk_s
        rows = batch[work], kv[work], np.maximum(seconds - of_chunks, 0.0)[work]
        decodes = best_lines(sizes, *rows, scale=scale[work], beside=of_chunks[work])
        of_work = of_chunks + lines_s(decodes, batch, kv)
        if (~work).sum() > 2:
            straggler = _least_squares([ones[~work], kv[~work]], seconds[~work])
        work = of_work >= straggler[0] + straggler[1] * kv
    return MixedAttention(factor, decodes, float(straggler[0]), float(straggler[1]))


def _least_squares(columns: list[Floats], seconds: Floats) -> Floats:
    """Non-negative coefficients with the least squared relative error; columns that would be negative are dropped."""
    matrix = np.stack(columns, axis=1) / seconds[:, None]
    used = list(range(len(columns)))
    result = np.zeros(len(columns))
    while used:
        solved = np.linalg.lstsq(matrix[:, used], np.ones(len(seconds)), rcond=None)[0]
        if (solved >= 0).all():
            result[used] = solved
            break
        used.pop(int(np.argmin(solved)))
    return result
