from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.parallel.faults import Job
from tests.serving import Model


@pytest.fixture(scope="session")
def model(bytes_model: Model) -> Path:
    return bytes_model.folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes random Llamas of some shape, each once."""

    @cache
    def make(**shape: Any) -> Path:
        make_checkpoint(folder := tmp_path_factory.mktemp("checkpoint"), "llama", **shape)
        return folder

    return make


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        job.kill()
