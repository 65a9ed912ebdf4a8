"""Every rank moves its own layers and heads to host memory and back, and the tokens stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from medha.params import SamplingParams
from tests.parallel.workers import WorkerPool
from tests.serving import random_ids

LENGTHS = (40, 3, 70, 25, 90)
PARAMS = SamplingParams(
    temperature=0.7, seed=9, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=50, ignore_eos=True
)


def generate(folder: str, options: dict[str, Any], prompts: list[list[int]]) -> tuple[list[list[int]], int, int, int]:
    """On each rank: tokens; there and on rank 0: how often somebody gave way, was swapped, and tokens computed."""
    from medha import LLM
    from medha.worker.swap import HostCache

    with pytest.MonkeyPatch.context() as patch:  # what is decided is not to hang on a clock
        patch.setattr(HostCache, "measure_block_s", lambda self: 0.0)
        llm = LLM(folder, **options)
    with llm:
        num_tokens: list[int] = []
        if llm.is_driver:
            llm.engine.on_step = lambda batch, prediction, busy_s: num_tokens.append(batch.num_tokens)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS)
        counts = [sum(getattr(o.metrics, name) for o in outputs) for name in ("num_preemptions", "num_swaps")]
    return [list(output.outputs[0].token_ids) for output in outputs], counts[0], counts[1], sum(num_tokens)


@pytest.mark.parametrize("layout", [{"spp": 2}, {"kvp": 2, "max_kv_per_group": 80}, {"tp": 2}], ids=str)
def test_every_layout_says_the_same(workers: WorkerPool, model: Path, layout: dict[str, int]) -> None:
    prompts = [random_ids(length, seed=4) for length in LENGTHS]
    options = {"scheduler": "sarathi", "chunk_size": 16, "max_batch_tokens": 40, "block_size": 16} | layout
    undisturbed = workers.run(generate, 2, str(model), options | {"num_kv_blocks": 64}, prompts)
    tight = options | {"num_kv_blocks": 10 if "kvp" not in layout else 7, "overcommit": True, "swap_space": "8MiB"}
    disturbed = workers.run(generate, 2, str(model), tight, prompts)
    assert [tokens for tokens, *_ in disturbed] == [tokens for tokens, *_ in undisturbed]
    (_, none, _, num_once), (_, num_preemptions, num_swaps, num_computed) = undisturbed[0], disturbed[0]
    assert none == 0 and num_swaps >= 1
    if "kvp" in layout:  # who lies on both groups is computed again
        assert num_preemptions >= num_swaps
    else:
        assert num_preemptions == num_swaps and num_computed == num_once
