"""A program of several ranks ends as it would on one: where it closes its LLM, forgets it, or has caught an error."""

import atexit
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest
import torch

import medha.engine.distributed
import medha.parallel.mesh
from medha import LLM, SamplingParams
from medha.config import ParallelConfig
from medha.engine.build import RankHandle
from medha.engine.distributed import DrivingRunner, Follower
from medha.errors import ConfigError, EngineDeadError, ValidationError
from medha.records import Recorder
from medha.worker.runner import Runner
from tests.engines import drained
from tests.parallel.faults import Start
from tests.parallel.test_faults import SMALL


def forgotten(rank: int, model: Path) -> None:
    LLM(model, spp=2, **SMALL).generate("a", SamplingParams(temperature=0.0, max_tokens=2))


def caught(rank: int, model: Path) -> None:
    for refused in ("max_model_len", "max_kv_per_group"):  # before and behind the making of process groups
        with pytest.raises(ConfigError):
            LLM(model, spp=2, **SMALL | {refused: 10**9})
    LLM(model, spp=2, **SMALL).close()


def leaves(rank: int, model: Path) -> None:
    """With an exit code, or without any process group, its own too."""
    with suppress(SystemExit), LLM(model, spp=2, **SMALL):
        sys.exit(0)
    with LLM(model, spp=2, **SMALL):
        torch.distributed.destroy_process_group()


def fails_everywhere(rank: int, model: Path) -> None:
    """With an error that all ranks raise, and with an exit code of the program's own; further ones are made behind."""
    with suppress(ValidationError), LLM(model, tp=2, **SMALL) as llm:
        llm.generate({"prompt_token_ids": [10**6]})
    with suppress(SystemExit), LLM(model, spp=2, **SMALL):
        sys.exit(3)
    with LLM(model, tp=2, **SMALL) as llm:
        llm.generate("a", SamplingParams(max_tokens=2))


def closes_beside_a_call(rank: int, model: Path) -> None:
    llm = LLM(model, tp=2, **SMALL)
    thread = threading.Thread(target=llm.generate, args=("a", SamplingParams(max_tokens=60, ignore_eos=True)))
    thread.start()
    if rank == 0:
        time.sleep(0.1)
    else:
        thread.join()
    llm.close()
    thread.join()


def sends_much_ahead(rank: int, model: Path) -> None:
    """Messages longer than what a line between ranks holds, before the others have run a batch."""
    options = {"kvp": 2, "depth": 2, "async_scheduling": False, "max_kv_per_group": 64, "block_size": 16}
    with LLM(model, **SMALL | options, max_batch_tokens=64, dist_timeout=15) as llm:
        if rank:
            return llm.follow()
        llm.engine.add_request("long", "a" * 100, SamplingParams(max_tokens=20, ignore_eos=True))
        for _ in range(4):
            llm.engine.step()
        for i in range(8):
            params = SamplingParams(max_tokens=4, allowed_token_ids=[5, 6] * 80_000)
            llm.engine.add_request(str(i), "b" * 50, params)
        drained(llm.engine)


def closed_early(rank: int, model: Path) -> None:
    """The engine, which somebody drives, has a batch in flight that rank 0 computes only when it is asked for it."""
    options = SMALL | {"tp": 2, "depth": 2, "async_scheduling": False, "max_batch_tokens": 64, "dist_timeout": 30}
    with LLM(model, **options) as llm:
        if rank:
            return llm.follow()
        llm.engine.add_request("a", "a" * 300, SamplingParams(max_tokens=4))
        llm.engine.step()


def closes_while_busy(rank: int, model: Path) -> None:
    for program in (closes_beside_a_call, sends_much_ahead, closed_early):
        program(rank, model)


PROGRAMS = (forgotten, caught, leaves, fails_everywhere, closes_while_busy)


def run(rank: int, program: Callable[[int, Path], None], model: Path) -> None:
    """With the handlers of an interpreter that ends, which a forked process has none of."""
    program(rank, model)
    print("went on")
    atexit._run_exitfuncs()


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_ends_well(program: Callable[[int, Path], None], model: Path, start: Start) -> None:
    assert start(2, run, program, model).end_well() == ["went on\n"] * 2


def closed_after_a_mismatch(rank: int, model: Path) -> None:
    llm = LLM(model, spp=2, **SMALL)
    for _ in range(2 * rank):  # also a further call
        with pytest.raises(EngineDeadError):
            llm.generate("a")
    with pytest.raises(EngineDeadError):
        llm.close()


def closed_after_an_interrupt(rank: int, model: Path) -> None:
    llm = LLM(model, tp=2, **SMALL)
    if rank == 0:
        llm.engine.add_request("a", "a" * 50, SamplingParams(max_tokens=4))
        llm.engine.runner.runner.run = lambda step: signal.raise_signal(signal.SIGINT)  # type: ignore[attr-defined]
        with suppress(KeyboardInterrupt):
            llm.engine.step()
    with suppress(EngineDeadError):
        llm.close()


@pytest.mark.parametrize("program", [closed_after_a_mismatch, closed_after_an_interrupt])
def test_a_job_that_has_failed_is_closed_at_once(program: Any, model: Path, start: Start) -> None:
    assert None not in start(2, program, model).wait(30)


def unread(rank: int) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    sys.argv = ["follow", '{"model": "x", "tp": 0}']
    runpy.run_module("medha.generate.follow", run_name="__main__")


def test_a_rank_says_by_its_code_what_nobody_reads(start: Start) -> None:
    assert start(1, unread).wait() == [2]


# -- a rank with graphs; that all ranks of a group replay the same ones is shown on the emulated device ----------------


@pytest.mark.parametrize("part", ["caller", "follower"])
def test_graphs_are_gone_before_the_groups(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """NCCL ends a group when no graph is left that holds its collectives; the last barrier is gloo's."""
    dist = Mock()

    class Graph:
        def __del__(self) -> None:
            dist.graph_ends()

    groups = {"pipe_group": "pipe", "report_group": "gloo", "control_group": "control", "merge_group": "merges"}
    ranks: Any = MagicMock(config=ParallelConfig(tp=2), **groups, transfer_group=None)  # without decode instances
    ranks.monitor.has_failure = False
    runner: Any = SimpleNamespace(model=None, recorder=Recorder(), device=torch.device("cpu"))
    runner.graphs, runner._layers = Graph(), Graph()
    runner.drop_graphs = MethodType(Runner.drop_graphs, runner)
    quiet = Mock()
    monkeypatch.setattr(medha.parallel.mesh, "dist", dist)
    monkeypatch.setattr(medha.engine.distributed, "ControlReceiver", lambda *args, **kwargs: quiet)
    monkeypatch.setattr(Follower, "_follow_to", lambda self, name, kind: None)
    parts: dict[str, Any] = {"caller": DrivingRunner(runner, ranks, quiet), "follower": Follower(runner, ranks)}
    RankHandle(Mock(), None, runner, str, part=parts[part]).close()
    ends = [call.destroy_process_group(name) for name in ("pipe", "gloo", "control", "merges")]
    assert dist.mock_calls == [call.graph_ends(), call.graph_ends(), call.barrier(group="gloo"), *ends]
