"""Defects that the fuzzer must find: each is put in on every rank of a run.

A defect stands in the place of a function, which it is given first; its docstring says what is wrong.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

import medha.parallel.kvp as kvp
from medha.engine.prefix import PrefixIds
from medha.engine.request import Completion
from medha.models.decoder import Decoder
from medha.sched.memory import KVMemory
from medha.sched.preempt import Preemption
from medha.sched.prefix import PrefixCache
from medha.sched.queue import Queue
from medha.sched.scheduler import Scheduler
from medha.text import StopChecker
from medha.worker.runner import Runner
from medha.worker.swap import HostCache

Original = Callable[..., Any]


class Mutation(NamedTuple):
    """A defect and where it is put, on how many ranks it is looked for, which may have to be several, and a seed by
    which it shows."""

    owner: Any
    name: str
    defect: Original
    shown_by: int
    ranks: int

    def put_in(self, patch: pytest.MonkeyPatch) -> None:
        original = getattr(self.owner, self.name)
        patch.setattr(self.owner, self.name, lambda *args, **more: self.defect(original, *args, **more))


MUTATIONS: dict[str, Mutation] = {}


def instead_of(owner: Any, name: str, *, shown_by: int, ranks: int = 1) -> Callable[[Original], None]:
    """Enters the defect that it decorates."""

    def enter(defect: Original) -> None:
        MUTATIONS[defect.__name__] = Mutation(owner, name, defect, shown_by, ranks)

    return enter


@instead_of(Preemption, "preempt", shown_by=3)
def block_not_freed(preempt: Original, self: Preemption, victims: Any, now_s: float) -> None:
    """A request that gives way keeps a block."""
    victims, memory = list(victims), self.memory
    pools = [memory.pools[memory._accounts[state.slot].first] for state in victims]
    preempt(self, victims, now_s)
    for pool in pools:
        pool.allocate(-1, 1, reserved=1)


@instead_of(kvp, "merge_partials", shown_by=5, ranks=2)
def merge_without_lse(_: Original, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], **more: bool) -> Any:
    """The parts of a sequence on several groups are averaged, whatever their weights."""
    return torch.stack([out for out, _ in parts]).mean(dim=0), parts[0][1]


@instead_of(Runner, "_draws", shown_by=4)
def draw_index_reset(draws: Original, self: Any, step: Any) -> Any:
    """Who comes back after giving way draws with the numbers of its first tokens again."""
    slots, indices = draws(self, step)
    return slots, [index if row.is_decode else 0 for row, index in zip(step.drawn_rows, indices, strict=True)]


@instead_of(HostCache, "move", shown_by=3)
def stale_page(move: Original, self: Any, out: Any, back: Any) -> Any:
    """What comes back from the host lacks its last run of tokens."""
    return move(self, out, back[:-1])


@instead_of(Scheduler, "_close_ended", shown_by=1)
def slot_reused_in_flight(_: Original, self: Scheduler) -> tuple[int, ...]:
    """An ended request's slot is free though a row of it is in flight."""
    queue: Any = self._queue
    queue.computed = lambda rows: Queue.computed(queue, [row for row in rows if row.slot in queue.running])
    closed = tuple(sorted(queue.ending))
    for slot in closed:
        queue.drop(slot)
        self.memory.release(slot)
    return closed


@instead_of(Decoder, "pack_", shown_by=3, ranks=2)
def padding_drawn(pack_: Original, self: Decoder, shard: Any = None, fused: Any = None) -> None:
    """The vocabulary's padding, where tensor parallelism does not divide it, can be drawn."""
    pack_(self, shard, fused)
    size = 1 if shard is None else shard.size
    self.config = dataclasses.replace(self.config, vocab_size=size * -(-self.config.vocab_size // size))


@instead_of(Runner, "_draws", shown_by=129)
def min_tokens_counted_anew(draws: Original, self: Any, step: Any) -> Any:
    """Who comes back after giving way gives ``min_tokens`` more tokens."""
    slots, indices = draws(self, step)
    for slot, row, index in zip(slots, step.drawn_rows, indices, strict=True):
        if index and not row.is_decode and slot.end_ids:
            slot.held_until += index
    return slots, indices


@instead_of(Completion, "gave_way", shown_by=3)
def stop_string_lost(gave_way: Original, self: Completion, preempted: Any) -> None:
    """Who gives way forgets its stop strings."""
    gave_way(self, preempted)
    self._stops = StopChecker(())


@instead_of(PrefixCache, "hold", shown_by=1681068044)
def reference_forgotten(hold: Original, self: PrefixCache, path: Any, end: int, slot: int) -> None:
    """What two requests hold goes with the first that ends."""
    was_held = path.held
    hold(self, path, end, slot)
    self._is_held(path, was_held, path.shared)


@instead_of(PrefixIds, "further", shown_by=1681068053)
def ids_of_the_last_tokens(further: Original, self: PrefixIds, last: bytes, token_ids: Any) -> bytes:
    """An id names its own 16 tokens, not all that come before."""
    units = range(0, len(token_ids) // self.unit * self.unit, self.unit)
    return b"".join(further(self, bytes(16), token_ids[at : at + self.unit]) for at in units)


@instead_of(KVMemory, "note", shown_by=1681068045)
def known_before_computed(note: Original, self: KVMemory, slot: int, num_tokens: int) -> None:
    """What a request has not computed yet is shared."""
    note(self, slot, num_tokens + 16)
