"""Public kernel tables of a GPU, found by the names of their files: what :mod:`tools.fit_spec` fits to.

Read are aiconfigurator's ``gemm_*``, ``context_attention_*``, ``generation_attention_*`` and ``nccl_*`` (as CSV; half
or bfloat16, heads of 128, milliseconds), and Vidur's ``mlp``, ``attention*``, ``all_reduce``, ``send_recv`` and
``cpu_overheads*``. A table is rows of sizes, seconds, and the shape that each row is of, by which rows are held out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from medha.cost.coefficients import Floats
from medha.cost.hardware import HardwareSpec
from medha.cost.roofline import chunk_slope_s, decode_lines, elementwise_s, first_chunk_s, gemm_s
from medha.errors import ConfigError
from tools.tables import Record, read_records

Predict = Callable[[HardwareSpec, Floats], Floats]
_AICONFIGURATOR = ("gemm", "context_attention", "generation_attention", "nccl")
_HEAD_DIM = 128
_ELEMENTWISE = ("input_layernorm", "post_attention_layernorm", "attn_rope", "mlp_act", "add")
_UNSPLIT = 2.0  # times as long as others with as many keys: a kernel that does not split the keys of unshared heads
_LONG_KV, _FULL_PROMPT, _FULL_KEYS = 16383, 4096, 1 << 18  # tokens behind which a machine is full


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one kind of kernel: ``sizes`` as ``predict`` reads them, and the number of the shape of each."""

    name: str
    sizes: Floats
    seconds: Floats
    shapes: Floats
    predict: Predict
    source: str = ""

    @classmethod
    def of(
        cls, name: str, columns: Iterable[ArrayLike], predict: Predict, *, shape: Sequence[int], source: str = ""
    ) -> Table:
        """From columns, the last of which is milliseconds; ``shape`` are those that make a shape. Failed rows, of 0,
        are left out."""
        array = np.stack(np.broadcast_arrays(*columns), axis=1)
        array = array[array[:, -1] > 0]
        shapes = np.unique(array[:, list(shape)], axis=0, return_inverse=True)[1].reshape(-1).astype(np.float64)
        return cls(name, array[:, :-1], array[:, -1] * 1e-3, shapes, predict, source)

    def part(self, keep: Floats) -> Table:
        """The rows where ``keep`` is true."""
        return replace(self, sizes=self.sizes[keep], seconds=self.seconds[keep], shapes=self.shapes[keep])

    def predicted(self, spec: HardwareSpec) -> Floats:
        return self.predict(spec, self.sizes)


class Folders:
    """Files of tables, but those whose names begin with what is left out."""

    def __init__(self, paths: Sequence[Path], without: Sequence[str] = ()) -> None:
        if missing := [str(path) for path in paths if not path.exists()]:
            raise ConfigError(f"data={', '.join(missing)} does not exist; accepted: folders or files of tables")
        found = {file for path in paths for file in ([path] if path.is_file() else path.rglob("*.csv*"))}
        self._files = sorted(file for file in found if not file.name.startswith(tuple(without) or ("\0",)))

    def each(self, prefix: str) -> Iterator[tuple[str, list[Record]]]:
        """Name and lines of the files of a kind; the name has its origin, its folder and its own."""
        origin = "aiconfigurator" if prefix in _AICONFIGURATOR else "vidur"
        for path in self._files:
            if path.name.startswith(prefix):
                yield f"{origin} {path.parent.name}/{path.name.split('.csv')[0]}", read_records(path)


