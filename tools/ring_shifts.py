"""What shows of the history that moves when a request grows from one group to two: with and without overlap.

torchrun --nproc-per-node 2 -m tools.ring_shifts --history 32768 --chunk 2048

A request holds its history, random keys and values, on the first group; then a chunk is dealt to both, and half of the
history moves first. Each layer's moves while the layer before is computed; in every other run it begins when the layer
needs it. From the ranks' records: the seconds of the chunk, and of these the most that a rank waited for history.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import cast

import numpy as np

from medha.batch import Batch, Deal, Extent, Row, Shared
from medha.bench.cli import Report
from medha.bench.harness import Local, on_ranks
from medha.errors import ConfigError
from medha.params import SamplingParams
from medha.profile.steps import FIRST_SLOT
from medha.records import RankRecords
from medha.worker.runner import Runner
from medha.worker.sampling import SlotSampling
from medha.worker.step_input import StepInput
from medha.worker.swap import Wait
from tools.command import check_launched, main
from tools.live import random_llama

BLOCK = 256


def overlaps(batch_id: int) -> bool:
    """Whether history moves beside the compute in a batch; each run has two."""
    return batch_id // 2 % 2 == 0


def patch() -> None:
    """Let every other run of this process move history late."""
    begin = Runner._move

    def move(self: Runner, step: StepInput, layer: int) -> Wait | None:
        if overlaps(step.batch.batch_id) or not (step.sends or step.receives) or layer == len(self.cache.k):
            return begin(self, step, layer)

        def late() -> None:  # once its end is waited for
            with self.recorder.waiting("shift"):
                land = begin(self, step, layer)
            cast(Wait, land)()

        return late

    Runner._move = move  # type: ignore[method-assign]


def pair(number: int, history: int, chunk: int) -> list[Batch]:
    """The batches of a run: one that says what the first group holds, and the chunk."""
    slot, half = FIRST_SLOT, history // 2
    held = Row(slot, history - 1, 1, False, False)
    blocks = Extent(slot, 0, -(-history // BLOCK), 0)
    first = Batch(2 * number, (held,), (blocks,), (slot,), shared=(Shared(slot, 0, 0, history - 1),))
    deals = Deal(slot, 0, history, history - half), Deal(slot, 1, 0, half)
    more = Extent(slot, 0, -(-(half + chunk) // BLOCK), 1)
    return [first, Batch(2 * number + 1, (Row(slot, history, chunk, False, False, 0, 2, True),), (more,), deals=deals)]


def run(local: Local, *, history: int, chunk: int, runs: int) -> Report:
    """The shares of a chunk in which a rank waits for history, by whether it moves beside the compute."""
    runner = local.engine.runner
    prompt = np.random.default_rng(0).integers(0, local.model.vocab_size, history + chunk + 1).astype(np.int32)
    params = SamplingParams(max_tokens=1).resolve({})
    runner.open(FIRST_SLOT, prompt, SlotSampling.of(params, 0, (), prompt), [])
    for number in range(2 * (1 + runs)):
        for batch in pair(number, history, chunk):
            runner.submit(batch).result()
    ranks: Sequence[RankRecords] = runner.gather_records()  # type: ignore[attr-defined]
    found: Report = {}
    for is_beside in (True, False):
        ids = [2 * number + 1 for number in range(2, 2 * (1 + runs)) if overlaps(2 * number + 1) == is_beside]
        records = [[one for rank in ranks for one in rank.batches if one.batch_id == batch_id] for batch_id in ids]
        chunk_s = median(max(one.busy_s for one in batch) for batch in records)
        shift_s = median(max(one.shift_wait_s for one in batch) for batch in records)
        found["beside the compute" if is_beside else "when it is needed"] = (chunk_s, shift_s)
    return found


def ring_shifts(history: int = 32768, chunk: int = 2048, runs: int = 3, hf_overrides: str = "{}") -> None:
    """Measure, --runs of each kind behind one that does not count; print two lines."""
    if chunk > history:
        raise ConfigError(f"chunk={chunk}; accepted: at most the history of {history}")
    check_launched()
    patch()
    engine = {"num_threads": 1, "kvp": 2, "block_size": BLOCK, "num_kv_blocks": history // BLOCK + 2}
    work = partial(run, history=history, chunk=chunk, runs=runs)
    found = on_ranks(random_llama(hf_overrides), work, longest=history + chunk, fills=True, **engine)
    for what, (chunk_s, shift_s) in (found or {}).items():
        share = 100 * shift_s / chunk_s
        print(f"history moves {what}: chunk {chunk_s:.3f} s, waited for history {shift_s:.4f} s, {share:.2f} %")


if __name__ == "__main__":
    main(ring_shifts)
