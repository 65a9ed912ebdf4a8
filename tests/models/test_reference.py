"""The plain forward against transformers, on the checkpoints that it writes itself."""

from pathlib import Path

import pytest
import torch
import transformers

from medha.models.reference import llama_config, next_token_logprobs, random_weights, write_checkpoint


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (4, 4), (4, 1)])
def test_against_transformers(tmp_path: Path, num_heads: int, num_kv_heads: int) -> None:
    config = llama_config(
        num_layers=3, num_heads=num_heads, num_kv_heads=num_kv_heads, intermediate_size=96, dtype="float32"
    )
    weights = random_weights(config, seed=1)
    folder = write_checkpoint(tmp_path / "model", config, weights)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    ids = torch.randint(0, 512, (200,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = torch.log_softmax(theirs(ids[None]).logits[0], dim=-1)
    ours = next_token_logprobs(config, weights, ids.tolist())
    # transformers has its rotary angles in float32
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-3)
    assert float((ours - expected).abs().mean()) < 2e-5


def test_attention_of_the_random_model_is_far_from_an_average() -> None:
    """Otherwise an error of the merge would hardly show: a changed early token must move the last log-probabilities."""
    config = llama_config(num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=256, dtype="float32")
    weights = random_weights(config, seed=0)
    ids = torch.randint(0, 512, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    moved = [(token + 1) % 512 if i < 256 else token for i, token in enumerate(ids)]
    last, moved_last = (next_token_logprobs(config, weights, tokens)[-1] for tokens in (ids, moved))
    assert float((last - moved_last).abs().max()) > 0.5
