"""The predictor: monotone, affine in KV, inverted exactly; what it learns: convergence, no oscillation."""

import dataclasses
import math
from collections import deque

import numpy as np
import pytest
from hypothesis import given, strategies as st

from medha.cost.coefficients import ChunkAttention, Coefficients, Curve, DecodeAttention, Link, MixedAttention
from medha.cost.predictor import KINDS, MIN_SECONDS, Predictor, Tick, Work
from tests.sched.costs import FREE, PLAIN, coefficients

LENGTHS = st.integers(0, 10_000_000) | st.integers(0, 300)
RUNS = st.none() | st.just((0, 1)) | st.just((1, 3))


@st.composite
def ticks(draw: st.DrawFn) -> Tick:
    """A batch of some decodes and chunks, corrected by any factors."""
    predictor = Predictor(draw(coefficients()), max_tokens=256)
    for kind in KINDS:
        predictor.observe(kind, 1.0, draw(st.floats(0.01, 100.0)))
    tick = predictor.tick([Work(1, kv, True, run) for kv, run in draw(st.lists(st.tuples(LENGTHS, RUNS), max_size=4))])
    for q_len, kv, run in draw(st.lists(st.tuples(st.integers(1, 256), LENGTHS, RUNS), max_size=2)):
        tick.add(Work(q_len, kv, False, run))
    return tick


@given(ticks(), st.integers(1, 255), LENGTHS, LENGTHS, RUNS)
def test_more_tokens_and_more_kv_never_cost_less(tick: Tick, q_len: int, kv: int, more: int, run: None) -> None:
    seconds = tick.with_chunk(q_len, kv, run=run)
    slack = 1 + 1e-12
    assert MIN_SECONDS <= seconds < math.inf
    assert tick.seconds <= seconds
    assert seconds <= tick.with_chunk(q_len + 1, kv, run=run) * slack
    assert seconds <= tick.with_chunk(q_len, kv + more, run=run) * slack
    assert seconds <= tick.with_chunk(q_len, kv, run=run, samples=True) * slack


@given(coefficients(), st.integers(1, 128), LENGTHS, LENGTHS)
def test_more_kv_of_decodes_never_costs_less(stage: Coefficients, count: int, kv: int, more: int) -> None:
    short, long = (Predictor(stage).predict([Work(1, length, True)] * count) for length in (kv, kv + more))
    assert 0 < short <= long * (1 + 1e-12)


@given(ticks(), LENGTHS, st.floats(0, 3.0), st.integers(0, 200), st.sampled_from([1, 7, 16]), RUNS, st.booleans())
def test_the_largest_chunk_is_what_trying_all_would_find(
    tick: Tick, kv: int, share: float, most: int, granularity: int, run: None, samples: bool
) -> None:
    budget_s = tick.seconds + share * (tick.with_chunk(128, kv, run=run) - tick.seconds)
    found = tick.largest_chunk(kv, budget_s, most, granularity, run=run, samples=samples)

    def fits(q_len: int, limit_s: float) -> bool:
        return tick.with_chunk(q_len, kv, run=run, samples=samples and q_len == most) <= limit_s

    tried = [q_len for q_len in range(1, most + 1) if q_len % granularity == 0 or q_len == most]
    # Where a chunk takes the budget to the last bit, either answer is right.
    assert found == 0 or (found in tried and fits(found, budget_s))
    assert found >= max((q_len for q_len in tried if fits(q_len, budget_s * (1 - 1e-9))), default=0)


def test_one_batch_term_by_term() -> None:
    rows = [Work(1, 100, True)] * 8 + [Work(64, 1000, False), Work(16, 0, False)]
    linear_s = 3e-3 + (8e-3 - 3e-3) * (88 - 64) / (256 - 64)
    attention_s = 2e-4 + 6e-8 * 100 + 4e-4 + 2e-8 * 1000 + 1e-4
    assert Predictor(PLAIN).predict(rows) == pytest.approx(1e-3 + linear_s + attention_s)
    assert Predictor(PLAIN).predict(rows[::-1]) == pytest.approx(1e-3 + linear_s + attention_s)
    assert Predictor(PLAIN).predict([]) == 0.0


def test_a_chunk_longer_than_the_table_costs_its_parts_and_a_tile_the_same_whatever_fills_it() -> None:
    predictor = Predictor(dataclasses.replace(PLAIN, linear=FREE.linear, host_s=0.0), max_tokens=4096)
    parts = [predictor.predict([Work(1024, kv, False)]) for kv in (0, 1024, 2048)]
    assert predictor.predict([Work(3072, 0, False)]) == pytest.approx(sum(parts))
    assert predictor.predict([Work(17, 500, False)]) == predictor.predict([Work(32, 500, False)])
    assert predictor.predict([Work(33, 500, False)]) > predictor.predict([Work(32, 500, False)])


