"""The random model of the plain forward, which ``medha verify`` holds to the engine, and others to transformers."""

import torch

from medha.models.reference import llama_config, next_token_logprobs, random_weights


def test_attention_of_the_random_model_is_far_from_an_average() -> None:
    """Otherwise an error of the merge would hardly show: a changed early token must move the last log-probabilities."""
    config = llama_config(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=256, dtype="float32"
    )
    weights = random_weights(config, seed=0)
    ids = torch.randint(0, 512, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    moved = [(token + 1) % 512 if i < 256 else token for i, token in enumerate(ids)]
    last, moved_last = (next_token_logprobs(config, weights, tokens)[-1] for tokens in (ids, moved))
    assert float((last - moved_last).abs().max()) > 0.5
