"""Files that users name to append lines to, each line whole or not at all."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from medha.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


class _WholeWrites(io.FileIO):
    """A file to append to, in which a write that fails half way leaves nothing."""

    def write(self, data: Buffer, /) -> int:
        rest = memoryview(data)
        size = self.seek(0, os.SEEK_END) if self.seekable() else 0
        try:
            while rest:
                rest = rest[super().write(rest) :]
        except OSError:
            if len(rest) < memoryview(data).nbytes and self.seekable():
                self.truncate(size)
            raise
        return memoryview(data).nbytes


def opened(path: Path) -> TextIO:
    """Open an output file without changing it yet, so that one that cannot be written is found before the run.

    Each line goes to the file as it is written, whole or not at all.
    """
    try:  # unbuffered: a line that failed must not be tried again when the file is closed
        raw: Any = _WholeWrites(str(path), "a")
    except OSError as error:
        raise ConfigError(f"output file {path}: {error.strerror}") from error
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


def emptied(file: TextIO) -> TextIO:
    """A file of :func:`opened` without what an earlier run left; a device as it is."""
    if Path(file.name).is_file():
        file.truncate(0)
    return file
