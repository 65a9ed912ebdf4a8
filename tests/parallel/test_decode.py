"""Decode instances in real gloo processes: tokens, who computes what, back pressure, and ends in every state."""

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from medha.batch import Batch
from medha.errors import ConfigError, MedhaError
from medha.params import SamplingParams
from medha.worker.step_input import StepInput
from tests.checkpoints import random_prompt
from tests.commands import wait_until, write_lines
from tests.parallel.faults import Fault, Job, command, start
from tests.parallel.test_faults import check_ends, written
from tests.parallel.workers import WorkerPool

LENGTHS = (1, 33, 150, 5, 90, 61, 2)
SIZES = {"block_size": 16, "num_kv_blocks": 40, "chunk_size": 37, "max_batch_tokens": 64, "dtype": "float32"}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
PENALTIES = GREEDY | {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.2}
DRAWN: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 7, "ignore_eos": True, "logprobs": 1}


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool]:
    """Processes of this file alone. DTensor keeps a mesh by its ranks, with the names of its groups, also where all
    groups were ended and are made anew, which a pool of tests does and no program: in another layout the same ranks are
    a group of another number, so a later job would be given a group of other ranks."""
    pool = WorkerPool()
    yield pool
    pool.close()


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
        if not engine.hand_overs:
            return tokens, waits, [], engine.scheduler.memory.num_used
        left = [one.scheduler.memory.num_used for one in engine.hand_overs.instances]
        ran = [sum(batch.num_tokens for batch in rank.batches) for rank in engine.runner.gather_records()]
        return tokens, waits, ran, engine.scheduler.memory.num_used + sum(left)


LAYOUTS: list[dict[str, Any]] = [
    {"decode_tp": 2},
    {"kvp": 2, "max_kv_per_group": 80, "decode_tp": 1},
    {"decode_tp": 4},  # two KV heads: each is on two ranks
    {"spp": 2, "decode_tp": 2},
    {"tp": 2, "kvp": 2, "max_kv_per_group": 80, "decode_tp": 1},
    {"decode_replicas": 2, "decode_tp": 2},
    {"scheduler": "cdsp", "kvp": 2, "decode_tp": 2, "chunk_size": None, "improvement_rate": 0.0},
    {"scheduler": "cdsp", "kvp": 4, "decode_tp": 4, "chunk_size": None, "improvement_rate": 0.0},
]


def size_of(layout: dict[str, Any]) -> int:
    prefill = layout.get("tp", 1) * layout.get("spp", 1) * layout.get("kvp", 1)
    return prefill + layout.get("decode_replicas", 1) * layout["decode_tp"]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(num_hidden_layers=3)


@cache
def alone(folder: Path, *lengths: int) -> list[list[int]]:
    """Tokens of one rank."""
    tokens: list[list[int]] = serve(str(folder), {}, *wishes(lengths))[0]
    return tokens


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tokens_are_those_of_one_rank_and_decode_ranks_compute_no_prompt(
    workers: WorkerPool, folder: Path, layout: dict[str, Any]
) -> None:
    expected = alone(folder, *LENGTHS)
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


def beside(folder: str, options: dict[str, Any]) -> Any:
    """On each rank: a request decodes while a long prompt is prefilled in batches, each of which ends when there were
    four more decodes; when the one ends, and when the other has its first token, and after each batch what Prometheus
    is told."""
    from medha import LLM
    from medha.serve.metrics import Metrics
    from medha.worker.runner import Runner

    run, num_chunks, num_decodes = Runner.run, [0], [0]

    def run_beside(self: Runner, step: StepInput) -> Any:
        if step.batch.chunks and num_chunks[0] > 1:
            most = min(num_decodes[0] + 4, 24)
            wait_until(lambda: num_decodes[0] >= most)
        num_chunks[0] += len(step.batch.chunks)
        return run(self, step)

    with pytest.MonkeyPatch.context() as patch, LLM(folder, **SIZES | options) as llm:
        patch.setattr(Runner, "run", run_beside)
        pages: list[str] = []
        if llm.is_driver:
            metrics = Metrics(llm.engine, "m")

            def stepped(batch: Batch, *rest: Any) -> None:
                metrics.stepped(batch, *rest)
                pages.append(metrics.text().decode())
                num_decodes[0] += not batch.chunks

            llm.engine.on_step = stepped
        prompts = [{"prompt_token_ids": random_prompt(length, seed=0)} for length in (20, 300)]
        params = [SamplingParams(**GREEDY, max_tokens=max_tokens) for max_tokens in (25, 2)]
        outputs = llm.generate(prompts, params)
        return [(output.metrics.finished, output.metrics.first_token) for output in outputs], pages