def test_between_sizes_a_quadratic_is_followed() -> None:
    sizes = tuple(float(2**i) for i in range(4, 11))
    squares = tuple(size * size * 1e-8 for size in sizes)
    slopes = tuple(size * 2e-8 for size in sizes)  # as causal attention has it
    stage = dataclasses.replace(FREE, chunks=ChunkAttention(sizes, squares, slopes, squares, tile=16))
    predictor = Predictor(stage)
    for q_len in (96, 192, 384, 768, 1536, 5120):
        assert predictor.predict([Work(q_len, 0, False)]) == pytest.approx(q_len * q_len * 1e-8, rel=0.02)


def test_mixed_attention_is_the_work_of_all_or_the_longest_decode() -> None:
    beside = DecodeAttention((1.0, 8.0), (1e-3, 2e-3), (1e-7, 8e-7))
    stage = dataclasses.replace(PLAIN, mixed=MixedAttention(0.5, beside, 1e-4, 1e-6))
    plain, fused = Predictor(PLAIN), Predictor(stage)
    decodes = [Work(1, 1000, True)] * 8
    assert plain.predict(decodes) == fused.predict(decodes)
    chunk = [Work(64, 0, False)]
    assert plain.predict(chunk) == fused.predict(chunk)
    rest_s = plain.predict(decodes + chunk) - 3e-4 - (2e-4 + 6e-8 * 1000)
    assert fused.predict(decodes + chunk) == pytest.approx(rest_s + 0.5 * 3e-4 + 2e-3 + 8e-7 * 1000)
    longest = [Work(1, 8_000_000, True)] + [Work(1, 0, True)] * 7
    rest_s = plain.predict(longest + chunk) - 3e-4 - (2e-4 + 6e-8 * 1_000_000)
    assert fused.predict(longest + chunk) == pytest.approx(rest_s + 1e-4 + 1e-6 * 8_000_000)


def test_without_a_kv_split_the_longest_decode_bounds_the_batch() -> None:
    stage = dataclasses.replace(FREE, decodes=DecodeAttention((1.0, 64.0), (0.0, 0.0), (1e-6, 1e-6)))
    rows = [Work(1, 1_000_000, True)] + [Work(1, 0, True)] * 63
    assert Predictor(stage).predict(rows) == pytest.approx(1e-6 * 1_000_000 / 64)
    assert Predictor(dataclasses.replace(stage, splits_kv=False)).predict(rows) == pytest.approx(1.0)


def test_short_decodes_have_a_line_of_their_own() -> None:
    table = DecodeAttention((1.0,), (1e-3,), (1e-6,), 100.0, (5e-4,), (1e-4,))
    predictor = Predictor(dataclasses.replace(FREE, decodes=table))
    seconds = [predictor.predict([Work(1, kv, True)]) for kv in (1, 99, 100, 200)]
    assert seconds == pytest.approx([6e-4, 1.1e-3, 1.1e-3, 1.2e-3])  # never above the long line's start


def test_collectives_are_counted() -> None:
    stage = dataclasses.replace(PLAIN, tp=Link(64, 1e-5, 1e9, 8192.0), spp=Link(1, 1e-4, 1e8, 8192.0))
    row = [Work(100, 0, False)]
    more_s = 64 * (1e-5 + 100 * 8192 / 1e9) + 1e-4 + 100 * 8192 / 1e8
    assert Predictor(stage).predict(row) - Predictor(PLAIN).predict(row) == pytest.approx(more_s)


def test_a_merge_is_paid_once_a_run_and_per_token_and_group() -> None:
    plain, shared = Predictor(PLAIN), Predictor(dataclasses.replace(PLAIN, kvp=Link(4, 1e-3, 1e9, 1000.0)))

    def extra(*runs: tuple[int, int] | None) -> float:
        rows = [Work(1, 0, True, run) for run in runs]
        return shared.predict(rows) - plain.predict(rows)

    token_s = 4 * 1000 / 1e9
    assert extra(None) == pytest.approx(0.0)
    assert extra((0, 1)) == pytest.approx(4e-3 + token_s)
    assert extra((0, 3)) == pytest.approx(4e-3 + 3 * token_s)
    assert extra((0, 1), (0, 1)) == pytest.approx(4e-3 + 2 * token_s)
    assert extra((0, 1), (1, 2)) == pytest.approx(8e-3 + 2 * token_s)
    tick = shared.tick([Work(1, 0, True, (0, 1))])
    assert tick.with_chunk(16, 0, run=(0, 1)) - tick.with_chunk(16, 0) == pytest.approx(16 * token_s)


