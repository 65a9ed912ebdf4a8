"""Fitting: known coefficients come back from rows made with them, noise and failures of real tables included."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from medha.profile.fit import attention_of, fit_chunks, fit_curve, fit_decodes, isotonic
from tools.kernels import best_tile, fit_mixed

SIZES = np.array([32, 64, 96, 128, 192, 256, 320, 384, 512, 768, 1024, 1280, 1536, 2048])
KV = np.array([0, 512, 1024, 2048, 4096, 8192])


def grid(*axes: npt.ArrayLike) -> tuple[np.ndarray, ...]:
    """The coordinates of each point."""
    return tuple(axis.ravel().astype(float) for axis in np.meshgrid(*axes, indexing="ij"))


def attention_s(q_len: np.ndarray, kv: np.ndarray, tile: int = 64) -> np.ndarray:
    """A made-up kernel: whole tiles, dearer by a third of a launch where keys are cached."""
    padded = np.ceil(q_len / tile) * tile
    return np.asarray(1e-5 + padded**2 * 1e-10 + np.where(kv > 0, 5e-6, 0.0) + 2e-10 * padded * kv)


def noisy(seconds: np.ndarray) -> np.ndarray:
    return np.asarray(seconds * np.random.default_rng(0).normal(1.0, 0.002, seconds.shape))


def test_chunks_come_back() -> None:
    q_len, kv = grid(SIZES, KV)
    table = fit_chunks(q_len, kv, attention_s(q_len, kv), tile=64)
    tokens = np.array(table.tokens)
    assert table.tokens[:4] == (64.0, 128.0, 192.0, 256.0)
    np.testing.assert_allclose(table.b_s, 2e-10 * tokens, rtol=1e-6)
    np.testing.assert_allclose(table.a_s, 1.5e-5 + tokens**2 * 1e-10, rtol=1e-6)
    np.testing.assert_allclose(table.first_s, 1e-5 + tokens**2 * 1e-10, rtol=1e-6)


@pytest.mark.parametrize("tile", [32, 64, 128])
def test_the_tile_is_found(tile: int) -> None:
    q_len, kv = grid(np.arange(16, 1024, 16), KV)
    assert best_tile(q_len, kv, noisy(attention_s(q_len, kv, tile))) == tile


def test_slopes_that_rows_do_not_determine_are_not_believed() -> None:
    # The largest chunks of Vidur's tables have a few rows close together: one size has a negative slope.
    q_len, kv = grid(SIZES, KV)
    seconds = attention_s(q_len, kv)
    more = np.array([2500.0, 2500.0, 2500.0]), np.array([32.0, 64.0, 96.0])
    wrong = attention_s(*more) * np.array([1.03, 1.0, 0.97])
    table = fit_chunks(*(np.append(a, b) for a, b in zip((q_len, kv, seconds), (*more, wrong), strict=True)), tile=64)
    assert table.b_s[-1] == pytest.approx(2e-10 * table.tokens[-1], rel=0.01)
    assert table.a_s[-1] == pytest.approx(attention_s(np.array(2500.0), np.array(1.0)), rel=0.03)


def test_decodes_come_back_and_short_ones_of_another_regime_get_a_line() -> None:
    batch, kv = grid([1, 4, 16, 64], [64, 256, 1024, 4096])
    table = fit_decodes(batch, kv, 2e-5 + 1e-9 * batch * kv)
    np.testing.assert_allclose(table.a_s, 2e-5, rtol=1e-6)
    np.testing.assert_allclose(table.b_s, 1e-9 * np.array([1, 4, 16, 64]), rtol=1e-6)
    assert table.short_kv == 0.0
    batch, kv = grid([1, 4, 16], [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384])
    table = fit_decodes(batch, kv, np.where(kv <= 256, 1e-5, 3e-5 + 1e-10 * batch * kv))
    assert table.short_kv == 256.0
    np.testing.assert_allclose(table.short_a_s, 1e-5, rtol=1e-6)
    np.testing.assert_allclose(table.a_s, 3e-5, rtol=1e-6)


def test_mixed_batches_come_back() -> None:
    chunk_s, batch, kv = grid([1e-5, 5e-5, 3e-4], [1, 8, 64], [64, 1024, 16384, 65536])
    straggler = 1e-5 + 2e-8 * kv
    seconds = np.maximum(0.9 * chunk_s + 1e-6 * batch + 4e-9 * batch * kv, straggler)
    mixed = fit_mixed(chunk_s, batch, kv, seconds)
    assert (mixed.straggler_a_s, mixed.straggler_b_s) == pytest.approx((1e-5, 2e-8), rel=0.05)
    assert mixed.decodes.b_s[-1] == pytest.approx(64 * 4e-9, rel=0.02)
    assert mixed.prefill_factor == pytest.approx(0.9, rel=0.1)


def test_decodes_beside_a_chunk_have_two_lines_where_one_does_not_explain_them() -> None:
    chunk_s, batch, kv = grid([1e-5, 1e-4, 5e-4], [1, 16, 64, 128], [64, 256, 512, 1024, 2048, 4096, 8192, 16384])
    work_s = chunk_s + batch * np.where(kv <= 1024, 4e-9 * kv, 12e-9 * kv - 8192e-9)
    mixed = fit_mixed(chunk_s, batch, kv, np.maximum(work_s, 1e-6 + 1e-8 * kv))
    assert mixed.decodes.short_kv == 1024
    assert mixed.decodes.short_b_s[2:] == pytest.approx([64 * 4e-9, 128 * 4e-9], rel=0.05)
    assert mixed.decodes.b_s[2:] == pytest.approx([64 * 12e-9, 128 * 12e-9], rel=0.15)  # no offset is negative


def test_a_curve_is_the_median_and_never_falls() -> None:
    curve = fit_curve([4, 1, 2, 2, 2, 3], [5.0, 1.0, 3.0, 90.0, 2.0, 2.0])
    assert curve.x == (1.0, 2.0, 3.0, 4.0)
    assert curve.y[0] == 1.0 and curve.y[1] == curve.y[2] and curve.y[3] == 5.0


@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.floats(0.1, 10.0)), min_size=1, max_size=30))
def test_isotonic_is_the_nearest_that_never_falls(points: list[tuple[float, float]]) -> None:
    values, weights = (np.array(column) for column in zip(*points, strict=True))
    found = isotonic(values, weights)
    assert (np.diff(found) >= -1e-9).all()
    # Optimal: the residual is orthogonal to the solution, and sums to nothing.
    residual = weights * (values - found)
    assert abs(residual.sum()) < 1e-6 * (1 + np.abs(weights * values).sum())
    assert (np.cumsum(residual) >= -1e-6 * (1 + np.abs(weights * values).sum())).all()


def test_attention_in_whole_steps() -> None:
    """What is left does not depend on the keys, whatever else a step of its size takes."""
    size, kv = grid(SIZES, KV)
    seen, rest = kv + (size + 1) / 2, 5e-3 + 2e-5 * size
    found = attention_of(size, kv, seen, noisy(rest + 3e-10 * size * seen))
    left = rest + 3e-10 * size * seen - found
    np.testing.assert_allclose(left, rest, rtol=0.02)
    np.testing.assert_allclose(attention_of([4, 4], [9, 9], [9, 9], [0.5, 0.5]), 0.0)  # keys do not vary
