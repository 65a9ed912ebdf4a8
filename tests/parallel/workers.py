"""Real gloo processes: a pool of workers that forms jobs of 2, 4 or 8 ranks, one thread each.

A worker is started once and takes one job after the other; in each it sees the environment that torchrun would set.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 120.0
_AFTER_FAILURE_S = 10.0
_POLL_S = 0.5


class WorkerPool:
    """Processes that run functions named ``module:function`` as ranks of a job."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        watch: Callable[[Sequence[int], float], str | None] | None = None,
    ) -> list[Any]:
        """Run ``function(*args)`` on every rank; returns what each rank returned, rank 0 first.

        Args:
            function: of a module.
            world_size: ranks.
            args: its arguments.
            watch: asked now and then, with the processes' ids and the seconds since it was last asked, while an answer
                is waited for, however long it takes; what it says ends the job. None ends it after ``TIMEOUT_S``.

        Raises:
            AssertionError: a rank raised, with its traceback, or did not end in time.
        """
        while len(self._workers) < world_size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_live, args=(theirs,), daemon=True)
            process.start()
            self._workers.append((process, ours))
        port = free_port()
        name = f"{function.__module__}:{function.__qualname__}"
        for rank, (_, pipe) in enumerate(self._workers[:world_size]):
            pipe.send((name, args, launch_environment(rank, world_size, port)))
        pids = [process.pid for process, _ in self._workers[:world_size]]
        answers: list[tuple[bool, Any]] = []
        for rank in range(world_size):
            patient = partial(watch, pids) if watch else _in_time(TIMEOUT_S)
            is_well = all(ok for ok, _ in answers)  # who waits for a rank that has failed waits for ever
            answers.append(self._answer(rank, patient if is_well else _in_time(_AFTER_FAILURE_S)))
        failures = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if failures:
            self.close()
        assert not failures, "\n".join(failures)
        return [value for _, value in answers]

    def close(self) -> None:
        """End every process."""
        for process, _ in self._workers:
            process.kill()
            process.join()
        self._workers.clear()

    def _answer(self, rank: int, watch: Callable[[float], str | None]) -> tuple[bool, Any]:
        pipe = self._workers[rank][1]
        try:
            while not pipe.poll(_POLL_S):
                if (trouble := watch(_POLL_S)) is not None:
                    return False, trouble
            return pipe.recv()
        except EOFError:
            return False, "the process has died"


def _in_time(limit_s: float) -> Callable[[float], str | None]:
    """A watch that says when the time is over."""
    end_s = time.monotonic() + limit_s
    return lambda _: f"no answer within {limit_s:.0f} s" if time.monotonic() > end_s else None


def launch_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun would set on one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _live(pipe: Connection) -> None:
    """A worker's life, which ends without a word when its owner has gone, or is about to."""
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        _work(pipe)


def _work(pipe: Connection) -> None:
    """Take a job, run it, answer."""
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
