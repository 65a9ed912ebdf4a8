"""Writes traces: to a file beside the named one, which takes its place when it is whole."""

from __future__ import annotations

import gzip
import io
from contextlib import suppress
from pathlib import Path

from medha.errors import ConfigError
from medha.workload.formats import FORMATS, format_named
from medha.workload.trace import Trace

_BY_SUFFIX = {".jsonl": "medha", ".csv": "vidur"}


def format_for(path: Path) -> str:
    """The format that a file's name asks for: medha for ``.jsonl``, vidur for ``.csv``, both also with ``.gz``.

    Raises:
        ConfigError: the name ends otherwise.
    """
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix not in _BY_SUFFIX:
        raise ConfigError(f"{path.name!r} names no format; accepted: .jsonl, .csv, .jsonl.gz, .csv.gz, or name one")
    return _BY_SUFFIX[suffix]


def write_trace(path: Path | str, trace: Trace, format: str | None = None) -> None:
    """Write a trace; the same trace gives the same bytes. Formats keep what they have columns for.

    ``vidur`` and ``medha`` keep times exactly; ``mooncake`` to 1 ns, ``azure`` to 100 ns and from the first request.

    Args:
        path: gzip if it ends in ``.gz``.
        trace: with at least one request, as readers refuse an empty file.
        format: by default :func:`format_for` the path.

    Raises:
        ConfigError: the trace is empty, the format has no writer, or the file cannot be written.
    """
    path = Path(path)
    kind = format_named(format or format_for(path))
    if kind.line is None:
        others = ", ".join(f.name for f in FORMATS.values() if f.line is not None)
        raise ConfigError(f"format={kind.name!r} holds text, which a trace has not; accepted: {others}")
    if not len(trace):
        raise ConfigError(f"{path}: the trace has no requests; accepted: at least 1")
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as raw:
            packed = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if path.suffix == ".gz" else raw
            with io.TextIOWrapper(packed, encoding="utf-8", newline="\n") as file:
                if kind.header is not None:
                    file.write(kind.header + "\n")
                file.writelines(kind.line(row) + "\n" for row in trace.rows())
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"trace file {path} cannot be written: {error.strerror}") from error
    finally:
        with suppress(OSError):
            partial.unlink()
