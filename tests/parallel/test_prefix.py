"""The prefix cache on every layout: what is shared lies where it was computed, and tokens are those of one rank."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_checkpoint, random_prompt
from tests.parallel.workers import WorkerPool

OPTIONS: dict[str, Any] = {"block_size": 32, "num_kv_blocks": 40, "max_batch_tokens": 128, "quantum_s": 0.25}
DOCUMENT, NUM_TOKENS = 700, 6
# of the document, and how many tokens of its own each prompt has; each round begins when the one before has ended
ROUNDS = ([(700, 20)], [(700, 30), (690, 20), (400, 33), (100, 20), (0, 50)], [(700, 30), (0, 500), (700, 300)])


def prompt(of: int, more: int) -> list[int]:
    return random_prompt(DOCUMENT, seed=1)[:of] + random_prompt(more, seed=of)


def serve(folder: str, options: dict[str, Any], rounds: Sequence[list[tuple[int, int]]] = ROUNDS) -> Any:
    """On each rank: rounds of prompts; tokens and cached tokens of each, and what is held at the end."""
    from medha import LLM, SamplingParams
    from medha.worker.swap import HostCache

    HostCache.measure_block_s = lambda self: 1e-9  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    tokens, cached = [], []
    with LLM(folder, **options) as llm:
        for one in rounds:
            asked = [{"prompt_token_ids": prompt(*sizes)} for sizes in one]
            outputs = llm.generate(asked, params)
            tokens += [output.outputs[0].token_ids for output in outputs]
            cached += [output.num_cached_tokens for output in outputs]
        held = llm.engine.scheduler.memory.num_used if llm.is_driver else 0
    return tokens, cached, held


@pytest.mark.parametrize(
    "layout",
    [
        {"spp": 2},
        {"tp": 2},
        {"kvp": 2, "max_kv_per_group": 512},
        {"kvp": 3, "max_kv_per_group": 352},
        {"kvp": 2, "spp": 2, "tp": 2, "max_kv_per_group": 512},
    ],
    ids=str,
)
def test_tokens_and_hits_are_those_of_one_rank(workers: WorkerPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    make_checkpoint(tmp_path, "llama")
    size = layout.get("tp", 1) * layout.get("spp", 1) * layout.get("kvp", 1)
    without = OPTIONS | {"num_kv_blocks": 200, "prefix_caching": False}
    ((expected, none, _),) = workers.run(serve, 1, str(tmp_path), without)
    tokens, cached, held = workers.run(serve, size, str(tmp_path), OPTIONS | layout)[0]
    assert tokens == expected and not any(none) and held == 0
    assert cached[0] == 0 and cached[1] >= 672 and cached[2] >= 672 and cached[6] >= 672


@pytest.mark.parametrize("layout", [{"spp": 2}, {"kvp": 2, "spp": 2, "max_kv_per_group": 512}], ids=str)
def test_each_rank_reads_its_part_back_from_the_host(
    workers: WorkerPool, tmp_path: Path, layout: dict[str, Any]
) -> None:
    make_checkpoint(tmp_path, "llama")
    rounds = [[(700, 20)], [(0, 900)], [(0, 850)], [(700, 20)], [(0, 900)], [(700, 60), (700, 60)]]
    size = layout.get("spp", 1) * layout.get("kvp", 1)
    ((expected, _, _),) = workers.run(serve, 1, str(tmp_path), OPTIONS | {"prefix_caching": False}, rounds)
    tight = OPTIONS | layout | {"num_kv_blocks": 32 // layout.get("kvp", 1), "swap_space": "64MiB"}
    tokens, cached, held = workers.run(serve, size, str(tmp_path), tight, rounds)[0]
    assert tokens == expected and held == 0
    assert [num >= (480 if "kvp" in layout else 672) for num in cached] == [False] * 3 + [True] * 4
