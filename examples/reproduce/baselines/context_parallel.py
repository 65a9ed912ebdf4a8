"""Prefill by context parallelism: the prompt is split over ranks, and blocks of keys and values go around a ring.

Source: Ring Attention (Liu et al., arXiv:2310.01889) and Striped Attention (Brandon et al., arXiv:2311.09431), what v4
section 3.3 and v5 section 3.3 compare stream pipeline parallelism with. In every layer each rank works on its share of
the tokens, and in each of ``cp`` steps on one block of keys, while the next block arrives:

    layer = linear(n / cp) + sum over steps of (attention of a block + what of its transfer is not hidden + step_s)

With ``ring`` a rank holds neighbouring tokens, so that some ranks meet whole blocks where others have nothing to do,
and all wait for the slowest. With ``striped`` tokens are dealt out in turn, and every block is causal.

``step_s`` is what a step costs beside arithmetic and bytes (launches, merge, synchronising with neighbours). It is set
by one column of Table 1 of the Tetris paper: at 4,096 tokens on an A100 the table leaves 0.25, 0.52, 0.73 and 0.68 ms a
step at 2, 4, 8 and 16 ranks, the median is 0.6 ms. Held to the whole table (34 cells, 4K to 256K, 1 to 16 ranks), the
link between nodes at the same share of its published rate as the H100's: median 11 %, 31 cells within 15 %, worst 26 %
too much (32K on 16 ranks). The spec alone is 6 to 15 % above the table's single rank, and that is most of it:
speed-ups over one rank are 4 % off in the median, at worst 23 %.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from medha.config import ModelConfig, ParallelConfig
from medha.cost.hardware import HardwareSpec, LinkRates
from medha.cost.predictor import Predictor, Work
from medha.cost.roofline import chunk_slope_s, first_chunk_s, stage_coefficients
from medha.sim.replica import DTYPE_BYTES

KINDS = ("ring", "striped")
STEP_S = 0.6e-3
"""Seconds of a step beside arithmetic and bytes."""
_PIECE = 16384


@dataclass(frozen=True)
class ContextParallel:
    """A layout: ``cp`` ranks in a ring, each of them ``tp`` accelerators.

    Attributes:
        spec: the accelerators.
        model: what runs on them.
        cp: ranks in the ring.
        tp: accelerators of a rank.
        kind: ``ring`` or ``striped``.
        link: from a rank to the next, for each accelerator; None is what the spec says of a ring that lies in a node,
            or spans nodes.
    """

    spec: HardwareSpec
    model: ModelConfig
    cp: int
    tp: int = 1
    kind: str = "striped"
    link: LinkRates | None = None

    @cached_property
    def _linear(self) -> tuple[Predictor, float, float]:
        """What predicts a piece without attention; seconds of a whole piece, and of the host's step and first token."""
        whole = stage_coefficients(self.spec, self.model, ParallelConfig(tp=self.tp), 0)
        nothing = (0.0,) * len(whole.chunks.a_s)
        chunks = replace(whole.chunks, a_s=nothing, first_s=nothing)
        predictor = Predictor(replace(whole, chunks=chunks, host_s=0.0), max_tokens=_PIECE)
        with_head, without = (predictor.predict([Work(1, 0, False, None, samples)]) for samples in (True, False))
        return predictor, predictor.predict([Work(_PIECE, 0, False)]), self.spec.host_s + (with_head - without)

    def linear_s(self, tokens: float) -> float:
        """Seconds of all layers without attention, in pieces of at most 16K tokens, first token and the host's step
        included."""
        predictor, piece_s, fixed_s = self._linear
        pieces, rest = divmod(round(tokens), _PIECE)
        seconds = fixed_s + pieces * piece_s
        return seconds + predictor.predict([Work(rest, 0, False)]) if rest else seconds


def block_bytes(layout: ContextParallel, tokens: float) -> float:
    """Bytes of one layer's keys and values of a block, on one accelerator."""
    kv_heads = max(1, layout.model.num_kv_heads // layout.tp)
    return 2 * kv_heads * layout.model.head_dim * DTYPE_BYTES * tokens


def prefill_s(layout: ContextParallel, *prompts: int) -> float:
    """Seconds to the first token of prompts, in tokens, that are read together and have the ring to themselves."""
    own = [tokens / layout.cp for tokens in prompts]
    attention_s, exposed_s = attention_parts_s(layout, *own)
    overhead_s = layout.model.num_layers * (layout.cp - 1) * STEP_S
    return layout.linear_s(sum(own)) + layout.model.num_layers * (attention_s + exposed_s) + overhead_s


def attention_parts_s(layout: ContextParallel, *own: float) -> tuple[float, float]:
    """Of one layer: seconds of attention on the slowest rank, and of transfers that are not hidden behind it.

    Args:
        layout: the ring; its kind is ``striped`` for several prompts.
        own: tokens of a rank, of each prompt. The prompts share launches.
    """
    spec, model, total = layout.spec, layout.model, sum(own)
    heads = model.num_heads / layout.tp
    each_s = first_chunk_s(spec, np.array(own), heads=heads, head_dim=model.head_dim)
    causal_s = later_s = float(each_s.sum()) - (len(own) - 1) * spec.attention.launch_s
    if layout.cp == 1:
        return causal_s, 0.0
    if layout.kind == "ring":
        kv_heads = max(1.0, model.num_kv_heads / layout.tp)
        slope_s = chunk_slope_s(spec, total, heads=heads, kv_heads=kv_heads, head_dim=model.head_dim)
        later_s = total * float(slope_s)
    link = link_of(layout)
    send_s = link.alpha_s + block_bytes(layout, total) / link.bytes_per_s
    hidden_in = [causal_s, *([later_s] * (layout.cp - 2))]  # the last block sends nothing on
    exposed_s = sum(max(0.0, send_s - block_s) for block_s in hidden_in)
    return causal_s + (layout.cp - 1) * later_s, exposed_s


def link_of(layout: ContextParallel) -> LinkRates:
    """The slowest hop of the ring, on which all wait."""
    spans_nodes = layout.cp * layout.tp > layout.spec.gpus_per_node
    return layout.link or (layout.spec.node_send if spans_nodes else layout.spec.send)


def hidden_tokens(flops_per_s: float, bytes_per_s: float, *, query_heads_per_kv_head: float = 1.0) -> float:
    """Tokens of a rank from which a transfer is hidden: ``4 c^2 d h_q / flops_per_s >= 4 c d h_kv / bytes_per_s``."""
    return flops_per_s / bytes_per_s / query_heads_per_kv_head
