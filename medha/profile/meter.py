"""Where the busy time of each batch went on one rank, and how the ranks' figures come together on rank 0.

On the CPU times are of the host's clock, and of each part. On CUDA, which runs behind the host and whose graphs show no
parts, the seconds of a batch are those between two events in its stream, and :func:`medha.profile.fit.attention_of`
tells attention from the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Marks:
    """Of one batch: entered, first layer begun, last layer done, all done; and the calls within the layers."""

    entered: Mark
    layers: Mark = 0.0
    layers_end: Mark = 0.0
    end: Mark = 0.0
    calls: list[tuple[str, Mark, Mark]] = field(default_factory=list)


class StageMeter:
    """Notes where a rank's time goes, by wrapping what its runner consists of, in place.

    Batches run one after the other, without async scheduling.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._batches: dict[int, _Marks] = {}
        self._now = _Marks(0.0)
        self._run, self._layers = runner.run, runner.model.forward
        runner.run = self._measured_run  # type: ignore[method-assign]
        if runner.device.type != "cuda":
            runner.model.forward = self._measured_layers  # type: ignore[assignment]
            runner.backend.run = partial(self._measured, "attention", runner.backend.run)  # type: ignore[method-assign]
        if runner.merge is not None:
            self._start_merge, runner.merge.start = runner.merge.start, self._measured_merge  # type: ignore[method-assign]

    def take(self) -> dict[int, StageTime]:
        """By batch id, what was measured since the last call."""
        records = self._runner.recorder.take()
        batches, self._batches = self._batches, {}
        return {record.batch_id: _stage_time(record, batches[record.batch_id]) for record in records}

    def _mark(self) -> Mark:
        """This moment on the device."""
        return record_event(self._runner.device, timing=True) or time.perf_counter()

    def _measured_run(self, step: StepInput) -> PendingStep | None:
        self._now = self._batches[step.batch.batch_id] = _Marks(self._mark())
        result, end = self._run(step), self._mark()
        if self._runner.device.type == "cuda":
            began = self._runner._began  # behind what the stage before sends
            assert began is not None, "the device was given a batch"
            self._now.entered = self._now.layers = began
            self._now.layers_end = end
        # a stage without the head is done with its layers, and then waits to send
        self._now.end = end if self._runner.model.has_head else self._now.layers_end
        return result

    def _measured_layers(self, *args: Any) -> torch.Tensor:
        self._now.layers = self._mark()
        x_TD = self._layers(*args)
        self._now.layers_end = self._mark()
        return x_TD

    def _measured_merge(self, *args: Any, **options: Any) -> Callable[[], list[torch.Tensor]]:
        result = self._measured("merge", self._start_merge, *args, **options)
        # on the host's clock the record has the wait
        return partial(self._measured, "merge", result) if self._runner.device.type == "cuda" else result

    def _measured(self, what: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start = self._mark()
        result = call(*args, **options)
        self._now.calls.append((what, start, self._mark()))
        return result


def _between(start: Mark, end: Mark) -> float:
    """Seconds from one mark to another; waits for the device to come there."""
    if start is end:
        return 0.0
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3  # milliseconds
    assert isinstance(start, float) and isinstance(end, float), "marks of one batch are of one clock"
    return end - start


def _stage_time(record: BatchRecord, marks: _Marks) -> StageTime:
    waited_s = 0.0 if isinstance(marks.end, torch.cuda.Event) else record.merge_wait_s
    spent = {"attention": 0.0, "merge": waited_s}
    for name, start, end in marks.calls:
        spent[name] += _between(start, end)
    attention_s, merge_s = spent.values()
    layers_s, host_s = _between(marks.layers, marks.layers_end), _between(marks.entered, marks.layers)
    head_s = _between(marks.layers_end, marks.end)
    if marks.layers is not marks.entered:
        host_s -= record.hidden_wait_s
    return StageTime(attention_s, merge_s, layers_s - attention_s - merge_s, head_s, host_s)


def gathered(ranks: Ranks, mine: Mapping[int, StageTime]) -> list[dict[int, StageTime]]:
    """What every rank measured, by rank; each of them calls it."""
    rows = [[batch_id, *one] for batch_id, one in mine.items()]
    everyone = wait_for_all(ranks.job, "profile", rows, limit_s=_LIMIT_S)
    return [{int(row[0]): StageTime(*row[1:]) for row in its_rows} for its_rows in everyone]