def floats(records: Sequence[Record], *names: str) -> Floats:
    """Columns of a table, [names, rows]; empty cells are 0."""
    try:
        return np.array([[float(record[name] or 0) for record in records] for name in names])
    except (KeyError, ValueError) as error:
        raise ConfigError(f"a table has no number in column {error}; accepted: columns {', '.join(names)}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Products and elementwise kernels


def _mlp(data: Folders, *operations: str) -> Iterator[tuple[str, Floats, Floats]]:
    """Names of tables; [5, rows]: tokens, hidden size, this rank's widths of queries, keys and MLP; and milliseconds,
    [operations, rows]."""
    sizes = ("num_tensor_parallel_workers", "num_tokens", "n_embd", "n_expanded_embd", "n_head", "n_kv_head")
    for name, records in sorted(data.each("mlp"), reverse=True):
        tp, tokens, hidden, inner, heads, kv = floats(records, *sizes)
        widths = np.stack([tokens, hidden, hidden / tp, hidden / heads * kv / tp, inner / tp])
        yield name, widths, floats(records, *(f"time_stats.{one}.median" for one in operations))


def gemms(data: Folders) -> list[Table]:
    """Columns: m, n, k."""

    def predict(spec: HardwareSpec, sizes: Floats) -> Floats:
        return gemm_s(spec, *sizes.T)

    found: list[tuple[str, Iterable[Floats]]] = [
        (name, floats(records, "m", "n", "k", "latency")) for name, records in data.each("gemm")
    ]
    operations = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
    for name, (m, hidden, width, kv, inner), ms in _mlp(data, *operations):
        n, k = (width + 2 * kv, hidden, 2 * inner, hidden), (hidden, width, hidden, inner)
        found.append((name, [np.ravel(column, "F") for column in ([m] * 4, n, k, ms)]))  # row after row
    return [Table.of(f"products, {name}", columns, predict, shape=(1, 2), source=name) for name, columns in found]


def elementwise(data: Folders) -> list[Table]:
    """Columns: tokens, elements of each."""

    def predict(spec: HardwareSpec, sizes: Floats) -> Floats:
        return elementwise_s(spec, 2 * sizes[:, 0] * sizes[:, 1], kernels=len(_ELEMENTWISE))

    tables = []
    for name, (m, hidden, width, kv, inner), ms in _mlp(data, *_ELEMENTWISE):
        columns = m, 7 * hidden + 2 * (width + kv) + 3 * inner, sum(ms)
        tables.append(Table.of(f"elementwise, {name}", columns, predict, shape=(1,), source=name))
    return tables


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def chunks(data: Folders) -> list[Table]:
    """Columns: tokens, cached tokens, query heads, KV heads. Rows of one prompt."""
    tables = []
    for name, records in sorted(data.each("context_attention"), reverse=True):
        table = floats(records, "batch_size", "isl", "step", "num_heads", "num_key_value_heads", "latency")
        columns = table[1:, table[0] == 1]
        tables.append(Table.of(f"prefills, {name}", columns, _chunk_s, shape=(2, 3), source=name))
    for name, records in data.each("attention"):
        if records and "attn_prefill_median_ms" in records[0]:  # of Llama-3 8B, whose heads it does not tell
            tokens, kv, ms = floats(records, "prefill_chunk_size", "kv_cache_size", "attn_prefill_median_ms")
            tables.append(Table.of(f"chunks, {name}", (tokens, kv, 32.0, 8.0, ms), _chunk_s, shape=(0,), source=name))
    return tables


def has_cached(tables: Sequence[Table]) -> bool:
    """Whether any chunk was measured behind cached tokens."""
    return any((table.sizes[:, 1] > 0).any() for table in tables)


def derived_chunks(data: Folders) -> list[Table]:
    """Chunks behind a cache where none was measured, from both ends; columns as of :func:`chunks`.

    A prompt takes longer than a shorter one by the chunk that it has more, once the machine is full; and a decode is a
    chunk of one token: what more keys take, where many are read, is that of its tile, with as many rows as query heads
    share a KV head. Launches drop out of both.
    """
    found: list[tuple[str, tuple[ArrayLike, ...]]] = []
    for name, records in data.each("context_attention"):
        table = floats(records, "batch_size", "num_heads", "num_key_value_heads", "isl", "latency")
        is_full = (table[0] == 1) & (table[3] >= _FULL_PROMPT)
        _, heads, own, at, more, ms = _steps(table[:, is_full])
        found.append((f"chunks, from {name}", (more, at, heads, own, ms)))
    for name, records in data.each("generation_attention"):
        batch, heads, own, kv, ms = table = _decode(records)
        is_full = (heads > own) & (kv >= _LONG_KV) & (batch * own * kv >= _FULL_KEYS)
        batch, heads, own, _, more, ms = _steps(table[:, is_full])
        found.append((f"chunks of 1, from {name}", (1.0, more, heads, own, ms / batch)))
    tables = [Table.of(name, columns, _increment_s, shape=(2, 3)) for name, columns in found]
    return [table for table in tables if len(table.sizes)]


def _steps(table: Floats) -> Floats:
    """Of columns that end in a size and milliseconds: those before, where a size is, how far it is to the next with the
    same before, and how much more that takes."""
    times = defaultdict[tuple[float, ...], dict[float, float]](dict)
    for *group, size, ms in table.T.tolist():
        if ms > 0:
            times[tuple(group)][size] = ms
    rows = [[*group, at, to - at, of[to] - of[at]] for group, of in times.items() for at, to in pairwise(sorted(of))]
    return np.reshape(rows, (-1, len(table) + 1)).T


def _chunk_s(spec: HardwareSpec, sizes: Floats) -> Floats:
    tokens, kv, heads, _ = sizes.T
    first = first_chunk_s(spec, tokens, heads=heads, head_dim=_HEAD_DIM)
    later = np.maximum(first, spec.attention.cached_launch_s) + _slope_s(spec, sizes) * kv
    return np.asarray(np.where(kv > 0, later, first), dtype=np.float64)


def _increment_s(spec: HardwareSpec, sizes: Floats) -> Floats:
    tokens, kv, heads, _ = sizes.T
    first = first_chunk_s(spec, tokens, heads=heads, head_dim=_HEAD_DIM) - spec.attention.launch_s
    return np.asarray(first + _slope_s(spec, sizes) * kv, dtype=np.float64)


def _slope_s(spec: HardwareSpec, sizes: Floats) -> Floats:
    """Seconds that each cached token adds; 0 where there are none."""
    slope = np.zeros(len(sizes))
    for heads, own in np.unique(sizes[sizes[:, 1] > 0, 2:], axis=0):
        at = (sizes[:, 2] == heads) & (sizes[:, 3] == own) & (sizes[:, 1] > 0)
        slope[at] = chunk_slope_s(spec, sizes[at, 0], heads=heads, kv_heads=own, head_dim=_HEAD_DIM)
    return slope


def _decode(records: Sequence[Record]) -> Floats:
    return floats(records, "batch_size", "num_heads", "num_key_value_heads", "step", "latency")


def decodes(data: Folders) -> list[Table]:
    """Columns: decodes times KV heads, cached tokens."""
    tables = []
    for name, records in data.each("generation_attention"):
        batch, heads, own, kv, ms = _decode(records)
        table = np.stack([batch * own, kv, heads / own, ms])
        shared, alone = table[:, heads > own], table[:, heads == own]
        if _never_split(shared, alone):
            tables += [_decodes(name, shared, _decode_s), _decodes(name, alone, _unsplit_s, ", not split")]
        else:
            tables.append(_decodes(name, np.concatenate([shared, alone], axis=1), _decode_s))
    for name, records in data.each("attention"):
        names = ("batch_size", "kv_cache_size", "n_kv_head", "num_tensor_parallel_workers")
        if timed := [r for r in records if r.get("is_prefill", "True") != "True"]:
            batch, kv, heads, tp, ms = floats(timed, *names, "time_stats.attn_decode.median")
            tables.append(_decodes(name, np.stack([batch * heads / tp, kv, np.zeros_like(kv), ms]), _decode_s))
    return tables


def _decodes(name: str, columns: Floats, predict: Predict, what: str = "") -> Table:
    """Shapes are query heads of a KV head, or where there is one shape alone the decodes."""
    several = len(np.unique(columns[2])) > 1
    table = Table.of(f"decodes, {name}{what}", columns, predict, shape=(2,) if several else (0,), source=name)
    return replace(table, sizes=table.sizes[:, :2])


def _never_split(shared: Floats, alone: Floats) -> bool:
    """Whether a kernel leaves the keys of heads that nobody shares to one thread block: its longest rows tell."""
    times = {(units, kv): ms for units, kv, _, ms in shared.T[::-1].tolist()}  # of several the first
    ratios = [
        ms / times[units, kv] for units, kv, _, ms in alone.T.tolist() if kv >= _LONG_KV and times.get((units, kv))
    ]
    return bool(ratios) and max(ratios) > _UNSPLIT


def _decode_s(spec: HardwareSpec, sizes: Floats) -> Floats:
    units, kv = sizes.T
    a, b, short_a, short_b = decode_lines(spec, units, head_dim=_HEAD_DIM)
    long = a + b * np.maximum(kv, spec.attention.short_kv)
    short = np.where(kv < spec.attention.short_kv, short_a + short_b * kv, np.inf)
    return np.asarray(np.minimum(short, long), dtype=np.float64)


def _unsplit_s(spec: HardwareSpec, sizes: Floats) -> Floats:
    whole = replace(spec, attention=replace(spec.attention, splits_kv=False))
    a, b = decode_lines(whole, sizes[:, 0], head_dim=_HEAD_DIM)
    return np.asarray(a + b * sizes[:, 1], dtype=np.float64)


# ---------------------------------------------------------------------------------------------------------------------
# Links and host


def links(data: Folders, op: str, nvlink_bytes_per_s: float) -> dict[tuple[int, int], list[tuple[str, Floats]]]:
    """Tables of a collective or transfer, rows of bytes and seconds, by ranks and ranks a node.

    NCCL's sizes are said to be elements of 2 bytes. Where such messages would pass more than the links can one way, as
    in the A100's table, they are bytes. Of a gather a rank's own part is not received.
    """
    found = defaultdict[tuple[int, int], list[tuple[str, Floats]]](list)

    def add(name: str, columns: Floats) -> None:
        for ranks, per_node in np.unique(columns[:2].astype(int), axis=1).T.tolist():
            size, ms = columns[2:, (columns[0] == ranks) & (columns[1] == per_node) & (columns[3] > 0)]
            rows = np.stack([size, ms * 1e-3], axis=1)
            found[ranks, per_node].append((f"{name}: {ranks} ranks, {per_node} a node", rows))

    for name, records in data.each(op):
        add(name, floats(records, "num_workers", "devices_per_node", "size", f"time_stats.{op}.median"))
    for name, records in data.each("nccl"):
        ops = np.array([record["op_name"] for record in records])
        ranks, size, ms = floats(records, "num_gpus", "message_size", "latency")
        share = 1 - 1 / ranks
        around = 2 * size * np.where(ops == "all_reduce", 2 * share, share)  # bytes one way, around a ring
        is_elements = (around <= nvlink_bytes_per_s / 2 * ms * 1e-3)[ms > 0].all()
        size = size * ((2.0 if is_elements else 1.0) * np.where(ops == "all_gather", share, 1.0))
        add(name, np.stack([ranks, ranks, size, ms])[:, ops == op])
    return dict(found)


def host(data: Folders) -> tuple[str, float, float] | None:
    """File, seconds of a step on the host with a batch of none, and of sampling one token; None without a table."""
    for name, records in data.each("cpu_overheads"):
        names = ("schedule_median", "prepare_inputs_e2e_median", "process_model_outputs_median", "sampler_e2e_median")
        batch, schedule_ms, prepare_ms, process_ms, sampler_ms = floats(records, "batch_size", *names)
        _, own_ms = np.polyfit(batch, schedule_ms + prepare_ms + process_ms, 1)
        sample_ms, fixed_ms = np.polyfit(batch, sampler_ms, 1)
        return name, (max(own_ms, 0.0) + fixed_ms) * 1e-3, sample_ms * 1e-3
    return None
