"""A request is aborted before every step of its life; the others do not notice, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from medha.engine.engine import Engine
from medha.outputs import RequestOutput
from medha.params import SamplingParams
from tests.checkpoints import make_checkpoint, random_prompt
from tests.engines import load_decoder, make_engine, run_to_end
from tests.parallel.workers import WorkerPool

LENGTHS = (20, 158, 70)  # the second is the one that is aborted: five chunks, then decodes
VICTIM = 1
NUM_TOKENS = 6


def run(engine: Engine, prompts: list[list[int]], abort_at: int | None) -> tuple[list[RequestOutput], int, int]:
    """Run the prompts together and abort the victim before step ``abort_at``; returns outputs, the steps taken, and
    the batches in flight with a chunk of the victim as it was aborted."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, output_kind="final_only")
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    outputs: dict[str, RequestOutput] = {}
    step = num_in_flight = 0
    while engine.has_unfinished:
        if step == abort_at:
            slots = [slot for slot, one in engine._by_slot.items() if one.request.request_id == str(VICTIM)]
            rows = [row for batch in engine.scheduler.in_flight for row in batch.rows if row.slot in slots]
            num_in_flight = sum(not row.is_decode for row in rows)
            engine.abort(str(VICTIM))
        outputs |= {output.request_id: output for output in engine.step()}
        step += 1
    return [outputs[str(i)] for i in range(len(prompts))], step, num_in_flight


def cancel_at_every_step(folder: str, options: dict[str, Any], prompts: list[list[int]]) -> Any:
    """On each rank. Rank 0 answers with (tokens, finish reasons, blocks and slots in use, chunks in flight) of each
    run; the others with what they still keep of any request."""
    from medha import LLM

    llm = LLM(folder, **options)
    if not llm.is_driver:
        follower = llm._role.follower  # type: ignore[union-attr]
        llm.follow()
        runner = follower._runner  # type: ignore[union-attr]
        return len(runner._sampling), len(runner.slots._num_blocks)
    answers = []
    _, num_steps, _ = run(llm.engine, prompts, None)
    for abort_at in range(num_steps + 1):
        outputs, _, num_in_flight = run(llm.engine, prompts, abort_at)
        scheduler = llm.engine.scheduler
        left = (scheduler.memory.num_used, scheduler.num_running, scheduler.num_waiting, len(llm.engine._by_slot))
        reasons = [o.outputs[0].finish_reason for o in outputs]
        answers.append(([o.outputs[0].token_ids for o in outputs], reasons, left, num_in_flight))
    run(llm.engine, prompts[:VICTIM], None)  # tells the others of the last frees
    caller = llm._role.caller  # type: ignore[union-attr]
    assert caller is not None and caller.ranks.monitor._activity == "idle"
    llm.close()
    return answers


# Tokens of a request on one group: the victim takes the second of three within its prompt, the last as it decodes.
SHARES = {1: 288, 2: 160}


@pytest.mark.parametrize("layout", [pytest.param((1, 3, 1), marks=pytest.mark.slow), (2, 2, 1)], ids=str)
def test_cancel_at_every_step(workers: WorkerPool, tmp_path: Path, layout: tuple[int, int, int]) -> None:
    kvp, spp, tp = layout
    make_checkpoint(tmp_path, "llama")
    prompts = [random_prompt(length, seed=3) for length in LENGTHS]
    expected = run_to_end(make_engine(load_decoder(tmp_path)), prompts, NUM_TOKENS)
    options = {
        "scheduler": "sarathi",
        "chunk_size": 32,
        "max_batch_tokens": 48,
        "block_size": 16,
        "num_kv_blocks": 18 if kvp == 1 else 11,
        "max_kv_per_group": SHARES[kvp],
        "kvp": kvp,
        "spp": spp,
        "tp": tp,
    }
    answers, *others = workers.run(cancel_at_every_step, kvp * spp * tp, str(tmp_path), options, prompts)
    num_tokens_at_end = []
    for tokens, reasons, left, _ in answers:
        assert left == (0, 0, 0, 0)
        victim = tokens[VICTIM]
        assert [t for i, t in enumerate(tokens) if i != VICTIM] == [t for i, t in enumerate(expected) if i != VICTIM]
        assert victim == expected[VICTIM][: len(victim)]
        assert reasons == ["length", "abort" if len(victim) < NUM_TOKENS else "length", "length"]
        num_tokens_at_end.append(len(victim))
    assert num_tokens_at_end == sorted(num_tokens_at_end)
    assert set(num_tokens_at_end) == set(range(NUM_TOKENS + 1))  # before its first token, between any two, and after
    assert num_tokens_at_end.count(0) >= -(-LENGTHS[VICTIM] // 32)  # at each of its chunks
    if kvp == tp == 1:  # with a batch more in flight than there are stages, each stage has had a chunk of it
        assert max(num_in_flight for *_, num_in_flight in answers) == spp
    # The last request's close goes with a batch that never comes; whatever came before is gone.
    assert all(num_sampling <= VICTIM and num_tables <= VICTIM for num_sampling, num_tables in others)
