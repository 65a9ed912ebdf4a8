"""Every layout generates the tokens of transformers, in real gloo processes, and those of one rank where a program has
several LLMs.

``make test`` covers families and layouts pairwise; the full product is marked slow and runs with ``make test-full``.
"""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from medha import LLM, SamplingParams
from tests.checkpoints import FAMILIES, make_checkpoint, random_prompt, reference_greedy
from tests.parallel.faults import Start
from tests.parallel.workers import WorkerPool, generate, serve
from tests.serving import MIN_GAP, NUM_TOKENS

LENGTHS = (1, 2, 33, 257, 700)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)

# (tp, spp, tp_forward); the checkpoints have 4 query heads, 2 KV heads and 3 layers (4 where there are 4 stages).
LOCAL = [(tp, spp, "local") for tp, spp in ((2, 1), (4, 1), (1, 2), (1, 3), (1, 4), (2, 2))]
LAYOUTS = (*LOCAL, *((tp, spp, "dtensor") for tp, spp, _ in LOCAL if tp > 1))
Case = tuple[str, bool, tuple[int, int, str]]
"""Family, whether embeddings are tied, layout."""
PAIRS: list[Case] = [
    ("llama-llama3", False, (2, 1, "local")),
    ("qwen2", False, (4, 1, "local")),
    ("llama-bias", False, (4, 1, "dtensor")),
    ("mistral", False, (1, 2, "local")),
    ("llama-yarn", False, (1, 4, "local")),
    ("qwen3", True, (2, 2, "local")),
    ("llama-bias", True, (2, 2, "dtensor")),
]


def check_layout(
    workers: WorkerPool, folder: Path, case: Case, lengths: Sequence[int] = LENGTHS, **options: Any
) -> None:
    family, tied, (tp, spp, tp_forward) = case
    prompts, expected = reference(folder, family, tied, lengths, num_layers=max(3, spp))
    options = {"chunk_size": 97, "max_batch_tokens": 160, "block_size": 64, "num_kv_blocks": 40} | options
    options |= {"tp": tp, "spp": spp, "tp_forward": tp_forward, "async_scheduling": tp_forward == "local"}
    answers = workers.run(serve, tp * spp, folder, options, (prompts, GREEDY))
    assert [served.tokens for served in answers] == [expected] + [[]] * (tp * spp - 1)


def reference(
    folder: Path, family: str, tied: bool, lengths: Sequence[int], *, num_layers: int
) -> tuple[list[list[int]], list[list[int]]]:
    """A checkpoint in ``folder``, prompts, and transformers' answers with gaps above MIN_GAP."""
    for seed in range(10):
        model = make_checkpoint(folder, family, tied=tied, seed=seed, num_hidden_layers=num_layers)
        prompts = [random_prompt(length, seed=7) for length in lengths]
        answers = [reference_greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
        if min(gap for _, gap in answers) > MIN_GAP:
            return prompts, [tokens for tokens, _ in answers]
    raise AssertionError("no seed gives gaps that rounding cannot close")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case in PAIRS else pytest.mark.slow)
        for case in itertools.product(FAMILIES, (False, True), LAYOUTS)
    ],
    ids=str,
)
def test_layout_matches_transformers(workers: WorkerPool, tmp_path: Path, case: Case) -> None:
    _, _, (_, _, tp_forward) = case
    # DTensor takes milliseconds for each operation
    check_layout(workers, tmp_path, case, LENGTHS if tp_forward == "local" else (1, 2, 33, 160))


def test_one_request_at_a_time_and_tight_pool(workers: WorkerPool, tmp_path: Path) -> None:
    """Requests queue for the pool, so batches come one by one and slots are used again at once."""
    check_layout(workers, tmp_path, ("llama", False, (2, 2, "local")), num_kv_blocks=12, max_num_seqs=2)


def test_two_stages_say_the_same_without_a_stream(workers: WorkerPool, tmp_path: Path) -> None:
    """Micro-batches in a pipeline (``stream=False``)."""
    options = {"scheduler": "sarathi", "chunk_size": 32, "max_batch_tokens": 64, "stream": False}
    check_layout(workers, tmp_path, ("llama", False, (1, 2, "local")), (1, 33, 200), **options)


# -- several LLMs in one program of several ranks --------------------------------------------------------------

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [random_prompt(length, seed=5) for length in (40, 3, 70)]
OPTIONS: dict[str, Any] = {"num_kv_blocks": 16, "block_size": 16, "max_batch_tokens": 64}


def served(folder: Path, **layout: Any) -> list[list[int]]:
    return serve(folder, OPTIONS | layout, (PROMPTS, PARAMS)).tokens


def several(rank: int, folder: Path) -> None:
    """One after the other, also with DTensor, which remembers a mesh by its ranks: the groups behind it must live on.
    Then two are open at once, of which the first is closed first, and two that nobody closes."""
    torch.set_default_device("meta")  # is the program's own, as is the default type
    torch.set_default_dtype(torch.float64)
    layouts: list[dict[str, Any]] = [{"tp": 2, "tp_forward": "dtensor"}, {"spp": 2}, {"kvp": 2}]
    said = [served(folder, **layout) for layout in (*layouts, layouts[0])]
    for closes in (True, False):
        first, second = LLM(folder, **OPTIONS, tp=2), LLM(folder, **OPTIONS, spp=2)
        said += [generate(llm, PROMPTS, PARAMS) for llm in (first, second, first)]
        if closes:
            first.close()
        said.append(generate(second, PROMPTS, PARAMS))
        if closes:
            second.close()
    print(json.dumps(said), flush=True)


def test_several_in_a_program(checkpoint: Callable[..., Path], start: Start) -> None:
    expected = served(folder := checkpoint(num_hidden_layers=4))
    job = start(2, several, folder)
    assert list(map(json.loads, job.end_well())) == [[expected] * 12, [[]] * 12]  # outputs are rank 0's alone
    assert "Traceback" not in job.stderr(0) + job.stderr(1)
