"""One request at a long context whose keys and values are random numbers, and steps over it.

To prefill 128K tokens for real would take minutes and change nothing about the time of the next step. So every rank
fills its pools with random numbers and notes the shard that it would hold, and then hand-made batches run through the
real control plane and runner: the messages, reports and merges are those of any other batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from medha.attention.interface import AttentionBackend
from medha.batch import Batch, Row
from medha.config import ParallelConfig
from medha.errors import ConfigError
from medha.parallel.kvp import Merge, Partial, Pending, Shared
from medha.params import SamplingParams
from medha.worker.runner import Runner
from medha.worker.step import BatchRunner

SLOT = 0


@dataclass(frozen=True, slots=True)
class Held:
    """A request and the step that is repeated over it.

    Attributes:
        context: tokens in the KV cache before the step.
        q_len: tokens of the step.
        is_decode: the step decodes one token; otherwise it is a chunk in the middle of a prefill.
    """

    context: int
    q_len: int
    is_decode: bool

    def shard(self, group: int, *, num_groups: int, block_size: int) -> tuple[int, int]:
        """Positions [start, end) that lie on a group: even shares of whole blocks.

        Raises:
            ConfigError: the context is too short for every group to hold some.
        """
        share = -(-self.context // (num_groups * block_size)) * block_size
        start = group * share
        if start >= self.context:
            raise ConfigError(
                f"context={self.context} over {num_groups} groups in blocks of {block_size} leaves group {group} "
                f"without any; accepted: more than {(num_groups - 1) * block_size}"
            )
        return start, min(start + share, self.context)

    def num_blocks(self, group: int, *, num_groups: int, block_size: int) -> int:
        """Blocks that a group needs; the last takes what the step adds."""
        start, end = self.shard(group, num_groups=num_groups, block_size=block_size)
        added = self.q_len if group == num_groups - 1 else 0
        return -(-(end - start + added) // block_size)


def hold(runner: Runner, layout: ParallelConfig, held: Held) -> None:
    """Fill a rank's pools with random numbers and note its shard, in place."""
    generator = torch.Generator().manual_seed(runner.group)
    for pool in (*runner.cache.k, *runner.cache.v):
        pool.normal_(generator=generator)
    sizes = {"num_groups": layout.kvp, "block_size": runner.cache.block_size}
    start, end = held.shard(runner.group, **sizes)
    count = held.num_blocks(runner.group, **sizes)
    runner.tables.adopt(SLOT, start, end, [(0, count)])


def run_steps(runner: BatchRunner, held: Held, *, num_groups: int, vocab_size: int, steps: int) -> list[float]:
    """Seconds of each of some equal steps, from the batch to its result; rank 0 calls it.

    A first batch, which is not counted, gives decodes the token that they go on from.
    """
    prompt = np.random.default_rng(0).integers(0, vocab_size, held.context + held.q_len * (not held.is_decode))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    runner.open(SLOT, prompt.astype(np.int32), params.resolve({}), seed=0, end_ids=())
    first = Row(SLOT, held.context - 1, 1, is_decode=False, samples=True, num_groups=num_groups)
    row = Row(SLOT, held.context, held.q_len, held.is_decode, samples=held.is_decode, num_groups=num_groups)
    runner.submit(Batch(0, (first,))).result()
    seconds = []
    for number in range(1, steps + 1):
        start = time.perf_counter()
        runner.submit(Batch(number, (row,))).result()
        seconds.append(time.perf_counter() - start)
    return seconds


class Meter:
    """Notes when a rank attends and packs, by wrapping what does it.

    Attributes:
        spans: (what, start, seconds) of each call.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []

    def watch(self, runner: Runner) -> None:
        """Wrap a runner's backend and merges, in place."""
        runner.backend = _MeasuredBackend(runner.backend, self)
        runner.merges = {run: _measured(merge, self) for run, merge in runner.merges.items()}

    def measured(self, what: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call something and note how long it took."""
        start = time.perf_counter()
        result = call(*args)
        self.spans.append((what, start, time.perf_counter() - start))
        return result


class _MeasuredBackend:
    """A backend with a meter."""

    def __init__(self, backend: AttentionBackend, meter: Meter) -> None:
        self.name = backend.name
        self.plan = backend.plan
        self._backend = backend
        self._meter = meter

    def run(
        self, q_TNH: torch.Tensor, k_PKH: torch.Tensor, v_PKH: torch.Tensor, plan: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = self._meter.measured(
            "attention", self._backend.run, q_TNH, k_PKH, v_PKH, plan
        )
        return found


def _measured(merge: Merge, meter: Meter) -> Merge:
    """A merge with a meter, in place; returns it."""
    start = merge.start

    def measured_start(shared: Shared, partial: Partial) -> Pending:
        pending: Pending = meter.measured("packing", start, shared, partial)
        return pending

    merge.start = measured_start  # type: ignore[method-assign]
    return merge