def test_the_head_runs_on_sampled_rows() -> None:
    stage = dataclasses.replace(PLAIN, head=Curve((1.0, 2.0, 3.0), (5e-3, 6e-3, 7e-3)))
    tick = Predictor(stage).tick([Work(1, 0, True)])
    assert tick.seconds - Predictor(PLAIN).tick([Work(1, 0, True)]).seconds == pytest.approx(5e-3)
    assert tick.with_chunk(16, 0, samples=True) - tick.with_chunk(16, 0) == pytest.approx(1e-3)
    tick.add(Work(16, 0, False, samples=True))
    assert tick.with_chunk(16, 0, samples=True) - tick.with_chunk(16, 0) == pytest.approx(1e-3)
    alone = Predictor(stage).tick()
    assert alone.with_chunk(16, 0, samples=True) - alone.with_chunk(16, 0) == pytest.approx(5e-3)


def test_a_tick_keeps_the_factor_it_began_with() -> None:
    predictor = Predictor(PLAIN)
    predictor.observe("prefill", 1.0, 2.0)
    tick = predictor.tick()
    before = tick.with_chunk(64, 0)
    predictor.observe("prefill", 1.0, 50.0)
    assert tick.factor == pytest.approx(2.0)
    assert tick.with_chunk(64, 0) == before == pytest.approx(2 * predictor.uncorrected().predict([Work(64, 0, False)]))


def test_a_chunk_never_makes_a_batch_shorter_whatever_was_learned() -> None:
    predictor = Predictor(PLAIN)
    predictor.observe("decode", 1.0, 2.0)
    predictor.observe("mixed", 1.0, 0.1)
    tick = predictor.tick([Work(1, 0, True)])
    assert tick.with_chunk(1, 0) == tick.seconds
    assert tick.largest_chunk(0, tick.seconds, 10) == 10


def test_nothing_that_runs_takes_no_time() -> None:
    predictor = Predictor(FREE)
    assert predictor.predict([Work(1, 0, True)]) == MIN_SECONDS
    assert predictor.predict([Work(64, 10_000_000, False)]) == MIN_SECONDS
    assert predictor.tick().largest_chunk(0, 1.0, 300) == 300
    assert predictor.tick().largest_chunk(0, MIN_SECONDS / 2, 300) == 0


# -- what is learned -------------------------------------------------------------------------------------------


def run(predictor: Predictor, truth: float, steps: int, *, depth: int = 1) -> list[float]:
    """Factors while batches of 10 ms by the table take ``truth`` times as long, ``depth`` of them in flight."""
    flying: deque[tuple[float, float]] = deque()
    factors = []
    for _ in range(steps):
        factor = predictor.factor("prefill")
        flying.append((0.01 * factor, factor))
        if len(flying) == depth:
            predicted_s, within = flying.popleft()
            assert predictor.observe("prefill", predicted_s, 0.01 * truth, factor=within)
        factors.append(predictor.factor("prefill"))
    return factors


@given(st.floats(-1, 1), st.integers(1, 16))
def test_a_wrong_start_is_corrected_within_200_steps(exponent: float, depth: int) -> None:
    truth = 10.0**exponent
    assert run(Predictor(PLAIN), truth, 200, depth=depth)[-1] == pytest.approx(truth, rel=1e-3)


@given(st.sampled_from([1.3, 1 / 1.3]), st.integers(1, 16), st.integers(100, 300))
def test_a_change_of_speed_is_followed_from_one_side(change: float, depth: int, before: int) -> None:
    predictor = Predictor(PLAIN)
    run(predictor, 2.0, before, depth=depth)
    factors = run(predictor, 2.0 * change, 200, depth=depth)
    steps = np.diff(factors) * (1 if change > 1 else -1)
    assert (steps >= -1e-12).all()  # never back, so never beyond
    assert factors[60 + depth] == pytest.approx(2.0 * change, rel=0.03)
    assert factors[-1] == pytest.approx(2.0 * change, rel=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e9, 1e-9])
def test_bad_observations_are_ignored(bad: float) -> None:
    predictor = Predictor(PLAIN)
    run(predictor, 2.0, 200)
    before = dict(predictor.learned)
    assert not predictor.observe("prefill", 0.01, bad)
    assert not predictor.observe("prefill", bad, 0.01)
    assert predictor.learned == before and before["prefill"][1] == 200


def test_kinds_are_apart_and_an_unseen_one_borrows() -> None:
    predictor = Predictor(PLAIN)
    assert predictor.factor("mixed") == 1.0
    for _ in range(3):
        predictor.observe("decode", 1.0, 2.0, factor=1.0)
    assert predictor.factor("mixed") == predictor.factor("prefill") == predictor.factor("decode")
    predictor.observe("mixed", 1.0, 1.0, factor=1.0)
    assert predictor.factor("mixed") == pytest.approx(1.0)
    assert predictor.factor("decode") == pytest.approx(2.0)
