"""Disaggregated prefill and decode: what fits, and the figure drawn from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from examples.reproduce.baselines.disaggregation import (
    Disaggregated,
    is_refused,
    largest_prefill,
    stage_memories,
)
from examples.reproduce.figures.disaggregation import FIGURE, LAYOUTS, OUTPUT_TOKENS, splits
from examples.reproduce.result import Options
from examples.reproduce.timing import MODELS, M, a100
from medha.config import ParallelConfig
from medha.errors import ConfigError
from medha.sim.replica import kv_pool_tokens

SMALL = MODELS["Llama-3 8B"]
TP1 = ParallelConfig()


def system(
    num_prefill: int = 1,
    num_decode: int = 1,
    *,
    prefill: ParallelConfig = TP1,
    decode: ParallelConfig = TP1,
    **more: Any,
) -> Disaggregated:
    return Disaggregated(a100(), SMALL, num_prefill, num_decode, prefill, decode, **more)


@pytest.mark.parametrize("layout", [TP1, ParallelConfig(tp=8), ParallelConfig(tp=2, spp=4)], ids=str)
def test_the_largest_prompt_is_that_of_the_pool_with_its_own_activations(layout: ParallelConfig) -> None:
    most = largest_prefill(stage_memories(a100(), SMALL, layout))
    pools = []
    for tokens in (most, most + 1):
        try:
            pools.append(kv_pool_tokens(a100(), SMALL, layout, max_batch_tokens=tokens) >= tokens)
        except ConfigError:
            pools.append(False)
    assert pools == [True, False]
    wide = system(prefill=layout, decode=ParallelConfig(tp=8))
    assert is_refused(wide, most, 2) is None and is_refused(wide, most + 1, 2) is not None


def test_refusals_name_the_side_and_the_numbers() -> None:
    said = is_refused(system(decode=ParallelConfig(tp=8)), M, 500)
    assert said is not None and said.startswith(
        "out of memory: prefill at tp=1 spp=1 of 1,048,576 prompt and 500 output"
    )
    assert "124.6 GB for activations of 1,048,576 tokens and 137.4 GB for keys and values; 77.3 GB are there" in said
    said = is_refused(system(prefill=ParallelConfig(tp=8)), M // 2, 500)
    assert said is not None and said.startswith("out of memory: decode at tp=1 spp=1")
    assert is_refused(system(prefill=ParallelConfig(tp=8)), M // 2, 1) is None  # never gets to a decode instance


def test_bad_systems_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_decode=0; accepted: a whole number of at least 1"):
        system(1, 0)
    with pytest.raises(ConfigError, match="kvp=2; accepted: 1"):
        system(decode=ParallelConfig(kvp=2))
    with pytest.raises(ConfigError, match=r"does not fit a100-80g: stage 0 needs 141\.1 GB for weights"):
        replace(system(), model=MODELS["Llama-3 70B"])


def test_the_figure_counts_what_is_refused() -> None:
    result = FIGURE.run(Options(quick=True))
    numbers, answer = result.numbers, result.answers["disaggregated-oom"]
    assert len(splits()) == len(LAYOUTS) ** 2 == 100
    assert {one.num_gpus for one in splits()} == {16}
    assert answer.ours == numbers["splits_out_of_memory_on_some_prompt"] / numbers["splits"]
    assert f"{numbers['splits_out_of_memory_on_some_prompt']} run out" in answer.sentence
    shares = list(numbers["share_out_of_memory"].values())
    assert shares == sorted(shares) and numbers["cases_out_of_memory"] == round(sum(shares) * 100)
    most = min(numbers["largest_prefill_tokens"]["TP 1"], numbers["largest_decode_tokens"]["TP 1"] - OUTPUT_TOKENS + 1)
    alone = splits()[0]
    assert (alone.prefill.world_size, alone.decode.world_size) == (1, 1)
    assert is_refused(alone, most, OUTPUT_TOKENS) is None and is_refused(alone, most + 1, OUTPUT_TOKENS) is not None


def test_the_figure_says_by_how_much_1m_fits_and_is_drawn() -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure(layout="constrained")
    numbers = FIGURE.run(Options()).numbers
    (memory,) = stage_memories(a100(), SMALL, ParallelConfig(tp=8))
    for factor, fits in ((0.999, True), (1.001, False)):
        activations = int(memory.activation_token * numbers["activations_that_fit_1m_tp8"] * factor)
        assert replace(memory, activation_token=activations).fits(M, M) is fits
    FIGURE.draw(numbers, figure)
    assert len(figure.axes) == 2 and len(figure.axes[1].patches) == len(numbers["prompts"])
