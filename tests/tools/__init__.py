"""Tests of tools/."""

import gzip
from collections.abc import Iterable, Sequence
from pathlib import Path


def write(path: Path, header: str, rows: Iterable[Sequence[object]]) -> Path:
    """A CSV file, gzipped where its name says so."""
    data = "\n".join([header, *(",".join(map(str, row)) for row in rows)]).encode() + b"\n"
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
