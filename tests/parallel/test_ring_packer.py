"""Medha's packer deals chunks, live: tokens are those of one rank, and some chunks were dealt."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from medha.params import SamplingParams
from tests.checkpoints import random_prompt
from tests.parallel.test_ring import GREEDY, PENALTIES
from tests.parallel.workers import WorkerPool


def generate(folder: str, options: dict[str, Any], prompts: list[list[int]]) -> Any:
    """On each rank: the tokens, and of each batch its chunks on several groups."""
    from medha import LLM

    params = [SamplingParams(**(GREEDY, PENALTIES)[i % 2]) for i in range(len(prompts))]
    shared: list[tuple[int, int, bool]] = []
    with LLM(folder, **options) as llm:
        if llm.is_driver:
            schedule = llm.engine.scheduler.schedule

            def watched(now_s: float) -> Any:
                decision = schedule(now_s)
                for row in decision.batch.chunks if decision.batch else ():
                    if row.is_shared:
                        shared.append((row.position, row.q_len, row.is_dealt))
                return decision

            llm.engine.scheduler.schedule = watched  # type: ignore[method-assign]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        left = llm.engine.scheduler.memory.num_used if llm.is_driver else 0
    return [output.outputs[0].token_ids for output in outputs], shared, left


PROMPTS = [random_prompt(length, seed=length) for length in (700, 33, 500, 90, 1, 610)]
SIZES = {"block_size": 16, "num_kv_blocks": 200, "max_batch_tokens": 160}


@cache
def alone(folder: Path) -> Any:
    """The tokens of one rank."""
    return generate(str(folder), SIZES, PROMPTS)[0]


@pytest.mark.parametrize("layout", [(2, 1, 0), (3, 1, 0), (2, 2, 0), (2, 1, 1)], ids=str)
def test_tokens(workers: WorkerPool, checkpoint: Callable[..., Path], layout: tuple[int, int, int]) -> None:
    """Also where decode instances take over what was dealt, whose tokens do not lie in their order."""
    kvp, spp, replicas = layout
    folder = checkpoint(num_hidden_layers=3)
    dealt = {"kvp": kvp, "spp": spp, "max_kv_per_group": 720 // kvp // 16 * 16, "ring": True, **SIZES}
    dealt |= {"decode_replicas": replicas}
    (tokens, shared, left), *_ = workers.run(generate, kvp * spp + replicas, str(folder), dealt, PROMPTS)
    assert tokens == alone(folder)
    assert left == 0
    assert any(is_dealt for *_, is_dealt in shared)
