"""The decoder against transformers with the same random weights, whole, packed and in stages."""

from itertools import combinations, pairwise
from typing import NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file

from medha.config import ModelConfig, RopeConfig
from medha.models.decoder import Decoder, build_decoder, fill_random_
from medha.models.hf_config import load_model_config
from medha.models.layers import OWN_KERNELS, cos_sin, inverse_frequencies
from medha.models.reference import llama_config, next_token_logprobs, random_weights
from medha.verify.kernels import dense_attention
from tests.checkpoints import FAMILIES, VOCAB, make_checkpoint, random_prompt, reference_logits
from tests.commands import run_python

CPU = torch.device("cpu")
NUM_TOKENS = 40
RELATIVE = 1e-4  # of the largest logit, float32


class Checkpoint(NamedTuple):
    config: ModelConfig
    weights: dict[str, torch.Tensor]
    reference: transformers.PreTrainedModel


@pytest.fixture(scope="module", params=[(name, tied) for name in FAMILIES for tied in (False, True)], ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    family, tied = request.param
    folder = tmp_path_factory.mktemp(family)
    reference = make_checkpoint(folder, family, tied=tied)
    return Checkpoint(load_model_config(folder), load_file(folder / "model.safetensors"), reference)


def build(checkpoint: Checkpoint, layers: range | None = None) -> Decoder:
    decoder = build_decoder(checkpoint.config, dtype=torch.float32, device=CPU, layers=layers)
    for name, parameter in decoder.named_parameters():
        parameter.copy_(checkpoint.weights[name])
    return decoder


def causal_attend(_: int, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor) -> torch.Tensor:
    return dense_attention(q_TNH, k_TKH, v_TKH, causal=True)[0].to(q_TNH.dtype)


@torch.inference_mode()
def logits(stages: list[Decoder], ids: list[int]) -> torch.Tensor:
    """Logits of every position, float32 [len(ids), V], through a chain of decoders."""
    config = stages[0].config
    inv_freq = inverse_frequencies(config.rope, config.head_dim)
    angles = cos_sin(torch.arange(len(ids)), inv_freq, config.rope.attention_factor)
    x = stages[0].embed(torch.tensor(ids))
    for stage in stages:
        x = stage(x, angles, causal_attend)
    return stages[-1].logits(x)


# -- the whole model -------------------------------------------------------------------------------------------


def test_logits_of_transformers(checkpoint: Checkpoint) -> None:
    """By torch, by oneDNN, and by our own kernels."""
    decoders = [build(checkpoint) for _ in range(3)]
    for decoder, fused in zip(decoders[1:], (None, OWN_KERNELS), strict=True):
        decoder.pack_(fused=fused)
        assert all("norm" in name or "embed_tokens" in name for name, _ in decoder.named_parameters())
    for length, seed in ((NUM_TOKENS, 1), (NUM_TOKENS, 2), (1, 2)):
        ids = random_prompt(length, seed=seed)
        want = reference_logits(checkpoint.reference, ids)
        for got in (logits([decoder], ids) for decoder in decoders):
            assert got.dtype == torch.float32 and want.shape == (length, VOCAB)
            torch.testing.assert_close(got, want, rtol=0, atol=RELATIVE * float(want.abs().max()))
            assert torch.equal(got.argmax(-1), want.argmax(-1))


# -- stages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_stages_in_a_row_are_the_whole(checkpoint: Checkpoint, packed: bool) -> None:
    runs = {layers: build(checkpoint, range(*layers)) for layers in combinations(range(4), 2)}
    for decoder in runs.values() if packed else ():
        decoder.pack_(fused=OWN_KERNELS)
    ids = random_prompt(NUM_TOKENS, seed=4)
    whole = logits([runs[0, 3]], ids)
    for cuts in ((0, 1, 3), (0, 2, 3), (0, 1, 2, 3)):
        assert torch.equal(logits([runs[layers] for layers in pairwise(cuts)], ids), whole)


def test_a_stage_holds_only_its_own_weights(checkpoint: Checkpoint) -> None:
    embedding, ends = "model.embed_tokens.weight", {"model.norm.weight", "lm_head.weight"}
    for i, is_first, is_last in ((0, True, False), (1, False, False), (2, False, True)):
        stage = Decoder(checkpoint.config, range(i, i + 1))
        wanted = {name for name in checkpoint.weights if name.startswith(f"model.layers.{i}.")}
        wanted |= {embedding} if is_first or (is_last and checkpoint.config.tie_word_embeddings) else set()
        wanted |= ends & set(checkpoint.weights) if is_last else set()
        assert {name for name, _ in stage.named_parameters()} == wanted
        assert (stage.has_embedding, stage.has_head) == (is_first, is_last)


# -- building and layers ---------------------------------------------------------------------------------------


def test_build_and_random_fill() -> None:
    config = ModelConfig("Qwen2ForCausalLM", VOCAB, 64, 96, 3, 4, 2, 16, 64, RopeConfig(), qkv_bias=True)
    decoder = build_decoder(config, dtype=torch.bfloat16, device=CPU)
    fill_random_(decoder, seed=1, std=0.02)
    assert not decoder.training
    for name, tensor in decoder.state_dict().items():
        assert tensor.dtype == torch.bfloat16 and not tensor.requires_grad
        assert torch.equal(tensor, torch.ones_like(tensor)) if "norm" in name else tensor.float().std() > 0.01
    assert float(decoder.state_dict()["lm_head.weight"].float().std()) == pytest.approx(0.02, rel=0.05)


def test_attention_of_the_random_model_is_far_from_an_average() -> None:
    """That of ``medha verify``; otherwise an error of the merge would hardly show: a changed early token must move the
    last log-probabilities."""
    config = llama_config(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256, dtype="float32"
    )
    weights = random_weights(config, seed=0)
    ids = torch.randint(0, 512, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    moved = [(token + 1) % 512 if i < 256 else token for i, token in enumerate(ids)]
    last, moved_last = (next_token_logprobs(config, weights, tokens)[-1] for tokens in (ids, moved))
    assert float((last - moved_last).abs().max()) > 0.5


ROWS_OF_MANY_LENGTHS = """
import torch
from medha.models.layers import packed_weight

def mebibytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20

torch.set_num_threads(1)
linears = [packed_weight(torch.randn(size, 64)) for size in (64, 96, 128)]
rows = torch.randn(300, 64)
for number in range(5, 60):
    [linear(rows[:number]) for linear in linears]
before = mebibytes()
for number in range(60, 260):
    [linear(rows[:number]) for linear in linears]
print(mebibytes() - before)
"""


def test_batches_of_many_lengths_take_no_more_memory_each() -> None:
    """oneDNN compiles a kernel for each number of rows: 0.2 MB each, of which it would keep 1,024 twice."""
    done = run_python("-c", ROWS_OF_MANY_LENGTHS)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 40.0
