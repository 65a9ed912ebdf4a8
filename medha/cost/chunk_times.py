"""Seconds of a prefill chunk that is dealt to several KVP groups: the latency model of Tetris, and a ring's cost.

Source: Tetris ("Optimizing Long-context LLM Serving via Fine-grained Sequence Parallelism"), section 5.1, Eq. 1. For
each SP size s, the number of groups that a chunk is dealt to, the seconds of L tokens behind C tokens of history are

    P(s, C, L) = a + b L + c C L + d L^2 + e C

The last term is ours: between nodes a small chunk does not hide the transfer of its history. The coefficients of a size
are fitted to measured chunks, or to predicted ones (:func:`fitted_times`), by relative error and none below 0. Where no
chunk has a history (the paper's Table 1), e = 0 and c = 2 d: a token of history is read like one before it in the
chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from medha.batch import Row
from medha.cost.coefficients import Floats
from medha.cost.predictor import Predictor, dealt_work
from medha.errors import ConfigError

_HALVINGS, _HISTORIES = 9, (0.0, 0.5, 1.0, 2.0, 4.0)  # chunks that a fit is made of: lengths, and histories in chunks

Chunk = tuple[int, int, float]
"""(history in tokens, tokens, seconds)."""


@dataclass(frozen=True, slots=True)
class ChunkTimes:
    """Eq. 1 of each SP size."""

    sizes: tuple[int, ...]
    coefficients: tuple[tuple[float, float, float, float, float], ...]  # a to e of each size; seconds and tokens
    groups_per_node: int = 8  # that the fast links join: a run of groups lies in one node where it fits

    def seconds(self, size: int, history: int, tokens: int) -> float:
        """P(s, C, L); ValueError for a size without coefficients."""
        a, b, c, d, e = self.coefficients[self.sizes.index(size)]
        return a + e * history + tokens * (b + c * history + d * tokens)


def fit_chunk_times(chunks: Mapping[int, Sequence[Chunk]], *, groups_per_node: int = 8) -> ChunkTimes:
    """The coefficients of each SP size that has chunks, by least squares of the relative error, none below 0.

    Raises:
        ConfigError: a size has fewer chunks than coefficients.
    """
    found = []
    for size in sorted(chunks):
        history, tokens, seconds = np.array(chunks[size], dtype=np.float64).T
        parts = [np.ones_like(tokens), tokens, tokens * tokens]
        parts += [history * tokens, history] if history.any() else []
        if len(tokens) < len(parts):
            raise ConfigError(f"SP size {size} has {len(tokens)} chunks to fit; accepted: at least {len(parts)}")
        a, b, d, *rest = relative_fit(parts, seconds).tolist()
        c, e = rest or (2 * d, 0.0)
        found.append((a, b, c, d, e))
    return ChunkTimes(tuple(sorted(chunks)), tuple(found), groups_per_node)


def relative_fit(columns: Sequence[Floats], seconds: Floats) -> Floats:
    """What columns are multiplied by so that their sum has the least squared error relative to the seconds, none below
    0: the best of all sets of columns whose own fit is that."""
    scale = np.array([np.abs(column).max() or 1.0 for column in columns])
    matrix = np.stack(columns, axis=1) / scale / seconds[:, None]
    best, least = np.zeros(len(columns)), math.inf
    for kept in product((True, False), repeat=len(columns)):
        found, *_ = np.linalg.lstsq(matrix[:, kept], np.ones(len(seconds)), rcond=None)
        error = float(((matrix[:, kept] @ found - 1) ** 2).sum())
        if (found >= 0).all() and error < least:
            best, least = np.zeros(len(columns)), error
            best[list(kept)] = found
    return np.asarray(best / scale, dtype=np.float64)


def fitted_times(
    predictor_over: Callable[[int], Predictor], sizes: Sequence[int], *, longest: int, groups_per_node: int = 8
) -> ChunkTimes:
    """Eq. 1 of some SP sizes, fitted to what the predictor of a group says of chunks that end by token ``longest``."""
    longest = max(longest, 3)  # below it there are fewer chunks than coefficients
    lengths = sorted({max(longest >> halvings, 1) for halvings in range(_HALVINGS)})
    grid = [(int(share * n), n) for n in lengths for share in _HISTORIES if (share + 1) * n <= longest]

    def chunks(size: int) -> list[Chunk]:
        predict = predictor_over(size).predict
        return [(at, n, predict([dealt_work(Row(0, at, n, False, True, 0, size))])) for at, n in grid]

    return fit_chunk_times({size: chunks(size) for size in sizes}, groups_per_node=groups_per_node)
