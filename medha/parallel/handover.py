"""Hand-over: which keys and values of a request go from which rank to which, when a decode instance takes it over.

Tetris ("Optimizing Long-context LLM Serving via Fine-grained Sequence Parallelism") prefills and decodes on instances
of different tensor-parallel sizes. A rank that has held a request's KV has a run of layers (its stage's), a run of KV
heads (its tensor-parallel share) and the tokens of its group; a rank of the decode instance takes all layers, its own
run of heads, and the tokens of all groups. What passes between two ranks is where these meet. Decodes read history
unmasked and keys carry their positions, so a table may have its tokens in any order: here group behind group, each as
it lay.

Where there are fewer KV heads than tensor-parallel ranks, ranks hold the same head: several take it, and each of those
takes it from another of the ranks that have it, as far as there are as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product
from typing import NamedTuple

from medha.config import ParallelConfig


class Part(NamedTuple):
    """What one rank sends of a request's KV to one rank of a decode instance: all tokens of its group."""

    source: int  # global ranks
    target: int
    layers: range  # in the whole model
    heads: range  # KV heads of the model
    start: int  # of the first token among those of the request on the target
    num_tokens: int


def kv_heads_of(tp_rank: int, tp: int, num_kv_heads: int) -> range:
    """The KV heads that a tensor-parallel rank holds: a share of them, or one that others have too."""
    head = tp_rank * num_kv_heads // tp
    return range(head, head + max(1, num_kv_heads // tp))


def parts_of(
    config: ParallelConfig,
    held: Sequence[tuple[int, int]],
    target: int,
    *,
    num_layers: int,
    num_kv_heads: int,
) -> list[Part]:
    """What passes between ranks when a decode instance takes over a request.

    Args:
        config: of the job.
        held: the KV-parallel groups that hold its KV, and how many tokens each.
        target: group of the decode instance.

    Returns:
        The parts in the order in which all ranks send and receive those of a layer: by layers, group, head and rank.
    """
    tp, decode_tp = config.tp, config.of_group(target).tp
    copies = max(1, tp // num_kv_heads)  # ranks of the source that hold the same head
    ends = accumulate(count for _, count in held)
    holders = [(group, count, end - count) for (group, count), end in zip(held, ends, strict=True)]
    parts = []
    for stage, (group, count, start), to, rank in product(range(config.spp), holders, range(decode_tp), range(tp)):
        given, wanted = kv_heads_of(rank, tp, num_kv_heads), kv_heads_of(to, decode_tp, num_kv_heads)
        heads = range(max(given.start, wanted.start), min(given.stop, wanted.stop))
        if not heads or rank % copies != to % copies:  # of ranks with the same head each gives it to others
            continue
        source = config.rank_of(stage=stage, tp_rank=rank, kvp_rank=group)
        its_target = config.rank_of(stage=0, tp_rank=to, kvp_rank=target)
        layers = config.layers_of(stage, num_layers)
        parts.append(Part(source, its_target, layers, heads, start, count))
    return parts
