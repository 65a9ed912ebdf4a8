"""Public kernel tables as rows of sizes and seconds.

Formats, told apart by their columns: Vidur's attention and mlp profiles (ms, one layer), aiconfigurator's context and
generation attention (ms, one layer), LLMServingSim's attention and dense profiles (us), and chunk, KV, ms. Rows that
read 0 have failed and are left out.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from medha.errors import ConfigError

Floats = NDArray[np.float64]
Record = dict[str, str]
TableKind = Literal["prefill", "decode", "mixed", "linear"]


@dataclass(frozen=True, slots=True)
class FitError:
    """Errors of predicted over measured on some rows; shares, 0.01 is 1 %.

    Attributes:
        table: file, and what of it.
        split: how the rows were chosen.
        rows: how many.
        median_error, p90_error, p99_error: absolute.
        total_error: of the sums, signed.
    """

    table: str
    split: str
    rows: int
    median_error: float
    p90_error: float
    p99_error: float
    total_error: float

    @classmethod
    def of(cls, table: str, split: str, predicted: Floats, real: Floats) -> FitError:
        """From seconds of each row."""
        median, p90, p99 = np.percentile(np.abs(predicted / real - 1), [50, 90, 99]).tolist()
        return cls(table, split, len(real), median, p90, p99, float(predicted.sum() / real.sum() - 1))


@dataclass(frozen=True, slots=True)
class KernelTable:
    """Rows of one kernel on one machine, for one number of heads or tensor-parallel degree.

    Attributes:
        name: of the file.
        group: what sets it apart from other tables of the file; may be empty.
        kind: tells the columns of ``sizes``: prefill (chunk, KV before it), decode (batch, KV of each), mixed (chunk,
            KV before it, decodes, KV of each), linear (tokens).
        sizes: [rows, columns].
        seconds: [rows], above 0.
    """

    name: str
    group: str
    kind: TableKind
    sizes: Floats
    seconds: Floats


def read_tables(path: Path) -> list[KernelTable]:
    """Read a CSV file, gzipped or not.

    Raises:
        ConfigError: it cannot be read, or is of no known format.
    """
    records = read_records(path)
    columns = set(records[0]) if records else set()
    for needed, rows_of in _FORMATS:
        if needed <= columns:
            try:
                return _collect(path.name, rows_of(records))
            except (TypeError, ValueError) as error:
                raise ConfigError(f"table {path} has a value that is no number: {error}") from error
    known = "; ".join(", ".join(sorted(needed)) for needed, _ in _FORMATS)
    raise ConfigError(f"table {path} is of no known format; accepted are columns {known}")


def find_file(folder: Path, *names: str) -> Path:
    """The first of these files that a folder holds.

    Raises:
        ConfigError: none is there.
    """
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(f"{folder} has no {names[0]}; accepted: a folder with {' or '.join(names)}")


def columns_of(path: Path, names: Sequence[str], *, texts: Sequence[str] = ()) -> tuple[list[Record], Floats]:
    """A CSV file, and columns of it as numbers, [names, rows].

    Args:
        path: of the file.
        names: of the columns that hold numbers.
        texts: other columns that it has to have.

    Raises:
        ConfigError: it cannot be read, has no rows, lacks a column, or a value is no number.
    """
    records = read_records(path)
    if not records:
        raise ConfigError(f"table {path} has no rows")
    needed = [*texts, *names]
    if missing := [name for name in needed if name not in records[0]]:
        raise ConfigError(f"table {path} lacks {', '.join(missing)}; accepted: columns {', '.join(needed)}")
    try:
        return records, np.array([[float(record[name]) for record in records] for name in names])
    except (TypeError, ValueError) as error:
        raise ConfigError(f"table {path} has a value that is no number: {error}") from error


def read_records(path: Path) -> list[Record]:
    """The lines of a CSV file, gzipped or not, by the names of its columns.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        return list(csv.DictReader(text.splitlines()))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"table {path} cannot be read: {error}") from error


Row = tuple[str, TableKind, tuple[float, ...], float]


