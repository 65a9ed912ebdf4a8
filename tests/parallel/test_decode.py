"""Decode instances in real gloo processes: tokens, who computes what. Full pools, and how it ends: test_states.py."""

import io
from collections.abc import Sequence
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from medha import LLM, SamplingParams
from medha.batch import Batch
from medha.cost.chunk_times import ChunkTimes
from medha.cost.coefficients import Coefficients
from medha.engine import build
from medha.errors import ConfigError, ValidationError
from medha.serve.metrics import Metrics
from medha.worker.runner import Runner
from medha.worker.step_input import StepInput
from tests.checkpoints import random_prompt
from tests.commands import wait_until
from tests.engines import drained
from tests.parallel.workers import WorkerPool, generate, num_ranks, serve
from tests.sched.costs import PLAIN

LENGTHS = (1, 33, 150, 5, 90, 61, 2)
SIZES = {"block_size": 16, "num_kv_blocks": 40, "chunk_size": 37, "max_batch_tokens": 64, "dtype": "float32"}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
PENALTIES = GREEDY | {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.2}
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "ignore_eos": True, "logprobs": 1}


def wishes(
    lengths: Sequence[int] = LENGTHS, max_tokens: Sequence[int] = (9, 3, 20, 1, 12)
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, and parameters of every kind; one asks for its first token alone."""
    wanted = zip(cycle((GREEDY, PENALTIES, DRAWN)), cycle(max_tokens), range(len(lengths)), strict=False)
    params = [SamplingParams(**kind, max_tokens=most) for kind, most, _ in wanted]
    return [random_prompt(length, seed=i) for i, length in enumerate(lengths)], params


LAYOUTS: list[dict[str, Any]] = [
    {"decode_tp": 4},  # two KV heads: each is on two ranks
    {"spp": 2, "decode_tp": 2},
    {"tp": 2, "kvp": 2, "max_kv_per_group": 80, "decode_tp": 1},
    {"decode_replicas": 2, "decode_tp": 2},
    {"scheduler": "cdsp", "kvp": 2, "decode_tp": 2, "chunk_size": None, "improvement_rate": 0.0},
]


@cache
def alone(folder: Path) -> list[list[int]]:
    """Tokens of one rank."""
    return serve(folder, SIZES, wishes()).tokens


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tokens_are_those_of_one_rank_and_decode_ranks_compute_no_prompt(
    own_workers: WorkerPool, folder: Path, layout: dict[str, Any]
) -> None:
    expected = alone(folder)
    layout = {"decode_replicas": 1} | layout
    served = own_workers.run(serve, num_ranks(layout), folder, SIZES | layout, wishes())
    assert served[0].tokens == expected
    explained, ran = [one.metrics.explanation for one in served[0].outputs], [rank.num_tokens for rank in served]
    assert [one is not None and one.decode_wait_s > 0 for one in explained] == [len(found) > 1 for found in expected]
    decode_tp, behind = layout["decode_tp"], len(ran) - layout["decode_replicas"] * layout["decode_tp"]
    assert sum(ran[behind::decode_tp]) == sum(len(found) - 1 for found in expected)  # but the first token of each
    assert all(ran[rank] == ran[rank - (rank - behind) % decode_tp] for rank in range(behind, len(ran)))
    if "kvp" not in layout:
        assert ran[:behind] == [sum(LENGTHS)] * behind


SECONDS = {1: (0.0, 1.0, 0.0, 0.0, 0.0), 2: (30.0, 0.5, 0.0, 0.0, 0.0), 4: (80.0, 0.25, 0.0, 0.0, 0.0)}
"""By which the last of GROWING is read by one group until a second is free, by two until all are, then by four. No
queue ends before all are planned, as a token takes a second."""
GROWING = (20, 40, 60, 100, 600)


def made_up_times(_: Any, sizes: Sequence[int], **__: Any) -> ChunkTimes:
    """Those of SECONDS, in place of fitted ones."""
    return ChunkTimes(tuple(sizes), tuple(SECONDS[size] for size in sizes))


@patch.object(build, "fitted_times", made_up_times)
def grow(folder: Path, options: dict[str, Any], prompts: Any, params: Any) -> Any:
    """On each rank: serve prompts that are all planned at once. Rank 0 says the tokens of each; of each chunk of the
    last one how many tokens of it every group computed, by the records of the ranks; and what each decode rank did."""
    with LLM(folder, **SIZES | options) as llm:
        if not llm.is_driver:
            return None
        engine, chunks = llm.engine, list[int]()
        engine.on_step = lambda batch, *_: chunks.extend(
            batch.batch_id for row in batch.chunks if row.slot == len(prompts) - 1
        )
        for name, (prompt, its) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(str(name), prompt, its)
        tokens = {output.request_id: output.outputs[0].token_ids for output in drained(engine)}
        ranks = engine.runner.gather_records()
    prefills, decodes = ranks[: options["kvp"]], ranks[options["kvp"] :]
    shares = [
        {rank.group: one.num_tokens for rank in prefills for one in rank.batches if one.batch_id == chunk}
        for chunk in chunks
    ]
    decoded = [sum(one.num_tokens for one in rank.batches) for rank in decodes]
    return [tokens[str(name)] for name in range(len(prompts))], shares, decoded


GROWN: list[tuple[dict[str, Any], list[dict[int, int]]]] = [
    ({}, [{0: 20}, {0: 30, 1: 30}, {0: 130, 1: 130, 2: 130, 3: 130}]),
    ({"sp_sizes": "1,2", "max_chunks": 1}, [{0: 300, 1: 300}]),
]


@pytest.mark.parametrize(("bounds", "expected_shares"), GROWN)
def test_a_plan_that_grows_over_one_two_and_four_groups_is_handed_over(
    own_workers: WorkerPool, folder: Path, bounds: dict[str, Any], expected_shares: list[dict[int, int]]
) -> None:
    """As the planner decides; to an instance of another tensor-parallel size."""
    options = {"scheduler": "cdsp", "kvp": 4, "decode_replicas": 1, "decode_tp": 4, "chunk_size": None}
    options |= {"improvement_rate": 0.0, "num_kv_blocks": 60} | bounds
    prompts, params = wishes(GROWING, (9,))
    expected = serve(folder, SIZES | {"num_kv_blocks": 60}, (prompts, params)).tokens
    tokens, shares, decoded = own_workers.run(grow, 8, folder, options, prompts, params)[0]
    assert tokens == expected
    assert shares == expected_shares
    assert decoded == [8 * len(GROWING)] * 4


def beside(folder: Path, options: dict[str, Any]) -> Any:
    """On each rank: a request decodes while a long prompt is prefilled in batches, each of which ends when there were
    four more decodes; when the one ends, and when the other has its first token, and after each batch what Prometheus
    is told."""
    run, num_chunks, num_decodes = Runner.run, [0], [0]

    def run_beside(self: Runner, step: StepInput) -> Any:
        if step.batch.chunks and num_chunks[0] > 1:
            most = min(num_decodes[0] + 4, 24)
            wait_until(lambda: num_decodes[0] >= most)
        num_chunks[0] += len(step.batch.chunks)
        return run(self, step)

    with LLM(folder, **SIZES | options) as llm, patch.object(Runner, "run", run_beside):
        pages: list[str] = []
        if llm.is_driver:
            metrics = Metrics(llm.engine, "m")

            def stepped(batch: Batch, *rest: Any) -> None:
                metrics.stepped(batch, *rest)
                pages.append(metrics.text().decode())
                num_decodes[0] += not batch.chunks

            llm.engine.on_step = stepped
        prompts = [random_prompt(length, seed=0) for length in (20, 300)]
        params = [SamplingParams(**GREEDY, max_tokens=max_tokens) for max_tokens in (25, 2)]
        outputs = llm.generate(prompts, params)
        return [(output.metrics.finished, output.metrics.first_token) for output in outputs], pages


def test_decodes_go_on_beside_a_long_prefill(own_workers: WorkerPool, folder: Path) -> None:
    """Batches of the instance complete independently: several of them within one of a prompt's."""
    options = {"decode_replicas": 1, "decode_tp": 1, "scheduler": "medha", "max_batch_tokens": 37}
    ((short_end, _), (_, long_first)), pages = own_workers.run(beside, 2, folder, options)[0]
    assert short_end < long_first
    assert 'vllm:num_requests_running{model_name="m"} 2.0' in "".join(pages)  # one decodes elsewhere
    assert all(f'medha:kv_group_usage{{group="{group}",model_name="m"}}' in pages[0] for group in (0, 1))


def test_prompts_are_shared_and_have_several_completions(own_workers: WorkerPool, folder: Path) -> None:
    """One prompt twice, then several completions of it."""
    one, several = SamplingParams(**PENALTIES, max_tokens=30), SamplingParams(**DRAWN, n=3, max_tokens=9)
    calls = [(random_prompt(100, seed=3), params) for params in (one, one, several)]
    layouts: list[dict[str, Any]] = [{}, {"decode_replicas": 1, "decode_tp": 2}]
    expected, found = (
        own_workers.run(serve, num_ranks(layout), folder, SIZES | {"prefix_caching": True} | layout, *calls)[0].outputs
        for layout in layouts
    )
    for output, wanted in zip(found, expected, strict=True):
        assert [one.token_ids for one in output.outputs] == [one.token_ids for one in wanted.outputs]
    assert [output.metrics.num_cached_tokens for output in found[:2]] == [0, 96]


@patch.object(Coefficients, "load", lambda *_, **__: PLAIN)
def profiled(folder: Path, options: dict[str, Any]) -> list[bool]:
    """On rank 0: whether each side, the prefills' and the instance's, predicts by the profile."""
    with LLM(folder, profile="of an odd machine", **SIZES | options) as llm:
        sides = [llm.engine, *llm.engine.hand_overs.instances] if llm.is_driver else []
        return [side.scheduler.predictor.coefficients == PLAIN for side in sides]


@pytest.mark.parametrize(("kvp", "decode_tp"), [(2, 1), (1, 2)])
def test_a_profile_holds_for_instances_that_are_like_a_group(
    own_workers: WorkerPool, folder: Path, kvp: int, decode_tp: int
) -> None:
    options = {"kvp": kvp, "decode_replicas": 1, "decode_tp": decode_tp}
    assert own_workers.run(profiled, 3, folder, options)[0] == [True, decode_tp == 1]


def refuse(folder: Path, options: dict[str, Any]) -> Any:
    """On each rank: what is said of requests that do not fit or are wrong, and tokens of the call behind them."""
    long, few, many = random_prompt(700, seed=0), SamplingParams(max_tokens=2), SamplingParams(max_tokens=500)
    calls: list[Any] = [(long[:150], many), (long, few), ([[5], [999]], few), ([[5], [6]], [few])]
    with LLM(folder, **SIZES | options) as llm:
        said = []
        for call in calls:
            with pytest.raises(ValidationError) as caught:
                llm.generate(*call)
            said.append((str(caught.value), caught.value.param, caught.value.index))
        if llm.is_driver:
            with pytest.raises(ConfigError, match="a journal holds the decisions of one scheduler; accepted: without"):
                llm.engine.record(io.StringIO())
        return said, [len(tokens) for tokens in generate(llm, [5] * 150, SamplingParams(max_tokens=3, **GREEDY))]


def test_a_refusal_is_the_same_everywhere_and_the_next_call_works(own_workers: WorkerPool, folder: Path) -> None:
    """Also of a claim that is too large for either side, with the numbers."""
    answers = own_workers.run(refuse, 3, folder, {"decode_replicas": 1, "decode_tp": 2})
    ((large, *_), (long, *_), (wrong, param, index), (lists, *_)), _ = answers[0]
    assert "150 prompt tokens and max_tokens=500 need 649 tokens of KV cache on a decode instance" in large
    assert "accepted: at most 640" in large
    assert "700 prompt tokens need 700 tokens of KV cache; accepted: at most 640" in long
    assert wrong.startswith("prompt 1: ") and (param, index) == ("prompt_token_ids", 1)
    assert lists.startswith("1 sampling_params for 2 prompts; ")
    assert [said for said, _ in answers] == [answers[0][0]] * 3
    assert [counts for _, counts in answers] == [[3], [], []]  # outputs are rank 0's
