"""Settings that every test runs under: one thread, no network, logging as it was, no limits of Hypothesis' own."""

import faulthandler
import gc
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from medha.__main__ import app
from medha.cli.command import run_app
from medha.cpu import library
from medha.models.needle import write_needle
from tests.commands import LIMIT_S, Command, Done
from tests.parallel.workers import WorkerPool
from tests.serving import Case, Model, load_model, make_byte_model, make_case

# How long examples take is the machine's affair.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


def pytest_configure() -> None:
    """Keep huggingface_hub, which test modules import before any fixture, off the network; wait a second, not ten, for
    the name of a loopback address, which torch's store asks for; do not ignore Ctrl-C, as what a shell starts in the
    background does; and compute on one thread."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where there is no GPU."""
    for item in items if not torch.cuda.is_available() else ():
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Show where the end of the process hangs, if it does, and end it: no limit of a test covers that. A worker of
    xdist stays until all others are done, and is ended by the first process."""
    if not hasattr(config, "workerinput"):
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)


@pytest.fixture(autouse=True)
def _same_process_after() -> Iterator[None]:
    """A command sets up logging for its whole process, and ignores Ctrl-C once it ends; an engine sets threads. A test
    need not put back its handler of a signal, the garbage collector, torch's device or how threads take turns."""
    logger, numbers = logging.getLogger("medha"), (signal.SIGINT, signal.SIGUSR1, signal.SIGVTALRM)
    handlers, level = logger.handlers[:], logger.level
    on_signals, interval = [*map(signal.getsignal, numbers)], sys.getswitchinterval()
    yield
    for number, handler in zip(numbers, on_signals, strict=True):
        signal.signal(number, handler)
    logger.handlers[:] = handlers
    logger.setLevel(level)
    sys.setswitchinterval(interval)
    gc.enable()
    torch.set_default_device(None)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPool]:
    """The pool of gloo processes, shared by all tests."""
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def needle(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The needle model."""
    return load_model(write_needle(tmp_path_factory.mktemp("needle")))


@pytest.fixture(scope="session")
def bytes_model(tmp_path_factory: pytest.TempPathFactory, needle: Model) -> Model:
    """The byte model, shared by all tests: whoever spoils its folder takes a copy."""
    return make_byte_model(tmp_path_factory.mktemp("bytes"), needle.folder / "tokenizer.json")


@pytest.fixture
def folder(bytes_model: Model, tmp_path: Path) -> Path:
    """A copy of the byte model's folder, to change."""
    return shutil.copytree(bytes_model.folder, tmp_path / "model")


@pytest.fixture(scope="session")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Prompts and what transformers says."""
    return make_case(tmp_path_factory.mktemp("case"))


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The library of the CPU's kernels is looked for again, and again after the test."""
    library.library.cache_clear()
    library.function.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    library.library.cache_clear()
    library.function.cache_clear()


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command in this process."""
    monkeypatch.setenv("COLUMNS", "100")

    def run(*arguments: object) -> Done:
        code = run_app(app, "medha", list(map(str, arguments)))
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run
