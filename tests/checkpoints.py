"""Random Hugging Face checkpoints of each family, and what transformers says about them.

Weights are drawn at ``initializer_range`` 0.2 with perturbed norms and biases: at 0.02 the outputs hardly depend on
attention, and half the prompts do not notice a merge with the wrong base.
"""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models.hf_folders import LLAMA3, SHAPE, YARN

VOCAB = 211
BASE = SHAPE | {"vocab_size": VOCAB, "num_hidden_layers": 3, "initializer_range": 0.2}
BASE |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3 | {"rope_theta": 500000.0}}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN | {"rope_theta": 10000.0}}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "llama-bias": ("Llama", {"attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}
"""How transformers' classes of a family are called, and what sets it apart."""


def make_checkpoint(
    folder: Path,
    family: str,
    *,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shard_size: str | None = None,
    **shape: Any,
) -> transformers.PreTrainedModel:
    """Write a random checkpoint of a family into ``folder``; returns the transformers model in eval mode.

    With ``shard_size``, as transformers takes it, in files of about so many bytes.
    """
    name, options = FAMILIES[family]
    torch.manual_seed(seed)
    fields = {**BASE, **options, "tie_word_embeddings": tied, **shape}
    config = getattr(transformers, f"{name}Config")(**fields)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
    model.to(dtype).save_pretrained(folder, **({} if shard_size is None else {"max_shard_size": shard_size}))
    return model.to(dtype)


@torch.inference_mode()
def reference_logits(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Logits of transformers for every position, float32 [len(ids), V]."""
    return model(torch.tensor([ids])).logits[0].float()


@torch.inference_mode()
def reference_greedy(model: transformers.PreTrainedModel, ids: list[int], num_tokens: int) -> tuple[list[int], float]:
    """Greedy continuation by transformers with its KV cache, and the smallest gap between first and second logit."""
    output, tokens, gaps = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1), [], []
    for _ in range(num_tokens):
        (first, second), (token, _) = output.logits[0, -1].float().topk(2)
        tokens.append(int(token))
        gaps.append(float(first - second))
        output = model(torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values, use_cache=True)
    return tokens, min(gaps)


def random_prompt(length: int, *, seed: int, vocab: int = VOCAB) -> list[int]:
    """Seeded random token ids."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + length)
    return torch.randint(0, vocab, (length,), generator=generator).tolist()
