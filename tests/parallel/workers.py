"""Real gloo processes: a pool of workers that forms jobs of up to 8 ranks, one thread each.

Workers are forked from a server that has torch loaded. Each is started once and takes one job after the other; in each
it sees the environment that torchrun would set.
"""

import importlib
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from io import StringIO
from multiprocessing.connection import Connection
from typing import Any

from medha.parallel.own_ranks import reserved_port

TIMEOUT_S = 240.0  # of a job, and of a transfer in it
_AFTER_FAILURE_S = 30.0

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    ["medha.llm", "medha.generate.__main__", "torch.distributed.tensor.parallel", "tests.parallel.faults"]
)


class WorkerPool:
    """Processes that run functions named ``module:function`` as ranks of a job."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, limit_s: float | None = None) -> list[Any]:
        """Run ``function(*args)``, of a module, on every rank; returns what each rank returned, rank 0 first.

        Raises:
            AssertionError: a rank raised, with its traceback, or did not end in time (``TIMEOUT_S``, or ``limit_s``).
        """
        while len(self._workers) < world_size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_live, args=(theirs,), daemon=True)
            process.start()
            self._workers.append((process, ours))
        name = f"{function.__module__}:{function.__qualname__}"
        answers: list[tuple[bool, Any]] = []
        end_s = time.monotonic() + (limit_s or TIMEOUT_S)
        with reserved_port() as port:
            for rank, (_, pipe) in enumerate(self._workers[:world_size]):
                pipe.send((name, args, launch_environment(rank, world_size, port)))
            for rank in range(world_size):
                if not all(ok for ok, _ in answers):  # who waits for a rank that has failed waits for ever
                    end_s = min(end_s, time.monotonic() + _AFTER_FAILURE_S)
                answers.append(self._answer(rank, max(0.0, end_s - time.monotonic())))
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            self.close()
        assert not failures, "\n".join(failures)
        return [value for _, value in answers]

    def close(self) -> None:
        for process, _ in self._workers:
            process.kill()
            process.join()
        self._workers.clear()

    def _answer(self, rank: int, limit_s: float) -> tuple[bool, Any]:
        pipe = self._workers[rank][1]
        try:
            return pipe.recv() if pipe.poll(limit_s) else (False, f"hang: no answer in {limit_s:.0f} s")
        except EOFError:
            return False, "the process has died"


def run_medha(arguments: list[str]) -> tuple[int, str]:
    """On each rank: a command of medha, as under torchrun; its exit code and what it printed."""
    from medha.__main__ import app
    from medha.cli.command import run_app

    with redirect_stdout(StringIO()) as out:
        return run_app(app, "medha", arguments), out.getvalue()


def launch_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _live(pipe: Connection) -> None:
    """A worker's life, which ends without a word when its owner has gone, or is about to."""
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        _work(pipe)


def _work(pipe: Connection) -> None:
    import torch

    from medha.parallel.mesh import _destroy_all

    torch.set_num_threads(1)
    while True:
        name, args, environment = pipe.recv()
        os.environ.update(environment)
        module, _, function = name.partition(":")
        try:
            answer = (True, getattr(importlib.import_module(module), function)(*args))
            _destroy_all()  # the next job may have another world size, which no program of torchrun's ever sees
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
