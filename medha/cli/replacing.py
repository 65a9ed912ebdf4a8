"""Files that take the place of former ones once they are whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from medha.errors import ConfigError


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
