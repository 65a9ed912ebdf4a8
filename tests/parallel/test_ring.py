"""Dealt rows, planned by hand or by Medha's packer: tokens and hidden states."""

from contextlib import nullcontext
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers

from medha import LLM
from medha.batch import Batch, Deal, Row, even_shares
from medha.errors import PlanDivergenceError
from medha.parallel.kvp import shared_rows
from medha.parallel.ring import Ring
from medha.worker.runner import Runner
from medha.worker.sampling import SlotSampling
from medha.worker.step_input import StepInput
from tests.parallel.test_decode import wishes
from tests.parallel.workers import WorkerPool, generate, gloo, merge_of_all, serve
from tests.worker.test_dealt import BLOCK, FOUR, NUM_BLOCKS, THREE, TWO, Chunk, Hand, Plan

Layout = tuple[int, int, int]  # kvp, spp, tp
NUM_TOKENS = 5


# -- on each rank ----------------------------------------------------------------------------------------------


class Ran(NamedTuple):
    """What a rank says of plans."""

    tokens: list[list[int]]  # rank 0's alone
    hidden: dict[int, torch.Tensor]  # of slot 0 by position


def run_plans(
    folder: Path, options: dict[str, Any], prompts: list[list[int]], plans: list[Plan], params: list[Any]
) -> Ran:
    """On each rank: submit the batches of the plans, then decodes."""
    ran, eager = Ran([[] for _ in prompts], {}), Runner._eager

    def watched(self: Runner, step: StepInput, copies: Any) -> Any:
        def keep(module: Any, args: Any, x_TD: torch.Tensor) -> None:
            tokens = [row.tokens_on(self.group) for row in step.batch.rows]
            at = np.repeat([row.slot for row in step.batch.rows], tokens) == 0
            ran.hidden.update(zip(step.positions[at].tolist(), x_TD[at].clone(), strict=True))

        with self.model.register_forward_hook(keep):
            return eager(self, step, copies)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "_eager", watched)
        with LLM(folder, **options) as llm:
            if llm.is_driver:
                runner, hand = llm.engine.runner, Hand(plans)
                for slot, prompt in enumerate(prompts):
                    ids = np.array(prompt, np.int32)
                    sampling = SlotSampling.of(params[slot].resolve({}), params[slot].seed or 0, (), ids)
                    runner.open(slot, ids, sampling, ran.tokens[slot])
                pending = [runner.submit(batch) for batch in hand.prefills()]
                steps = chain(pending, (runner.submit(hand.decode()) for _ in range(NUM_TOKENS - 1)))
                for result in (step.result() for step in steps):
                    for row, sampled in zip(result.rows, result.sampled, strict=True):
                        ran.tokens[row.slot].append(sampled.token_id)
    return ran


def lengths_of(plans: list[Plan]) -> list[int]:
    return [sum(chunk.q_len for chunk in plan) for plan in plans]


@cache
def plain(folder: Path, *lengths: int) -> list[list[int]]:
    """The tokens of one rank."""
    return serve(folder, {"block_size": BLOCK, "num_kv_blocks": 200}, wishes(lengths, (NUM_TOKENS,))).tokens


def run(workers: WorkerPool, folder: Path, plans: list[Plan], layout: Layout, *, dtype: str = "float32") -> list[Ran]:
    """What the ranks of a layout say of the plans."""
    kvp, spp, tp = layout
    prompts, params = wishes(lengths_of(plans), (NUM_TOKENS,))
    options = {"kvp": kvp, "spp": spp, "tp": tp, "block_size": BLOCK, "num_kv_blocks": NUM_BLOCKS, "dtype": dtype}
    return workers.run(run_plans, kvp * spp * tp, folder, options, prompts, plans, params)


def test_history_lies_evenly() -> None:
    assert even_shares(11, 3) == [4, 4, 3]


# the plans of eight groups are held to a plain reference, without ranks, in tests/worker/test_dealt.py
CASES = [(THREE, (3, 1, 1)), (FOUR, (4, 1, 1)), (TWO, (2, 2, 2))]