def _collect(name: str, rows: Iterator[Row]) -> list[KernelTable]:
    """Tables of the rows, by group and kind."""
    found: dict[tuple[str, TableKind], list[tuple[tuple[float, ...], float]]] = {}
    for group, kind, sizes, seconds in rows:
        if seconds > 0:
            found.setdefault((group, kind), []).append((sizes, seconds))
    return [
        KernelTable(name, group, kind, np.array([r[0] for r in rows]), np.array([r[1] for r in rows]))
        for (group, kind), rows in found.items()
    ]


def _vidur_attention(records: list[Record]) -> Iterator[Row]:
    for record in records:
        group = f"tp{record['num_tensor_parallel_workers']}"
        kv = float(record["kv_cache_size"])
        if record["is_prefill"].lower() == "true":
            sizes = (float(record["prefill_chunk_size"]), kv)
            yield group, "prefill", sizes, float(record["time_stats.attn_prefill.median"]) * 1e-3
        else:
            sizes = (float(record["batch_size"]), kv)
            yield group, "decode", sizes, float(record["time_stats.attn_decode.median"]) * 1e-3


def _vidur_mlp(records: list[Record]) -> Iterator[Row]:
    """Every operation of a layer but the embedding, which runs once."""
    timed = [name for name in records[0] if name.startswith("time_stats.") and ".emb." not in name]
    for record in records:
        total_ms = sum(float(record[name]) for name in timed)
        yield f"tp{record['num_tensor_parallel_workers']}", "linear", (float(record["num_tokens"]),), total_ms * 1e-3


def _chunks_ms(records: list[Record]) -> Iterator[Row]:
    for record in records:
        sizes = (float(record["prefill_chunk_size"]), float(record["kv_cache_size"]))
        yield "", "prefill", sizes, float(record["attn_prefill_median_ms"]) * 1e-3


def _aiconfigurator(records: list[Record]) -> Iterator[Row]:
    """Whole prefills of one prompt (those of several are left out), or decodes behind ``step`` tokens."""
    generation = any(float(record["step"]) > 0 for record in records)
    for record in records:
        group = f"{record['num_heads']}/{record['num_key_value_heads']} heads"
        batch, seconds = float(record["batch_size"]), float(record["latency"]) * 1e-3
        if generation:
            yield group, "decode", (batch, float(record["step"])), seconds
        elif batch == 1:
            yield group, "prefill", (float(record["isl"]), 0.0), seconds


def _servingsim_attention(records: list[Record]) -> Iterator[Row]:
    names = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
    for record in records:
        chunk, kv, count, kv_decode = (float(record[name]) for name in names)
        seconds = float(record["time_us"]) * 1e-6
        if chunk and count:
            yield "", "mixed", (chunk, kv, count, kv_decode), seconds
        elif chunk:
            yield "", "prefill", (chunk, kv), seconds
        else:
            yield "", "decode", (count, kv_decode), seconds


def _servingsim_dense(records: list[Record]) -> Iterator[Row]:
    """The sum over a layer's operations; the embedding and the last norm run once."""
    once = ("embedding", "final_layernorm")
    total: dict[float, float] = {}
    for record in records:
        if record["layer"] not in once:
            tokens = float(record["tokens"])
            total[tokens] = total.get(tokens, 0.0) + float(record["time_us"]) * 1e-6
    for tokens, seconds in total.items():
        yield "", "linear", (tokens,), seconds


_FORMATS: tuple[tuple[set[str], Callable[[list[Record]], Iterator[Row]]], ...] = (
    (
        {"is_prefill", "prefill_chunk_size", "kv_cache_size", "batch_size", "time_stats.attn_prefill.median"},
        _vidur_attention,
    ),
    ({"num_tokens", "num_tensor_parallel_workers", "time_stats.mlp_up_proj.median"}, _vidur_mlp),
    ({"prefill_chunk_size", "kv_cache_size", "attn_prefill_median_ms"}, _chunks_ms),
    ({"batch_size", "isl", "step", "latency", "num_heads", "num_key_value_heads"}, _aiconfigurator),
    ({"prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"}, _servingsim_attention),
    ({"layer", "tokens", "time_us"}, _servingsim_dense),
)
