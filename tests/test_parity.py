"""Greedy tokens and logits against Hugging Face transformers on the same weights, and independence of the schedule.

Tokens are compared with transformers as it is. Logits are compared with its run in float64, with angles to match: it
computes them in float32, which at position 3,000 already moves logits by 1.3e-4 relative.
"""

import copy
import types
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st

import medha.attention.torch_backend as torch_backend
from medha.attention.interface import AttentionRows
from medha.attention.merge import merge_partials
from medha.attention.torch_backend import TorchBackend
from medha.batch import Batch
from medha.config import RopeConfig
from medha.models.layers import inverse_frequencies
from medha.params import SamplingParams
from medha.worker.step_input import Slots, StepInput
from tests.checkpoints import FAMILIES, make_checkpoint, random_prompt, reference_logits
from tests.engines import load_decoder, make_engine, run_to_end, run_with_logits
from tests.serving import NUM_TOKENS, Case, greedy_of

LENGTHS = (1, 2, 33, 257, 1000, 3000)
LOGIT_TOLERANCE = 1e-5  # relative to the largest logit


def in_float64(model: transformers.PreTrainedModel, rope: RopeConfig, head_dim: int) -> transformers.PreTrainedModel:
    """A copy of a transformers model that computes all, rotary angles too, in float64."""
    inv_freq = inverse_frequencies(rope, head_dim)

    def forward(self, x, position_ids, *args, **kwargs):  # type: ignore[no-untyped-def]
        angles = position_ids[..., None].double() * inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        scaling = self.attention_scaling
        return (angles.cos() * scaling).to(x.dtype), (angles.sin() * scaling).to(x.dtype)

    exact = copy.deepcopy(model).double()
    exact.model.rotary_emb.forward = types.MethodType(forward, exact.model.rotary_emb)
    return exact


def relative_error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    return float((logits - reference).abs().max() / reference.abs().max())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_matches_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    """Tied weights are the table's and the head's alone, so long prompts are those of the untied ones; the longest are
    for families that stretch RoPE."""
    stretches = "rope_parameters" in FAMILIES[family][1]
    lengths = LENGTHS[:4] if tied else LENGTHS if stretches else LENGTHS[:5]
    reference = make_checkpoint(tmp_path, family, tied=tied, seed=SEEDS.get((family, tied), 0))
    prompts = [random_prompt(length, seed=7) for length in lengths]
    expected = greedy_of(reference, prompts, NUM_TOKENS)

    decoder = load_decoder(tmp_path)
    engine = make_engine(decoder, num_blocks=80, chunk_size=97, max_batch_tokens=160)
    tokens, logits = run_with_logits(engine, prompts, NUM_TOKENS)
    assert tokens == expected

    exact = in_float64(reference, decoder.config.rope, decoder.config.head_dim)
    for prompt, said, ours in zip(prompts, tokens, logits, strict=True):
        theirs = reference_logits(exact, prompt + said[:-1])[-NUM_TOKENS:]
        assert relative_error(ours, theirs) < LOGIT_TOLERANCE


