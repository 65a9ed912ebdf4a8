"""Public kernel tables of a GPU, found by the names of their files: what :mod:`tools.fit_spec` fits to.

Read are aiconfigurator's ``gemm_*``, ``context_attention_*``, ``generation_attention_*`` and ``nccl_*`` (as CSV; half
or bfloat16, heads of 128, milliseconds), and Vidur's ``mlp``, ``attention*``, ``all_reduce``, ``send_recv`` and
``cpu_overheads*``. A table is rows of sizes, seconds, and the shape that each row is of, by which rows are held out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

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
        cls,
        name: str,
        rows: Sequence[Sequence[float]],
        predict: Predict,
        *,
        shape: Sequence[int] = (),
        source: str = "",
    ) -> Table:
        """From rows that end in milliseconds, of which ``shape`` are the columns that make a shape. Failed rows, of 0,
        are left out."""
        array = np.array(rows, dtype=np.float64)
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


def floats(record: Record, *names: str) -> list[float]:
    """Columns of a line; empty ones are 0."""
    try:
        return [float(record[name] or 0) for name in names]
    except (KeyError, ValueError) as error:
        raise ConfigError(f"a table has no number in column {error}; accepted: columns {', '.join(names)}") from error


# ---------------------------------------------------------------------------------------------------------------------
# Products and elementwise kernels


def _mlp(records: Sequence[Record]) -> Iterator[tuple[list[float], dict[str, float]]]:
    """Tokens, hidden size, this rank's widths of queries, keys and MLP; and milliseconds of each operation."""
    for record in records:
        tp, tokens, hidden, inner, heads, kv = floats(
            record, "num_tensor_parallel_workers", "num_tokens", "n_embd", "n_expanded_embd", "n_head", "n_kv_head"
        )
        timed = {name.split(".")[1]: float(ms) for name, ms in record.items() if name.startswith("time_stats.")}
        yield [tokens, hidden, hidden / tp, hidden / heads * kv / tp, inner / tp], timed


def gemms(data: Folders) -> list[Table]:
    """Columns: m, n, k."""

    def predict(spec: HardwareSpec, sizes: Floats) -> Floats:
        return gemm_s(spec, *sizes.T)

    found = [
        (name, [floats(record, "m", "n", "k", "latency") for record in records]) for name, records in data.each("gemm")
    ]
    for name, records in sorted(data.each("mlp"), reverse=True):
        rows = []
        for (m, hidden, width, kv, inner), ms in _mlp(records):
            rows += [[m, width + 2 * kv, hidden, ms["attn_pre_proj"]], [m, hidden, width, ms["attn_post_proj"]]]
            rows += [[m, 2 * inner, hidden, ms["mlp_up_proj"]], [m, hidden, inner, ms["mlp_down_proj"]]]
        found.append((name, rows))
    return [Table.of(f"products, {name}", rows, predict, shape=(1, 2), source=name) for name, rows in found]


def elementwise(data: Folders) -> list[Table]:
    """Columns: tokens, elements of each."""

    def predict(spec: HardwareSpec, sizes: Floats) -> Floats:
        return elementwise_s(spec, 2 * sizes[:, 0] * sizes[:, 1], kernels=len(_ELEMENTWISE))

    tables = []
    for name, records in sorted(data.each("mlp"), reverse=True):
        rows = [
            [m, 7 * hidden + 2 * (width + kv) + 3 * inner, sum(ms[kernel] for kernel in _ELEMENTWISE)]
            for (m, hidden, width, kv, inner), ms in _mlp(records)
        ]
        tables.append(Table.of(f"elementwise, {name}", rows, predict, shape=(1,), source=name))
    return tables


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def chunks(data: Folders) -> list[Table]:
    """Columns: tokens, cached tokens, query heads, KV heads. Rows of one prompt."""
    tables = []
    for name, records in sorted(data.each("context_attention"), reverse=True):
        columns = ("isl", "step", "num_heads", "num_key_value_heads", "latency")
        rows = [floats(record, *columns) for record in records if float(record["batch_size"]) == 1]
        tables.append(Table.of(f"prefills, {name}", rows, _chunk_s, shape=(2, 3), source=name))
    for name, records in data.each("attention"):
        if records and "attn_prefill_median_ms" in records[0]:  # of Llama-3 8B, whose heads it does not tell
            rows = [
                [*floats(r, "prefill_chunk_size", "kv_cache_size"), 32.0, 8.0, float(r["attn_prefill_median_ms"])]
                for r in records
            ]
            tables.append(Table.of(f"chunks, {name}", rows, _chunk_s, shape=(0,), source=name))
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
    found = []
    for name, records in data.each("context_attention"):
        lengths = defaultdict[tuple[float, float], dict[float, float]](dict)
        for record in records:
            batch, heads, own, tokens, ms = floats(
                record, "batch_size", "num_heads", "num_key_value_heads", "isl", "latency"
            )
            if batch == 1 and tokens >= _FULL_PROMPT and ms > 0:
                lengths[heads, own][tokens] = ms
        rows = [[more, at, *heads, ms] for heads, of in lengths.items() for at, more, ms in _steps(of)]
        found.append((f"chunks, from {name}", rows))
    for name, records in data.each("generation_attention"):
        keys = defaultdict[tuple[float, float, float], dict[float, float]](dict)
        for record in records:
            batch, heads, own, kv, ms = _decode(record)
            if heads > own and kv >= _LONG_KV and batch * own * kv >= _FULL_KEYS and ms > 0:
                keys[batch, heads, own][kv] = ms
        rows = [[1.0, more, *heads, ms / n] for (n, *heads), of in keys.items() for _, more, ms in _steps(of)]
        found.append((f"chunks of 1, from {name}", rows))
    tables = [Table.of(name, rows, _increment_s, shape=(2, 3)) for name, rows in found if rows]
    return [table for table in tables if len(table.sizes)]


