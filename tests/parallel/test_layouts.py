"""Every layout generates the tokens of transformers, in real gloo processes.

``make test`` covers families and layouts pairwise; the full product is marked slow and runs with ``make test-full``.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import FAMILIES, make_checkpoint, random_prompt, reference_greedy
from tests.parallel.workers import WorkerPool

LENGTHS = (1, 2, 33, 257, 700)
NUM_TOKENS = 6
MIN_GAP = 1e-3

# (tp, spp, tp_forward); the checkpoints have 4 query heads, 2 KV heads and 3 layers (4 where there are 4 stages).
LAYOUTS = (
    (2, 1, "local"),
    (2, 1, "dtensor"),
    (4, 1, "local"),
    (4, 1, "dtensor"),
    (1, 2, "local"),
    (1, 3, "local"),
    (1, 4, "local"),
    (2, 2, "local"),
    (2, 2, "dtensor"),
)
PAIRS = [
    ("llama-llama3", False, (2, 1, "local")),
    ("qwen3", False, (2, 1, "dtensor")),
    ("qwen2", False, (4, 1, "local")),
    ("llama-bias", False, (4, 1, "dtensor")),
    ("mistral", False, (1, 2, "local")),
    ("qwen2", True, (1, 3, "local")),
    ("llama-yarn", False, (1, 4, "local")),
    ("qwen3", True, (2, 2, "local")),
    ("llama-bias", True, (2, 2, "dtensor")),
    ("llama", True, (2, 1, "local")),
]
EVERYTHING = [
    case for case in itertools.product(FAMILIES, (False, True), LAYOUTS) if case not in {(f, t, x) for f, t, x in PAIRS}
]


def generate(folder: str, options: dict[str, Any], prompts: list[list[int]], num_tokens: int) -> Any:
    """On each rank: build the LLM, generate, and report the tokens and the state afterwards."""
    from medha import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    with LLM(folder, **options) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        left = llm.engine.scheduler.pool.num_used if llm.is_driver else 0
    return [output.outputs[0].token_ids for output in outputs], left


def check_layout(
    workers: WorkerPool, folder: Path, family: str, tied: bool, layout: tuple[int, int, str], **options: Any
) -> None:
    tp, spp, tp_forward = layout
    prompts, expected = reference(folder, family, tied, num_layers=max(3, spp))
    options = {"chunk_size": 97, "max_batch_tokens": 160, "block_size": 64, "num_kv_blocks": 40} | options
    options |= {"tp": tp, "spp": spp, "tp_forward": tp_forward}
    answers = workers.run(generate, tp * spp, str(folder), options, prompts, NUM_TOKENS)
    assert [tokens for tokens, _ in answers] == [expected] * (tp * spp)  # every rank returns the same
    assert [left for _, left in answers] == [0] * (tp * spp)


def reference(folder: Path, family: str, tied: bool, *, num_layers: int) -> tuple[list[list[int]], list[list[int]]]:
    """A checkpoint in ``folder``, prompts, and transformers' answers with gaps above MIN_GAP."""
    for seed in range(10):
        model = make_checkpoint(folder, family, tied=tied, seed=seed, num_hidden_layers=num_layers)
        prompts = [random_prompt(length, seed=7) for length in LENGTHS]
        answers = [reference_greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
        if min(gap for _, _, gap in answers) > MIN_GAP:
            return prompts, [tokens for tokens, _, _ in answers]
    raise AssertionError("no seed gives gaps that rounding cannot close")


@pytest.mark.parametrize(("family", "tied", "layout"), PAIRS)
def test_layout_matches_transformers(
    workers: WorkerPool, tmp_path: Path, family: str, tied: bool, layout: tuple[int, int, str]
) -> None:
    check_layout(workers, tmp_path, family, tied, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "tied", "layout"), EVERYTHING)
def test_every_layout_matches_transformers(
    workers: WorkerPool, tmp_path: Path, family: str, tied: bool, layout: tuple[int, int, str]
) -> None:
    check_layout(workers, tmp_path, family, tied, layout)


@pytest.mark.parametrize("layout", [(1, 2, "local"), (2, 2, "local"), (2, 1, "local")])
def test_one_request_at_a_time_and_tight_pool(
    workers: WorkerPool, tmp_path: Path, layout: tuple[int, int, str]
) -> None:
    """Requests queue for the pool, so batches come one by one and slots are used again at once."""
    check_layout(workers, tmp_path, "llama", False, layout, num_kv_blocks=12, max_num_seqs=2)
