"""Defects that the fuzzer must find: each is put in on every rank of a run.

A defect is a function of a :class:`pytest.MonkeyPatch`; its docstring says what is wrong.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import medha.models.decoder as decoder
import medha.parallel.kvp as kvp
from medha.engine.engine import Engine
from medha.engine.prefix import PrefixIds
from medha.models.layers import FusedKernels, TensorShard
from medha.sched.account import Account
from medha.sched.decision import Decision
from medha.sched.memory import KVMemory
from medha.sched.preempt import Preemption
from medha.sched.prefix import Path, PrefixCache
from medha.sched.queue import Queue
from medha.sched.scheduler import Scheduler
from medha.text import StopChecker
from medha.worker.kv_cache import KVCache
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


def output_ids_not_moved(patch: Patch) -> None:
    """Whoever samples for a request next is not told what has been drawn elsewhere."""
    patch.setattr(Runner, "sampling_so_far", lambda self, slot: self.sampling[slot], raising=False)


def draw_index_reset(patch: Patch) -> None:
    """Who comes back after giving way draws with the numbers of its first tokens again."""
    draws = Runner._draws

    def reset(self: Runner, step: StepInput) -> Any:
        slots, indices = draws(self, step)
        return slots, [index if row.is_decode else 0 for row, index in zip(step.drawn_rows, indices, strict=True)]

    patch.setattr(Runner, "_draws", reset)


def another_host_block(patch: Patch) -> None:
    """What comes back from the host is read one block further on."""
    move = HostCache.move

    def shifted(self: HostCache, out: Sequence[Run], back: Sequence[Run]) -> list[Wait]:
        size, end = self._cache.block_size, self.num_blocks * self._cache.block_size + 1
        return move(self, out, [(at, (host + size) % (end - count), count) for at, host, count in back])

    patch.setattr(HostCache, "move", shifted)


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
    schedule = Engine._schedule

    def forgetting(self: Engine, now: float) -> Decision:
        decision = schedule(self, now)
        for preempted in decision.preempted:
            self._by_slot[preempted.slot]._stops = StopChecker(())
        return decision

    patch.setattr(Engine, "_schedule", forgetting)


def tail_not_copied(patch: Patch) -> None:
    """A request that shares part of a block finds nothing in its own."""
    patch.setattr(KVCache, "copy", lambda self, *args: None)


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


def span_shifted(patch: Patch) -> None:
    """What is shared is said to begin a token later than it does."""
    hit_extents = Account.hit_extents

    def shifted(self: Account, slot: int, block_size: int) -> Any:
        extents, shared = hit_extents(self, slot, block_size)
        return extents, [one._replace(start=one.start + 1) for one in shared]

    patch.setattr(Account, "hit_extents", shifted)


MUTATIONS: dict[str, tuple[Callable[[Patch], None], int]] = {
    "block-not-freed": (block_not_freed, 1),
    "merge-without-lse": (merge_without_lse, 2),
    "output-ids-not-moved": (output_ids_not_moved, 3),
    "draw-index-reset": (draw_index_reset, 1),
    "stale-page": (stale_page, 1),
    "another-host-block": (another_host_block, 1),
    "slot-reused-in-flight": (slot_reused_in_flight, 1),
    "padding-drawn": (padding_drawn, 2),
    "min-tokens-counted-anew": (min_tokens_counted_anew, 1),
    "stop-string-lost": (stop_string_lost, 1),
    "tail-not-copied": (tail_not_copied, 1),
    "reference-forgotten": (reference_forgotten, 1),
    "ids-of-the-last-tokens": (ids_of_the_last_tokens, 1),
    "known-before-computed": (known_before_computed, 1),
    "span-shifted": (span_shifted, 2),
}
"""Each defect, and on how many ranks it is looked for; one with several cannot show on one."""
