"""Disaggregated prefill and decode: what fits, and the figure drawn from it."""

from dataclasses import replace

import pytest

from examples.reproduce.figures.disaggregation import LAYOUTS, largest_prefill, spare_factor, stage_memories
from examples.reproduce.report import FIGURES
from examples.reproduce.result import Options
from examples.reproduce.timing import MODELS, M, a100
from medha.config import ParallelConfig
from medha.errors import ConfigError
from medha.sim.replica import kv_pool_tokens

SMALL = MODELS["Llama-3 8B"]


@pytest.mark.parametrize("layout", [ParallelConfig(), ParallelConfig(tp=8), ParallelConfig(tp=2, spp=4)], ids=str)
def test_the_largest_prompt_is_that_of_the_pool_with_its_own_activations(layout: ParallelConfig) -> None:
    most = largest_prefill(stage_memories(a100(), SMALL, layout))
    pools = []
    for tokens in (most, most + 1):
        try:
            pools.append(kv_pool_tokens(a100(), SMALL, layout, max_batch_tokens=tokens) >= tokens)
        except ConfigError:
            pools.append(False)
    assert pools == [True, False]


def test_the_figure_counts_what_is_refused_and_says_by_how_much_1m_fits() -> None:
    answer = FIGURES["disaggregation"].run(Options()).answers["disaggregated-oom"]
    assert answer.facts["failing"] == 100 * answer.ours and answer.facts["pairs"] == len(LAYOUTS) ** 2 == 100
    (memory,) = stage_memories(a100(), SMALL, ParallelConfig(tp=8))
    spare = spare_factor([memory], M)
    assert answer.facts["spare"] == spare
    activations = int(memory.activation_token * spare)
    assert spare_factor([replace(memory, activation_token=activations)], M) == pytest.approx(1, rel=1e-4)
