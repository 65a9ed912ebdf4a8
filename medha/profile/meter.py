"""Where the busy time of each batch went on one rank, and how the ranks' figures come together on rank 0.

On the CPU times are of the host's clock, and of each part. On CUDA, which runs behind the host and whose graphs show no
parts, the seconds of a batch are those between two events in its stream, and :func:`medha.profile.fit.attention_of`
tells attention from the rest.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from medha.attention.staging import record_event
from medha.parallel.mesh import Ranks, wait_for_all
from medha.records import BatchRecord
from medha.worker.runner import Runner
from medha.worker.step import PendingStep
from medha.worker.step_input import StepInput

Mark = float | torch.cuda.Event
_Call = tuple[str, Mark, Mark]  # what was called, before and after
_LIMIT_S = 600.0  # for the slowest rank to come


class StageTime(NamedTuple):
    """Seconds of one batch on one rank; they add up to its busy time."""

    attention_s: float  # attending over the keys that lie here
    merge_s: float  # packing the parts of shared rows, waiting for the other groups' and merging them
    linear_s: float  # the rest of the layers, with the all-reduces of a tensor-parallel group
    head_s: float  # vocabulary projection and sampling; 0 where nothing is sampled
    host_s: float  # before the layers: block tables, the attention plan, rotations, the embedding

    @property
    def busy_s(self) -> float:
        """Their sum."""
        return sum(self)


class StageMeter:
    """Notes where a rank's time goes, by wrapping what its runner consists of, in place.

    Batches run one after the other, without async scheduling.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner, self._is_cuda = runner, runner.device.type == "cuda"
        self._batches: dict[int, list[_Call]] = {}
        self._calls: list[_Call] = []  # of the present batch
        self._run = runner.run
        runner.run = self._measured_run  # type: ignore[method-assign]
        if not self._is_cuda:
            runner.model.forward = partial(self._measured, "layers", runner.model.forward)  # type: ignore[method-assign]
            runner.backend.run = partial(self._measured, "attention", runner.backend.run)  # type: ignore[method-assign]
        if runner.merge is not None:
            self._start_merge, runner.merge.start = runner.merge.start, self._measured_merge  # type: ignore[method-assign]

    def take(self) -> dict[int, StageTime]:
        """By batch id, what was measured since the last call."""
        records = self._runner.recorder.take()
        batches, self._batches = self._batches, {}
        return {record.batch_id: self._stage_time(record, batches[record.batch_id]) for record in records}

    def _mark(self) -> Mark:
        """This moment on the device."""
        return record_event(self._runner.device, timing=True) or time.perf_counter()

    def _measured_run(self, step: StepInput) -> PendingStep | None:
        self._calls = self._batches[step.batch.batch_id] = []
        result: PendingStep | None = self._measured("run", self._run, step)
        if self._is_cuda:  # of which no parts show, behind what the stage before sends
            (_, _, end), began = self._calls.pop(), self._runner._began
            assert began is not None, "the device was given a batch"
            self._calls += [("run", began, end), ("layers", began, end)]
        return result

    def _measured_merge(self, *args: Any, **options: Any) -> Callable[[], list[torch.Tensor]]:
        result = self._measured("merge", self._start_merge, *args, **options)
        # on the host's clock the record has the wait
        return partial(self._measured, "merge", result) if self._is_cuda else result

    def _measured(self, what: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start = self._mark()
        result = call(*args, **options)
        self._calls.append((what, start, self._mark()))
        return result

    def _stage_time(self, record: BatchRecord, calls: Sequence[_Call]) -> StageTime:
        marks = {what: (start, end) for what, start, end in calls}
        (entered, end), (layers, layers_end) = marks["run"], marks["layers"]
        spent = defaultdict[str, float](float, merge=0.0 if self._is_cuda else record.merge_wait_s)
        for what, *both in calls:
            spent[what] += _between(*both)
        linear_s = spent["layers"] - spent["attention"] - spent["merge"]
        # a stage without the head is done with its layers, and then waits to send
        head_s = _between(layers_end, end) if self._runner.model.has_head else 0.0
        host_s = _between(entered, layers) - (0.0 if self._is_cuda else record.hidden_wait_s)
        return StageTime(spent["attention"], spent["merge"], linear_s, head_s, host_s)


def _between(start: Mark, end: Mark) -> float:
    """Seconds from one mark to another; waits for the device to come there."""
    if start is end:
        return 0.0
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3  # milliseconds
    assert isinstance(start, float) and isinstance(end, float), "marks of one batch are of one clock"
    return end - start


def gathered(ranks: Ranks, mine: Mapping[int, StageTime]) -> list[dict[int, StageTime]]:
    """What every rank measured, by rank; each of them calls it."""
    rows = [[batch_id, *one] for batch_id, one in mine.items()]
    everyone = wait_for_all(ranks.job, "profile", rows, limit_s=_LIMIT_S)
    return [{int(row[0]): StageTime(*row[1:]) for row in its_rows} for its_rows in everyone]
