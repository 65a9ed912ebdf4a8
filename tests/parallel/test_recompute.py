"""Requests that give up their KV memory, and are computed again or swapped, say what they would have said (D8)."""

from typing import Any

import pytest

from medha.outputs import RequestOutput
from medha.params import SamplingParams
from tests.parallel.workers import WorkerPool
from tests.serving import Model, finish, random_ids

LENGTHS = (40, 3, 70, 25, 90)
SMALL = {"quantum_s": 0.25, "chunk_size": 16, "max_batch_tokens": 40, "block_size": 16, "num_blocks": 10}
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True),
    "drawn": SamplingParams(temperature=1.0, top_k=40, seed=5, max_tokens=50, ignore_eos=True, logprobs=2),
    "penalties": SamplingParams(
        temperature=0.7, seed=9, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=50, ignore_eos=True
    ),
}


def serve(bytes_model: Model, params: SamplingParams, **options: int) -> dict[str, RequestOutput]:
    engine = bytes_model.engine(**(SMALL | options))
    for i, length in enumerate(LENGTHS):
        engine.add_request(str(i), random_ids(length, seed=4), params)
    return finish(engine)


def chosen(output: RequestOutput) -> list[float]:
    completion = output.outputs[0]
    assert completion.logprobs is not None
    return [step[token].logprob for step, token in zip(completion.logprobs, completion.token_ids, strict=True)]


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_are_those_of_a_run_in_which_nobody_gives_way(
    bytes_model: Model, params: SamplingParams, depth: int
) -> None:
    undisturbed = serve(bytes_model, params, num_blocks=64)
    disturbed = serve(bytes_model, params, overcommit=True, depth=depth)
    assert sum(output.metrics.num_preemptions for output in undisturbed.values()) == 0
    assert sum(output.metrics.num_preemptions for output in disturbed.values()) >= 3
    assert sum(output.metrics.work_lost_s for output in disturbed.values()) > 0
    for name, output in disturbed.items():
        expected = undisturbed[name].outputs[0]
        assert output.outputs[0].token_ids == expected.token_ids
        assert output.outputs[0].text == expected.text
        if expected.logprobs is not None:
            assert chosen(output) == pytest.approx(chosen(undisturbed[name]), abs=1e-4)


def generate(folder: str, options: dict[str, Any], prompts: list[list[int]]) -> tuple[list[list[int]], int, int, int]:
    """On each rank: tokens; on rank 0 also how often somebody gave way, was swapped, and the tokens computed."""
    from medha import LLM
    from medha.worker.swap import HostCache

    with pytest.MonkeyPatch.context() as patch:  # what is decided is not to hang on a clock
        patch.setattr(HostCache, "measure_block_s", lambda self: 0.0)
        llm = LLM(folder, **options)
    with llm:
        num_tokens: list[int] = []
        if llm.is_driver:
            llm.engine.on_step = lambda batch, prediction, busy_s: num_tokens.append(batch.num_tokens)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS["penalties"])
        counts = [sum(getattr(output.metrics, name) for output in outputs) for name in ("num_preemptions", "num_swaps")]
    return [list(output.outputs[0].token_ids) for output in outputs], *counts, sum(num_tokens)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"kvp": 2, "max_kv_per_group": 80}], ids=str)
def test_every_layout_says_the_same(workers: WorkerPool, bytes_model: Model, layout: dict[str, int]) -> None:
    """Computed again, and swapped: every rank moves its own layers and heads to host memory and back."""
    prompts = [random_ids(length, seed=4) for length in LENGTHS]
    options = {"scheduler": "sarathi", "chunk_size": 16, "max_batch_tokens": 40, "block_size": 16} | layout
    tight = options | {"num_kv_blocks": 10 if "kvp" not in layout else 7, "overcommit": True}
    folder = str(bytes_model.folder)
    runs = (options | {"num_kv_blocks": 64}, tight, tight | {"swap_space": "8MiB"})
    undisturbed, computed, swapped = (workers.run(generate, 2, folder, each, prompts)[0] for each in runs)
    assert undisturbed[0] == computed[0] == swapped[0] and len(swapped[0]) == len(prompts)
    assert undisturbed[1] == 0 and computed[1] >= 2 and swapped[2] >= 1
    if "kvp" in layout:  # who lies on both groups is computed again
        assert swapped[1] >= swapped[2]
    else:
        assert swapped[1] == swapped[2] and swapped[3] == undisturbed[3]


def test_a_request_that_comes_back_on_another_group_draws_as_before(workers: WorkerPool, bytes_model: Model) -> None:
    """Penalties count the tokens that another rank has drawn."""
    prompts = [random_ids(20 + 5 * i, seed=i) for i in range(10)]
    options: dict[str, Any] = {"kvp": 2, "block_size": 4, "max_kv_per_group": 200, "max_batch_tokens": 64}
    runs = (options | {"num_kv_blocks": 500}, options | {"num_kv_blocks": 50, "overcommit": True})
    undisturbed, disturbed = (workers.run(generate, 2, str(bytes_model.folder), each, prompts)[0] for each in runs)
    assert undisturbed[1] == 0 and disturbed[1] >= 5
    assert disturbed[0] == undisturbed[0] and len(disturbed[0]) == len(prompts)
