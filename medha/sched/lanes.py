"""The packer of CDSP: plans of prompts become tasks on lanes, one lane a KVP group, and each batch is one task.

A task is a chunk of a plan (:mod:`medha.sched.cdsp`) on its run of groups. Each group works through its lane in order;
a task begins when all groups of its run have come to it. So batches that share no group run beside each other, and the
scheduler has one in flight a group. Every prefill has its groups to itself, and decodes are elsewhere.

As published a request is planned when it arrives, and its plan is kept (``plan_order`` ``arrival``). With a policy as
``plan_order`` the requests that have not started are planned anew at each decision, in the policy's order, each around
the plans before it; who can begin now does, and then keeps its plan. So slack decides who is planned first, and nobody
is bound to groups before it uses them.

The queue time of a group is what its lane is predicted to take. When a task took another time than predicted, begins
later, or should be over, all lanes are timed anew: tasks in flight from when they began, the others behind them.

KV memory: a plan needs its largest even share of tokens on each group of its last run. Shares are granted in the order
in which plans are made, and no task begins without its grant. Whoever waits for one waits for plans made before its
own, whose tasks are all before its own as well: so nobody waits for ever.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import takewhile

from medha.batch import Batch
from medha.config import SchedulerConfig
from medha.cost.predictor import Predictor
from medha.sched.batch_builder import BatchBuilder, Packer
from medha.sched.cdsp import Chunk, Planner
from medha.sched.decision import Prediction
from medha.sched.improvement import LoadWindow, RateTable
from medha.sched.memory import KVMemory
from medha.sched.policy import load_policy, order
from medha.sched.queue import Queue, State

ARRIVAL = "arrival"
_FIRST = 64  # requests that are planned anew at a decision
_EXACT = 1e-6  # seconds by which a task may be off its prediction before lanes are timed anew


@dataclass(frozen=True, slots=True)
class Dealing:
    """What the scheduler needs to deal chunks."""

    planner: Planner
    rates: float | RateTable  # improvement rates


@dataclass(slots=True, eq=False)
class _Task:
    """A chunk on its run of groups."""

    plan: _Committed
    chunk: Chunk
    seconds: float  # predicted, uncorrected
    start_s: float  # predicted, or known
    is_in_flight: bool = False

    @property
    def groups(self) -> range:
        return range(self.chunk.first, self.chunk.first + self.chunk.size)


@dataclass(slots=True, eq=False)
class _Committed:
    """A plan that is kept."""

    state: State
    span: range  # groups of its last run
    num_blocks: int  # of KV on each of them
    tasks: deque[_Task]  # not complete
    is_granted: bool = False  # its blocks are set aside


class CdspPacker(Packer):
    """See the module."""

    learns = True

    def __init__(self, config: SchedulerConfig, dealing: Dealing, memory: KVMemory, predictor: Predictor) -> None:
        self.planner, self.load = dealing.planner, LoadWindow(dealing.rates)
        self.memory, self.predictor = memory, predictor
        self._ranking = None if config.plan_order == ARRIVAL else load_policy(config.plan_order)
        groups = range(dealing.planner.num_groups)
        self._lanes: list[deque[_Task]] = [deque() for _ in groups]
        self._free_s = [0.0 for _ in groups]  # when each lane is done
        self._plans: dict[int, _Committed] = {}  # by slot, in the order in which they were made
        self._ungranted: deque[_Committed] = deque()
        self._granted_blocks = [0 for _ in groups]
        self._seen: set[int] = set()  # slots of those that are planned, or wait for it
        self._is_stale = False  # the lanes are to be timed anew

    def fill(self, queue: Queue, builder: BatchBuilder) -> None:
        now_s, factor = builder.now_s, self.predictor.factor("prefill")
        self.prediction = None
        running = (lane[0] for lane in self._lanes if lane and lane[0].is_in_flight)
        if self._is_stale or any(task.start_s + task.seconds * factor < now_s - _EXACT for task in running):
            self._time_anew(now_s, factor)
        arrived = self._arrived(queue)
        for state in arrived:
            self.load.arrived(state.request.arrival_s)
        if self._ranking is None:
            for state in arrived:
                self._commit(state, self._chunks(state, self._queue_s(now_s, factor)), now_s, factor)
        task = self._ready()
        if task is None and self._ranking is not None:
            task = self._planned_anew(queue, builder, factor)
        if task is not None:
            self._send(task, builder, factor)

    def completed(self, batch: Batch, busy_s: float) -> None:
        for row in batch.rows:
            task = self._plans[row.slot].tasks.popleft()
            for group in task.groups:
                self._lanes[group].popleft()
            self._is_stale |= abs(busy_s - task.seconds * self.predictor.factor("prefill")) > _EXACT
            self._end(task.plan)

    def cancelled(self, slot: int) -> None:
        if (plan := self._plans.get(slot)) is None:
            self._seen.discard(slot)
            return
        while plan.tasks and not plan.tasks[-1].is_in_flight:
            task = plan.tasks.pop()
            for group in task.groups:
                self._lanes[group].remove(task)
        self._is_stale = True
        self._end(plan)

    # -- plans -------------------------------------------------------------------------------------------------------

    def _arrived(self, queue: Queue) -> list[State]:
        """Who has arrived since the last call: the end of those that wait."""
        new = takewhile(lambda state: state.slot not in self._seen, reversed(queue.waiting.values()))
        arrived = list(new)[::-1]
        self._seen.update(state.slot for state in arrived)
        return arrived

    def _queue_s(self, now_s: float, factor: float) -> list[float]:
        """Uncorrected seconds until each group is free."""
        return [max(free_s - now_s, 0.0) / factor for free_s in self._free_s]

    def _chunks(self, state: State, queue_s: list[float]) -> tuple[Chunk, ...]:
        least = -(-state.request.num_kv_tokens // self.memory.max_kv_per_group)
        rate = self.load.rate
        return self.planner.plan(state.num_prefill_tokens, queue_s, rate, least_size=least).chunks

    def _commit(self, state: State, chunks: tuple[Chunk, ...], now_s: float, factor: float) -> _Committed:
        """Keep a plan: its tasks join the lanes."""
        queue_s = self._queue_s(now_s, factor)
        spans_s = self.planner.finish_s(queue_s, chunks)
        last, num_tokens, share = chunks[-1], 0, 0
        for chunk in chunks:
            num_tokens += chunk.num_tokens
            share = max(share, -(-num_tokens // (chunk.size * self.memory.block_size)))
        plan = _Committed(state, range(last.first, last.first + last.size), share, deque())
        for chunk, (start_s, end_s) in zip(chunks, spans_s, strict=True):
            task = _Task(plan, chunk, end_s - start_s, now_s + start_s * factor)
            plan.tasks.append(task)
            for group in task.groups:
                self._lanes[group].append(task)
                self._free_s[group] = now_s + end_s * factor
        self._plans[state.slot] = plan
        self._ungranted.append(plan)
        self._grant()
        return plan

    def _planned_anew(self, queue: Queue, builder: BatchBuilder, factor: float) -> _Task | None:
        """The first task of whoever can begin now, of those that have not started, in the policy's order."""
        assert self._ranking is not None
        queue_s = [  # a task that should be over and is not will not be for a little while
            max(one_s, 2 * _EXACT) if lane else one_s
            for one_s, lane in zip(self._queue_s(builder.now_s, factor), self._lanes, strict=True)
        ]
        rows = order(
            self._ranking,
            queue.columns(factor),
            slots=queue.column("slot"),
            now_s=builder.now_s,
            first=_FIRST,
            among=~queue.column("started"),
            last=queue.column("relegated"),
            behind=queue.tenants.ahead(queue.column("tenant")) if queue.tenants.are_several else None,
        )
        for state in queue.states_of_rows(rows):
            if min(queue_s) > _EXACT or self._ungranted:
                break
            chunks = self._chunks(state, queue_s)
            first = chunks[0]
            if max(queue_s[first.first : first.first + first.size]) <= _EXACT:
                plan = self._commit(state, chunks, builder.now_s, factor)
                return plan.tasks[0] if plan.is_granted else None
            self.planner.finish_s(queue_s, chunks)
        return None

    def _grant(self) -> None:
        """Set memory aside for the plans that wait for it, in order."""
        while self._ungranted:
            plan = self._ungranted[0]
            if plan.tasks and any(
                self._granted_blocks[group] + plan.num_blocks > self.memory.num_blocks for group in plan.span
            ):
                return
            self._ungranted.popleft()
            if plan.tasks:  # else it was cancelled
                plan.is_granted = True
                for group in plan.span:
                    self._granted_blocks[group] += plan.num_blocks

    def _end(self, plan: _Committed) -> None:
        """Give back what a plan had, if nothing of it is left."""
        if plan.tasks:
            return
        del self._plans[plan.state.slot]
        self._seen.discard(plan.state.slot)
        if plan.is_granted:
            for group in plan.span:
                self._granted_blocks[group] -= plan.num_blocks
        self._grant()

    # -- lanes -------------------------------------------------------------------------------------------------------

    def _ready(self) -> _Task | None:
        """A task to which all of its groups have come, and which is not in flight."""
        for group, lane in enumerate(self._lanes):
            if not lane or (task := lane[0]).chunk.first != group or task.is_in_flight or not task.plan.is_granted:
                continue
            if all(self._lanes[other][0] is task for other in task.groups):
                return task
        return None

    def _send(self, task: _Task, builder: BatchBuilder, factor: float) -> None:
        self._is_stale |= abs(builder.now_s - task.start_s) > _EXACT
        task.is_in_flight, task.start_s = True, builder.now_s
        plan, seconds = task.plan, task.seconds * factor
        builder.add_dealt(plan.state, task.chunk.num_tokens, task.groups, span=plan.span, num_blocks=plan.num_blocks)
        self.prediction = Prediction("prefill", seconds, factor, seconds)

    def _time_anew(self, now_s: float, factor: float) -> None:
        """When each task begins, and each lane is done, from what is known now."""
        self._is_stale = False
        self._free_s = [now_s] * len(self._lanes)
        tasks = [task for plan in self._plans.values() for task in plan.tasks]
        for task in sorted(tasks, key=lambda task: not task.is_in_flight):
            groups = slice(task.groups.start, task.groups.stop)
            if not task.is_in_flight:
                task.start_s = max(self._free_s[groups])
            end_s = max(task.start_s + task.seconds * factor, now_s)
            self._free_s[groups] = [end_s] * len(task.groups)
