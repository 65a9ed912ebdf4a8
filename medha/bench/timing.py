"""The measuring loop, processes that take turns in it, and what this machine does at best: products, reading memory.

A share of the machine's rate says how much of it a piece of work uses: MFU of the products, MBU of the memory. Rates
are measured in turn with the work (:func:`in_turn`), with its dtype, device and threads. The products are plain
``torch.mm``; a model's own may be a little faster (on the CPU its weights are kept in the matrix library's layout), so
a share may exceed 1.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from medha.errors import ConfigError, RankFailedError
from medha.models.layers import onednn_has

_END_S = 30.0
_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

_CPU_PRODUCT, _CUDA_PRODUCT = (2048, 1024, 4096), (8192, 8192, 8192)  # (m, k, n)


T = TypeVar("T")


def timing_of(seconds: Sequence[float]) -> dict[str, float]:
    """Of repeated runs of one thing the median, least and most seconds, and their number."""
    low, high = min(seconds), max(seconds)
    return {"median_s": statistics.median(seconds), "min_s": low, "max_s": high, "runs": len(seconds)}


class Yardstick(NamedTuple):
    """Work of a known size: ``amount`` floating-point operations of one run, and what runs it (:func:`timed`)."""

    amount: float
    seconds: Callable[[], float]

    def rate(self, seconds: Sequence[float]) -> dict[str, Any]:
        """From the seconds of its runs: the rate is that at the median."""
        timing = timing_of(seconds)
        return {"flops_per_s": self.amount / timing["median_s"], "timing": timing}


def matrix_product(dtype: torch.dtype, device: torch.device) -> Yardstick:
    """A product of two large matrices; on a CPU for whose 16 bits torch's library has no kernel, of float32."""
    m, k, n = _CUDA_PRODUCT if device.type == "cuda" else _CPU_PRODUCT
    if device.type == "cpu" and not onednn_has(dtype):
        dtype = torch.float32
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(shape, generator=generator, device=device).to(dtype) for shape in ((m, k), (k, n)))
    work = partial(torch.mm, left, right, out=torch.empty(m, n, dtype=dtype, device=device))
    return Yardstick(2.0 * m * k * n, timed(work, device))


def timed(work: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """What does some work once and returns the seconds until the device has done it."""

    def run() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    return run


def in_turn(contestants: Mapping[Any, Callable[[], T]], *, warmup: int, runs: int) -> dict[Any, list[T]]:
    """Let several callables take turns (a b c a b c ...), so that a slow spell of the machine hits all alike.

    By its key, what each returned in so many runs, after those of the warm-up: its seconds, or what else it found.
    """
    found: dict[Any, list[T]] = {name: [] for name in contestants}
    for _ in range(warmup + runs):
        for name, run in contestants.items():
            found[name].append(run())
    return {name: ran[warmup:] for name, ran in found.items()}


class Worker(AbstractContextManager["Worker"]):
    """A process that gets its settings as its first line of JSON and answers when it is ready; then each line is work
    and is answered by what came of it, or ``{"error": ...}``. It ends with its input.

    ``ready`` is its answer to the settings. With ``stops`` it is stopped while it is not asked, with all processes of
    its own.
    """

    def __init__(self, name: str, command: Sequence[str], settings: Mapping[str, Any], *, stops: bool = True) -> None:
        self._name, self._stops = name, stops
        environment = {key: value for key, value in os.environ.items() if key not in _LAUNCHER}
        if command[0] == sys.executable:  # it finds modules where they are found here
            environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        pipe = subprocess.PIPE
        try:  # its processes are one group, which signals reach
            self._process = subprocess.Popen(
                command, env=environment, text=True, stdin=pipe, stdout=pipe, start_new_session=True
            )
        except OSError as error:
            raise ConfigError(f"{name}: {command[0]} cannot be started: {error.strerror}") from error
        try:
            self.ready = self.ask(**settings)
        except BaseException:
            self._kill()
            raise

    def ask(self, **work: Any) -> dict[str, Any]:
        """Have a piece of work done; raises ConfigError where it cannot be, RankFailedError where the worker ended."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None, "it was started with pipes"
        self._signal(signal.SIGCONT)
        line = ""
        with suppress(BrokenPipeError):
            stdin.write(json.dumps(work) + "\n")
            stdin.flush()
            line = stdout.readline()
        if not line:
            raise RankFailedError(f"{self._name} has ended: {self._process.wait()}")
        if self._stops:
            self._signal(signal.SIGSTOP)
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            answer = {"error": f"it answers {line[:80]!r}, which is not JSON"}
        if "error" in answer:
            raise ConfigError(f"{self._name}: {answer['error']}")
        return answer

    def __exit__(self, kind: object, *error: object) -> None:
        self._signal(signal.SIGCONT)
        if kind is None:
            with suppress(subprocess.TimeoutExpired, OSError):
                self._process.communicate(timeout=_END_S)  # the end of its input ends it
        self._kill()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
