"""Batches made by hand, over a KV cache that holds random numbers: one step of any shape, as often as wanted.

What a step costs depends on how many tokens it has and how many are cached before them, not on what they are. So block
tables are pointed at random numbers, and a batch of any shape runs through the real runner and control plane, on every
layout. What lies before its rows a batch says as of a prefix that others have computed (:class:`medha.batch.Shared`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count

import numpy as np
import torch

from medha.batch import Batch, Deal, Extent, Row, Shared, even_shares
from medha.params import SamplingParams
from medha.worker.kv_cache import KVCache
from medha.worker.sampling import SlotSampling
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


def fill_pools(cache: KVCache, num_tokens: int, *, seed: int) -> None:
    """Put random numbers into the first tokens of some pools, in place; pages never written would cost less."""
    generator = torch.Generator(cache.k[0].device).manual_seed(seed)
    for pool in (*cache.k, *cache.v):
        for head in range(pool.shape[1]):  # heads lie outermost
            pool[:num_tokens, head].normal_(generator=generator)


class StepRunner:
    """Runs hand-made steps on the engine's runner, while the engine has nothing in flight; rank 0 has one.

    It uses ``num_blocks`` blocks of each group's pool; those of different rows may be the same ones. ``last_s`` are the
    seconds of the last call, from when its first batch was sent to the tokens of its last.
    """

    last_s = 0.0

    def __init__(self, runner: BatchRunner, *, block_size: int, num_blocks: int, vocab_size: int) -> None:
        self._runner = runner
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._batch_ids = count()
        self._num_open = 0
        self._prompt = np.random.default_rng(0).integers(0, vocab_size, num_blocks * block_size).astype(np.int32)

    def run(self, step: Step) -> tuple[int, float]:
        """Run a step once, behind what it has cached; returns its batch id and its busy seconds, those of the stage
        that samples."""
        (ran,) = self.run_all([step])
        return ran

    def run_all(self, steps: Sequence[Step]) -> list[tuple[int, float]]:
        """Run steps one behind the other, all of them sent at once; returns what :meth:`run` does of each."""
        self._open(max(map(len, steps)))
        batches = [self._batch(step, tuple(row.slot for row in step)) for step in steps]
        start_s = time.perf_counter()
        pending = [self._runner.submit(batch) for batch in batches]
        busy_s = [one.result().busy_s for one in pending]
        self.last_s = time.perf_counter() - start_s
        return [(batch.batch_id, seconds) for batch, seconds in zip(batches, busy_s, strict=True)]

    def _open(self, number: int) -> None:
        """Make the first slots known, each with a token drawn for a decode to go on from; their prompts are as long as
        the pool, so none ever ends."""
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True).resolve({})
        sampling = SlotSampling.of(params, 0, (), self._prompt)
        new = range(FIRST_SLOT + self._num_open, FIRST_SLOT + number)
        for slot in new:
            self._runner.open(slot, self._prompt, sampling, [])
        if new:
            self._runner.submit(self._batch(tuple(Row(slot, 0, 1, False, True) for slot in new), ())).result()
        self._num_open = max(self._num_open, number)

    def _batch(self, step: Step, frees: tuple[int, ...]) -> Batch:
        """A batch that says what every group holds before it: nobody else has computed it. The blocks of each slot are
        one run a group, one row behind the other around the pool."""
        extents, shared, deals = list[Extent](), list[Shared](), list[Deal]()
        first = [0] * max(row.num_groups for row in step)
        for row in step:
            start, dealt = 0, row.is_dealt
            for group, held in zip(row.groups, _held(row, self._block_size), strict=True):
                more = row.tokens_on(group) if dealt or group == row.writer else 0
                size = -(-(held + more) // self._block_size)
                assert size <= self._num_blocks, "a row fits the pool"
                if first[group] + size > self._num_blocks:
                    first[group] = 0
                extents.append(Extent(row.slot, first[group], size, group))
                first[group] += size
                shared += [Shared(row.slot, group, 0 if dealt else start, held)] * (held > 0)
                deals += [Deal(row.slot, group, held, held)] * dealt
                start += held
        return Batch(next(self._batch_ids), step, tuple(extents), frees, (), (), tuple(shared), (), tuple(deals))


def _held(row: Row, block_size: int) -> list[int]:
    """Tokens before a row that lie on each group of its run: of a dealt row even shares, of another whole blocks on all
    but the last."""
    if row.is_dealt:
        return even_shares(row.position, row.num_groups)
    share = -(-row.position // (row.num_groups * block_size)) * block_size
    return [*[share] * (row.num_groups - 1), row.position - share * (row.num_groups - 1)]
