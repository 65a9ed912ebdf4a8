"""Requests that give up their KV memory, and are computed again or swapped, say what they would have said (D8)."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from medha import SamplingParams
from medha.worker.swap import HostCache
from tests.parallel.workers import WorkerPool, serve
from tests.serving import random_ids

LENGTHS = (40, 3, 70, 25, 90)
PENALTIES = SamplingParams(
    temperature=0.7, seed=9, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=50, ignore_eos=True
)


@patch.object(HostCache, "measure_block_s", lambda self: 0.0)  # what is decided is not to hang on a clock
def generate(folder: Path, options: dict[str, Any], prompts: list[list[int]]) -> Any:
    """On each rank: tokens; how often somebody gave way, was swapped, and seconds lost; tokens computed."""
    served = serve(folder, options, (prompts, PENALTIES))
    names = ("num_preemptions", "num_swaps", "work_lost_s")
    counts = [sum(getattr(output.metrics, name) for output in served.outputs) for name in names]
    return served.tokens, counts, served.num_tokens


@pytest.mark.parametrize("layout", [{"tp": 2}, {"kvp": 2, "max_kv_per_group": 80}], ids=str)
def test_every_layout_says_the_same(workers: WorkerPool, model: Path, layout: dict[str, int]) -> None:
    """Computed again, and swapped: every rank moves its own layers and heads to host memory and back. Who comes back on
    another group draws as before: penalties count the tokens that another rank has drawn."""
    prompts = [random_ids(length, seed=4) for length in LENGTHS]
    options = {"scheduler": "sarathi", "chunk_size": 16, "max_batch_tokens": 40, "block_size": 16} | layout
    tight = options | {"num_kv_blocks": 10 if "kvp" not in layout else 7, "overcommit": True}
    runs = (options | {"num_kv_blocks": 64}, tight, tight | {"swap_space": "8MiB"})
    plain, without_host, with_host = (workers.run(generate, 2, model, each, prompts)[0] for each in runs)
    tokens, (none, _, no_s), num_tokens = plain
    computed, (num, _, lost_s), _ = without_host
    swapped, (more, num_swaps, _), again = with_host
    assert tokens == computed == swapped and len(tokens) == len(prompts)
    assert (none, no_s) == (0, 0) and num >= 2 and lost_s > 0 and num_swaps >= 1
    if "kvp" in layout:  # who lies on both groups is computed again
        assert more >= num_swaps
    else:
        assert more == num_swaps and again == num_tokens
