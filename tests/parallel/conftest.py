from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.workers import WorkerPool


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """The pool of gloo processes, shared by all tests."""
    pool = WorkerPool()
    yield pool
    pool.close()
