"""Defects that the fuzzer must find: each is put in on every rank of a run.

A defect is a function of a :class:`pytest.MonkeyPatch`; its docstring says what is wrong.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

import medha.models.decoder as decoder
import medha.parallel.kvp as kvp
from medha.engine.prefix import PrefixIds
from medha.engine.request import Completion
from medha.models.layers import FusedKernels, TensorShard
from medha.sched.decision import Preempted
from medha.sched.memory import KVMemory
from medha.sched.preempt import Preemption
from medha.sched.prefix import Path, PrefixCache
from medha.sched.queue import Queue
from medha.sched.scheduler import Scheduler
from medha.text import StopChecker
from medha.worker.runner import Runner
from medha.worker.step_input import StepInput
from medha.worker.swap import HostCache, Run, Wait

Patch = pytest.MonkeyPatch


def block_not_freed(patch: Patch) -> None:
    """A request that gives way keeps its last block."""
    preempt, release = Preemption.preempt, KVMemory.release

    def kept(self: KVMemory, slot: int) -> None:
        pool, num_frees = self.pools[self._accounts[slot].first], len(self.frees)
        release(self, slot)
        if len(self.frees) > num_frees:
            pool.allocate(-1, 1, reserved=1)

    def keeping(*args: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(KVMemory, "release", kept)
            preempt(*args)

    patch.setattr(Preemption, "preempt", keeping)


def merge_without_lse(patch: Patch) -> None:
    """The parts of a sequence on several groups are averaged, whatever their weights."""

    def mean(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], **_: bool) -> tuple[torch.Tensor, torch.Tensor]:
        outs = torch.stack([out for out, _ in parts])
        return outs.mean(dim=0), parts[0][1]

    patch.setattr(kvp, "merge_partials", mean)


def draw_index_reset(patch: Patch) -> None:
    """Who comes back after giving way draws with the numbers of its first tokens again."""
    draws = Runner._draws

    def reset(self: Runner, step: StepInput) -> Any:
        slots, indices = draws(self, step)
        return slots, [index if row.is_decode else 0 for row, index in zip(step.drawn_rows, indices, strict=True)]

    patch.setattr(Runner, "_draws", reset)


def stale_page(patch: Patch) -> None:
    """What comes back from the host lacks its last run of tokens."""
    move = HostCache.move

    def lacking(self: HostCache, out: Sequence[Run], back: Sequence[Run]) -> list[Wait]:
        return move(self, out, back[:-1])

    patch.setattr(HostCache, "move", lacking)


def slot_reused_in_flight(patch: Patch) -> None:
    """An ended request's slot is free though a row of it is in flight."""
    computed = Queue.computed

    def close(self: Scheduler) -> tuple[int, ...]:
        closed = sorted(self._queue.ending)
        for slot in closed:
            self._queue.drop(slot)
            self.memory.release(slot)
        return tuple(closed)

    patch.setattr(Scheduler, "_close_ended", close)
    patch.setattr(Queue, "computed", lambda self, rows: computed(self, [r for r in rows if r.slot in self.running]))


def padding_drawn(patch: Patch) -> None:
    """The vocabulary's padding, where tensor parallelism does not divide it, can be drawn."""
    pack_ = decoder.Decoder.pack_

    def padded_(self: decoder.Decoder, shard: TensorShard | None = None, fused: FusedKernels | None = None) -> None:
        pack_(self, shard, fused)
        size = 1 if shard is None else shard.size
        self.config = dataclasses.replace(self.config, vocab_size=size * -(-self.config.vocab_size // size))

    patch.setattr(decoder.Decoder, "pack_", padded_)


def min_tokens_counted_anew(patch: Patch) -> None:
    """Who comes back after giving way gives ``min_tokens`` more tokens."""
    draws = Runner._draws

    def anew(self: Runner, step: StepInput) -> Any:
        slots, indices = draws(self, step)
        for slot, row, index in zip(slots, step.drawn_rows, indices, strict=True):
            if index and not row.is_decode and slot.end_ids:
                slot.held_until += index
        return slots, indices

    patch.setattr(Runner, "_draws", anew)


def stop_string_lost(patch: Patch) -> None:
    """Who gives way forgets its stop strings."""
    gave_way = Completion.gave_way

    def forgetting(self: Completion, preempted: Preempted) -> None:
        gave_way(self, preempted)
        self._stops = StopChecker(())

    patch.setattr(Completion, "gave_way", forgetting)


def reference_forgotten(patch: Patch) -> None:
    """What two requests hold goes with the first that ends."""
    hold = PrefixCache.hold

    def forgetting(self: PrefixCache, path: Path, end: int, slot: int) -> None:
        was_held = path.held
        hold(self, path, end, slot)
        self._is_held(path, was_held, path.shared)

    patch.setattr(PrefixCache, "hold", forgetting)


def ids_of_the_last_tokens(patch: Patch) -> None:
    """An id names its own 16 tokens, not all that come before."""
    further = PrefixIds.further

    def unchained(self: PrefixIds, last: bytes, token_ids: npt.NDArray[np.int32]) -> bytes:
        units = range(0, len(token_ids) // self.unit * self.unit, self.unit)
        return b"".join(further(self, bytes(16), token_ids[at : at + self.unit]) for at in units)

    patch.setattr(PrefixIds, "further", unchained)


def known_before_computed(patch: Patch) -> None:
    """What a request has not computed yet is shared."""
    note = KVMemory.note
    patch.setattr(KVMemory, "note", lambda self, slot, num_tokens: note(self, slot, num_tokens + 16))


class Mutation(NamedTuple):
    """A defect, on how many ranks it is looked for, which may have to be several, and a seed by which it shows."""

    put_in: Callable[[Patch], None]
    ranks: int
    shown_by: int


MUTATIONS = {
    "block-not-freed": Mutation(block_not_freed, 1, 3),
    "merge-without-lse": Mutation(merge_without_lse, 2, 5),
    "draw-index-reset": Mutation(draw_index_reset, 1, 4),
    "stale-page": Mutation(stale_page, 1, 3),
    "slot-reused-in-flight": Mutation(slot_reused_in_flight, 1, 1),
    "padding-drawn": Mutation(padding_drawn, 2, 3),
    "min-tokens-counted-anew": Mutation(min_tokens_counted_anew, 1, 54),
    "stop-string-lost": Mutation(stop_string_lost, 1, 3),
    "reference-forgotten": Mutation(reference_forgotten, 1, 1681068043),
    "ids-of-the-last-tokens": Mutation(ids_of_the_last_tokens, 1, 1681068053),
    "known-before-computed": Mutation(known_before_computed, 1, 1681068045),
}
