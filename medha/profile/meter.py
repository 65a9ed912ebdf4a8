"""Where the busy time of each batch went on one rank, and how the ranks' figures come together on rank 0."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from medha.batch import Batch
from medha.parallel.mesh import Ranks
from medha.profile.held import Meter
from medha.timeline import BatchRecord
from medha.worker.runner import Runner
from medha.worker.step import StepResult

_REDUCE_CALLS = 5


@dataclass(frozen=True, slots=True)
class StageTime:
    """Seconds of one batch on one rank; they add up to its busy time.

    Attributes:
        attention_s: attending over the keys that lie here.
        merge_s: packing the parts of shared rows, waiting for the other groups' and merging them.
        linear_s: the rest of the layers, with the all-reduces of a tensor-parallel group.
        head_s: vocabulary projection and sampling; 0 where nothing is sampled.
        host_s: before the layers: block tables, the attention plan, rotations, the embedding.
    """

    attention_s: float
    merge_s: float
    linear_s: float
    head_s: float
    host_s: float

    @property
    def busy_s(self) -> float:
        """Their sum."""
        return self.attention_s + self.merge_s + self.linear_s + self.head_s + self.host_s


@dataclass(slots=True)
class _Marks:
    """Times of one batch: entered, first layer begun, last layer done; and within, attention and packing."""

    entered_s: float
    layers_s: float = 0.0
    layers_end_s: float = 0.0


class StageMeter:
    """Notes where a rank's time goes, by wrapping what it consists of, in place.

    Args:
        runner: this rank's own.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._marks: dict[int, _Marks] = {}
        self._now: _Marks | None = None
        self._meter = Meter()
        self._meter.watch(runner)
        self._run, self._layers = runner.run, runner.model.forward
        runner.run = self._measured_run  # type: ignore[method-assign]
        runner.model.forward = self._measured_layers  # type: ignore[assignment]

    def take(self) -> dict[int, StageTime]:
        """By batch id, what was measured since the last call."""
        records = self._runner.recorder.take()
        spans, self._meter.spans = self._meter.spans, []
        marks, self._marks = self._marks, {}
        within = _by_batch(spans, records)
        return {
            record.batch_id: _stage_time(record, marks[record.batch_id], within[record.batch_id]) for record in records
        }

    def _measured_run(self, batch: Batch, input_ids: torch.Tensor | None) -> StepResult | None:
        self._now = self._marks[batch.batch_id] = _Marks(time.perf_counter())
        return self._run(batch, input_ids)

    def _measured_layers(self, *args: Any) -> torch.Tensor:
        assert self._now is not None, "layers run within a batch"
        self._now.layers_s = time.perf_counter()
        x_TD = self._layers(*args)
        self._now.layers_end_s = time.perf_counter()
        return x_TD


def _by_batch(
    spans: Iterable[tuple[str, float, float]], records: Iterable[BatchRecord]
) -> dict[int, Mapping[str, float]]:
    """Seconds by name within each batch; both are in order of time."""
    left = iter([*spans, ("", float("inf"), 0.0)])
    what, start_s, seconds = next(left)
    sums: dict[int, Mapping[str, float]] = {}
    for record in records:
        total = {"attention": 0.0, "packing": 0.0}
        while start_s <= record.end_s:
            total[what] += seconds
            what, start_s, seconds = next(left)
        sums[record.batch_id] = total
    return sums


def _stage_time(record: BatchRecord, marks: _Marks, within: Mapping[str, float]) -> StageTime:
    merge_s = within["packing"] + record.merge_wait_s
    return StageTime(
        within["attention"],
        merge_s,
        marks.layers_end_s - marks.layers_s - within["attention"] - merge_s,
        record.end_s - marks.layers_end_s,
        marks.layers_s - marks.entered_s - record.hidden_wait_s,
    )


def gathered(ranks: Ranks, mine: Mapping[int, StageTime]) -> list[dict[int, StageTime]]:
    """What every rank measured, by rank, on rank 0, which waits for it; the others give theirs and get nothing."""
    store = ranks.job.store
    if ranks.rank != 0:
        store.set(_key(ranks.rank), json.dumps([[batch_id, *astuple(one)] for batch_id, one in mine.items()]))
        return []
    others = [json.loads(store.get(_key(rank))) for rank in range(1, ranks.config.world_size)]
    return [dict(mine), *({int(row[0]): StageTime(*row[1:]) for row in rows} for rows in others)]


def _key(rank: int) -> str:
    return f"profile/{rank}"


def all_reduce_seconds(
    group: dist.ProcessGroup, sizes: Iterable[int], *, dim: int, dtype: torch.dtype, device: torch.device
) -> list[tuple[int, float]]:
    """Median seconds of an all-reduce of [tokens, dim]; every rank of ``group`` calls it.

    Args:
        group: a tensor-parallel group.
        sizes: tokens.
        dim, dtype, device: of the hidden states.

    Returns:
        (tokens, seconds) of each size.
    """
    found = []
    for size in sizes:
        x_TD = torch.zeros(size, dim, dtype=dtype, device=device)
        seconds = [_timed(partial(dist.all_reduce, x_TD, group=group)) for _ in range(1 + _REDUCE_CALLS)]
        found.append((size, sorted(seconds[1:])[_REDUCE_CALLS // 2]))
    return found


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