# Seeds at which every gap exceeds MIN_GAP, where 0 is not one.
SEEDS = {("llama-linear", False): 1, ("llama-bias", True): 1, ("mistral", True): 2, ("qwen3", True): 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_low_precision_stays_near_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    reference, prompt = make_checkpoint(tmp_path, "llama-llama3"), random_prompt(300, seed=7)
    with torch.inference_mode():
        truth = reference(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1]
        theirs = copy.deepcopy(reference).to(dtype)(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1].float()
    engine = make_engine(load_decoder(tmp_path, dtype=dtype), dtype=dtype, chunk_size=97, max_batch_tokens=160)
    _, (ours,) = run_with_logits(engine, [prompt], 1)
    assert relative_error(ours[0], truth) < max(2 * relative_error(theirs, truth), 2e-2)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_schedule_never_changes_tokens(case: Case, data: st.DataObject) -> None:
    """Any order, chunking, company, depth, block size and tight pool, with other requests aborted on the way."""
    draw = data.draw
    block_size = draw(st.sampled_from([1, 16, 48, 256]), "block_size")
    async_scheduling = draw(st.booleans(), "async_scheduling")
    chunk_size = draw(st.sampled_from([1, 2, 3]) | st.integers(1, 200), "chunk_size")
    engine = make_engine(
        case.decoder,
        block_size=block_size,
        num_blocks=-(-draw(st.sampled_from([706, 900, 3000]), "pool tokens") // block_size),
        chunk_size=chunk_size,
        max_batch_tokens=draw(st.integers(8, 256), "max_batch_tokens"),
        max_num_seqs=draw(st.integers(1, 8), "max_num_seqs"),
        depth=draw(st.sampled_from([1, 2, 4]), "depth"),
        async_scheduling=async_scheduling,
    )
    readable = range(len(case.prompts) - 3 * (chunk_size < 4))  # hundreds of steps are as good as thousands
    chosen = draw(st.lists(st.sampled_from(readable), min_size=1, max_size=5), "requests")
    arrive_at = draw(st.lists(st.integers(0, 12), min_size=len(chosen), max_size=len(chosen)), "arrival steps")
    abort_at = draw(st.integers(0, 10), "abort step")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, output_kind="final_only")
    waiting = sorted(zip(arrive_at, range(len(chosen)), strict=True))
    engine.add_request("aborted", random_prompt(100 * min(chunk_size, 4), seed=9), params)
    tokens: dict[str, list[int]] = {}
    step = 0
    while waiting or engine.has_unfinished:
        while waiting and waiting[0][0] <= step:
            _, i = waiting.pop(0)
            engine.add_request(str(i), case.prompts[chosen[i]], params)
        if step == abort_at:
            engine.abort("aborted")
        for output in engine.step():
            tokens[output.request_id] = output.outputs[0].token_ids
        step += 1
    assert [tokens[str(i)] for i in range(len(chosen))] == [case.expected[c] for c in chosen]
    assert engine.scheduler.memory.num_used == 0


# -- the suite notices the errors it is there for: each seeded defect must turn it red -------------------------

LOG2_E = 1.4426950408889634
plan = TorchBackend.plan
prepare = Slots.prepare


def check_parity(case: Case) -> None:
    """The shortest form of the parity test: three prompts, small chunks, small blocks."""
    engine = make_engine(case.decoder, chunk_size=37, max_batch_tokens=96, block_size=16, num_blocks=100)
    assert run_to_end(engine, case.prompts[3:], NUM_TOKENS) == case.expected[3:]


def base_2_lse(patch: pytest.MonkeyPatch) -> None:
    def merge(partials: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        return merge_partials([(out, lse * LOG2_E) for out, lse in partials])

    patch.setattr(torch_backend, "merge_partials", merge)


def dropped_block(patch: pytest.MonkeyPatch) -> None:
    """Every request that has more than a block before its chunk loses its first one."""

    def without_first_block(rows: AttentionRows) -> AttentionRows:
        drops = rows.kv_len - rows.q_len > rows.page_size
        tables = np.split(rows.pages, rows.page_indptr[1:-1])
        kept = [table[1:] if drop else table for table, drop in zip(tables, drops, strict=True)]
        return AttentionRows.of(rows.q_len, rows.kv_len - drops * rows.page_size, rows.causal, kept, rows.page_size)

    patch.setattr(TorchBackend, "plan", lambda self, rows: plan(self, without_first_block(rows)))


def shifted_pages(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TorchBackend, "plan", lambda self, rows: plan(self, replace(rows, pages=rows.pages + 1)))


def position_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """In every chunk but the first: a shift of all positions alike would be invisible to RoPE."""

    def shifted(self: Slots, batch: Batch) -> StepInput:
        step = prepare(self, batch)
        step.positions += np.concatenate([np.full(row.q_len, int(row.position > 0)) for row in batch.rows])
        return step

    patch.setattr(Slots, "prepare", shifted)


def test_mutations_turn_parity_red(case: Case) -> None:
    """And only they do."""
    for mutate in (base_2_lse, dropped_block, shifted_pages, position_off_by_one):
        with pytest.MonkeyPatch.context() as patch:
            mutate(patch)
            with pytest.raises(AssertionError):
                check_parity(case)
    check_parity(case)
