"""Greedy tokens and logits against Hugging Face transformers on the same weights; tests/fuzz draws schedules for them.

Tokens are compared with transformers as it is. Logits are compared with transformers given the same rotary angles:
it computes them in float32, which at position 3,000 already moves logits by 1.3e-4 relative (medha's are within
4e-6 of a float64 run); ``test_medha_is_closer_to_float64`` shows that this is the reference's rounding and not ours.
"""

import copy
import types
from pathlib import Path

import pytest
import torch
import transformers

from medha.config import RopeConfig
from medha.models.layers import inverse_frequencies
from tests.checkpoints import FAMILIES, make_checkpoint, random_prompt, reference_logits
from tests.engines import load_decoder, make_engine, run_with_logits
from tests.serving import NUM_TOKENS, greedy_of

LENGTHS = (1, 2, 33, 257, 1000, 3000)
LOGIT_TOLERANCE = 1e-4  # relative to the largest logit


def use_exact_angles(model: transformers.PreTrainedModel, rope: RopeConfig, head_dim: int) -> None:
    """Give a transformers model rotary angles computed in float64."""
    inv_freq = inverse_frequencies(rope, head_dim)

    def forward(self, x, position_ids, *args, **kwargs):  # type: ignore[no-untyped-def]
        angles = position_ids[..., None].double() * inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        scaling = self.attention_scaling
        return (angles.cos() * scaling).to(x.dtype), (angles.sin() * scaling).to(x.dtype)

    rotary = model.model.rotary_emb
    rotary.forward = types.MethodType(forward, rotary)


def relative_error(logits: torch.Tensor, reference: torch.Tensor) -> float:
    return float((logits - reference).abs().max() / reference.abs().max())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_matches_transformers(family: str, tied: bool, tmp_path: Path) -> None:
    """Tied weights are the table's and the head's alone, so long prompts are those of the untied ones."""
    reference = make_checkpoint(tmp_path, family, tied=tied, seed=SEEDS.get((family, tied), 0))
    prompts = [random_prompt(length, seed=7) for length in (LENGTHS[:4] if tied else LENGTHS)]
    expected = greedy_of(reference, prompts, NUM_TOKENS)

    decoder = load_decoder(tmp_path)
    engine = make_engine(decoder, num_blocks=80, chunk_size=97, max_batch_tokens=160)
    tokens, logits = run_with_logits(engine, prompts, NUM_TOKENS)
    assert tokens == expected

    use_exact_angles(reference, decoder.config.rope, decoder.config.head_dim)
    for prompt, said, ours in zip(prompts, tokens, logits, strict=True):
        theirs = reference_logits(reference, prompt + said[:-1])[-NUM_TOKENS:]
        assert relative_error(ours, theirs) < LOGIT_TOLERANCE


# Seeds at which every gap exceeds MIN_GAP, where 0 is not one.
SEEDS = {("llama-linear", False): 1, ("llama-bias", True): 1, ("mistral", True): 2, ("qwen3", True): 1}


def test_medha_is_closer_to_float64(tmp_path: Path) -> None:
    reference, prompt = make_checkpoint(tmp_path, "mistral"), random_prompt(3000, seed=7)
    decoder = load_decoder(tmp_path)
    exact = copy.deepcopy(reference).double()
    use_exact_angles(exact, decoder.config.rope, decoder.config.head_dim)
    with torch.inference_mode():
        truth = exact(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1].float()
        theirs = reference(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1]
    engine = make_engine(decoder, num_blocks=80, chunk_size=97, max_batch_tokens=160)
    _, (ours,) = run_with_logits(engine, [prompt], 1)
    assert relative_error(ours[0], truth) < 1e-5
    assert relative_error(ours[0], truth) < relative_error(theirs, truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_low_precision_stays_near_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    reference, prompt = make_checkpoint(tmp_path, "llama-llama3"), random_prompt(300, seed=7)
    with torch.inference_mode():
        truth = reference(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1]
        theirs = copy.deepcopy(reference).to(dtype)(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1].float()
    engine = make_engine(load_decoder(tmp_path, dtype=dtype), dtype=dtype, chunk_size=97, max_batch_tokens=160)
    _, (ours,) = run_with_logits(engine, [prompt], 1)
    assert relative_error(ours[0], truth) < max(2 * relative_error(theirs, truth), 2e-2)
