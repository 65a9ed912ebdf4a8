"""The packer of CDSP: plans of prompts become tasks on lanes, one lane a KVP group, and each batch is one task.

A task is a chunk of a plan (:mod:`medha.sched.cdsp`) on its run of groups. Each group works through its tasks in the
order in which they were planned; a task begins when all groups of its run have come to it. So batches that share no
group run beside each other, one in flight a group, every prefill has its groups to itself, and decodes are elsewhere.

As published a request is planned when it arrives, and its plan is kept (``plan_order`` ``arrival``). With a policy as
``plan_order`` those that have not started are planned anew at each decision, in the policy's order, each around the
plans before it; who can begin now does, and then keeps its plan. So nobody is bound to groups before it uses them.

The queue time of a group is what its lane is predicted to take, from what is known when somebody is planned: tasks in
flight from when they began, the others behind them; one that should be over is taken to need as long again as it is
late. Where one takes far longer than predicted and another group is idle, whoever has not started is planned anew, also
with ``arrival``: else they would queue behind it.

A plan needs memory for its largest even share of tokens on each group of its last run. That is set aside when the plan
is made, and where it is not there nobody is planned until it is: a plan that is kept waits for tasks before its own
alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import accumulate, takewhile

from medha.batch import PIECES, Batch
from medha.config import SchedulerConfig
from medha.cost.improvement import LoadWindow
from medha.cost.predictor import Predictor
from medha.sched.batch_builder import BatchBuilder, Packer
from medha.sched.cdsp import Chunk, Planner
from medha.sched.decision import Prediction, SchedulerRequest
from medha.sched.memory import KVMemory
from medha.sched.policy import load_policy
from medha.sched.queue import Queue, State

ARRIVAL = "arrival"
_FIRST = 64  # requests that are planned anew at a decision
_FAR = 2.0  # times the predicted seconds of a task, from which others are planned anew
_SOON_S = 1e-6  # within which a group that is free counts as idle


@dataclass(slots=True, eq=False)
class _Task:
    """A chunk on its run of groups."""

    state: State
    chunk: Chunk
    seconds: float  # predicted, uncorrected
    start_s: float = 0.0  # once it is in flight


class CdspPacker(Packer):
    """See the module."""

    def __init__(self, config: SchedulerConfig, planner: Planner, memory: KVMemory, predictor: Predictor) -> None:
        self.planner, self.load = planner, LoadWindow(planner.rates)
        self.memory, self.predictor = memory, predictor
        self._ranking = None if config.plan_order == ARRIVAL else load_policy(config.plan_order)
        self._running: list[_Task] = []  # in flight
        self._waiting: list[_Task] = []  # those of a group are in the order in which it works through them

    def added(self, request: SchedulerRequest) -> None:
        self.load.arrived(request.arrival_s)

    def fill(self, queue: Queue, builder: BatchBuilder) -> Prediction | None:
        now_s, factor = builder.now_s, self.predictor.factor("prefill")
        late = max(((now_s - task.start_s) / (task.seconds * factor) for task in self._running), default=0.0)
        if late > _FAR and len(self._busy()) < self.planner.num_groups:
            self._drop({task.state.slot for task in self._waiting if not task.state.has_started})
        if self._ranking is None:
            unplanned = takewhile(lambda state: not self.memory.is_bound(state.slot), reversed(queue.waiting.values()))
            states = list(unplanned)[::-1]
            queue_s = self._queue_s(now_s, factor) if states else []
            for state in states:
                if not self._commit(state, chunks := self._chunks(state, queue_s)):
                    break
                self.planner.occupy(queue_s, chunks)
        task = self._ready()
        if task is None and self._ranking is not None and self._plan_anew(queue, builder, factor):
            task = self._ready()
        if task is None:
            return None
        task.start_s = now_s
        self._waiting.remove(task)
        self._running.append(task)
        builder.add_dealt(task.state, task.chunk.num_tokens, task.chunk.groups)
        return Prediction("prefill", task.seconds * factor, factor, task.seconds * factor)

    def completed(self, batch: Batch) -> None:
        (row,) = batch.rows
        self._running = [task for task in self._running if task.state.slot != row.slot]

    def cancelled(self, slot: int) -> None:
        self._drop({slot})

    def _drop(self, slots: Collection[int]) -> None:
        """Forget the plans of some requests, but what is in flight."""
        gone = {task.state.slot: task.state for task in self._waiting if task.state.slot in slots}
        self._waiting = [task for task in self._waiting if task.state.slot not in gone]
        for slot, state in gone.items():
            if not state.has_started:
                self.memory.release(slot)

    def _queue_s(self, now_s: float, factor: float) -> list[float]:
        """Uncorrected seconds until each group is free, from what is known now."""
        free_s = [now_s] * self.planner.num_groups
        in_flight = len(self._running)
        for index, task in enumerate((*self._running, *self._waiting)):
            _, first, size = task.chunk
            start_s = task.start_s if index < in_flight else max(free_s[first : first + size])
            end_s = start_s + task.seconds * factor
            free_s[first : first + size] = [end_s + 2 * max(now_s - end_s, 0.0)] * size
        return [(one_s - now_s) / factor for one_s in free_s]

    def _chunks(self, state: State, queue_s: list[float]) -> tuple[Chunk, ...]:
        least = -(-state.request.num_kv_tokens // self.memory.max_share)
        return self.planner.plan(state.num_prefill_tokens, queue_s, self.load.rate, least_size=least).chunks

    def _commit(self, state: State, chunks: tuple[Chunk, ...]) -> bool:
        """Keep a plan: its tasks join the lanes; False where its memory is not there."""
        ends = list(accumulate(chunk.num_tokens for chunk in chunks))
        tokens = max(-(-end // chunk.size) for end, chunk in zip(ends, chunks, strict=True))
        share = -(-(tokens + self.memory.block_size + PIECES) // self.memory.block_size)  # even to a block, and a piece
        if not self.memory.set_aside(state.slot, chunks[-1].groups, share):
            return False
        for end, chunk in zip(ends, chunks, strict=True):
            seconds = self.planner.times.seconds(chunk.size, end - chunk.num_tokens, chunk.num_tokens)
            self._waiting.append(_Task(state, chunk, seconds))
        return True

    def _plan_anew(self, queue: Queue, builder: BatchBuilder, factor: float) -> bool:
        """Keep the plan of whoever can begin now, the first in the policy's order; whether there is one."""
        assert self._ranking is not None
        queue_s = self._queue_s(builder.now_s, factor)
        for group in self._busy():  # a task that should be over and is not will not be for a little while
            queue_s[group] = max(queue_s[group], 2 * _SOON_S)
        rows = queue.order(self._ranking, builder.now_s, factor=factor, first=_FIRST, among=~queue.column("started"))
        for state in queue.states_of_rows(rows):
            if min(queue_s) > _SOON_S:
                break
            chunks = self._chunks(state, queue_s)
            if max(queue_s[group] for group in chunks[0].groups) <= _SOON_S:
                return self._commit(state, chunks)
            self.planner.occupy(queue_s, chunks)
        return False

    def _ready(self) -> _Task | None:
        """The task to which all of its groups have come, and which is not in flight; of several that on the first."""
        before, ready = self._busy(), list[_Task]()
        for task in self._waiting:
            if before.isdisjoint(task.chunk.groups):
                ready.append(task)
            before.update(task.chunk.groups)
            if len(before) == self.planner.num_groups:
                break
        return min(ready, key=lambda task: task.chunk.first, default=None)

    def _busy(self) -> set[int]:
        """The groups on which a task is in flight."""
        return {group for task in self._running for group in task.chunk.groups}
