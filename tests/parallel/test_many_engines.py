"""Several LLMs in one program of several ranks: one after the other with layouts that change, and two at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medha.request import SamplingParams
from tests.checkpoints import make_checkpoint, random_prompt
from tests.parallel.faults import Job, start
from tests.parallel.workers import WorkerPool

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": random_prompt(length, seed=5)} for length in (40, 3, 70)]
OPTIONS: dict[str, Any] = {"num_kv_blocks": 16, "block_size": 16, "max_batch_tokens": 64}


def tokens(llm: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def in_turn(folder: str, layouts: list[dict[str, Any]]) -> list[list[list[int]]]:
    """On each rank: what an LLM of each layout says."""
    from medha import LLM

    said = []
    for layout in layouts:
        with LLM(folder, **OPTIONS, **layout) as llm:
            said.append(tokens(llm))
    return said


def at_once(folder: str) -> list[list[list[int]]]:
    """On each rank: two LLMs are open, and the first one is closed first."""
    from medha import LLM

    first, second = LLM(folder, **OPTIONS, tp=2), LLM(folder, **OPTIONS, spp=2)
    said = [tokens(first), tokens(second), tokens(first)]
    first.close()
    said.append(tokens(second))
    second.close()
    return said


def alone(folder: Path) -> list[list[int]]:
    from medha import LLM

    make_checkpoint(folder, "llama")
    with LLM(folder, **OPTIONS) as llm:
        return tokens(llm)


def test_layouts_that_change(workers: WorkerPool, tmp_path: Path) -> None:
    """Also with DTensor, which remembers a mesh by its ranks: the groups behind it must live on."""
    expected = alone(tmp_path)
    whole = {"tp": 2, "kvp": 2, "tp_forward": "dtensor"}
    layouts = [
        whole,
        {"spp": 4},
        {"tp": 2, "spp": 2, "tp_forward": "dtensor"},
        {"kvp": 4},
        {"tp": 4, "tp_forward": "dtensor"},
        whole,
    ]
    said, *others = workers.run(in_turn, 4, str(tmp_path), layouts)
    assert said == [expected] * len(layouts)
    assert others == [[[]] * len(layouts)] * 3  # outputs are rank 0's alone


def test_two_at_once(workers: WorkerPool, tmp_path: Path) -> None:
    expected = alone(tmp_path)
    said, _ = workers.run(at_once, 2, str(tmp_path))
    assert said == [expected] * 4


def left_open(rank: int, folder: str) -> None:
    """Two LLMs, of which the program closes none."""
    from medha import LLM

    llms = [LLM(folder, **OPTIONS, **layout) for layout in ({"tp": 2}, {"spp": 2})]
    print([len(tokens(llm)) for llm in llms], flush=True)


def test_a_program_that_closes_nothing_ends_well(tmp_path: Path, jobs: list[Job]) -> None:
    alone(tmp_path)
    jobs.append(job := start(tmp_path, 2, left_open, str(tmp_path)))
    assert job.wait(60.0) == [0, 0], job.stderr(0) + job.stderr(1)
    assert (tmp_path / "stdout-0").read_text() == "[3, 3]\n"
    assert "Traceback" not in job.stderr(0) + job.stderr(1)
