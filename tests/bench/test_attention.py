"""``medha bench micro attention`` at a toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medha.bench.attention import AttentionOptions, useful_flops
from medha.bench.cli import app
from medha.bench.harness import Subject
from medha.cli.command import run_app
from tests.bench.shapes import ON_TINY, TINY

SMALL = [*ON_TINY, "--num-iters", "2", "--num-iters-warmup", "0"]


@pytest.mark.usefixtures("_small_rates")
def test_tables_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "attention.json"
    grid = ["--chunk-size", "32,1,8", "--kv-lens", "300,16", "--output-json", str(path)]
    assert run_app(app, "bench", ["micro", "attention", *SMALL, *grid]) == 0
    report = json.loads(path.read_text())
    assert (report["num_heads"], report["num_kv_heads"], report["head_dim"]) == (2, 1, 16)
    assert set(report["backend"].values()) == {"torch"}
    cells = report["results"]
    expected = [(16, 1), (16, 8), (300, 1), (300, 8), (300, 32)]
    assert [(c["dtype"], c["kv_len"], c["chunk"]) for c in cells] == [
        (dtype, *cell) for dtype in ("float32", "bfloat16") for cell in expected
    ]
    rates = {(rate["dtype"], rate["kv_len"]): rate["per_s"] for rate in report["matrix_rates"]}
    for cell in cells:
        assert cell["timing"]["runs"] == 2
        assert cell["flops_per_s"] == pytest.approx(cell["flops"] / cell["timing"]["median_s"])
        assert cell["share"] == pytest.approx(cell["flops_per_s"] / rates[cell["dtype"], cell["kv_len"]])
        assert cell["share"] > 0 and cell["overhead"] > -1
    assert [c["overhead"] for c in cells if (c["kv_len"], c["chunk"]) in ((16, 8), (300, 32))] == [0.0] * 4
    printed = capsys.readouterr()
    assert "float32" in printed.out and "bfloat16" in printed.out and "overhead" in printed.out
    assert "attending" not in printed.out


def test_useful_operations_are_those_under_the_mask() -> None:
    model = Subject(hf_overrides=TINY).model_config(longest=64)
    scores = sum(min(key, 10) <= query for query in range(6, 10) for key in range(10))  # the last 4 of 10 positions
    assert useful_flops(model, 4, 10) == 4 * model.num_heads * model.head_dim * scores
    assert useful_flops(model, 1, 10) == 4 * model.num_heads * model.head_dim * 10


def test_chunks_longer_than_the_cache_are_left_out() -> None:
    assert AttentionOptions(chunks=(8, 32), kv_lens=(64, 16)).cells == [(16, [8]), (64, [8, 32])]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "float64"], "dtype='float64'; accepted"),
        (["--chunk-size", "64", "--kv-lens", "32"], "kv_lens=(32,) with chunks=(64,)"),
        (["--kv-lens", "0"], "kv_lens='0'; accepted"),
        (["--device", "cuda:99"], "device='cuda:99'; accepted"),
        (["--output-json", "absent/attention.json"], "absent/attention.json cannot be written"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "bench", ["micro", "attention", *SMALL, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
