from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.parallel.faults import Job
from tests.serving import Model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts several processes, which ``make test`` runs one at a time."""
    for item in items:
        if {"workers", "jobs"} & set(getattr(item, "fixturenames", ())) and item.path.parent == Path(__file__).parent:
            item.add_marker("ranks")


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
