from collections.abc import Iterator
from pathlib import Path

import pytest

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


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        job.kill()
