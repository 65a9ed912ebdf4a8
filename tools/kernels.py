"""Coefficients from a folder of kernel tables alone; beyond :mod:`medha.profile.fit` tiles of kernels, mixed batches.

The folder is one that LLMServingSim's profiler writes for a model on one accelerator: ``attention.csv`` and
``dense.csv`` for one layer, ``per_sequence.csv`` for what runs once a step, in microseconds, plain or gzipped.
Rows that read 0 have failed and are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from medha.cost.chunk_times import relative_fit
from medha.cost.coefficients import Coefficients, Curve, Floats, MixedAttention, ProfileKey
from medha.cost.predictor import Predictor, Work
from medha.errors import ConfigError
from medha.profile.fit import best_lines, decode_scale, fit_chunks, fit_curve, fit_decodes, floats, lines_s
from tools.tables import columns_of, find_file

TILES = (16, 32, 64, 128, 256)
"""Query tiles that :func:`best_tile` tries."""
_NEAR_BEST = 1.1
"""A larger tile, which makes shorter tables, may err this much more than the best."""
_ONCE = ("embedding", "final_layernorm")
_TWICE = ("layernorm",)
_SIZES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_NOTHING = Curve((1.0,), (0.0,))


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernel times of all layers of one rank.

    Attributes:
        attention: rows of chunk, KV before it, decodes, KV of each, and seconds of all layers; of a chunk alone
            (``prefill``), decodes alone (``decode``) and both (``mixed``).
        linear: everything else that works a token at a time, over tokens.
        head: vocabulary projection and sampling, over sequences.
    """

    attention: dict[str, Floats]
    linear: Curve
    head: Curve

    @property
    def max_chunk(self) -> int:
        """Query tokens of the largest chunk that was measured."""
        return int(self.attention["prefill"][:, 0].max())


def read_kernels(folder: Path, num_layers: int) -> Kernels:
    """Read the three tables of a folder, for a model of so many layers.

    Raises:
        ConfigError: a file or a column is missing, or a value is no number.
    """
    return Kernels(
        attention=_attention(_file(folder, "attention"), num_layers),
        linear=_summed(_file(folder, "dense"), "tokens", lambda name: _calls(name, num_layers)),
        head=_summed(_file(folder, "per_sequence"), "sequences", lambda name: 1),
    )


def fit_kernels(kernels: Kernels, key: ProfileKey, *, host_s: float) -> Coefficients:
    """Coefficients of the stage that holds all layers.

    Args:
        kernels: measured.
        key: what they are for.
        host_s: seconds of a step on the host.
    """
    q_len, kv, _, _, seconds = kernels.attention["prefill"].T
    chunks = fit_chunks(q_len, kv, seconds, tile=best_tile(q_len, kv, seconds))
    decodes = fit_decodes(*kernels.attention["decode"].T[2:])
    alone, mixed = Coefficients(key, _NOTHING, chunks, decodes), None
    rows = kernels.attention["mixed"]
    if len(rows):
        predictor = Predictor(alone, max_tokens=int(rows[:, 0].max()))
        chunk_s = [predictor.predict([Work(int(c), int(kv), False)]) for c, kv in rows[:, :2]]
        mixed = fit_mixed(chunk_s, *rows.T[2:])
    return replace(alone, linear=kernels.linear, mixed=mixed, head=kernels.head, host_s=host_s)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def _file(folder: Path, name: str) -> Path:
    return find_file(folder, f"{name}.csv", f"{name}.csv.gz")


def _attention(path: Path, num_layers: int) -> dict[str, Floats]:
    rows = columns_of(path, (*_SIZES, "time_us"))[1].T
    rows = rows[rows[:, -1] > 0]
    rows[:, -1] = rows[:, -1] * 1e-6 * num_layers
    has_chunk, has_decodes = rows[:, 0] > 0, rows[:, 2] > 0
    found = {
        "prefill": rows[has_chunk & ~has_decodes],
        "decode": rows[~has_chunk],
        "mixed": rows[has_chunk & has_decodes],
    }
    if missing := [kind for kind in ("prefill", "decode") if not len(found[kind])]:
        raise ConfigError(f"table {path} has no rows of {' and '.join(missing)} alone")
    return found


def _calls(name: str, num_layers: int) -> int:
    """How often an operation runs in a step: the embedding and the last norm once, a layer's norm twice in each."""
    return 1 if name in _ONCE else num_layers * (1 + (name in _TWICE))


def _summed(path: Path, size: str, calls: Callable[[str], int]) -> Curve:
    """Seconds of a step's operations over a size that all of them were measured at."""
    records, (sizes, times_us) = columns_of(path, (size, "time_us"), texts=("layer",))
    seconds: dict[str, dict[float, float]] = {}
    for record, point, time_us in zip(records, sizes.tolist(), times_us.tolist(), strict=True):
        if time_us > 0:
            seconds.setdefault(record["layer"], {})[point] = time_us * 1e-6
    points = sorted(set.intersection(*(set(times) for times in seconds.values()))) if seconds else []
    if not points or points[0] <= 0:
        raise ConfigError(f"table {path}: {size} that all of {', '.join(seconds)} have: {points}; accepted: above 0")
    return fit_curve(points, [sum(calls(name) * times[x] for name, times in seconds.items()) for x in points])


# ---------------------------------------------------------------------------------------------------------------------
# Fits


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
        tiles = np.ceil(q_len[held] / tile) * tile
        a_s, b_s, own_s = (np.interp(tiles, table.tokens, column) for column in (table.a_s, table.b_s, table.first_s))
        predicted = np.where(kv[held] > 0, a_s + b_s * kv[held], own_s)
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
    straggler = relative_fit([ones[lone], kv[lone]], seconds[lone])
    work = seconds > 1.1 * (straggler[0] + straggler[1] * kv)
    sizes = np.unique(batch)
    for _ in range(rounds):
        if not work.any():
            work = ones > 0
        factor = float(relative_fit([c[work] for c in (chunk_s, batch * kv, batch)], seconds[work])[0])
        of_chunks = factor * chunk_s
        rows = batch[work], kv[work], np.maximum(seconds - of_chunks, 0.0)[work]
        decodes = best_lines(sizes, *rows, scale=scale[work], beside=of_chunks[work])
        of_work = of_chunks + lines_s(decodes, batch, kv)
        if (~work).sum() > 2:
            straggler = relative_fit([ones[~work], kv[~work]], seconds[~work])
        work = of_work >= straggler[0] + straggler[1] * kv
    return MixedAttention(factor, decodes, float(straggler[0]), float(straggler[1]))
