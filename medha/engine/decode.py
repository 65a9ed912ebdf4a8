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

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from medha.batch import Batch
from medha.sched.decision import SchedulerRequest
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


class HandOvers:
    """The requests between their first token and their second.

    Args:
        instances: none where requests decode where they are prefilled.
        most: requests that come to an instance at once.
        begin: of :class:`medha.engine.distributed.DrivingRunner`, ``hand_over``.

    Attributes:
        waiting: by slot, the first to wait first.
        transfers: by slot, those on their way.
    """

    def __init__(self, instances: Sequence[DecodeInstance] = (), most: int = 0, begin: Begin | None = None) -> None:
        self.instances = instances
        self.waiting: dict[int, SchedulerRequest] = {}
        self.transfers: dict[int, Future[None]] = {}
        self._most = most
        self._begin = begin

    def __bool__(self) -> bool:
        return bool(self.instances)

    @property
    def largest(self) -> KVMemory | None:
        """The memory of an instance that takes the longest requests."""
        memories = (instance.scheduler.memory for instance in self.instances)
        return max(memories, key=lambda memory: memory.max_request_tokens, default=None)

    def grants(self) -> Iterator[tuple[SchedulerRequest, Batch]]:
        """Grant what can be granted; a request that finds no room holds up those behind it. The batch, on the
        instance's group, says where keys and values go."""
        while self.waiting:
            request = next(iter(self.waiting.values()))
            able = [
                one
                for one in self.instances
                if len(one.coming) < self._most and one.scheduler.has_room(request, len(one.coming))
            ]
            if not able:
                return
            instance = max(able, key=lambda one: one.freeness)
            del self.waiting[request.slot]
            batch = instance.scheduler.receive(request).on_group(instance.group)
            instance.coming[request.slot] = request
            yield request, batch

    def waits(self, slot: int) -> bool:
        """Whether a request waits for a grant, or is on its way."""
        return slot in self.waiting or slot in self.transfers

    def begin(self, request: SchedulerRequest, token: int, held: Sequence[tuple[int, int]], batch: Batch) -> None:
        """Begin a hand-over that was granted: the request's first token, the groups that hold its KV and how many
        tokens each, and the batch of the grant."""
        assert self._begin is not None, "there are instances"
        self.transfers[request.slot] = self._begin(token, held, batch)

    def arrived(self, slot: int) -> tuple[DecodeInstance, SchedulerRequest]:
        """A request has been handed over; to which instance. Raises what went wrong with it."""
        self.transfers.pop(slot).result()
        instance = next(one for one in self.instances if slot in one.coming)
        return instance, instance.coming.pop(slot)
