"""Decode instances in real gloo processes: tokens, who computes what, back pressure, and ends in every state."""

from pathlib import Path
from typing import Any

import pytest

from medha.params import SamplingParams
from tests.checkpoints import make_checkpoint, random_prompt
from tests.parallel.workers import WorkerPool

LENGTHS = (1, 33, 150, 5, 90, 61, 2)
SIZES = {"block_size": 16, "num_kv_blocks": 40, "chunk_size": 37, "max_batch_tokens": 64, "dtype": "float32"}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
PENALTIES = GREEDY | {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.2}
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "ignore_eos": True, "logprobs": 1}


def wishes(lengths: tuple[int, ...] = LENGTHS) -> tuple[list[dict[str, Any]], list[SamplingParams]]:
    """Prompts, and parameters of every kind; one asks for its first token alone."""
    kinds = (GREEDY, PENALTIES, DRAWN)
    params = [SamplingParams(**kinds[i % 3], max_tokens=(9, 3, 20, 1, 12)[i % 5]) for i in range(len(lengths))]
    return [{"prompt_token_ids": random_prompt(length, seed=i)} for i, length in enumerate(lengths)], params


def serve(folder: str, options: dict[str, Any], prompts: Any, params: Any) -> Any:
    """On each rank: build the LLM and generate. Rank 0 says the tokens, the seconds that each waited for a decode
    instance, the tokens that each rank computed, and the blocks that are left in use."""
    from medha import LLM

    with LLM(folder, **SIZES | options) as llm:
        outputs = llm.generate(prompts, params)
        if not llm.is_driver:
            return [], [], [], 0
        tokens = [output.outputs[0].token_ids for output in outputs]
        explained = [output.metrics.explanation for output in outputs]
        waits = [0.0 if one is None else one.decode_wait_s for one in explained]
        engine = llm.engine
        if engine.hand_overs is None:
            return tokens, waits, [], engine.scheduler.memory.num_used
        left = [one.scheduler.memory.num_used for one in engine.hand_overs.instances]
        ran = [sum(batch.num_tokens for batch in rank.batches) for rank in engine.runner.gather_records()]
        return tokens, waits, ran, engine.scheduler.memory.num_used + sum(left)


LAYOUTS: list[dict[str, Any]] = [
    {"decode_tp": 2},
    {"kvp": 2, "max_kv_per_group": 64, "decode_tp": 1},
    {"decode_tp": 4},  # two KV heads: each is on two ranks
    {"spp": 2, "decode_tp": 2},
    {"tp": 2, "kvp": 2, "max_kv_per_group": 64, "decode_tp": 1},
    {"decode_replicas": 2, "decode_tp": 2},
]


def size_of(layout: dict[str, Any]) -> int:
    prefill = layout.get("tp", 1) * layout.get("spp", 1) * layout.get("kvp", 1)
    return prefill + layout.get("decode_replicas", 1) * layout["decode_tp"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, "llama", tied=False, seed=0, num_hidden_layers=3)
    return folder


@pytest.fixture(scope="module")
def expected(workers: WorkerPool, folder: Path) -> list[list[int]]:
    return workers.run(serve, 1, str(folder), {}, *wishes())[0][0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tokens_are_those_of_one_rank_and_decode_ranks_compute_no_prompt(
    workers: WorkerPool, folder: Path, expected: list[list[int]], layout: dict[str, Any]
) -> None:
    answers = workers.run(serve, size_of(layout), str(folder), {"decode_replicas": 1} | layout, *wishes())
    tokens, waits, ran, left = answers[0]
    assert tokens == expected
    assert left == 0
    assert [wait > 0 for wait in waits] == [len(found) > 1 for found in expected]
    decode_tp, behind = layout["decode_tp"], size_of(layout) - layout.get("decode_replicas", 1) * layout["decode_tp"]
    assert sum(ran[behind::decode_tp]) == sum(len(found) - 1 for found in expected)  # but the first token of each
    assert all(ran[rank] == ran[rank - (rank - behind) % decode_tp] for rank in range(behind, len(ran)))
    if "kvp" not in layout:
        assert ran[:behind] == [sum(LENGTHS)] * behind
