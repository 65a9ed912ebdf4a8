"""Jobs whose ranks fail on purpose: forked from a server that has torch loaded, so a job starts in a second.

A rank is a process of its own with the environment that torchrun would set, its stdout and stderr in files. Before it
runs, hooks are put into medha: at a point of the work (``start``, ``prefill``, ``decode``, ``shutdown``, ``shared``: a
batch with rows that lie on several groups, ``transfer``: a hand-over, or ``states``: a request is in each of
:data:`STATES`) the rank is killed, stopped, told to end, throws, is slow, or waits until the test lets it go on.
"""

import importlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from medha.batch import Batch
from medha.cli.command import end_process, run_app
from medha.engine import distributed
from medha.engine.engine import Engine
from medha.parallel.own_ranks import launch_environment, reserved_port
from medha.worker import shard
from medha.worker.runner import Runner
from medha.worker.transfer import TransferLine
from tests.commands import LIMIT_S, parse, wait_until
from tests.parallel.workers import context

STATES = ("queued", "in a chunk", "waits for a grant", "in transfer", "arrived", "decodes")
"""What a request goes through where there are decode instances."""


class Fault(NamedTuple):
    """What happens to a rank and where."""

    rank: int
    point: str
    action: str  # kill, stop, terminate, throw, sleep or hold; at ``states`` a signal, which rank 0 sends
    after: int = 0  # how often the point is passed first
    sleep_s: float = 0.0


@dataclass
class Job:
    """Running ranks."""

    folder: Path
    processes: list[Any]

    def wait(
        self, limit_s: float = LIMIT_S, *, since_s: float | None = None, but: int | None = None
    ) -> list[int | None]:
        """Wait for all ranks, or all but one, so long from now or from a monotonic time on; returns their exit codes,
        None for one that still runs."""
        end_s = limit_s + (time.monotonic() if since_s is None else since_s)
        for rank, process in enumerate(self.processes):
            if rank != but:
                process.join(max(0.0, end_s - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def end_well(self) -> list[str]:
        """Wait for all ranks, none of which may have failed; returns what each printed."""
        codes = self.wait()
        assert set(codes) == {0}, "\n".join([str(codes), *map(self.stderr, range(len(codes)))])
        return [self.stdout(rank) for rank in range(len(codes))]

    def stdout(self, rank: int) -> str:
        return (self.folder / f"stdout-{rank}").read_text()

    def stderr(self, rank: int) -> str:
        return (self.folder / f"stderr-{rank}").read_text()

    @property
    def lines(self) -> dict[str, Any]:
        """What a command has written into ``out.jsonl``, by request."""
        return {line["id"]: line for line in parse((self.folder / "out.jsonl").read_text())}

    def fault_s(self) -> float:
        """Monotonic time at which the fault struck; waits for it."""
        path = self.folder / "fault"
        wait_until(lambda: path.is_file() and path.read_text(), told=lambda: f"no fault; {self.stderr(0)}")
        return float(path.read_text())

    def let_go(self) -> None:
        """End what a fault holds up."""
        (self.folder / "go").touch()


Start = Callable[..., Job]


def start(
    folder: Path,
    stack: ExitStack,
    world_size: int,
    target: Callable[..., None],
    *args: Any,
    fault: Fault | None = None,
    environment: Mapping[str, str] | None = None,
    ranks: Sequence[int] | None = None,
) -> Job:
    """Start ``target(rank, *args)`` on every rank, or on some of them only, until the stack ends them."""
    port = stack.enter_context(reserved_port())
    processes = []
    for rank in range(world_size) if ranks is None else ranks:
        env = launch_environment(rank, world_size, port) | dict(environment or {})
        process = context.Process(target=_rank, args=(rank, folder, env, fault, target, *args))
        process.start()
        stack.callback(process.join)
        stack.callback(process.kill)
        processes.append(process)
    return Job(folder, processes)


def command(rank: int, arguments: list[str], module: str = "medha.generate") -> None:
    sys.argv = [module, *arguments]
    app = importlib.import_module(f"{module}.__main__").app
    end_process(run_app(app, f"python -m {module}"))


def _rank(
    rank: int, folder: Path, env: dict[str, str], fault: Fault | None, target: Callable[..., None], *args: Any
) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        with (folder / f"{name}-{rank}").open("wb") as file:
            os.dup2(file.fileno(), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the server that forks ignores it
    os.environ.update(env)
    torch.set_num_threads(1)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if fault is not None and rank == (0 if fault.point == "states" else fault.rank):
        _install(fault, folder)
    target(rank, *args)


def states_of(engine: Any) -> dict[str, str]:
    """The state of each unfinished request that is in one of :data:`STATES`."""
    hand_overs, found = engine.hand_overs, {}
    chunks = {row.slot for sent in engine._in_flight for row in sent.batch.chunks}
    for slot, one in engine.by_slot.items():
        if one.finish_reason is not None:
            continue
        if slot in hand_overs.waiting:
            found[one.name] = "waits for a grant"
        elif slot in hand_overs.transfers:
            found[one.name] = "in transfer"
        elif any(instance.scheduler.knows(slot) for instance in hand_overs.instances):
            found[one.name] = "decodes" if len(one.token_ids) > 1 else "arrived"
        elif slot in chunks:
            found[one.name] = "in a chunk"
        elif not one.num_computed_tokens:
            found[one.name] = "queued"
    return found


_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
_CALLS: dict[str, tuple[Any, str]] = {
    "start": (shard, "load_model"),
    "shutdown": (distributed, "leave"),
    "states": (Engine, "_fill_pipeline"),
    "transfer": (TransferLine, "_run"),
}
"""What is called at a point; at others :meth:`Runner.run`, for some batches."""


def _is_at(point: str, batch: Batch) -> bool:
    if point == "shared":
        return any(row.is_shared for row in batch.rows)
    return (point == "decode") == any(row.is_decode for row in batch.rows)


def _install(fault: Fault, folder: Path) -> None:
    passed = itertools.count()

    def strike() -> None:
        if next(passed) != fault.after:
            return
        (folder / "fault").write_text(str(time.monotonic()))
        if fault.action in _SIGNALS:
            os.kill(int((folder / f"pid-{fault.rank}").read_text()), _SIGNALS[fault.action])
        elif fault.action == "sleep":
            time.sleep(fault.sleep_s)
        elif fault.action == "hold":
            wait_until((folder / "go").exists)
        else:
            raise ValueError("boom")

    owner, name = _CALLS.get(fault.point, (Runner, "run"))
    call = getattr(owner, name)

    def strike_first(*args: Any, **named: Any) -> Any:
        if owner is not Runner or _is_at(fault.point, args[1].batch):
            strike()
        return call(*args, **named)

    def strike_in_all_states(engine: Engine) -> None:
        call(engine)
        states = states_of(engine)
        if set(states.values()) == set(STATES) and not (folder / "states").exists():
            (folder / "states").write_text(json.dumps(states))
            strike()

    setattr(owner, name, strike_in_all_states if fault.point == "states" else strike_first)
