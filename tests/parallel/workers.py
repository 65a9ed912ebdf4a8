"""Real gloo processes: a pool of workers that forms jobs of up to 8 ranks, one thread each.

Workers are forked from a server that has torch loaded. Each is started once and takes one job after the other; in each
it sees the environment that torchrun would set.
"""

import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import timedelta
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from medha import LLM, RequestOutput
from medha.__main__ import app
from medha.cli.command import run_app
from medha.config import EngineConfig
from medha.parallel.kvp import Merge
from medha.parallel.mesh import _destroy_all
from medha.parallel.own_ranks import launch_environment, reserved_port
from medha.parallel.spp import Digests

TIMEOUT_S = 240.0  # of a job, and of a transfer in it
_AFTER_FAILURE_S = 30.0

context = multiprocessing.get_context("forkserver")
# Whatever the modules of tests import that takes long: else each worker would load it anew (2.6 s of transformers).
context.set_forkserver_preload(
    ["medha.generate.__main__", "torch.distributed.tensor.parallel", "tests.checkpoints", "tests.parallel.faults"]
)


class WorkerPool:
    """Processes that run functions of modules as ranks of a job."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, limit_s: float | None = None) -> list[Any]:
        """Run ``function(*args)`` on every rank; returns what each rank returned, rank 0 first.

        Raises:
            AssertionError: a rank raised, with its traceback, or did not end in time (``TIMEOUT_S``, or ``limit_s``).
        """
        while len(self._workers) < world_size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_live, args=(theirs,), daemon=True)
            process.start()
            self._workers.append((process, ours))
        answers: list[tuple[bool, Any]] = []
        end_s = time.monotonic() + (limit_s or TIMEOUT_S)
        with reserved_port() as port:
            for rank, (_, pipe) in enumerate(self._workers[:world_size]):
                pipe.send((function, args, launch_environment(rank, world_size, port)))
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
        process, pipe = self._workers[rank]
        try:
            if pipe.poll(limit_s):
                return pipe.recv()
            os.kill(process.pid, signal.SIGUSR2)  # it says on stderr where it is
            pipe.poll(1.0)
            return False, f"hang: no answer in {limit_s:.0f} s"
        except EOFError:
            return False, "the process has died"


def run_medha(arguments: list[str]) -> tuple[int, str]:
    """On each rank: a command of medha, as under torchrun; its exit code and what it printed."""
    with redirect_stdout(StringIO()) as out:
        return run_app(app, "medha", arguments), out.getvalue()


@contextmanager
def gloo() -> Iterator[None]:
    """On each rank, within, or as a decorator: torch has its default group."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    yield
    dist.barrier()
    dist.destroy_process_group()


def merge_of_all() -> Merge:
    """Within :func:`gloo`: what merges between ranks, each of which is a group of its own."""
    everyone = range(dist.get_world_size())
    return Merge(dist.new_group(), Digests(dist.new_group()), ranks=everyone, own=dist.get_rank())


def check_free(llm: LLM) -> None:
    """On rank 0: no block is in use, nor one of a decode instance."""
    if llm.is_driver:
        schedulers = [llm.engine.scheduler, *(one.scheduler for one in llm.engine.hand_overs.instances)]
        assert [one.memory.num_used for one in schedulers] == [0] * len(schedulers)


def generate(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    """On rank 0 the tokens of each prompt, which leave no block in use; on others nothing."""
    outputs = llm.generate(prompts, params)
    check_free(llm)
    return [output.outputs[0].token_ids for output in outputs]


class Served(NamedTuple):
    """What a rank says after :func:`serve`."""

    outputs: list[RequestOutput]  # rank 0's alone
    num_tokens: int  # that this rank computed

    @property
    def tokens(self) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in self.outputs]


def serve(folder: Path, options: dict[str, Any], *calls: tuple[Any, Any]) -> Served:
    """On each rank: build an LLM and generate for (prompts, parameters), call by call; no block is in use then."""
    with LLM(folder, **options) as llm:
        outputs = [output for call in calls for output in llm.generate(*call)]
        check_free(llm)
        recorder, runner = llm._open_role.runner.recorder, weakref.ref(llm._open_role.runner)
    assert runner() is None, "what a closed LLM held is free at once, not when garbage is collected"
    return Served(outputs, sum(batch.num_tokens for batch in recorder.take()))


def num_ranks(layout: Mapping[str, Any]) -> int:
    """The ranks of the options of a layout."""
    return EngineConfig.from_flat("any model", **layout).parallel.world_size


def _live(pipe: Connection) -> None:
    """A worker's life, which ends without a word when its owner has gone, or is about to."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR2)
    with suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        while True:
            function, args, environment = pipe.recv()
            os.environ.update(environment)
            try:
                answer = (True, function(*args))
                _destroy_all()  # the next job may have another world size, which no program of torchrun's ever sees
            except BaseException:
                answer = (False, traceback.format_exc())
            pipe.send(answer)
