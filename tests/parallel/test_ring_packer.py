"""Medha's packer deals chunks, live: tokens are those of one rank, and some chunks were dealt."""

from pathlib import Path
from typing import Any

import pytest

from medha.params import SamplingParams
from tests.checkpoints import make_checkpoint, random_prompt
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


@pytest.mark.parametrize("layout", [(2, 1, 0), (3, 1, 0), (2, 2, 0), (2, 1, 1)], ids=str)
def test_tokens(workers: WorkerPool, tmp_path: Path, layout: tuple[int, int, int]) -> None:
    """Also where decode instances take over what was dealt, whose tokens do not lie in their order."""
    kvp, spp, replicas = layout
    make_checkpoint(tmp_path, "llama", num_hidden_layers=3)
    lengths = (700, 33, 500, 90, 1, 610)
    prompts = [random_prompt(length, seed=length) for length in lengths]
    sizes = {"block_size": 16, "num_kv_blocks": 200, "max_batch_tokens": 160}
    dealt = {"kvp": kvp, "spp": spp, "max_kv_per_group": 720 // kvp // 16 * 16, "ring": True, **sizes}
    dealt |= {"decode_replicas": replicas}
    (tokens, shared, left), *_ = workers.run(generate, kvp * spp + replicas, str(tmp_path), dealt, prompts)
    expected, *_ = generate(str(tmp_path), sizes, prompts)
    assert tokens == expected
    assert left == 0
    assert any(is_dealt for *_, is_dealt in shared)
