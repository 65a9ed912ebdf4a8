"""Decode instances: which one takes a request over once its first token is drawn, and when.

A request that has its first token waits where it was prefilled for a *grant*: room for its whole claim on an instance,
and one of the transfers that the instance takes at once. Grants go out in the order in which requests began to wait,
each to the instance with the greatest ``(free - virtual) / max(1, batch)``: free blocks, less what is claimed and not
there yet, for each request that decodes there (Tetris, "Optimizing Long-context LLM Serving via Fine-grained Sequence
Parallelism"). Whatever a decoding request may come to need is its own already, so each comes to its end, gives its
blocks back, and nobody waits for ever; what waits keeps its blocks, so that prefills wait for memory in the end.

Each instance has a scheduler of its own, which knows one group, 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from medha.batch import Batch
from medha.engine.request import Completion
from medha.sched.decision import Decision, SchedulerRequest
from medha.sched.memory import KVMemory
from medha.sched.scheduler import Scheduler

Begin = Callable[[int, Sequence[tuple[int, int]], Batch], "Future[None]"]


@dataclass(slots=True)
class DecodeInstance:
    """A decode instance."""

    group: int  # behind the KV-parallel ones
    scheduler: Scheduler
    coming: dict[int, SchedulerRequest] = field(default_factory=dict)  # by slot: granted, and not here

    @property
    def freeness(self) -> float:
        """Blocks for each request that decodes here, those apart that are claimed for requests on their way."""
        memory = self.scheduler.memory
        claimed = sum(sum(memory.reservation(one.num_kv_tokens)) for one in self.coming.values())
        held = sum(sum(memory.reservation(one.num_prompt_tokens)) for one in self.coming.values())
        return (memory.num_free(0) + held - claimed) / max(1, self.scheduler.num_running)


@dataclass(slots=True)
class HandOvers:
    """The requests between their first token and their second, and the instances where they decode."""

    instances: Sequence[DecodeInstance] = ()  # none where requests decode where they are prefilled
    most: int = 0  # requests that come to an instance at once
    begin: Begin | None = None  # of :class:`medha.engine.distributed.DrivingRunner`, ``hand_over``
    waiting: dict[int, SchedulerRequest] = field(default_factory=dict)  # by slot, the first to wait first
    transfers: dict[int, Future[None]] = field(default_factory=dict)  # by slot, those on their way

    @property
    def largest(self) -> KVMemory | None:
        """The memory of an instance that takes the longest requests."""
        memories = (instance.scheduler.memory for instance in self.instances)
        return max(memories, key=lambda memory: memory.max_request_tokens, default=None)

    def keep(self, prefills: Scheduler, request: SchedulerRequest) -> None:
        """A request, all of it, has its first token: what ``prefills`` has computed stays until an instance has it."""
        prefills.keep(request.slot)
        self.waiting[request.slot] = request

    def grants(self) -> Iterator[tuple[SchedulerRequest, Batch]]:
        """Grant what can be granted; a request that finds no room holds up those behind it. The batch, on the
        instance's group, says where keys and values go."""
        while self.waiting:
            request = next(iter(self.waiting.values()))
            with_place = [one for one in self.instances if len(one.coming) < self.most]
            able = [one for one in with_place if one.scheduler.has_room(request, len(one.coming))]
            if not able:
                return
            instance = max(able, key=lambda one: one.freeness)
            del self.waiting[request.slot]
            batch = instance.scheduler.receive(request).on_group(instance.group)
            instance.coming[request.slot] = request
            yield request, batch

    def advance(self, prefills: Scheduler, by_slot: Mapping[int, Completion], now: Callable[[], float]) -> list[int]:
        """Take what has been handed over, and begin what is granted; returns the slots whose requests ended on the way.

        Raises what went wrong with a hand-over.
        """
        ended = []
        for slot in [slot for slot, transfer in self.transfers.items() if transfer.done()]:
            one = by_slot[slot]
            self.note_wait(one, now())
            self.transfers.pop(slot).result()
            instance = next(one for one in self.instances if slot in one.coming)
            prefills.let_go(slot)
            wanted = one.finish_reason is None
            instance.scheduler.arrived(instance.coming.pop(slot), wanted=wanted)
            ended += [] if wanted else [slot]
        for request, batch in self.grants():
            assert self.begin is not None, "there are instances"
            held = prefills.memory.held_by_group(request.slot, request.num_prompt_tokens)
            self.transfers[request.slot] = self.begin(by_slot[request.slot].token_ids[0], held, batch)
        return ended

    def decisions(self, now: Callable[[], float]) -> Iterator[tuple[Scheduler, Decision, float, Batch]]:
        """What the instances decide to run: by whom it is decided, when, and the batch on the instance's group."""
        for one in self.instances:
            while (decision := one.scheduler.schedule(start_s := now())).batch is not None:
                yield one.scheduler, decision, start_s, decision.batch.on_group(one.group)

    def cancel(self, prefills: Scheduler, slot: int) -> tuple[int, ...]:
        """Stop scheduling a request, wherever it is; returns the slots closed by that."""
        for instance in self.instances:
            if instance.scheduler.knows(slot):
                return instance.scheduler.cancel(slot)
        closed = prefills.cancel(slot)
        return closed if self.waiting.pop(slot, None) is None else prefills.let_go(slot)

    def note_wait(self, one: Completion, now_s: float) -> None:
        """Note for how long a completion has waited for an instance, if it waits for one or is on its way."""
        metrics = one.metrics
        waits = one.slot in self.waiting or one.slot in self.transfers
        if waits and metrics.explanation is not None and metrics.first_token is not None:
            metrics.explanation = replace(metrics.explanation, decode_wait_s=now_s - metrics.first_token)
