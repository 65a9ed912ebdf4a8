"""Context parallelism against the published table of another system; disaggregated prefill and decode."""

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
from examples.reproduce.baselines.tetris import CELLS, ring_s
from examples.reproduce.figures.disaggregation import LAYOUTS, largest_prefill, spare_factor, stage_memories
from examples.reproduce.report import FIGURES
from examples.reproduce.result import Options
from examples.reproduce.timing import A100, H100, MODELS, M
from medha.config import ParallelConfig, SchedulerConfig
from medha.cost.hardware import LinkRates
from medha.errors import ConfigError
from medha.sim.replica import Replica

SMALL = MODELS["Llama-3 8B"]


def test_tetris_table_1() -> None:
    off = np.array([abs(ring_s(*cell) / seconds - 1) for cell, seconds in CELLS.items()])
    assert len(off) == 34
    assert np.median(off) < 0.12
    assert (off <= 0.15).sum() >= 31
    assert off.max() < 0.27


def test_ring_waits_for_whole_blocks() -> None:
    ring, striped = (ContextParallel(H100, SMALL, cp=16, tp=8, kind=kind) for kind in ("ring", "striped"))
    attention_s = [attention_parts_s(layout, 1 << 16)[0] for layout in (ring, striped)]
    assert attention_s[0] / attention_s[1] == pytest.approx(31 / 16, rel=0.1)  # one half block and 15 whole ones
    assert block_bytes(ring, 1000) == 2 * 1 * 128 * 2 * 1000


def test_transfers_show_where_blocks_are_short() -> None:
    layout = ContextParallel(H100, SMALL, cp=16, tp=8)
    assert attention_parts_s(layout, 1 << 16)[1] == 0.0
    slow = replace(layout, link=LinkRates(alpha_s=1e-3, bytes_per_s=1e9))
    assert attention_parts_s(slow, 1 << 10)[1] > 15 * 1e-3 / 2
    assert prefill_s(slow, 1 << 16) > prefill_s(layout, 1 << 16)
    assert hidden_tokens(312e12, 12.5e9) == 4 * hidden_tokens(312e12, 12.5e9, query_heads_per_kv_head=4) == 24960


@pytest.mark.parametrize("layout", [ParallelConfig(), ParallelConfig(tp=8), ParallelConfig(tp=2, spp=4)], ids=str)
def test_the_largest_prompt_is_that_of_the_pool_with_its_own_activations(layout: ParallelConfig) -> None:
    most = largest_prefill(stage_memories(layout))
    pools = []
    for tokens in (most, most + 1):
        try:
            pools.append(Replica(A100, SMALL, layout, SchedulerConfig(max_batch_tokens=tokens)).pool_tokens() >= tokens)
        except ConfigError:
            pools.append(False)
    assert pools == [True, False]


def test_the_figure_counts_what_is_refused_and_says_by_how_much_1m_fits() -> None:
    answer = FIGURES["disaggregation"].run(Options()).answers["disaggregated-oom"]
    assert answer.facts["failing"] == 100 * answer.ours and answer.facts["pairs"] == len(LAYOUTS) ** 2 == 100
    (memory,) = stage_memories(ParallelConfig(tp=8))
    spare = spare_factor([memory], M)
    assert answer.facts["spare"] == spare
    activations = int(memory.activation_token * spare)
    assert spare_factor([replace(memory, activation_token=activations)], M) == pytest.approx(1, rel=1e-4)
