"""The prefix cache on every layout: what is shared lies where it was computed, and tokens are those of one rank."""

from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from medha import SamplingParams
from medha.worker.swap import HostCache
from tests.checkpoints import random_prompt
from tests.parallel.workers import WorkerPool, num_ranks, serve

OPTIONS: dict[str, Any] = {"block_size": 32, "num_kv_blocks": 40, "max_batch_tokens": 128, "quantum_s": 0.25}
DOCUMENT, NUM_TOKENS = 700, 6
Rounds = Sequence[list[tuple[int, int]]]
"""Of the document, and how many tokens of its own each prompt has; a round begins when the one before has ended."""
ROUNDS: Rounds = ([(700, 20)], [(700, 30), (690, 20), (400, 33), (100, 20), (0, 50)], [(700, 30), (0, 500), (700, 300)])
RETURNS: Rounds = ([(700, 20)], [(0, 900)], [(0, 850)], [(700, 20)], [(0, 900)], [(700, 60), (700, 60)])


@patch.object(HostCache, "measure_block_s", lambda self: 1e-9)
def serve_rounds(folder: Path, options: dict[str, Any], rounds: Rounds) -> Any:
    """On each rank: rounds of prompts; tokens of each by its sizes, and cached tokens of each."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    document = random_prompt(DOCUMENT, seed=1)
    calls = [([document[:of] + random_prompt(more, seed=of) for of, more in one], params) for one in rounds]
    served, by_sizes = serve(folder, options, *calls), {}
    for sizes, tokens in zip(chain(*rounds), served.tokens, strict=False):  # none but on rank 0
        assert by_sizes.setdefault(sizes, tokens) == tokens
    return by_sizes, [output.num_cached_tokens for output in served.outputs]


@cache
def alone(folder: Path) -> Any:
    """Tokens by sizes of the prompt, on one rank that keeps nothing."""
    options = OPTIONS | {"num_kv_blocks": 200, "prefix_caching": False}
    tokens, cached = serve_rounds(folder, options, [*ROUNDS, *RETURNS])
    assert not any(cached)
    return tokens


def check(workers: WorkerPool, folder: Path, options: dict[str, Any], rounds: Rounds) -> list[int]:
    """Tokens are those of one rank; the cached tokens of each prompt."""
    tokens, cached = workers.run(serve_rounds, num_ranks(options), folder, OPTIONS | options, rounds)[0]
    assert tokens.items() <= alone(folder).items()
    return cached


STAGES = {"spp": 2, "tp": 2}


@pytest.mark.parametrize(
    "layout", [STAGES, {"kvp": 2, "tp": 2, "max_kv_per_group": 512}, {"kvp": 3, "max_kv_per_group": 352}], ids=str
)
def test_tokens_and_hits_are_those_of_one_rank(workers: WorkerPool, folder: Path, layout: dict[str, Any]) -> None:
    cached = check(workers, folder, layout, ROUNDS)
    assert len(cached) == 9
    assert cached[0] == 0 and cached[1] >= 672 and cached[2] >= 672 and cached[6] >= 672


@pytest.mark.parametrize("layout", [STAGES, {"kvp": 2, "spp": 2, "max_kv_per_group": 512}], ids=str)
def test_each_rank_reads_its_part_back_from_the_host(workers: WorkerPool, folder: Path, layout: dict[str, Any]) -> None:
    tight = layout | {"num_kv_blocks": 32 // layout.get("kvp", 1), "swap_space": "64MiB"}
    cached = check(workers, folder, tight, RETURNS)
    assert [num >= (480 if "kvp" in layout else 672) for num in cached] == [False] * 3 + [True] * 4