def test_decodes_go_on_beside_a_long_prefill(workers: WorkerPool, folder: Path) -> None:
    """Batches of the instance complete independently: several of them within one of a prompt's."""
    options = {"decode_replicas": 1, "decode_tp": 1, "scheduler": "medha", "max_batch_tokens": 37}
    ((short_end, _), (_, long_first)), pages = workers.run(beside, 2, str(folder), options)[0]
    assert short_end < long_first
    assert 'vllm:num_requests_running{model_name="m"} 2.0' in "".join(pages)  # one decodes elsewhere
    assert all(f'medha:kv_group_usage{{group="{group}",model_name="m"}}' in pages[0] for group in (0, 1))


def share(folder: str, options: dict[str, Any]) -> Any:
    """On each rank: one prompt twice, then several completions of it; the tokens, and the cached tokens of each."""
    from medha import LLM

    with LLM(folder, **SIZES | options) as llm:
        prompt = {"prompt_token_ids": random_prompt(100, seed=3)}
        asked = [SamplingParams(**PENALTIES, max_tokens=30), SamplingParams(**DRAWN, n=3, max_tokens=9)]
        outputs = [output for params in (asked[0], asked[0], asked[1]) for output in llm.generate([prompt], params)]
        return [[one.token_ids for one in output.outputs] for output in outputs], [
            output.metrics.num_cached_tokens for output in outputs
        ]


def test_prompts_are_shared_and_have_several_completions(workers: WorkerPool, folder: Path) -> None:
    options = {"decode_replicas": 1, "decode_tp": 2, "prefix_caching": True}
    expected = workers.run(share, 1, str(folder), {"prefix_caching": True})[0]
    tokens, cached = workers.run(share, 3, str(folder), options)[0]
    assert tokens == expected[0]
    assert cached[:2] == [0, 96]


def profiled(folder: str, options: dict[str, Any], profile: str) -> Any:
    """On each rank: build the LLM twice, the second time with a profile of an odd step; what each side predicts of the
    host."""
    from medha import LLM

    with LLM(folder, **SIZES | options) as llm:
        if llm.is_driver:
            assert llm.engine.scheduler.predictor is not None
            Path(profile).write_text(replace(llm.engine.scheduler.predictor.coefficients, host_s=0.25).to_json())
    with LLM(folder, profile=profile, **SIZES | options) as llm:
        if not llm.is_driver:
            return None
        schedulers = [llm.engine.scheduler, *(one.scheduler for one in llm.engine.hand_overs.instances)]
        return [one.predictor.coefficients.host_s for one in schedulers if one.predictor is not None]


@pytest.mark.parametrize(("kvp", "decode_tp"), [(2, 1), (1, 2)])
def test_a_profile_holds_for_instances_that_are_like_a_group(
    workers: WorkerPool, folder: Path, tmp_path: Path, kvp: int, decode_tp: int
) -> None:
    options = {"kvp": kvp, "decode_replicas": 1, "decode_tp": decode_tp}
    prefills_s, decodes_s = workers.run(profiled, 3, str(folder), options, str(tmp_path / "profile.json"))[0]
    assert prefills_s == 0.25
    assert (decodes_s == 0.25) == (decode_tp == 1)


