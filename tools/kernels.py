"""Coefficients from a folder of kernel tables alone.

The folder is one that LLMServingSim's profiler writes for a model and a tensor-parallel degree: ``attention.csv`` and
``dense.csv`` for one layer, ``per_sequence.csv`` for what runs once a step, in microseconds, plain or gzipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from medha.cost.coefficients import (
    ChunkAttention,
    Coefficients,
    Curve,
    DecodeAttention,
    Link,
    MixedAttention,
    ProfileKey,
)
from medha.cost.predictor import Predictor, Work
from medha.errors import ConfigError
from medha.profile.fit import fit_chunks, fit_curve, fit_decodes
from tools.kernel_fit import best_tile, fit_mixed
from tools.tables import Floats, KernelTable, TableKind, columns_of, find_file, read_tables

_ONCE = ("embedding", "final_layernorm")
_TWICE = ("layernorm",)
NOTHING = Curve((1.0,), (0.0,))
"""Other parts of a model, where attention alone is looked at."""
ANY = ProfileKey("tables", "", "", "", "", num_threads=1, block_size=1, torch_version="")


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernel times of all layers of one rank.

    Attributes:
        attention: tables by kind: prefill and decode, and mixed where there are such rows; seconds of all layers.
        linear: everything else that works a token at a time, over tokens.
        head: vocabulary projection and sampling, over sequences.
    """

    attention: dict[TableKind, KernelTable]
    linear: Curve
    head: Curve

    @property
    def max_chunk(self) -> int:
        """Query tokens of the largest chunk that was measured."""
        return int(self.attention["prefill"].sizes[:, 0].max())


def read_kernels(folder: Path, num_layers: int) -> Kernels:
    """Read the three tables of a folder.

    Args:
        folder: that holds them.
        num_layers: of the model.

    Raises:
        ConfigError: a file or a column is missing, or a value is no number.
    """
    return Kernels(
        attention=_attention(_file(folder, "attention"), num_layers),
        linear=_summed(_file(folder, "dense"), "tokens", lambda name: _calls(name, num_layers)),
        head=_summed(_file(folder, "per_sequence"), "sequences", lambda name: 1),
    )


def fit_kernels(kernels: Kernels, key: ProfileKey, *, host_s: float, tp: Link | None = None) -> Coefficients:
    """Coefficients of the stage that holds all layers.

    Args:
        kernels: measured.
        key: what they are for.
        host_s: seconds of a step on the host.
        tp: all-reduces of the layers, which the tables do not hold.
    """
    chunks, decodes = fit_attention(kernels.attention)
    mixed = None
    if (rows := kernels.attention.get("mixed")) is not None:
        mixed = fit_mixed_batches(chunks, decodes, rows.sizes, rows.seconds)
    return Coefficients(key, kernels.linear, chunks, decodes, mixed, head=kernels.head, host_s=host_s, tp=tp)


def fit_attention(tables: Mapping[TableKind, KernelTable]) -> tuple[ChunkAttention, DecodeAttention]:
    """Chunks alone and decodes alone, from tables of these kinds."""
    prefill, decode = tables["prefill"], tables["decode"]
    decodes = fit_decodes(decode.sizes[:, 0], decode.sizes[:, 1], decode.seconds)
    return fit_chunks_alone(prefill.sizes, prefill.seconds), decodes


def fit_chunks_alone(sizes: Floats, seconds: Floats) -> ChunkAttention:
    """Chunks, with the tile that fits best."""
    q_len, kv = sizes.T
    return fit_chunks(q_len, kv, seconds, tile=best_tile(q_len, kv, seconds))


def fit_mixed_batches(
    chunks: ChunkAttention, decodes: DecodeAttention, sizes: Floats, seconds: Floats
) -> MixedAttention:
    """What becomes of chunks and decodes together; columns of ``sizes`` as of :class:`tools.tables.KernelTable`."""
    alone = Predictor(Coefficients(ANY, NOTHING, chunks, decodes), max_tokens=int(sizes[:, 0].max()))
    chunk_s = [alone.predict([Work(int(c), int(kv), False)]) for c, kv in sizes[:, :2]]
    return fit_mixed(chunk_s, sizes[:, 2], sizes[:, 3], seconds)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def _file(folder: Path, name: str) -> Path:
    return find_file(folder, f"{name}.csv", f"{name}.csv.gz")


def _attention(path: Path, num_layers: int) -> dict[TableKind, KernelTable]:
    found = {
        table.kind: KernelTable(table.name, table.group, table.kind, table.sizes, table.seconds * num_layers)
        for table in read_tables(path)
    }
    kinds: tuple[TableKind, ...] = ("prefill", "decode")
    if missing := [kind for kind in kinds if kind not in found]:
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
