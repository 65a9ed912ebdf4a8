"""``python -m tools.predictor``: how well the predictor's form fits public kernel tables.

Rows are held out in three ways: at random (one in five), by size (every fourth chunk size, batch size or token count,
the ends kept), and by KV beyond the fitted range (fitted up to half of the largest KV, or of the most tokens for linear
layers, and tested above). Coefficients are fitted on the rest and predict through
:class:`medha.cost.predictor.Predictor` itself, so the figures are of the code that serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import numpy as np
import typer
from numpy.typing import NDArray
from rich.table import Table

from medha.cli.command import end_process, make_app, run_app
from medha.cli.report import check_writable, machine_line, stamp, write_report
from medha.cli.table import report_console
from medha.cost.coefficients import ChunkAttention, Coefficients, Curve, DecodeAttention, MixedAttention, ProfileKey
from medha.cost.predictor import Predictor, Work
from medha.errors import ConfigError
from medha.profile.fit import fit_chunks, fit_curve, fit_decodes
from tools.kernel_fit import best_tile, fit_mixed
from tools.tables import Floats, KernelTable, TableKind, read_tables

Mask = NDArray[np.bool_]

SPLITS = ("random rows", "held-out sizes", "beyond the range")
_KEY = ProfileKey("table", "", "", "", "", num_threads=1, block_size=1, torch_version="")
_NOTHING = Curve((1.0,), (0.0,))
_NO_CHUNKS = ChunkAttention((1.0,), (0.0,), (0.0,), (0.0,))
_NO_DECODES = DecodeAttention((1.0,), (0.0,), (0.0,))


@dataclass(frozen=True, slots=True)
class FitError:
    """Errors on held-out rows; shares, 0.01 is 1 %.

    Attributes:
        table: file, with its folder.
        kind: prefill, decode, mixed or linear.
        split: how rows were held out.
        rows: how many were tested.
        median, p90, p99: of the absolute error relative to the measured time.
        total: of the sum of all predictions against the sum of all measured times, signed.
    """

    table: str
    kind: TableKind
    split: str
    rows: int
    median: float
    p90: float
    p99: float
    total: float


def bench_predictor(tables: Sequence[Path], *, seed: int = 0) -> list[FitError]:
    """Fit and test on each file; tables of one file and kind (heads, TP degrees) are fitted apart, reported together.

    Args:
        tables: CSV files, gzipped or not; formats in :mod:`tools.tables`.
        seed: of the random split.

    Raises:
        ConfigError: a file cannot be read or is of no known format.
    """
    results = []
    for path in tables:
        found = read_tables(path)
        for kind in dict.fromkeys(table.kind for table in found):
            for split in SPLITS:
                pairs = [_held_out(table, found, split, seed) for table in found if table.kind == kind]
                predicted, real = (np.concatenate(column) for column in zip(*pairs, strict=True))
                if len(real):
                    results.append(_figures(f"{path.parent.name}/{path.name}", kind, split, predicted, real))
    return results


def run_and_print(tables: Sequence[Path], output_json: Path | None, *, seed: int = 0) -> int:
    """Run, print the table on stdout and write the report; returns 0."""
    check_writable(output_json)
    results = bench_predictor(tables, seed=seed)
    table = Table(title="predictor against kernel tables, held-out rows, absolute error")
    for name in ("table", "kind", "held out"):
        table.add_column(name)
    for name in ("rows", "median", "P90", "P99", "total"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in results:
        shares = (f"{r.median:.1%}", f"{r.p90:.1%}", f"{r.p99:.1%}", f"{r.total:+.1%}")
        table.add_row(r.table, r.kind, r.split, f"{r.rows:,}", *shares)
    console = report_console()
    console.print(table)
    console.print(f"{machine_line()}; seed {seed}; kernel times of the tables, one run of the fit")
    report = {
        "benchmark": "predictor",
        "environment": stamp(),
        "options": {"tables": [str(path) for path in tables], "seed": seed},
        "results": [asdict(r) for r in results],
    }
    write_report(output_json, report)
    return 0


def _figures(name: str, kind: TableKind, split: str, predicted: Floats, real: Floats) -> FitError:
    median, p90, p99 = np.percentile(np.abs(predicted / real - 1.0), [50, 90, 99]).tolist()
    total = float(predicted.sum() / real.sum() - 1.0)
    return FitError(name, kind, split, len(real), median, p90, p99, total)


def _held_out(table: KernelTable, tables: Sequence[KernelTable], split: str, seed: int) -> tuple[Floats, Floats]:
    """Predicted and real seconds of the rows held out; empty where the table has nothing to hold out."""
    held = _mask(table, split, seed)
    if not held.any() or held.all():
        return np.zeros(0), np.zeros(0)
    fitted = _fit(table, ~held, [other for other in tables if other.group == table.group])
    longest = max([int(rows.sizes[:, 0].max()) for rows in tables if rows.kind != "decode"], default=1)
    predict = Predictor(fitted, max_tokens=max(longest, 1))
    predicted = np.array([predict.predict(list(_work(table.kind, row))) for row in table.sizes[held]])
    return predicted, table.seconds[held]


def _mask(table: KernelTable, split: str, seed: int) -> Mask:
    """Which rows are held out."""
    size = table.sizes[:, 2 if table.kind == "mixed" else 0]
    if split == "random rows":
        return np.random.default_rng(seed).random(len(size)) < 0.2
    if split == "held-out sizes":
        return np.isin(size, np.unique(size)[2:-1:4])
    if table.kind == "linear":
        return np.asarray(size > size.max() / 2)
    kv = table.sizes[:, 1::2].max(axis=1)
    return np.asarray(kv > kv.max() / 2)


def _fit(table: KernelTable, rows: Mask, group: Sequence[KernelTable]) -> Coefficients:
    """Coefficients of the kernel alone, everything else free."""
    linear, chunks, decodes, mixed = _NOTHING, _NO_CHUNKS, _NO_DECODES, None
    sizes, seconds = table.sizes[rows].T, table.seconds[rows]
    if table.kind == "linear":
        linear = fit_curve(sizes[0], seconds)
    elif table.kind == "prefill":
        chunks = _chunks(sizes, seconds)
    elif table.kind == "decode":
        decodes = fit_decodes(sizes[0], sizes[1], seconds)
    else:
        chunks, decodes, mixed = _mixed(sizes, seconds, group)
    return Coefficients(_KEY, linear, chunks, decodes, mixed)


def _chunks(sizes: Floats, seconds: Floats) -> ChunkAttention:
    return fit_chunks(sizes[0], sizes[1], seconds, tile=best_tile(sizes[0], sizes[1], seconds))


def _mixed(
    sizes: Floats, seconds: Floats, group: Sequence[KernelTable]
) -> tuple[ChunkAttention, DecodeAttention, MixedAttention]:
    """The parts from the rows that have one kind, and what becomes of them together."""
    alone = {table.kind: table for table in group}
    if not {"prefill", "decode"} <= alone.keys():
        raise ConfigError("a table of mixed batches needs rows of a chunk alone and of decodes alone")
    chunks = _chunks(alone["prefill"].sizes.T, alone["prefill"].seconds)
    decode_sizes = alone["decode"].sizes.T
    decodes = fit_decodes(decode_sizes[0], decode_sizes[1], alone["decode"].seconds)
    alone_only = Predictor(Coefficients(_KEY, _NOTHING, chunks, decodes), max_tokens=int(sizes[0].max()))
    chunk_s = [alone_only.predict([Work(int(c), int(kv), False)]) for c, kv in zip(sizes[0], sizes[1], strict=True)]
    return chunks, decodes, fit_mixed(chunk_s, sizes[2], sizes[3], seconds)


def _work(kind: TableKind, row: Floats) -> Iterator[Work]:
    """The batch that a row measured."""
    sizes = [int(value) for value in row]
    if kind == "linear":
        yield Work(sizes[0], 0, False)
        return
    if kind != "decode":
        yield Work(sizes[0], sizes[1], False)
    if kind != "prefill":
        count, kv = sizes[-2:]
        yield from [Work(1, kv, True)] * count


app = make_app()


@app.command()
def predictor(
    table: Annotated[list[Path], typer.Option(help="Kernel table as CSV or CSV.gz; may be repeated.")],
    seed: Annotated[int, typer.Option(min=0, help="Of the rows held out at random.")] = 0,
    output_json: Annotated[Path | None, typer.Option(help="Write the report here.")] = None,
) -> int:
    """Fit the predictor on public kernel tables; errors on held-out rows."""
    return run_and_print(table, output_json, seed=seed)


def main() -> NoReturn:
    """Entry point of ``python -m tools.predictor``. Ends in SystemExit."""
    end_process(run_app(app, "python -m tools.predictor"))


if __name__ == "__main__":
    main()