@pytest.mark.parametrize(("plans", "layout"), CASES, ids=[str(layout) for _, layout in CASES])
def test_tokens_are_those_of_one_rank(workers: WorkerPool, folder: Path, plans: list[Plan], layout: Layout) -> None:
    assert run(workers, folder, plans, layout)[0].tokens == plain(folder, *lengths_of(plans))


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 0.06)])
def test_hidden_states(workers: WorkerPool, folder: Path, dtype: str, most: float) -> None:
    """Against float64 on the same weights no worse than twice those of a KVP merge, and within a bound of the dtype."""
    errors = {}
    for name, is_dealt in (("ring", True), ("merge", False)):
        plans = [[Chunk(100, 0, 1), Chunk(100, 0, 2, is_dealt), Chunk(120, 0, 2, is_dealt)]]
        (prompt,), _ = wishes(lengths_of(plans))
        first, second = run(workers, folder, plans, (2, 1, 1), dtype=dtype)
        found = torch.stack([(first.hidden | second.hidden)[at] for at in range(len(prompt))])
        want = exact_hidden(folder, prompt, getattr(torch, dtype))
        errors[name] = float((found - want).norm() / want.norm())
    assert errors["ring"] <= min(2 * errors["merge"], most), errors


@torch.inference_mode()
def exact_hidden(folder: Path, prompt: list[int], dtype: torch.dtype) -> torch.Tensor:
    """What goes into the last norm, by transformers in float64 with weights of a dtype."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    for weight in model.parameters():
        weight.copy_(weight.to(dtype))
    found: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: found.append(args[0][0]))
    model(torch.tensor([prompt]))
    return found[0]


@gloo()
def deal_different_rows(row: Row, odd: int) -> str:
    """On each rank: go around with rows that one rank has otherwise; returns what is wrong with it."""
    rank, ring = dist.get_rank(), Ring(merge_of_all(), torch.zeros(0), nullcontext)
    deals = tuple(Deal(row.slot, g, 4, 4 + (rank == odd)) for g in row.groups)
    (shared,) = shared_rows(Batch(7, (row,), deals=deals, group=rank), dealt=True)
    part = torch.zeros(shared.tokens.stop, 2, 8), torch.zeros(shared.tokens.stop, 2)
    with pytest.raises(PlanDivergenceError) as caught:
        ring.attend(shared, [8] * 2, lambda *_: part, compare=True)
    return str(caught.value)


def test_other_rows_on_one_rank_are_a_divergence(workers: WorkerPool) -> None:
    """Who receives from the odd one, and it itself, refuse."""
    messages = workers.run(deal_different_rows, 2, Row(3, 100, 12, False, False, 0, 2, True), 1)
    assert [f"group {other} merges rows of batch 7" in messages[rank] for rank, other in ((0, 1), (1, 0))] == [True] * 2


# -- by the scheduler ------------------------------------------------------------------------------------------

LENGTHS = (700, 33, 500, 90, 1, 610)


def serve_scheduled(folder: Path, options: dict[str, Any]) -> Any:
    """On each rank: the tokens, and whether a chunk was dealt."""
    was_dealt: list[bool] = []
    with LLM(folder, **options) as llm:
        if llm.is_driver:
            llm.engine.on_step = lambda batch, *_: was_dealt.extend(row.is_dealt for row in batch.chunks)
        return generate(llm, *wishes(LENGTHS, (NUM_TOKENS,))), any(was_dealt)


@pytest.mark.parametrize("layout", [(3, 1, 0), (2, 2, 0), (2, 1, 1)], ids=str)
def test_chunks_are_dealt_by_medhas_packer(workers: WorkerPool, folder: Path, layout: tuple[int, int, int]) -> None:
    """Also where decode instances take over what was dealt, whose tokens do not lie in their order."""
    kvp, spp, replicas = layout
    options = {"kvp": kvp, "spp": spp, "max_kv_per_group": 720 // kvp // 16 * 16, "ring": True, "block_size": BLOCK}
    options |= {"num_kv_blocks": 200, "max_batch_tokens": 160, "decode_replicas": replicas}
    found = workers.run(serve_scheduled, kvp * spp + replicas, folder, options)[0]
    assert found == (plain(folder, *LENGTHS), True)