# -- full pools --------------------------------------------------------------------------------------------------------

MANY = tuple(1 + (37 * i) % 150 for i in range(24))


@pytest.mark.parametrize("layout", [{"decode_tp": 2}, {"kvp": 2, "max_kv_per_group": 96, "decode_tp": 1}], ids=str)
def test_everybody_ends_with_one_buffer_and_pools_for_a_few(
    workers: WorkerPool, folder: Path, layout: dict[str, Any]
) -> None:
    """Requests wait for a decode instance, and prefills for the memory of those that wait."""
    options = {"decode_replicas": 1, "transfer_buffers": 1, "num_kv_blocks": 12} | layout
    tokens, _, _, left = workers.run(serve, size_of(layout), str(folder), options, *wishes(MANY))[0]
    assert (tokens, left) == (alone(folder, *MANY), 0)


def refuse(folder: str, options: dict[str, Any]) -> Any:
    """On each rank: what is said of a request whose prompt fits, and what it is to decode does not."""
    from medha import LLM

    with LLM(folder, **SIZES | options) as llm:
        said = []
        for length, max_tokens in ((150, 500), (700, 2)):
            try:
                llm.generate(
                    [{"prompt_token_ids": random_prompt(length, seed=0)}], SamplingParams(max_tokens=max_tokens)
                )
            except MedhaError as error:
                said.append(f"{type(error).__name__}: {error}")
        if llm.is_driver:
            with pytest.raises(ConfigError, match="a journal holds the decisions of one scheduler; accepted: without"):
                llm.engine.record(io.StringIO())
        (output,) = llm.generate([{"prompt_token_ids": [5] * 150}], SamplingParams(max_tokens=3, **GREEDY)) or [None]
        return said, None if output is None else len(output.outputs[0].token_ids)


def test_a_claim_that_is_too_large_for_either_side_is_refused_with_the_numbers(
    workers: WorkerPool, folder: Path
) -> None:
    answers = workers.run(refuse, 3, str(folder), {"decode_replicas": 1, "decode_tp": 2})
    for said, _ in answers:
        assert "150 prompt tokens and max_tokens=500 need 649 tokens of KV cache on a decode instance" in said[0]
        assert "accepted: at most 640" in said[0]
        assert "700 prompt tokens and max_tokens=1 need 700 tokens of KV cache; accepted: at most 640" in said[1]
    assert [count for _, count in answers] == [3, None, None]


# -- ends in every state -----------------------------------------------------------------------------------------------


def abort_in(folder: str, options: dict[str, Any], prompts: Any, params: Any, state: str) -> Any:
    """On each rank: abort the second request when it is in a state; the tokens of all, and what is left in use."""
    from medha import LLM

    with LLM(folder, **SIZES | options) as llm:
        if not llm.is_driver:
            llm.follow()
            return {}, 0, 0
        engine, found = llm.engine, {}
        (instance,) = engine.hand_overs.instances
        for name, (prompt, its) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(str(name), prompt, its)
        is_aborted = False
        while engine.has_unfinished:
            for output in engine.step():
                found[output.request_id] = output.outputs[0]
            states = {
                "queued": True,
                "prefilling": engine._by_slot.get(1) is not None and engine._by_slot[1].num_computed_tokens > 0,
                "waiting": 1 in engine.hand_overs.waiting,
                "coming": 1 in engine.hand_overs.transfers,
                "decoding": instance.scheduler.knows(1),
            }
            if states[state] and not is_aborted:
                is_aborted = True
                engine.abort("1")
                engine.add_request("late", prompts[0], params[0])  # which may get the slot
        left = engine.scheduler.memory.num_used + instance.scheduler.memory.num_used
        return {name: (one.finish_reason, one.token_ids) for name, one in found.items()}, left, len(engine._by_slot)


