"""Several LLMs in one program of several ranks: one after the other with layouts that change, and two at once."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from medha.params import SamplingParams
from tests.checkpoints import random_prompt
from tests.parallel.faults import Job, start

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": random_prompt(length, seed=5)} for length in (40, 3, 70)]
OPTIONS: dict[str, Any] = {"num_kv_blocks": 16, "block_size": 16, "max_batch_tokens": 64}


def tokens(llm: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def in_turn(rank: int, folder: str, layouts: list[dict[str, Any]]) -> None:
    from medha import LLM

    said = []
    for layout in layouts:
        with LLM(folder, **OPTIONS, **layout) as llm:
            said.append(tokens(llm))
    print(json.dumps(said), flush=True)


def at_once(rank: int, folder: str, closes: bool) -> None:
    """Two LLMs are open, and the first one is closed first, or none."""
    from medha import LLM

    first, second = LLM(folder, **OPTIONS, tp=2), LLM(folder, **OPTIONS, spp=2)
    said = [tokens(first), tokens(second), tokens(first)]
    if closes:
        first.close()
    said.append(tokens(second))
    if closes:
        second.close()
    print(json.dumps(said), flush=True)


def said_by(job: Job) -> list[Any]:
    codes = job.wait()
    assert set(codes) == {0}, "\n".join(job.stderr(rank) for rank in range(len(codes)))
    return [json.loads((job.folder / f"stdout-{rank}").read_text()) for rank in range(len(codes))]


@cache
def alone(folder: Path) -> list[list[int]]:
    from medha import LLM

    with LLM(folder, **OPTIONS) as llm:
        return tokens(llm)


def test_layouts_that_change(checkpoint: Callable[..., Path], tmp_path: Path, jobs: list[Job]) -> None:
    """Also with DTensor, which remembers a mesh by its ranks: the groups behind it must live on."""
    expected = alone(folder := checkpoint(num_hidden_layers=4))
    layouts = [{"tp": 2, "tp_forward": "dtensor"}, {"spp": 2}, {"kvp": 2}, {"tp": 2, "tp_forward": "dtensor"}]
    jobs.append(start(tmp_path, 2, in_turn, str(folder), layouts))
    # outputs are rank 0's alone
    assert said_by(jobs[0]) == [[expected] * len(layouts), [[]] * len(layouts)]


@pytest.mark.parametrize("closes", [True, False])
def test_two_at_once(checkpoint: Callable[..., Path], tmp_path: Path, jobs: list[Job], closes: bool) -> None:
    expected = alone(folder := checkpoint(num_hidden_layers=4))
    jobs.append(start(tmp_path, 2, at_once, str(folder), closes))
    assert said_by(jobs[0]) == [[expected] * 4, [[]] * 4]
    assert "Traceback" not in jobs[0].stderr(0) + jobs[0].stderr(1)
