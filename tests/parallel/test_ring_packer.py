"""Medha's packer deals chunks, live: tokens are those of one rank, and some chunks were dealt."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medha.params import SamplingParams
from tests.parallel.test_ring import asked, plain
from tests.parallel.workers import WorkerPool

LENGTHS = (700, 33, 500, 90, 1, 610)


def generate(folder: str, options: dict[str, Any]) -> Any:
    """On each rank: the tokens, whether a chunk was dealt, and what is left."""
    from medha import LLM

    prompts, params = asked(LENGTHS)
    dealt: list[bool] = []
    with LLM(folder, **options) as llm:
        if llm.is_driver:
            llm.engine.on_step = lambda batch, *_: dealt.extend(row.is_dealt for row in batch.chunks)
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], [SamplingParams(**p) for p in params]
        )
        left = llm.engine.scheduler.memory.num_used if llm.is_driver else 0
    return [output.outputs[0].token_ids for output in outputs], any(dealt), left


@pytest.mark.parametrize("layout", [(2, 1, 0), (3, 1, 0), (2, 2, 0), (2, 1, 1)], ids=str)
def test_tokens(workers: WorkerPool, checkpoint: Callable[..., Path], layout: tuple[int, int, int]) -> None:
    """Also where decode instances take over what was dealt, whose tokens do not lie in their order."""
    kvp, spp, replicas = layout
    folder = checkpoint(num_hidden_layers=3)
    options = {"kvp": kvp, "spp": spp, "max_kv_per_group": 720 // kvp // 16 * 16, "ring": True, "block_size": 16}
    options |= {"num_kv_blocks": 200, "max_batch_tokens": 160, "decode_replicas": replicas}
    found = workers.run(generate, kvp * spp + replicas, str(folder), options)[0]
    assert found == (plain(folder, *LENGTHS), True, 0)