@pytest.fixture(scope="module")
def to_abort(folder: Path) -> Any:
    """Prompts, parameters, and the tokens of one rank where nobody is aborted."""
    prompts, _ = wishes((100, 90, 40, 70))
    params = [SamplingParams(**kind, max_tokens=25) for kind in (GREEDY, PENALTIES, PENALTIES, DRAWN)]
    return prompts, params, serve(str(folder), {}, prompts, params)[0]


@pytest.mark.parametrize("state", ["queued", "prefilling", "waiting", "coming", "decoding"])
def test_an_abort_in_any_state_leaves_nothing_behind(
    workers: WorkerPool, folder: Path, to_abort: Any, state: str
) -> None:
    prompts, params, expected = to_abort
    options = {"decode_replicas": 1, "decode_tp": 2, "num_kv_blocks": 16, "transfer_buffers": 1}
    found, left, num_slots = workers.run(abort_in, 3, str(folder), options, prompts, params, state)[0]
    reason, tokens = found.pop("1")
    assert reason == "abort"
    assert tokens == expected[1][: len(tokens)]
    assert (len(tokens) > 0) == (state in ("waiting", "coming", "decoding"))
    wanted = {"0": 0, "2": 2, "3": 3, "late": 0}
    assert {name: ids for name, (_, ids) in found.items()} == {name: expected[at] for name, at in wanted.items()}
    assert (left, num_slots) == (0, 0)


REQUESTS = [
    {"id": "short", "prompt": "a", "max_tokens": 1},
    {"id": "first", "prompt": "c" * 300, "max_tokens": 200, "ignore_eos": True},
    {"id": "second", "prompt": "b" * 2000, "max_tokens": 200, "ignore_eos": True},
]


def serving_requests(model: Path, folder: Path, fault: Fault, *options: str) -> Job:
    """A rank and a decode instance that serve REQUESTS."""
    requests = write_lines(folder / "requests.jsonl", *REQUESTS)
    files = ("--requests", str(requests), "--output", str(folder / "out.jsonl"))
    arguments = ["--model", str(model), *files, "--decode-replicas", "1", "--max-model-len", "4096", *options]
    return start(folder, 2, command, arguments, fault=fault)


FAULTS = [
    Fault(1, "transfer", "kill", after=1),  # the decode rank, while it takes over
    Fault(0, "transfer", "throw", after=1),  # the source
    Fault(1, "transfer", "throw", after=1),
    Fault(1, "transfer", "stop", after=1),
    Fault(0, "transfer", "stop", after=1),
    Fault(1, "decode", "kill", after=6),  # while another request is prefilled, or waits
    Fault(0, "prefill", "kill", after=20),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.rank}-{fault.point}-{fault.action}")
def test_a_rank_that_fails_ends_all_with_its_name(model: Path, tmp_path: Path, jobs: list[Job], fault: Fault) -> None:
    """A lost decode instance costs the job, as any lost rank does."""
    sizes = "--chunk-size 64 --max-batch-tokens 64 --block-size 64 --num-kv-blocks 64"
    jobs.append(job := serving_requests(model, tmp_path, fault, *sizes.split()))
    said = check_ends(job, fault)
    assert ("rank 0 (stage 0)", "rank 1 (decode instance 0)")[fault.rank] in said
    assert ("ValueError: boom" in said) == (fault.action == "throw")
    ends = written(tmp_path)
    assert ends["short"]["finish_reason"] == "length"
    if fault.rank:
        assert ends["second"]["finish_reason"] == "error"


def test_a_transfer_that_takes_long_is_waited_for(model: Path, tmp_path: Path, jobs: list[Job]) -> None:
    jobs.append(job := serving_requests(model, tmp_path, Fault(1, "transfer", "sleep", sleep_s=2.0)))
    assert job.wait() == [0, 0], job.stderr(0)
    assert {name: row["finish_reason"] for name, row in written(tmp_path).items()} == dict.fromkeys(
        ("short", "first", "second"), "length"
    )
    assert any(row.get("decode_wait_s", 0.0) > 1.0 for row in written(tmp_path).values())
