"""Batches made by hand, over a KV cache that holds random numbers: one step of any shape, as often as wanted.

What a step costs depends on how many tokens it has and how many are cached before them, not on what they are. So block
tables are pointed at random numbers, and a batch of any shape runs through the real runner and control plane, on every
layout. A row that has tokens cached is first given its blocks by a batch of one token, which every rank applies like
any other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count

import numpy as np
import torch

from medha.batch import PIECES, Batch, Deal, Extent, Row, Shared, even_shares
from medha.params import SamplingParams
from medha.worker.kv_cache import KVCache
from medha.worker.step import BatchRunner

FIRST_SLOT = 1 << 20  # slots from here on are for hand-made batches, out of the way of an engine's


Step = tuple[Row, ...]
"""The rows of one batch, decodes first, in slots from FIRST_SLOT on; a row on several groups begins at group 0."""


def chunk(q_len: int, kv_before: int, *, num_groups: int = 1, is_dealt: bool = False) -> Step:
    """A prefill chunk alone, in the middle of its prompt."""
    return (Row(FIRST_SLOT, kv_before, q_len, False, False, 0, num_groups, is_dealt),)


def decodes(batch: int, kv_before: int) -> Step:
    """Decodes of equal length."""
    return tuple(Row(FIRST_SLOT + i, kv_before, 1, True, True) for i in range(batch))


def step_of(batch: Batch) -> Step:
    """The shape of a batch that a scheduler made, on one group."""
    return tuple(row._replace(slot=FIRST_SLOT + i) for i, row in enumerate(batch.rows))


def fill_pools(cache: KVCache, num_tokens: int, *, seed: int) -> None:
    """Put random numbers into the first tokens of some pools, in place; pages never written would cost less."""
    generator = torch.Generator(cache.k[0].device).manual_seed(seed)
    for pool in (*cache.k, *cache.v):
        for head in range(pool.shape[1]):  # heads lie outermost
            pool[:num_tokens, head].normal_(generator=generator)


class StepRunner:
    """Runs hand-made steps on the engine's runner, while the engine has nothing in flight; rank 0 has one.

    It uses ``num_blocks`` blocks of each group's pool; those of different rows may be the same ones. ``last_s`` are the
    seconds of the last batch, from when it was sent to its tokens.
    """

    last_s = 0.0

    def __init__(self, runner: BatchRunner, *, block_size: int, num_blocks: int, vocab_size: int) -> None:
        self._runner = runner
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._batch_ids = count()
        self._num_open = 0
        tokens = np.random.default_rng(0).integers(0, vocab_size, num_blocks * block_size)
        self._prompt = tokens.astype(np.int32)

    def run(self, step: Step) -> tuple[int, float]:
        """Run a step once, behind what it has cached; returns its batch id and its busy seconds, those of the stage
        that samples."""
        self._open(len(step))
        extents = self._extents(step)
        frees = tuple(row.slot for row in step)
        for rows in _placing(step, self._block_size):
            self._submit(rows, [extent for slot in frees for extent in extents[slot]], frees)
            frees = ()
        new = [extent for slot in frees for extent in extents[slot]]
        return self._submit(step, new, frees)

    def read(self, num_tokens: int, chunk_size: int, *, num_groups: int) -> list[int]:
        """Read a prompt whose chunks are dealt to the first groups; returns its batch ids, and sets ``last_s``."""
        self._open(1)
        blocks = -(-num_tokens // (num_groups * self._block_size)) + 1
        extents = [Extent(FIRST_SLOT, 0, blocks, group) for group in range(num_groups)]
        frees: tuple[int, ...] = (FIRST_SLOT,)
        held, pending, start_s = [0] * num_groups, [], time.perf_counter()
        for at in range(0, num_tokens, chunk_size):
            q_len = min(chunk_size, num_tokens - at)
            is_dealt = num_groups > 1 and q_len >= PIECES * num_groups
            row = Row(FIRST_SLOT, at, q_len, False, at + q_len == num_tokens, 0, num_groups, is_dealt)
            deals = [Deal(FIRST_SLOT, group, here, here) for group, here in enumerate(held) if is_dealt]
            batch = Batch(next(self._batch_ids), (row,), tuple(extents), frees, deals=tuple(deals))
            pending.append((batch.batch_id, self._runner.submit(batch)))
            for group in row.groups if is_dealt else (row.writer,):
                held[group] += row.tokens_on(group)
            extents, frees = [], ()
        for _, step in pending:
            step.result()
        self.last_s = time.perf_counter() - start_s
        return [batch_id for batch_id, _ in pending]

    def _open(self, number: int) -> None:
        """Make the first slots known; their prompts are as long as the pool, so none ever ends."""
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True).resolve({})
        for slot in range(FIRST_SLOT + self._num_open, FIRST_SLOT + number):
            self._runner.open(slot, self._prompt, params, seed=0, end_ids=())
        self._num_open = max(self._num_open, number)

    def _submit(self, rows: Sequence[Row], extents: Sequence[Extent], frees: tuple[int, ...]) -> tuple[int, float]:
        dealt = [(row.slot, *one) for row in rows if row.is_dealt for one in enumerate(_shares(row))]
        deals = tuple(Deal(slot, group, share, share) for slot, group, share in dealt)
        shared = tuple(Shared(slot, group, 0, share) for slot, group, share in dealt)
        batch = Batch(next(self._batch_ids), tuple(rows), tuple(extents), frees, shared=shared, deals=deals)
        start_s = time.perf_counter()
        busy_s = self._runner.submit(batch).result().busy_s
        self.last_s = time.perf_counter() - start_s
        return batch.batch_id, busy_s

    def _extents(self, step: Step) -> dict[int, list[Extent]]:
        """Blocks of each slot, one run of them a group, one row behind the other around the pool."""
        extents: dict[int, list[Extent]] = {}
        first = [0] * max(row.num_groups for row in step)
        for row in step:
            extents[row.slot] = []
            for group in row.groups:
                size = -(-_tokens_on(row, group, self._block_size) // self._block_size)
                assert size <= self._num_blocks, "a row fits the pool"
                if first[group] + size > self._num_blocks:
                    first[group] = 0
                extents[row.slot].append(Extent(row.slot, first[group], size, group))
                first[group] += size
        return extents


def _shares(row: Row) -> list[int]:
    """Tokens before a dealt row that lie on each group."""
    return even_shares(row.position, row.num_groups)


def _share(row: Row, block_size: int) -> int:
    """Tokens that lie on each group but the last, whole blocks."""
    return -(-row.position // (row.num_groups * block_size)) * block_size


def _tokens_on(row: Row, group: int, block_size: int) -> int:
    """Tokens that a group holds once the row has run."""
    if row.is_dealt:
        return _shares(row)[group] + row.tokens_on(group)
    share = _share(row, block_size)
    return row.kv_len - share * group if group == row.writer else share


def _placing(step: Step, block_size: int) -> list[list[Row]]:
    """Batches of one token a row after which every group knows which positions it holds; none where nothing is cached.

    A group's shard is what lies between the first and the last position that it was given: so each gets the two ends of
    its own, while it is the last group of the run.
    """
    batches: list[list[Row]] = []
    cached = [row for row in step if row.position and not row.is_dealt]  # those a batch tells without one
    for group in range(max((row.num_groups for row in cached), default=0)):
        within = [(row, _share(row, block_size)) for row in cached if group < row.num_groups]
        starts = [
            Row(row.slot, share * group, 1, False, row.is_decode and group == 0, num_groups=group + 1)
            for row, share in within
        ]
        ends = [
            Row(row.slot, share * (group + 1) - 1, 1, False, False, num_groups=group + 1)
            for row, share in within
            if group < row.writer
        ]
        batches += [rows for rows in (starts, ends) if rows]
    return batches
