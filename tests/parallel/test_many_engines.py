"""Several LLMs in one program of several ranks: one after the other with layouts that change, and two at once."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medha import LLM, SamplingParams
from tests.checkpoints import random_prompt
from tests.parallel.faults import Job, Start
from tests.parallel.workers import generate

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [random_prompt(length, seed=5) for length in (40, 3, 70)]
OPTIONS: dict[str, Any] = {"num_kv_blocks": 16, "block_size": 16, "max_batch_tokens": 64}


def served(folder: Path, **layout: Any) -> list[list[int]]:
    with LLM(folder, **OPTIONS, **layout) as llm:
        return generate(llm, PROMPTS, PARAMS)


def in_turn(rank: int, folder: Path, layouts: list[dict[str, Any]]) -> None:
    print(json.dumps([served(folder, **layout) for layout in layouts]), flush=True)


def at_once(rank: int, folder: Path, closes: bool) -> None:
    """Two LLMs are open, and the first one is closed first, or none."""
    first, second = LLM(folder, **OPTIONS, tp=2), LLM(folder, **OPTIONS, spp=2)
    said = [generate(llm, PROMPTS, PARAMS) for llm in (first, second, first)]
    if closes:
        first.close()
    said.append(generate(second, PROMPTS, PARAMS))
    if closes:
        second.close()
    print(json.dumps(said), flush=True)


def said_by(job: Job) -> list[Any]:
    job.end_well()
    return [json.loads(job.stdout(rank)) for rank in (0, 1)]


def test_layouts_that_change(checkpoint: Callable[..., Path], start: Start) -> None:
    """Also with DTensor, which remembers a mesh by its ranks: the groups behind it must live on."""
    expected = served(folder := checkpoint(num_hidden_layers=4))
    layouts = [{"tp": 2, "tp_forward": "dtensor"}, {"spp": 2}, {"kvp": 2}, {"tp": 2, "tp_forward": "dtensor"}]
    # outputs are rank 0's alone
    assert said_by(start(2, in_turn, folder, layouts)) == [[expected] * len(layouts), [[]] * len(layouts)]


@pytest.mark.parametrize("closes", [True, False])
def test_two_at_once(checkpoint: Callable[..., Path], start: Start, closes: bool) -> None:
    expected = served(folder := checkpoint(num_hidden_layers=4))
    job = start(2, at_once, folder, closes)
    assert said_by(job) == [[expected] * 4, [[]] * 4]
    assert "Traceback" not in job.stderr(0) + job.stderr(1)
