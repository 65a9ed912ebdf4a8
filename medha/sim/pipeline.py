"""When each stage of each group computes what: batches flow through the stages in order, one at a time in each.

A stage begins a batch when it is done with the one before and the stage before has passed it on. Groups that share a
row of the batch merge in every layer, so on each stage they begin together and take as long as the slowest of them;
groups without work in a batch are passed by. Sends and collectives are within a stage's seconds, as its coefficients
say. Blocks that are swapped move beside the compute: a stage is busy with a batch for the longer of the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import NamedTuple

from medha.batch import Batch
from medha.cost.chunk_times import ChunkTimes
from medha.cost.predictor import Predictor
from medha.sched.memory import KVMemory, parts_of


class Segment(NamedTuple):
    """One batch on one stage of one group, seconds of the virtual clock."""

    batch_id: int
    group: int
    stage: int
    start_s: float
    end_s: float
    num_tokens: int  # query tokens of the batch, over all groups


class Part(NamedTuple):
    """A batch on one group."""

    group: int
    from_s: float  # no batch before accounts for the time from then on
    end_s: float
    stages: Sequence[tuple[float, float]]  # when each began, and its seconds


class Passage(NamedTuple):
    """A batch on its way."""

    end_s: float  # when it is done in every stage
    busy_s: float  # seconds of the slowest stage
    parts: Sequence[Part]


@dataclass(eq=False, repr=False)
class Pipeline:
    """The stages of one replica, of which the groups are alike; ``on_segment`` is told of every batch on every stage.

    A batch reaches the first of several stages ``control_s`` after it was decided. A decode that was decided before its
    token is known, as with async scheduling, waits for that in the first stage. With ``chunk_times`` chunks are dealt,
    one a batch, and take what these say.

    ``busy_s`` and ``bubble_s``, by group and stage, are the seconds computed by batches that are accounted for, and
    those without work while another stage of the group had some.
    """

    stages: Sequence[Predictor]
    num_groups: int = 1
    on_segment: Callable[[Segment], None] | None = None
    _: KW_ONLY
    control_s: float = 0.0
    chunk_times: ChunkTimes | None = None

    def __post_init__(self) -> None:
        stages, groups = self.stages, range(self.num_groups)
        self._control_s = self.control_s if len(stages) > 1 else 0.0
        self._tokens_s: dict[int, float] = {}  # when each slot has its newest token
        self._newest_s = 0.0  # the latest of these
        self.busy_s, self.bubble_s, self._free_s = ([[0.0] * len(stages) for _ in groups] for _ in range(3))
        costs = [replace(predictor.coefficients, key=stages[0].coefficients.key) for predictor in stages]
        self._kinds = [costs.index(cost) for cost in costs]  # stages that cost the same are predicted once

    def send(self, batch: Batch, memory: KVMemory, now_s: float) -> Passage:
        """Let a batch enter stage 0, right after it was scheduled; the memory says where the keys of each row lie."""
        end_s, slowest_s, parts = now_s, 0.0, list[Part]()
        now_s += self._control_s
        for groups in _together(batch, self.num_groups):
            seconds = self._seconds(batch, memory, groups)
            ready_s = now_s if self._newest_s <= now_s else max(now_s, self._last_token_s(batch, groups))
            entered_s = max(ready_s, *(self._free_s[group][0] for group in groups))
            begins_s = [max(entered_s, self._free_s[group][-1]) for group in groups]
            ran = []
            for stage, stage_s in enumerate(seconds):
                start_s = max(ready_s, *(self._free_s[group][stage] for group in groups))
                ready_s = start_s + stage_s
                slowest_s = max(slowest_s, stage_s)
                ran.append((start_s, stage_s))
                for group in groups:
                    self._free_s[group][stage] = ready_s
                    if self.on_segment is not None:
                        self.on_segment(Segment(batch.batch_id, group, stage, start_s, ready_s, batch.num_tokens))
            parts += [Part(group, from_s, ready_s, ran) for group, from_s in zip(groups, begins_s, strict=True)]
            end_s = max(end_s, ready_s)
        self._tokens_s.update((row.slot, end_s) for row in batch.rows if row.samples)
        self._newest_s = max(self._newest_s, end_s)
        return Passage(end_s, slowest_s, parts)

    def account(self, passage: Passage, now_s: float = math.inf) -> None:
        """Count a batch that is done, or what it has done so far."""
        for group, from_s, end_s, stages in passage.parts:
            for stage, (start_s, stage_s) in enumerate(stages):  # one of them works until the batch has left the last
                done_s = min(max(now_s - start_s, 0.0), stage_s)
                self.busy_s[group][stage] += done_s
                self.bubble_s[group][stage] += min(end_s, now_s) - min(from_s, now_s) - done_s

    def _last_token_s(self, batch: Batch, groups: Sequence[int]) -> float:
        """When the last of the tokens is known with which the decodes of some groups go on; those that others have
        drawn are."""
        decodes = (row.slot for row in batch.rows[: batch.num_decodes] if row.group in groups)
        return max((self._tokens_s.get(slot, 0.0) for slot in decodes), default=0.0)

    def _seconds(self, batch: Batch, memory: KVMemory, groups: Sequence[int]) -> list[float]:
        """Seconds of each stage: the slowest of the groups that go together."""
        if self.chunk_times is not None:
            (row,) = batch.rows
            return [self.chunk_times.seconds(row.num_groups, row.position, row.q_len)]
        works = [parts_of(batch.rows, batch.num_decodes, memory, group) for group in groups]
        known = {kind: max(self.stages[kind].tick(*parts).seconds for parts in works) for kind in set(self._kinds)}
        moved_s = max(batch.num_moved_blocks(group) for group in groups) * memory.swap_block_s
        return [max(known[kind], moved_s) for kind in self._kinds]


def _together(batch: Batch, num_groups: int) -> list[list[int]]:
    """Groups with rows or moves in a batch, those that share rows with each other in one list; ascending."""
    if num_groups == 1:
        return [[0]]
    moving = {extent.group for extent in (*batch.swaps_out, *batch.swaps_in)}
    joined: list[list[int]] = []
    for group in sorted(moving | batch.groups):
        if joined and any(row.group < group <= row.writer for row in batch.rows):
            joined[-1].append(group)
        else:
            joined.append([group])
    return joined
