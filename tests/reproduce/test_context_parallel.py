"""The context-parallel baseline against the published table of another system."""

from dataclasses import replace

import numpy as np
import pytest

from examples.reproduce.baselines.context_parallel import (
    ContextParallel,
    attention_parts_s,
    block_bytes,
    hidden_tokens,
    prefill_s,
)
from examples.reproduce.baselines.tetris import BETWEEN_NODES, CELLS
from examples.reproduce.timing import MODELS, a100, h100
from medha.cost.hardware import LinkRates

SMALL = MODELS["Llama-3 8B"]


def ours(ranks: int, tokens: int) -> float:
    """Our prefill seconds for a cell of the table."""
    return prefill_s(ContextParallel(a100(), SMALL, cp=ranks, link=BETWEEN_NODES if ranks > 8 else None), tokens)


def test_tetris_table_1() -> None:
    off = np.array([abs(ours(*cell) / seconds - 1) for cell, seconds in CELLS.items()])
    assert len(off) == 34
    assert np.median(off) < 0.12
    assert (off <= 0.15).sum() >= 31
    assert off.max() < 0.27


def test_ring_waits_for_whole_blocks() -> None:
    ring, striped = (ContextParallel(h100(), SMALL, cp=16, tp=8, kind=kind) for kind in ("ring", "striped"))
    assert ring.num_gpus == 128
    attention_s = [attention_parts_s(layout, 1 << 16)[0] for layout in (ring, striped)]
    assert attention_s[0] / attention_s[1] == pytest.approx(31 / 16, rel=0.1)  # one half block and 15 whole ones
    assert block_bytes(ring, 1000) == 2 * 1 * 128 * 2 * 1000


def test_transfers_show_where_blocks_are_short() -> None:
    layout = ContextParallel(h100(), SMALL, cp=16, tp=8)
    assert attention_parts_s(layout, 1 << 16)[1] == 0.0
    slow = replace(layout, link=LinkRates(alpha_s=1e-3, bytes_per_s=1e9))
    assert attention_parts_s(slow, 1 << 10)[1] > 15 * 1e-3 / 2
    assert prefill_s(slow, 1 << 16) > prefill_s(layout, 1 << 16)
    assert hidden_tokens(312e12, 12.5e9) == 4 * hidden_tokens(312e12, 12.5e9, query_heads_per_kv_head=4) == 24960
