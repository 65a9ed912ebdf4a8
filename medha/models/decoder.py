"""One decoder for Llama, Mistral, Qwen2 and Qwen3, whole or a run of its layers.

The module's parameter names are those of the Hugging Face checkpoint, with each layer under its index in the whole
model, so a stage of a pipeline is built by naming its layers and loads with the same code. How a forward is batched,
where keys and values live and how attention runs are not its concern: see :mod:`medha.worker.runner`.

Legend: T tokens, D model dimension, N query heads, K KV heads, H head dimension, R = H / 2, V vocabulary, S rows to
sample.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import nn

from medha.config import ModelConfig
from medha.errors import ConfigError
from medha.models.layers import (
    FusedKernels,
    LinearFn,
    RMSNorm,
    TensorShard,
    decoder_layers,
    local_part,
    packed_weight,
    rotation,
)

LayerAttendFn = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(index among the layers held here, q_TNH, k_TKH, v_TKH) -> out_TNH."""


class Decoder(nn.Module):
    """A run of decoder layers, with the embedding before the first and the head after the last.

    Args:
        config: the whole model.
        layers: which layers, as indices in the whole model; all by default.
    """

    def __init__(self, config: ModelConfig, layers: range | None = None) -> None:
        super().__init__()
        layers = range(config.num_layers) if layers is None else layers
        self.config = config
        self.has_embedding = layers.start == 0
        self.has_head = layers.stop == config.num_layers
        tied_head = self.has_head and config.tie_word_embeddings
        body: dict[str, nn.Module] = {"layers": decoder_layers(config, layers)}
        if self.has_embedding or tied_head:
            V, D = config.vocab_size, config.hidden_size
            body["embed_tokens"] = nn.Embedding(V, D, _weight=torch.empty(V, D))  # drawn ones load torch's compiler
        if self.has_head:
            body["norm"] = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.model = nn.ModuleDict(body)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if self.has_head else None
        self.tie_()
        self._embed: LinearFn | None = None
        self.head: LinearFn | None = None  # packed: of this rank's part of the vocabulary, [S, D] to [S, W]
        self._gather: LinearFn | None = None  # those of all ranks
        self.fused: FusedKernels | None = None

    def tie_(self) -> None:
        """Let the head share the embedding's parameter, where the model ties them; again after parameters moved."""
        if self.lm_head is not None and self.config.tie_word_embeddings:
            self.lm_head.weight = self.model["embed_tokens"].weight  # type: ignore[assignment]

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Token ids (int64) to hidden states [T, D]."""
        hidden: torch.Tensor = (self._embed or self.model["embed_tokens"])(ids_T)
        return hidden

    def forward(self, x_TD: torch.Tensor, cos_sin_TH: torch.Tensor, attend: LayerAttendFn) -> torch.Tensor:
        """Run the layers held here; returns hidden states [T, D], not normed.

        Args:
            x_TD: embedded tokens, or hidden states of the layer before; fused kernels take their memory.
            cos_sin_TH: float32 rotation of each token's position, of :func:`medha.models.layers.cos_sin`.
            attend: writes the new keys and values of a layer and attends over all of them.
        """
        rotate_both, more_TD = rotation(cos_sin_TH, self.fused), None
        for i, layer in enumerate(self.model["layers"].values()):  # type: ignore[operator]
            x_TD, more_TD = layer(x_TD, more_TD, rotate_both, partial(attend, i))
        return x_TD if more_TD is None else x_TD + more_TD

    def logits(
        self, x_SD: torch.Tensor, into: torch.Tensor | None = None, *, head: LinearFn | None = None
    ) -> torch.Tensor:
        """Final norm and head of the given rows: float32 [S, V], whole on every rank; ``into`` is where they go.
        ``head`` computes what this rank's does, if given."""
        head = head or self.head or self.lm_head
        assert head is not None, "this stage has no head"
        logits = head(self.model["norm"](x_SD))
        if self._gather is not None and len(logits):
            logits = self._gather(logits)[:, : self.config.vocab_size]
        return logits.float() if into is None else into.copy_(logits)

    def pack_(self, shard: TensorShard | None = None, fused: FusedKernels | None = None) -> None:
        """Fuse and pack this rank's linear weights in place, layer by layer; the plain ones are dropped. What ``fused``
        has a function for it computes, if given."""
        self.fused = fused
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.fused = fused
        for layer in self.model["layers"].values():  # type: ignore[operator]
            layer.self_attn.pack_(shard, fused)
            layer.mlp.pack_(shard, fused)
        if self.has_embedding and shard is not None:
            rows_VD = local_part(cast(torch.Tensor, self.model["embed_tokens"].weight))
            self._embed = _vocab_parallel_embedding(rows_VD, self.config.vocab_size, shard)
        if self.lm_head is not None:
            rows_VD = local_part(self.lm_head.weight)
            if shard is not None:  # split evenly, the last ranks' parts padded to the width of the first
                width = -(-self.config.vocab_size // shard.size)
                rows_VD, self._gather = F.pad(rows_VD, (0, 0, 0, width - len(rows_VD))), shard.all_gather
            self.head, self.lm_head = packed_weight(rows_VD, fused=fused), None


def _vocab_parallel_embedding(rows_VD: torch.Tensor, vocab_size: int, shard: TensorShard) -> LinearFn:
    """Embedding whose rows are split: each rank looks up its own, zeros elsewhere, summed."""
    first = shard.rank * -(-vocab_size // shard.size)

    def embed(ids_T: torch.Tensor) -> torch.Tensor:
        index = ids_T - first
        absent = (index < 0) | (index >= len(rows_VD))
        return shard.all_reduce(F.embedding(index.masked_fill(absent, 0), rows_VD).masked_fill_(absent[:, None], 0.0))

    return embed


def build_decoder(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    layers: range | None = None,
    parallelize_: Callable[[Decoder], None] | None = None,
) -> Decoder:
    """A decoder with uninitialised parameters, for a loader to fill.

    Args:
        config: the whole model.
        dtype, device: of the parameters.
        layers: which layers; all by default.
        parallelize_: turns parameters into DTensors, in place, while they are still without memory.
    """
    with torch.device("meta"):
        decoder = Decoder(config, layers).to(dtype)
    decoder.requires_grad_(False)
    if parallelize_ is not None:
        parallelize_(decoder)
    named = list(decoder.named_parameters())
    num_bytes = sum(local_part(parameter).nbytes for _, parameter in named)
    try:
        # As ``to_empty``, which imports sympy; a tied head's is the embedding's.
        weights = {name: parameter.new_empty(parameter.shape, device=device) for name, parameter in named}
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        what = f"the weights held here take {num_bytes} bytes on {device}, which does not give them ({reason})"
        raise ConfigError(f"{what}; accepted: a smaller model or dtype, or more ranks") from error
    decoder.load_state_dict(weights, strict=False, assign=True)
    decoder.tie_()
    return decoder.eval()


def fill_random_(decoder: Decoder, *, seed: int, std: float = 0.02) -> None:
    """Fill every parameter in place with seeded normal numbers, norms with ones: weights for benchmarks."""
    generator = torch.Generator(device=next(decoder.parameters()).device).manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            local_part(parameter).normal_(0.0, std, generator=generator)  # of a DTensor all ranks would have to


TP_PLAN: dict[str, Literal["column", "row", "vocab", "gathered"]] = {
    "model.embed_tokens": "vocab",
    **{f"model.layers.*.self_attn.{name}_proj": "column" for name in "qkv"},
    "model.layers.*.self_attn.o_proj": "row",
    **{f"model.layers.*.mlp.{name}_proj": "column" for name in ("gate", "up")},
    "model.layers.*.mlp.down_proj": "row",
    "lm_head": "gathered",
}
"""How tensor parallelism splits parameters. ``column``: output features, output stays split. ``row``: input features,
output summed. ``vocab``: rows of the embedding, output summed. ``gathered``: output features, output gathered."""
