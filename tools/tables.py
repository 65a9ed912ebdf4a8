"""Public measurements in CSV files."""

from __future__ import annotations

import csv
import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from medha.cost.coefficients import Floats
from medha.errors import ConfigError

Record = dict[str, str]


def find_file(folder: Path, *names: str) -> Path:
    """The first of these files that a folder holds."""
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(f"{folder} has no {names[0]}; accepted: a folder with {' or '.join(names)}")


def columns_of(path: Path, names: Sequence[str], *, texts: Sequence[str] = ()) -> tuple[list[Record], Floats]:
    """The rows of a CSV file, and columns of it as numbers, [names, rows]; ``texts`` are others that it has to have."""
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
    """The lines of a CSV file, gzipped or not, by the names of its columns."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        return list(csv.DictReader(text.splitlines()))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"table {path} cannot be read: {error}") from error
