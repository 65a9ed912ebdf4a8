"""One decoder for Llama, Mistral, Qwen2 and Qwen3, whole or a run of its layers.

The module's parameter names are those of the Hugging Face checkpoint, with each layer under its index in the whole
model, so a stage of a pipeline is built by naming its layers and loads with the same code. How a forward is batched,
where keys and values live and how attention runs are not its concern: see :mod:`medha.runner`.

Legend: T tokens, D model dimension, N query heads, K KV heads, H head dimension, R = H / 2, V vocabulary, S rows to
sample.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from medha.config import ModelConfig
from medha.models.layers import DecoderLayer, LinearFn, RMSNorm, packed_weight

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
        body: dict[str, nn.Module] = {"layers": nn.ModuleDict({str(i): DecoderLayer(config) for i in layers})}
        if self.has_embedding or tied_head:
            body["embed_tokens"] = nn.Embedding(config.vocab_size, config.hidden_size)
        if self.has_head:
            body["norm"] = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.model = nn.ModuleDict(body)
        self.lm_head: nn.Linear | None = None
        if self.has_head and not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._head: LinearFn | None = None

    @property
    def num_layers(self) -> int:
        """Layers held here."""
        return len(self.model["layers"])  # type: ignore[arg-type]

    def embed(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Token ids (int64) to hidden states [T, D]."""
        return F.embedding(ids_T, self._embedding_weight)

    def forward(
        self, x_TD: torch.Tensor, cos_TR: torch.Tensor, sin_TR: torch.Tensor, attend: LayerAttendFn
    ) -> torch.Tensor:
        """Run the layers held here.

        Args:
            x_TD: embedded tokens, or hidden states of the layer before.
            cos_TR, sin_TR: float32 rotation of each token's position.
            attend: writes the new keys and values of a layer and attends over all of them.

        Returns:
            Hidden states [T, D], not normed.
        """
        for i, layer in enumerate(self.model["layers"].values()):  # type: ignore[operator]
            x_TD = layer(x_TD, cos_TR, sin_TR, partial(attend, i))
        return x_TD

    def logits(self, x_SD: torch.Tensor) -> torch.Tensor:
        """Final norm and head of the given rows: float32 [S, V]."""
        x_SD = self.model["norm"](x_SD)
        if self._head is not None:
            return self._head(x_SD).float()
        weight = self._embedding_weight if self.lm_head is None else self.lm_head.weight
        return F.linear(x_SD, weight).float()

    def pack_(self) -> None:
        """Fuse and pack all linear weights in place, layer by layer; the plain ones are dropped."""
        for layer in self.model["layers"].values():  # type: ignore[operator]
            layer.self_attn.pack_()
            layer.mlp.pack_()
        if self.has_head:
            self._head = packed_weight(
                (self._embedding_weight if self.lm_head is None else self.lm_head.weight).detach()
            )
            self.lm_head = None

    @property
    def _embedding_weight(self) -> torch.Tensor:
        weight = self.model["embed_tokens"].weight
        assert isinstance(weight, torch.Tensor)
        return weight


def build_decoder(
    config: ModelConfig, *, dtype: torch.dtype, device: torch.device, layers: range | None = None
) -> Decoder:
    """A decoder with uninitialised parameters, for a loader to fill."""
    with torch.device("meta"):
        decoder = Decoder(config, layers).to(dtype)
    decoder.requires_grad_(False)
    return decoder.to_empty(device=device).eval()


def fill_random_(decoder: Decoder, *, seed: int, std: float = 0.02) -> None:
    """Fill every parameter in place with seeded normal numbers, norms with ones: weights for benchmarks."""
    generator = torch.Generator(device=next(decoder.parameters()).device).manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, std, generator=generator)
