"""Workers: processes that a benchmark starts and asks for one piece of work at a time, a line of JSON each way.

A worker gets its settings as its first line and answers when it is ready; then each line is a piece of work and is
answered by what came of it, or ``{"error": ...}``. Between two of them it may be stopped, with all processes of its
own, so that several can take turns on one machine. It ends with its input. Run as ``python -m medha.bench.job`` this
module is a worker itself: the engine of one layout, whose ranks it starts, for ``medha bench scaling``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from medha.batch import Batch
from medha.bench.harness import Local, Report, Subject, on_ranks, random_prompt
from medha.bench.load import fixed_output, serve_load
from medha.cli.command import end_process, run_guarded
from medha.engine.arrivals import Arrival
from medha.errors import ConfigError, RankFailedError
from medha.profile.steps import Part, StepRunner
from medha.timeline import RankRecords, decode_records, encode_records
from medha.worker.step import BatchRunner, PendingStep

_END_S = 30.0
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Worker:
    """A worker process and its pipes.

    Args:
        name: of what runs there, for messages.
        command: what starts it.
        settings: its first line.
        environment: beside this process's own.
        stops: whether it is stopped while it is not asked.

    Attributes:
        ready: what it answered when it was ready.

    Raises:
        RankFailedError: it has ended, and has said why on stderr.
        ConfigError: it cannot be started, or does not take the settings.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        settings: Mapping[str, Any],
        *,
        environment: Mapping[str, str],
        stops: bool = True,
    ) -> None:
        self._name = name
        self._stops = stops
        kept = {key: value for key, value in os.environ.items() if key not in _LAUNCHER}
        try:
            self._process = subprocess.Popen(
                command,
                env={**kept, **environment},
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # its processes are one group, which signals reach
            )
        except OSError as error:
            raise ConfigError(f"{name}: {command[0]} cannot be started: {error.strerror}") from error
        try:
            self.ready = self._exchange(settings)
        except BaseException:
            self._kill()
            raise
        self._signal(signal.SIGSTOP)

    def ask(self, work: str, **arguments: Any) -> dict[str, Any]:
        """Have a piece of work done, with the others stopped; raises as the class."""
        self._signal(signal.SIGCONT)
        try:
            return self._exchange({"work": work, **arguments})
        finally:
            self._signal(signal.SIGSTOP)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired, OSError):
            if value is None:
                self._process.communicate(timeout=_END_S)  # the end of its input ends it
        self._kill()

    def _exchange(self, message: Mapping[str, Any]) -> dict[str, Any]:
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None and pipe_out is not None, "it was started with pipes"
        try:
            pipe_in.write(json.dumps(message) + "\n")
            pipe_in.flush()
            line = pipe_out.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RankFailedError(f"{self._name} has ended: {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ConfigError(f"{self._name}: {answer['error']}")
        return answer

    def _signal(self, number: signal.Signals) -> None:
        if self._stops:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def start_job(subject: Subject, *, longest: int, fills: bool, **engine: Any) -> Worker:
    """A worker that runs the engine of a layout; see :func:`_prefill` and :func:`_steps` for its work."""
    layout = {name: value for name, value in subject.engine.items() if name in ("tp", "spp", "kvp")}
    settings = {
        "subject": {"model": subject.model, "hf_overrides": subject.hf_overrides, "engine": dict(subject.engine)},
        "longest": longest,
        "fills": fills,
        **engine,
    }
    command = [sys.executable, "-P", "-m", "medha.bench.job"]
    return Worker(f"a job of {layout}", command, settings, environment=_modules(sys.executable), stops=False)


def start_peer(name: str, python: str, settings: Mapping[str, Any]) -> Worker:
    """The worker of an engine of :mod:`medha.bench.peers`, run by an interpreter that has it, on its threads."""
    script = str(Path(__file__).with_name("peers.py"))
    threads = {"OMP_NUM_THREADS": str(settings["num_threads"])}
    return Worker(name, [python, script, name], settings, environment=threads | _modules(python))


def _modules(python: str) -> dict[str, str]:
    """For this interpreter, where modules are found: where they are found here."""
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {"PYTHONPATH": path} if python == sys.executable else {}


def records_of(answer: Mapping[str, Any]) -> tuple[RankRecords, ...]:
    """What each rank ran, from an answer."""
    return tuple(decode_records(text.encode()) for text in answer["ranks"])


class _Submitted:
    """A runner whose batches are waited for at once, so that the seconds of the last one are known."""

    def __init__(self, runner: BatchRunner) -> None:
        self._runner = runner
        self.seconds = 0.0
        self.open, self.close, self.reset = runner.open, runner.close, runner.reset

    def submit(self, batch: Batch) -> PendingStep:
        start = time.perf_counter()
        found = self._runner.submit(batch).result()
        self.seconds = time.perf_counter() - start
        return PendingStep(lambda: found)


class _Job:
    """What rank 0 of a job does."""

    def __init__(self, local: Local) -> None:
        self._local = local
        self._submitted = _Submitted(local.engine.runner)
        cache = local.role.runner.cache
        sizes = {"block_size": cache.block_size, "num_blocks": cache.num_blocks}
        self._hand = StepRunner(self._submitted, vocab_size=local.model.vocab_size, **sizes)

    def prefill(self, *, prompt_len: int, seed: int) -> Report:
        """Read a random prompt to its first token; seconds, and what each rank ran."""
        prompt = random_prompt(prompt_len, self._local.model.vocab_size, np.random.default_rng(seed))
        (outcome,) = serve_load(self._local.engine, [Arrival("prompt", prompt, fixed_output(1))]).outcomes
        if outcome.ttft_s is None:
            raise ConfigError(f"a prompt of {prompt_len} tokens has failed: {outcome.error}")
        return {"seconds": outcome.ttft_s, "ranks": self._records()}

    def steps(self, *, q_len: int, context: int, is_decode: bool, count: int) -> Report:
        """Equal steps of one row over a context that lies on all groups; of each its batch and its seconds."""
        groups = self._local.config.parallel.kvp
        step = (Part(q_len, context, is_decode=is_decode, num_groups=groups, samples=is_decode),)
        found = []
        for _ in range(count):
            batch_id, _ = self._hand.run(step)
            found.append((batch_id, self._submitted.seconds))
        return {"steps": found, "ranks": self._records()}

    def _records(self) -> list[str]:
        """What each rank ran since the last call."""
        role = self._local.role
        if role.caller is not None:
            gather: Callable[[], list[RankRecords]] = self._local.engine.runner.gather_records  # type: ignore[attr-defined]
            records = gather()
        else:
            records = [RankRecords(0, 0, 0, role.runner.recorder.take())]
        return [encode_records(one).decode() for one in records]


def _serve_lines(local: Local) -> Report:
    """Answer line after line until the input ends."""
    job = _Job(local)
    work: dict[str, Callable[..., Report]] = {"prefill": job.prefill, "steps": job.steps}
    _answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        _answer(work[request.pop("work")](**request))
    return {}


def _answer(value: Mapping[str, Any]) -> None:
    print(json.dumps(value), flush=True)


def _run() -> int:
    settings = json.loads(sys.stdin.readline())
    on_ranks(Subject(**settings.pop("subject")), _serve_lines, **settings)
    return 0


if __name__ == "__main__":
    end_process(run_guarded(_run))
