"""What a step gives back, the interface of whatever runs steps, and a thread that makes calls in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch.autograd.profiler as profiler

from medha.batch import Batch, Row
from medha.worker.sampling import Sampled, SlotSampling

T = TypeVar("T")
_NO_PHASE = nullcontext()


class StepResult(NamedTuple):
    """What a batch produced."""

    rows: tuple[Row, ...]  # that sampled, in batch order
    sampled: list[Sampled]  # their tokens
    busy_s: float  # seconds of compute, waits excluded


class PendingStep(NamedTuple):
    """A batch that was submitted; ``result`` waits for what it produced."""

    result: Callable[[], StepResult]
    # Whether ``result`` need not wait, where batches complete independently; where they do in order nobody asks first.
    is_done: Callable[[], bool] = lambda: True


class BatchRunner(Protocol):
    """What runs batches: :class:`medha.worker.runner.Runner` on one rank, or all ranks behind rank 0."""

    def open(self, slot: int, prompt_ids: npt.NDArray[np.int32], sampling: SlotSampling, drawn: list[int]) -> None:
        """Take a request ahead of its first batch; whoever reads results adds its tokens to ``drawn``."""

    def close(self, slot: int) -> None:
        """Forget a request."""

    def submit(self, batch: Batch) -> PendingStep:
        """Run a batch, or start it."""
        ...

    def reset(self) -> None:
        """Forget everything, after a step that did not finish."""


class Lane:
    """Makes calls one after the other in a thread of its own, until :meth:`close`; ``idle`` is around its waits. After
    one that failed the others fail as it did."""

    def __init__(self, name: str, idle: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        self._idle = idle
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Make a call after those before it."""
        future: Future[T] = Future()
        self._calls.put((call, future))
        return future

    def close(self) -> None:
        """End the thread after the calls so far."""
        self._calls.put(None)

    def _run(self) -> None:
        failure: BaseException | None = None
        while True:
            with self._idle():
                item = self._calls.get()
            if item is None:
                return
            call, future = item
            try:
                if failure is not None:
                    raise failure
                future.set_result(call())
            except BaseException as error:
                failure = error
                future.set_exception(error)
            del item, call, future  # an idle thread holds nothing that a call was about


def phase(name: str) -> AbstractContextManager[object]:
    """Names a phase of a step for PyTorch's profiler, if it runs."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NO_PHASE


def sampling_rows(batch: Batch, group: int) -> tuple[Row, ...]:
    """The rows of a batch after which a group draws a token, in order: those whose span begins there."""
    return tuple(row for row in batch.rows if row.samples and row.group == group)
