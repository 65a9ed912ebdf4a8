"""``python -m tools.predictor``: how well the predictor's form fits public kernel tables.

Rows are held out in three ways: at random (one in five), by size (every fourth chunk size, batch size or token count,
the ends kept), and by KV beyond the fitted range (fitted up to half of the largest KV, or of the most tokens for linear
layers, and tested above). Coefficients are fitted on the rest and predict through
:class:`medha.cost.predictor.Predictor` itself, so the figures are of the code that serves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import numpy as np
import typer
from numpy.typing import NDArray

from medha.cli.command import end_process, make_app, run_app
from medha.cli.report import check_writable, deliver, stamp
from medha.cost.coefficients import ChunkAttention, Coefficients, DecodeAttention
from medha.cost.predictor import Predictor, Work
from medha.errors import ConfigError
from medha.profile.fit import fit_curve, fit_decodes
from tools.kernels import ANY, NOTHING, fit_attention, fit_chunks_alone, fit_mixed_batches
from tools.tables import FitError, Floats, KernelTable, TableKind, read_tables

Mask = NDArray[np.bool_]

SPLITS = ("random rows", "held-out sizes", "beyond the range")
_NO_CHUNKS = ChunkAttention((1.0,), (0.0,), (0.0,), (0.0,))
_NO_DECODES = DecodeAttention((1.0,), (0.0,), (0.0,))


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
                    results.append(FitError.of(f"{path.parent.name}/{path.name}, {kind}", split, predicted, real))
    return results


def _held_out(table: KernelTable, tables: Sequence[KernelTable], split: str, seed: int) -> tuple[Floats, Floats]:
    """Predicted and real seconds of the rows held out; empty where the table has nothing to hold out."""
    held = _mask(table, split, seed)
    if not held.any() or held.all():
        return np.zeros(0), np.zeros(0)
    fitted = _fit(table, ~held, {other.kind: other for other in tables if other.group == table.group})
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


def _fit(table: KernelTable, rows: Mask, group: Mapping[TableKind, KernelTable]) -> Coefficients:
    """Coefficients of the kernel alone, everything else free; ``group`` are the tables that go with this one."""
    sizes, seconds = table.sizes[rows], table.seconds[rows]
    if table.kind == "linear":
        return Coefficients(ANY, fit_curve(sizes[:, 0], seconds), _NO_CHUNKS, _NO_DECODES)
    if table.kind == "prefill":
        return Coefficients(ANY, NOTHING, fit_chunks_alone(sizes, seconds), _NO_DECODES)
    if table.kind == "decode":
        return Coefficients(ANY, NOTHING, _NO_CHUNKS, fit_decodes(sizes[:, 0], sizes[:, 1], seconds))
    if not {"prefill", "decode"} <= group.keys():
        raise ConfigError("a table of mixed batches needs rows of a chunk alone and of decodes alone")
    chunks, decodes = fit_attention(group)
    return Coefficients(ANY, NOTHING, chunks, decodes, fit_mixed_batches(chunks, decodes, sizes, seconds))


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
    check_writable(output_json)
    report = {
        "benchmark": "predictor",
        "title": "predictor against kernel tables, held-out rows",
        "environment": stamp(),
        "options": {"tables": [str(path) for path in table], "seed": seed},
        "results": [asdict(error) for error in bench_predictor(table, seed=seed)],
        "notes": [f"seed {seed}; kernel times of the tables, one run of the fit"],
    }
    deliver(report, output_json)
    return 0


def main() -> NoReturn:
    """Entry point of ``python -m tools.predictor``. Ends in SystemExit."""
    end_process(run_app(app, "python -m tools.predictor"))


if __name__ == "__main__":
    main()