def _steps(times: dict[float, float]) -> list[tuple[float, float, float]]:
    """Where a size is, how far it is to the next, and how much more that takes."""
    sizes = sorted(times)
    return [(at, to - at, times[to] - times[at]) for at, to in pairwise(sizes)]


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


def _decode(record: Record) -> list[float]:
    return floats(record, "batch_size", "num_heads", "num_key_value_heads", "step", "latency")


def decodes(data: Folders) -> list[Table]:
    """Columns: decodes times KV heads, cached tokens."""
    tables = []
    for name, records in data.each("generation_attention"):
        measured = [_decode(record) for record in records]
        shared = [[batch * own, kv, heads / own, ms] for batch, heads, own, kv, ms in measured if heads > own]
        alone = [[batch * own, kv, 1.0, ms] for batch, heads, own, kv, ms in measured if heads == own]
        unsplit = _never_split(shared, alone)
        tables.append(_decodes(name, shared + ([] if unsplit else alone), _decode_s))
        if unsplit:
            tables.append(_decodes(name, alone, _unsplit_s, ", not split"))
    for name, records in data.each("attention"):
        names = ("batch_size", "kv_cache_size", "n_kv_head", "num_tensor_parallel_workers")
        timed = [r for r in records if r.get("is_prefill", "True") != "True"]
        rows = [(*floats(r, *names), float(r["time_stats.attn_decode.median"])) for r in timed]
        if rows:
            per_head = [[batch * heads / tp, kv, 0.0, ms] for batch, kv, heads, tp, ms in rows]
            tables.append(_decodes(name, per_head, _decode_s))
    return tables


def _decodes(name: str, rows: list[list[float]], predict: Predict, what: str = "") -> Table:
    """Shapes are query heads of a KV head, or where there is one shape alone the decodes."""
    several = len({row[2] for row in rows}) > 1
    table = Table.of(f"decodes, {name}{what}", rows, predict, shape=(2,) if several else (0,), source=name)
    return replace(table, sizes=table.sizes[:, :2])


def _never_split(shared: list[list[float]], alone: list[list[float]]) -> bool:
    """Whether a kernel leaves the keys of heads that nobody shares to one thread block: its longest rows tell."""
    times: dict[tuple[float, ...], float] = {}
    for units, kv, _, ms in shared:
        times.setdefault((units, kv), ms)
    ratios = [ms / times[units, kv] for units, kv, _, ms in alone if kv >= _LONG_KV and times.get((units, kv))]
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
    for name, records in data.each(op):
        columns = ("num_workers", "devices_per_node", "size", f"time_stats.{op}.median")
        _sort_links(found, name, [floats(record, *columns) for record in records])
    for name, records in data.each("nccl"):
        timed = [(record["op_name"], floats(record, "num_gpus", "message_size", "latency")) for record in records]
        element = 2.0 if all(_passed(own, *row) <= nvlink_bytes_per_s / 2 for own, row in timed) else 1.0
        for own, row in timed:
            row[1] *= element * (1 - 1 / row[0] if own == "all_gather" else 1.0)
        _sort_links(found, name, [[n, n, size, ms] for own, (n, size, ms) in timed if own == op])
    return dict(found)


def _passed(op: str, ranks: float, elements: float, ms: float) -> float:
    """Bytes a second one way that a message of so many elements would mean, around a ring."""
    share = 1 - 1 / ranks
    return 0.0 if ms <= 0 else 2 * elements * (2 * share if op == "all_reduce" else share) / (ms * 1e-3)


def _sort_links(found: dict[tuple[int, int], list[tuple[str, Floats]]], name: str, rows: list[list[float]]) -> None:
    for ranks, per_node in sorted({(int(row[0]), int(row[1])) for row in rows}):
        own = np.array([row[2:] for row in rows if row[:2] == [ranks, per_node] and row[-1] > 0])
        found[ranks, per_node].append((f"{name}: {ranks} ranks, {per_node} a node", own * [1.0, 1e-3]))


def host(data: Folders) -> tuple[str, float, float] | None:
    """File, seconds of a step on the host with a batch of none, and of sampling one token; None without a table."""
    for name, records in data.each("cpu_overheads"):
        batch = [float(record["batch_size"]) for record in records]
        names = ("schedule_median", "prepare_inputs_e2e_median", "process_model_outputs_median")
        _, own_ms = np.polyfit(batch, [sum(floats(record, *names)) for record in records], 1)
        sample_ms, fixed_ms = np.polyfit(batch, [floats(record, "sampler_e2e_median")[0] for record in records], 1)
        return name, (max(own_ms, 0.0) + fixed_ms) * 1e-3, sample_ms * 1e-3
    return None
