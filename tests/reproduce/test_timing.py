"""Closed forms against numbers worked out by hand, and arrays against the simulator."""

import numpy as np
import pytest

from examples.reproduce import timing
from examples.reproduce.figures.chunks import adaptive
from examples.reproduce.figures.example import POLICIES, play
from examples.reproduce.figures.requirements import gpus_needed, most_tokens_by_compute
from examples.reproduce.timing import H100, MODELS
from medha.config import ParallelConfig
from medha.cost.predictor import Work
from medha.sched.policy import srpt

SMALL, LARGE = MODELS["Llama-3 8B"], MODELS["Llama-3 70B"]


def test_closed_forms() -> None:
    assert timing.kv_bytes(LARGE, 1e6) == 1e6 * 2 * 80 * 8 * 128 * 2 == 327.68e9
    attention, linear = timing.attention_flops, timing.linear_parameters(SMALL)
    assert attention(LARGE, 1e6) == 2 * 1e12 * 128 * 64 * 80 == attention(LARGE, 1e6, causal=False) / 2
    assert linear == 32 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)
    assert timing.prefill_flops(SMALL, 10.0) == attention(SMALL, 10.0) + 20 * linear
    assert timing.weight_bytes(SMALL) == pytest.approx(15.0e9, rel=0.01)
    assert [timing.chunk_intensity(model, 40) for model in (SMALL, LARGE)] == [160, 320]
    tokens = most_tokens_by_compute(1e17)
    assert timing.prefill_flops(SMALL, tokens) == pytest.approx(1e17)
    assert gpus_needed(tokens)["compute"] == pytest.approx(1e17 / 30 / 989e12)


def test_batches_follow_each_other_through_the_stages() -> None:
    seconds = np.array([[1.0, 2.0, 3.0], [5.0, 1.0, 1.0]])
    assert timing.pipeline_ends(seconds).tolist() == [6.0, 7.0, 8.0]
    alike = np.tile([1.0, 2.0, 4.0], (3, 1))
    assert timing.pipeline_ends(alike)[-1] == 1 + 2 + 4 + 2 * 4  # all once, and the longest in each further stage


@pytest.mark.parametrize("layout", [(8, 1, 1), (8, 4, 1), (8, 2, 2), (4, 4, 4)], ids=str)
def test_arrays_and_the_simulator_agree(layout: tuple[int, int, int]) -> None:
    tp, spp, kvp = layout
    parallel = ParallelConfig(tp=tp, spp=spp, kvp=kvp)
    tokens, chunk = 1 << 19, 2048
    alone = timing.simulate(SMALL, parallel, tokens, chunk=chunk)
    seconds = timing.chunk_seconds(timing.stage_predictors(H100, SMALL, parallel), tokens, chunk, kvp=kvp)
    assert alone.num_batches == seconds.shape[1] == tokens // chunk
    assert timing.pipeline_ends(seconds)[-1] == pytest.approx(alone.times.ttft_s[0], rel=0.002)


def test_decodes_and_the_simulator_agree() -> None:
    parallel = ParallelConfig(tp=8, spp=4)
    alone = timing.simulate(SMALL, parallel, 1 << 20, output_tokens=5)
    stages = timing.stage_predictors(H100, SMALL, parallel)
    assert timing.decode_s(stages, 1 << 20) == pytest.approx(alone.times.tpot_s[0], rel=1e-4)


def test_a_chunk_is_predicted_as_one_work() -> None:
    stages = timing.stage_predictors(H100, LARGE, ParallelConfig(tp=8))
    decodes = (Work(1, 4096, True),)
    seconds = timing.chunk_seconds(stages, 1 << 16, 512, decodes=decodes)
    for at in (0, 1, 77):
        assert seconds[0, at] == pytest.approx(stages[0].predict([*decodes, Work(512, 512 * at, False)]), rel=1e-9)


def test_what_fits() -> None:
    parallel = ParallelConfig(tp=8, spp=4)
    assert timing.fits(LARGE, parallel, 4 << 20) and not timing.fits(LARGE, parallel, 10 << 20)
    assert timing.fits(LARGE, ParallelConfig(tp=8, spp=4, kvp=2), 10 << 20)
    assert not timing.fits(LARGE, ParallelConfig(), 1)  # not even the weights


def test_adaptive_chunks_keep_to_the_budget_and_shrink() -> None:
    predictor = timing.stage_predictors(H100, SMALL, ParallelConfig(tp=8))[0]
    seconds, sizes = adaptive(predictor, 1 << 18, 0.05)
    assert sizes.sum() == 1 << 18 and seconds.max() <= 0.05
    assert (np.diff(sizes[:-1]) <= 0).all()


def test_the_worked_example() -> None:
    """v5 section 4.1: 10 s of work due at 16 s; two of 0.5 s come at 5 s and are due at 6 s."""
    ends = {name: play(policy)[0] for name, policy in (POLICIES | {"srpt": srpt}).items()}
    assert ends["fcfs"] == pytest.approx({"long": 10.0, "short 1": 10.5, "short 2": 11.0})
    assert ends["edf"] == pytest.approx({"short 1": 5.5, "short 2": 6.0, "long": 11.0})
    assert all(max(end.values()) == pytest.approx(11.0) for end in ends.values())
    assert all(ends[name]["short 2"] <= 6.0 + 1e-9 for name in ("lrs", "srpt"))
    # the relative slack of the shorts falls by 2 a second, from 1; at 5.2 s it is that of the long one, 0.6
    assert ends["lars"] == pytest.approx({"short 1": 6.18, "short 2": 6.2, "long": 11.0}, abs=0.02)
