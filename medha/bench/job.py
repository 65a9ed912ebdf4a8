"""Workers: processes that a benchmark starts and asks for one piece of work at a time, a line of JSON each way.

A worker gets its settings as its first line and answers when it is ready; then each line is a piece of work and is
answered by what came of it, or ``{"error": ...}``. Between two of them it may be stopped, with all processes of its
own, so that several can take turns on one machine. It ends with its input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from medha.errors import ConfigError, RankFailedError

_END_S = 30.0
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Worker:
    """A worker process and its pipes; ``ready`` is what it answered when it was ready.

    Args:
        name: of what runs there, for messages.
        command: what starts it.
        settings: its first line.
        environment: beside this process's own.
        stops: whether it is stopped while it is not asked.

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
        environment: Mapping[str, str] | None = None,
        stops: bool = True,
    ) -> None:
        self._name = name
        self._stops = stops
        kept = {key: value for key, value in os.environ.items() if key not in _LAUNCHER}
        if command[0] == sys.executable:  # it finds modules where they are found here
            kept["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        try:
            self._process = subprocess.Popen(
                command,
                env={**kept, **(environment or {})},
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

    def __exit__(self, kind: Any, value: BaseException | None, traceback: Any) -> None:
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
