"""Public measurements in CSV files, and how far predictions are off."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medha.errors import ConfigError

Floats = NDArray[np.float64]
Record = dict[str, str]


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
