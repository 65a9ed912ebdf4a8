"""Disaggregated prefill and decode: closed forms, memory, its own published figure, and the figure drawn from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from examples.reproduce.baselines.disaggregation import (
    PUBLISHED,
    Disaggregated,
    is_refused,
    largest_decode,
    largest_prefill,
    own_figures,
    play,
    play_colocated,
    stage_memories,
)
from examples.reproduce.figures.disaggregation import FIGURE, LAYOUTS, OUTPUT_TOKENS, splits
from examples.reproduce.result import Options
from examples.reproduce.timing import MODELS, M, a100, stage_predictors
from medha.config import ParallelConfig
from medha.cost.predictor import Work
from medha.errors import ConfigError
from medha.sim.replica import kv_pool_tokens
from medha.workload.synth import synthesize
from medha.workload.trace import Trace

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


def requests(*rows: tuple[float, int, int]) -> Trace:
    """Of (arrival in seconds, prompt tokens, output tokens)."""
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    return Trace(columns[0].astype(np.float64), columns[1], columns[2])


def whole_s(tokens: int, parallel: ParallelConfig = TP1) -> list[float]:
    """A whole prompt of up to 16K on each stage."""
    return [p.predict([Work(tokens, 0, False, None, True)]) for p in stage_predictors(a100(), SMALL, parallel)]


def decodes_s(kv_tokens: list[int], parallel: ParallelConfig = TP1) -> list[float]:
    rows = [Work(1, kv, True, None, True) for kv in kv_tokens]
    return [predictor.predict(rows) for predictor in stage_predictors(a100(), SMALL, parallel)]


# -- time ---------------------------------------------------------------------------------------------------------


def test_a_request_alone_takes_its_prefill_its_transfer_and_its_decodes() -> None:
    served = play(system(), requests((1.0, 4000, 5)))
    send = a100().send
    transfer_s = send.alpha_s + 4000 * SMALL.kv_bytes_per_token(2) / send.bytes_per_s
    after_s = transfer_s + sum(decodes_s([4000 + i])[0] for i in range(4))
    assert served.ttft_s[0] == pytest.approx(whole_s(4000)[0], rel=1e-12)
    assert served.finish_s[0] - served.first_token_s[0] == pytest.approx(after_s, rel=1e-9)
    assert served.end_s == served.finish_s[0] and served.gaps.count == 4


def test_transfers_go_over_each_accelerators_link_and_between_nodes_where_there_are_two() -> None:
    wide = ParallelConfig(tp=8)
    served = play(system(prefill=wide, decode=wide), requests((0.0, 8000, 2)))
    link = a100().node_send
    transfer_s = link.alpha_s + 8000 * SMALL.kv_bytes_per_token(2) / (8 * link.bytes_per_s)
    gap_s = served.finish_s[0] - served.first_token_s[0]
    assert gap_s == pytest.approx(transfer_s + decodes_s([8000], wide)[0], rel=1e-9)


def test_a_whole_prompt_passes_the_stages_one_after_the_other_and_the_next_follows() -> None:
    stages = ParallelConfig(spp=2)
    first_s, second_s = whole_s(8000, stages)
    served = play(system(prefill=stages), requests((0.0, 8000, 1), (0.0, 8000, 1)))
    assert served.ttft_s[0] == pytest.approx(first_s + second_s, rel=1e-12)
    assert served.ttft_s[1] == pytest.approx(first_s + max(first_s, second_s) + second_s, rel=1e-12)


def test_a_long_prompt_costs_its_pieces() -> None:
    (predictor,) = stage_predictors(a100(), SMALL, TP1)
    pieces = [Work(16384, 0, False), Work(16384, 16384, False), Work(1000, 32768, False, None, True)]
    served = play(system(), requests((0.0, 33768, 1)))
    assert served.ttft_s[0] == pytest.approx(sum(predictor.predict([piece]) for piece in pieces), rel=1e-12)


def test_prompts_are_batched_whole_in_order_of_arrival() -> None:
    served = play(system(), requests((0.0, 100, 1), (0.0, 5000, 1), (0.0, 3000, 1), (0.0, 3000, 1)))
    (predictor,) = stage_predictors(a100(), SMALL, TP1)
    rest_s = predictor.predict([Work(tokens, 0, False, None, True) for tokens in (5000, 3000)])
    first_s = whole_s(100)[0]  # alone, as it is there first
    assert served.ttft_s[:3] == pytest.approx([first_s, first_s + rest_s, first_s + rest_s])
    assert served.ttft_s[3] == pytest.approx(first_s + rest_s + whole_s(3000)[0])


def test_the_least_loaded_instance_is_taken() -> None:
    trace = requests((0.0, 8000, 1), (0.0, 1000, 1), (0.0, 1000, 1))
    served = play(system(2), trace)
    assert served.ttft_s[1:] == pytest.approx([whole_s(1000)[0], 2 * whole_s(1000)[0]])
    assert served.ttft_s[0] == pytest.approx(whole_s(8000)[0])


def test_decodes_beside_prefills_are_not_held_up() -> None:
    """What disaggregation is for: a later long prompt stalls the decodes of the colocated instance only."""
    trace = requests((0.0, 500, 50), (0.1, 8000, 2))
    apart, together = play(system(), trace), play_colocated(a100(), SMALL, trace)
    stall_s = whole_s(8000)[0]
    assert together.finish_s[0] - together.first_token_s[0] > 0.9 * stall_s + sum(
        decodes_s([500 + i])[0] for i in range(49)
    )
    assert apart.finish_s[0] - apart.first_token_s[0] == pytest.approx(
        sum(decodes_s([500 + i])[0] for i in range(49)), abs=0.1 * stall_s
    )


def test_decode_stages_work_on_different_requests() -> None:
    stages = ParallelConfig(spp=2)
    one, two = (play(system(decode=stages), requests(*[(0.0, 1000, 100)] * count)) for count in (1, 2))
    spans_s = [served.end_s - served.first_token_s[0] for served in (one, two)]
    assert spans_s[1] < 1.2 * spans_s[0]
    assert spans_s[0] > 99 * sum(decodes_s([1000], stages))


# -- memory -------------------------------------------------------------------------------------------------------


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


def test_what_is_refused_gets_no_token_and_the_rest_is_served() -> None:
    small = system()
    most = largest_decode(stage_memories(a100(), SMALL, TP1))
    trace = requests((0.0, 300_000, 5), (0.0, 1000, 5), (0.1, 1000, most), (0.2, 1000, 5))
    refused = [is_refused(small, int(p), int(o)) is not None for p, o in zip(*_lengths(trace), strict=True)]
    served = play(small, trace)
    assert refused == [True, False, True, False]
    assert (~served.is_finished).tolist() == refused == np.isnan(served.first_token_s).tolist()


def _lengths(trace: Trace) -> tuple[Any, Any]:
    return trace.prompt_tokens, trace.output_tokens


def test_a_prompt_waits_until_the_one_before_has_left_the_memory() -> None:
    """Two of 200K do not fit a prefill instance of one A100 together: the second starts when the first is fetched."""
    served = play(system(prefill=TP1, decode=ParallelConfig(tp=4)), requests((0.0, 200_000, 2), (0.0, 200_000, 2)))
    (decode_s,) = decodes_s([200_000], ParallelConfig(tp=4))
    fetched_s = served.finish_s[0] - decode_s
    assert fetched_s > served.first_token_s[0]
    assert served.first_token_s[1] - fetched_s == pytest.approx(served.first_token_s[0], rel=1e-9)


def test_a_full_decode_instance_holds_prefills_back_and_nothing_is_lost() -> None:
    trace = requests(*[(0.001 * i, 20_000, 3000) for i in range(80)])
    (memory,) = stage_memories(a100(), SMALL, TP1)
    on_decode = largest_decode([memory]) // 22_999
    on_prefill = (memory.usable - memory.fixed) // (20_000 * memory.kv_token)
    served, free = play(system(2, 1), trace), play(system(2, 6), trace)
    alive = [((served.first_token_s <= t) & (served.finish_s > t)).sum() for t in served.first_token_s]
    assert served.is_finished.all() and free.is_finished.all()
    assert on_decode < max(alive) <= on_decode + 2 * on_prefill < 80
    assert served.first_token_s.max() > 1.1 * free.first_token_s.max()


def test_any_load_is_served_to_its_end_and_repeats() -> None:
    trace = synthesize("uniform:10-30000,1-60", qps=3.0, num_requests=150)
    layout = ParallelConfig(tp=2, spp=2)
    served, again = (play(system(2, 1, prefill=layout, decode=layout), trace) for _ in range(2))
    assert served.is_finished.all()
    assert (served.first_token_s > trace.arrival_s).all() and (served.finish_s >= served.first_token_s).all()
    assert served.gaps.count == int((trace.output_tokens - 1).sum())
    total_s = (served.finish_s - served.first_token_s).sum()
    assert served.gaps.total_s == pytest.approx(total_s, rel=1e-9)
    assert served.finish_s.tolist() == again.finish_s.tolist()


def test_a_play_can_be_stopped() -> None:
    trace = synthesize("fixed:2000,100", qps=5.0, num_requests=60)
    whole, part = play(system(), trace), play(system(), trace, stop_s=4.0)
    assert part.end_s == 4.0 and 0 < part.is_finished.sum() < 60
    by_then = whole.first_token_s <= 4.0
    assert part.first_token_s[by_then].tolist() == whole.first_token_s[by_then].tolist()
    assert np.isnan(part.first_token_s[~by_then]).all()


def test_bad_systems_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_decode=0; accepted: a whole number of at least 1"):
        system(1, 0)
    with pytest.raises(ConfigError, match="kvp=2; accepted: 1"):
        system(decode=ParallelConfig(kvp=2))
    with pytest.raises(ConfigError, match=r"does not fit a100-80g: stage 0 needs 141\.1 GB for weights"):
        replace(system(), model=MODELS["Llama-3 70B"])
    with pytest.raises(ConfigError, match="a request has 9,000 prompt tokens"):
        play_colocated(a100(), SMALL, requests((0.0, 9000, 1)))


# -- its own figure, and the one drawn from it ----------------------------------------------------------------------


def test_it_has_the_order_of_its_own_figure() -> None:
    """DistServe's figure 1; the rates are twice those published or more, and the ratio is nearer to 1."""
    ours = own_figures()
    assert set(ours) == set(PUBLISHED)
    assert ours["colocated"] < ours["2 + 1"] < ours["prefill only"] < ours["decode only"]
    assert 1.5 < ours["ratio"] < PUBLISHED["ratio"]
    assert all(1.9 < ours[name] / PUBLISHED[name] < 2.7 for name in PUBLISHED if name != "ratio")


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
