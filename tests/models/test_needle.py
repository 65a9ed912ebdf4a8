"""The needle model: what it must answer, held to transformers, and the numbers its construction rests on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from medha.models.needle import (
    HEAD_DIM,
    MATCH_LEN,
    NUM_BITS,
    NUM_HEADS,
    NUM_KV_HEADS,
    make_haystack,
    needle_config,
    needle_weights,
    write_needle,
)
from tests.serving import Model

NUM_KEYS = 10_000_000
# exp(-35) times 10M keys is 6e-9, below the rounding of float32.
ONE_HOT_GAP = 35.0
INV_FREQ = needle_config()["rope_theta"] ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))


@pytest.fixture(scope="module")
def model(needle: Model) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(needle.folder)


@pytest.fixture(scope="module")
def tokenizer(needle: Model) -> Any:
    return transformers.AutoTokenizer.from_pretrained(needle.folder)


def greedy(model: Any, ids: list[int], max_tokens: int) -> list[int]:
    with torch.inference_mode():
        out = model.generate(torch.tensor([ids]), max_new_tokens=max_tokens)
    return out[0, len(ids) :].tolist()


def layer1_scores(weights: dict[str, torch.Tensor], head: int, distances: Any, more: Any = 0) -> np.ndarray:
    """Scores of the keys at each distance and ``more``, [distances, more], in units of softmax, in float64.

    Layer 1's query and key before RoPE are the same for every token; as complex numbers they have one for each pair.
    """
    channels, prefix, half = weights["model.embed_tokens.weight"].double(), "model.layers.0.self_attn", HEAD_DIM // 2
    assert torch.equal(weights[f"{prefix}.q_proj.weight"][:, :NUM_BITS], torch.zeros(NUM_HEADS * HEAD_DIM, NUM_BITS))
    q_NH = (weights[f"{prefix}.q_proj.weight"].double() @ channels[0]).view(NUM_HEADS, HEAD_DIM)
    k_KH = (weights[f"{prefix}.k_proj.weight"].double() @ channels[0]).view(NUM_KV_HEADS, HEAD_DIM)
    q, k = q_NH[head].numpy(), k_KH[head // (NUM_HEADS // NUM_KV_HEADS)].numpy()
    product = (q[:half] + 1j * q[half:]) * (k[:half] - 1j * k[half:])
    turns = 1j * INV_FREQ[product != 0]
    far, near = (np.exp(np.multiply.outer(np.atleast_1d(some), turns)) for some in (distances, more))
    return (far * product[product != 0] @ near.T).real / HEAD_DIM**0.5


def test_folder_has_the_files_of_a_model_and_writing_again_replaces_them(needle: Model, tmp_path: Path) -> None:
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    folder, out = needle.folder, write_needle(tmp_path / "deep" / "model")
    for name in names:
        (out / name).write_bytes(b"broken")
    write_needle(out)
    assert {file.name for file in folder.iterdir()} == {file.name for file in out.iterdir()} == names
    assert all((out / name).read_bytes() == (folder / name).read_bytes() for name in names)


TEXTS = ["", "  two  spaces\r\n\ttab é ü 日本語 🙂 <s> </s> Ġ Ċ \x00\x7f\xad", "".join(map(chr, range(0x200)))]


@pytest.mark.parametrize("text", TEXTS, ids=len)
def test_tokenizer_ids_are_bytes_and_round_trip(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 256 and tokenizer.all_special_tokens == []


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("num_tokens", [1023, 2048])
def test_transformers_finds_the_needle(model: Any, tokenizer: Any, num_tokens: int, depth: float) -> None:
    hay = make_haystack(num_tokens, depth=depth, seed=num_tokens)
    ids = tokenizer(hay.prompt).input_ids
    assert len(ids) == num_tokens
    assert tokenizer.decode(greedy(model, ids, 32)) == hay.answer == " 7429-amber.\n"


@pytest.mark.parametrize("num_tokens", [87, 88, 500, 100_000])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_haystack_is_exact_deterministic_and_varied(num_tokens: int, depth: float) -> None:
    hay = make_haystack(num_tokens, depth=depth, seed=5)
    assert hay == make_haystack(num_tokens, depth=depth, seed=5)
    assert len(hay.prompt.encode()) == num_tokens
    before, _, _ = hay.prompt.partition("The vault code of Priya is 7429-amber.\n")
    assert before.endswith("\n") or not before
    assert len(before) <= depth * num_tokens
    assert hay.prompt.count("Priya is") == 2
    if num_tokens == 100_000:
        assert len(before) >= depth * num_tokens - 1000
        assert hay.prompt != make_haystack(num_tokens, depth=depth, seed=6).prompt
        lines = hay.prompt.split("\n")
        assert len(set(lines)) > 0.9 * len(lines)


def test_haystack_that_has_no_room_for_its_fact() -> None:
    with pytest.raises(ValueError, match="num_tokens=50; accepted: 87 or more"):
        make_haystack(50)


def test_layer_1_gap_at_every_distance_to_10m() -> None:
    """Float64, exact angles; each head's scores are those of head 0 shifted by its number."""
    weights = needle_weights()
    scores = layer1_scores(weights, 0, np.arange(0, NUM_KEYS, 2500), np.arange(2500)).flatten()
    assert scores[1] - np.delete(scores, 1).max() >= 1.9 * ONE_HOT_GAP
    distances = np.concatenate([np.arange(50.0), np.logspace(2, 7, 100).round()])
    for head in range(1, NUM_HEADS):
        shifted = layer1_scores(weights, 0, distances - head)
        assert np.allclose(layer1_scores(weights, head, distances), shifted, rtol=0, atol=1e-2), head


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layer_2_gap_of_any_bit_at_any_distance(dtype: torch.dtype) -> None:
    """A full match 10M tokens away beats a near one with any one bit wrong, and never loses to itself turned."""
    weights = needle_weights()
    generator = torch.Generator().manual_seed(2)
    num_codes = NUM_BITS * MATCH_LEN
    query = torch.randint(0, 2, (num_codes,), generator=generator) * 2.0 - 1.0
    hidden_q = torch.zeros(256)
    hidden_q[:num_codes] = query
    hidden_k = torch.zeros(num_codes + 1, 256)
    hidden_k[:, NUM_BITS : NUM_BITS + num_codes] = query
    flips = torch.arange(num_codes)
    hidden_k[flips, NUM_BITS + flips] *= -1
    inv_freq = torch.from_numpy(INV_FREQ).to(dtype)
    prefix = "model.layers.1.self_attn"
    q_NH = (weights[f"{prefix}.q_proj.weight"] @ hidden_q).view(NUM_HEADS, HEAD_DIM).to(dtype)
    k_MKH = (hidden_k @ weights[f"{prefix}.k_proj.weight"].T).view(-1, NUM_KV_HEADS, HEAD_DIM).to(dtype)

    def rotate(x: torch.Tensor, position: int) -> torch.Tensor:
        angle = (position * inv_freq).repeat(2)
        first, second = x.chunk(2, dim=-1)
        return x * angle.cos() + torch.cat([-second, first], dim=-1) * angle.sin()

    for distance in [1, 1000, 1_000_000, NUM_KEYS]:
        for head in range(NUM_HEADS):
            q = rotate(q_NH[head], NUM_KEYS)
            keys = k_MKH[:, head // (NUM_HEADS // NUM_KV_HEADS)]
            far = rotate(keys[-1], NUM_KEYS - distance) @ q / HEAD_DIM**0.5
            near = rotate(keys[:-1], NUM_KEYS - 1) @ q / HEAD_DIM**0.5
            assert far - near.max() >= 1.2 * ONE_HOT_GAP, (distance, head)


@torch.no_grad()
def test_every_head_of_layer_2_is_needed(model: Any) -> None:
    """A query head that reads the wrong values, or none, changes the answer."""
    hay = make_haystack(700)
    ids, expected = list(hay.prompt.encode()), list(hay.answer.encode())
    for head, part in enumerate(model.model.layers[1].self_attn.o_proj.weight.split(HEAD_DIM, dim=1)):
        part.neg_()
        assert greedy(model, ids, len(expected)) != expected, head
        part.neg_()
    assert greedy(model, ids, len(expected)) == expected
