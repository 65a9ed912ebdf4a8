from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint
from tests.commands import write_lines
from tests.parallel import faults
from tests.parallel.faults import Job, Start
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


@pytest.fixture(scope="session")
def folder(checkpoint: Callable[..., Path]) -> Path:
    """A random Llama of three layers."""
    return checkpoint(num_hidden_layers=3)


@pytest.fixture(scope="module")
def own_workers() -> Iterator[WorkerPool]:
    """Processes of one file alone. DTensor keeps a mesh by its ranks, with the names of its groups, also where all
    groups were ended and are made anew, which a pool of tests does and no program: in another layout the same ranks are
    a group of another number, so a later job would be given a group of other ranks."""
    with closing(WorkerPool()) as pool:
        yield pool


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ranks as :func:`tests.parallel.faults.start`, with files in the folder of the test, which kills them."""
    with ExitStack() as stack:
        yield partial(faults.start, tmp_path, stack)


@pytest.fixture
def serve(model: Path, tmp_path: Path, start: Start) -> Start:
    """Starts ranks of a command that serves requests, with its options as on a command line."""

    def serve(size: int, requests: list[Any], options: str, target: Any = faults.command, **more: Any) -> Job:
        path = write_lines(tmp_path / "requests.jsonl", *requests)
        files = ["--model", model, "--requests", path, "--output", tmp_path / "out.jsonl"]
        return start(size, target, [*map(str, files), *options.split()], **more)

    return serve
