"""How a decoder splits over tensor-parallel ranks, as data: the one place that states it.

:mod:`medha.parallel.tp` turns the plan into DTensor placements; loading and the fast path read those placements.
Source: column and row split of a layer as in Megatron-LM (arXiv 1909.08053).
"""

from __future__ import annotations

from typing import Literal

Split = Literal["column", "row", "vocab", "gathered"]
"""``column``: output features, output stays split. ``row``: input features, output summed. ``vocab``: rows of the
embedding, output summed. ``gathered``: output features, output gathered."""

TP_PLAN: dict[str, Split] = {
    "model.embed_tokens": "vocab",
    "model.layers.*.self_attn.q_proj": "column",
    "model.layers.*.self_attn.k_proj": "column",
    "model.layers.*.self_attn.v_proj": "column",
    "model.layers.*.self_attn.o_proj": "row",
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
    "lm_head": "gathered",
}
