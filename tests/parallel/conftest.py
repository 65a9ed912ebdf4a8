from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.parallel.faults import Job
from tests.parallel.workers import WorkerPool
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


@pytest.fixture(scope="module")
def own_workers() -> Iterator[WorkerPool]:
    """Processes of one file alone. DTensor keeps a mesh by its ranks, with the names of its groups, also where all
    groups were ended and are made anew, which a pool of tests does and no program: in another layout the same ranks are
    a group of another number, so a later job would be given a group of other ranks."""
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        job.kill()
