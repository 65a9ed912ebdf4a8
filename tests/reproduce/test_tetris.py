"""Tetris and its baselines: what they are, and that a comparison says what its plays say."""

import numpy as np
import pytest

from examples.reproduce.baselines import tetris
from examples.reproduce.baselines.tetris import CDSP, LOONGSERVE, SINGLE, SP8, SP16, TABLE_1, Stream, Tetris
from examples.reproduce.figures.tetris import LIMIT, Trial, medians
from medha.cost.improvement import RateTable
from tools.best_rates import RATES


@pytest.mark.parametrize(("system", "size"), [(SP8, 8), (SP16, 16)])
def test_alone_a_prompt_takes_what_its_group_takes(system: Tetris, size: int) -> None:
    stream = Stream("tetris-long", 50)
    alone_s = [tetris.table_times().seconds(size, 0, prompt) for prompt in stream.trace(1.0).prompt_tokens.tolist()]
    assert tetris.ttft_s(system, stream, 1e-4, 0.0) == pytest.approx(alone_s)


def test_loongserve_takes_the_fastest_size_and_tetris_never_waits_longer_alone() -> None:
    stream = Stream("tetris-short", 50)
    prompts = stream.trace(1.0).prompt_tokens.tolist()
    fastest_s = [min(tetris.table_times().seconds(size, 0, prompt) for size in TABLE_1) for prompt in prompts]
    assert tetris.ttft_s(LOONGSERVE, stream, 1e-4, 0.0) == pytest.approx(fastest_s)
    assert SINGLE.planner().max_chunks == LOONGSERVE.planner().max_chunks == 1
    least_s = tetris.ttft_s(CDSP, stream, 1e-4, 0.05) * 0.8  # four sizes at 5 % each
    assert (least_s <= np.array(fastest_s) * (1 + 1e-9)).all()


def test_loads_scale_the_same_requests() -> None:
    stream = Stream("tetris-medium", 100, seed=3)
    slow, fast, other = stream.trace(0.5), stream.trace(2.0), Stream("tetris-medium", 100, seed=4).trace(2.0)
    assert np.array_equal(slow.prompt_tokens, fast.prompt_tokens)
    assert slow.arrival_s == pytest.approx(4 * fast.arrival_s)
    assert not np.array_equal(other.prompt_tokens, fast.prompt_tokens)


def test_rates_grow_with_the_load() -> None:
    table = tetris.rates_of(CDSP, Stream("tetris-short", 150, 7), [0.5, 4.0])
    assert isinstance(table, RateTable) and set(table.rates) <= set(RATES)
    assert table.rates[0] < table.rates[1]
    assert tetris.rates_of(SP8, Stream("tetris-short", 10), [1.0]) == 0.0


def test_a_trial_finds_capacities_and_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.best_rates.RATES", RATES[::4])
    trial = Trial("tetris-short", 150, 0)
    before, after = (trial.quantiles(SP8, factor * trial.sp8_qps)[0] for factor in (0.98, 1.02))
    assert before <= trial.limit_s * 1.001 and after > 0.98 * trial.limit_s
    assert trial.limit_s == LIMIT * trial.quantiles(SP8, 0.1)[0]
    found = trial.figures()
    assert found["capacity, Tetris"] > 1 > found["capacity, fixed SP16"]
    times = [trial.quantiles(system, 0.9 * trial.sp8_qps)[1] for system in (SP8, CDSP)]
    assert found["P99 at 0.9, fixed SP8"] == times[0] / times[1]
    assert medians({"a": [{"x": 1.0}, {"x": 3.0}, {"x": 2.0}], "b": [{"x": 5.0}]}, "x") == [2.0, 5.0]


def test_with_memory_decodes_and_transfers_a_first_token_is_as_early_where_memory_is_there() -> None:
    stream = Stream("tetris-short", 25)
    trace = stream.trace(3.0)
    play, slow = (tetris.served(CDSP, stream, 3.0, 0.3, gbit=gbit) for gbit in (200, 2))
    assert play.waited_s(trace, 0) == pytest.approx(tetris.ttft_s(CDSP, stream, 3.0, 0.3).tolist(), rel=1e-6)
    second_s, slow_s = (np.array(one.waited_s(trace, 1)) - one.waited_s(trace, 0) for one in (play, slow))
    assert (second_s > 0).all() and (slow_s > 10 * second_s).all()
