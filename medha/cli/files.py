"""Files that users name to append lines to, each line whole or not at all."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """Open an output file without changing it yet, so that one that cannot be written is found before the run.

    Each line goes to the file as it is written, whole or not at all.
    """
    try:  # unbuffered: a line that failed must not be tried again when the file is closed
        raw: Any = _WholeWrites(str(path), "a")
    except OSError as error:
        raise ConfigError(f"output file {path}: {error.strerror}") from error
    with io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True) as file:
        yield file


@contextmanager
def replacing(path: Path, what: str) -> Iterator[Path]:
    """Within, write a file that takes the place of a former one when it is whole. A device, a pipe or a link stays what
    it is and is written to. ConfigError, which calls it ``what``, where it cannot be written."""
    in_place = os.path.islink(path) or (os.path.exists(path) and not os.path.isfile(path))
    part = path if in_place else path.with_name(path.name + ".partial")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"{what} {path} cannot be written: {error.strerror}") from error
    finally:
        if not in_place:
            with suppress(OSError):
                part.unlink()


def emptied(file: TextIO) -> TextIO:
    """A file of :func:`opened` without what an earlier run left; a device as it is."""
    if Path(file.name).is_file():
        file.truncate(0)
    return file
