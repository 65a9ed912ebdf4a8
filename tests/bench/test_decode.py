"""``medha bench micro decode`` and ``micro sampling`` at a toy size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medha.bench.cli import app
from medha.bench.decode import WAYS, DecodeOptions, step_parameters
from medha.bench.harness import Subject
from medha.cli.command import run_app
from tests.bench.shapes import ON_TINY, TINY

SMALL = [*ON_TINY, "--num-iters", "2", "--num-iters-warmup", "1"]
LAYER = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 32
"""Parameters of a layer: queries and output, keys and values, the MLP, two norms."""


@pytest.mark.usefixtures("_small_rates")
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_table_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str, size: int) -> None:
    path = tmp_path / "decode.json"
    grid = ["--batch-size", "3,1", "--context", "10,300", "--dtype", dtype, "--output-json", str(path)]
    assert run_app(app, "bench", ["micro", "decode", *SMALL, *grid]) == 0
    report = json.loads(path.read_text())
    assert report["timed"].startswith("a step of the runner") and report["dtype"] == dtype
    rate = report["memory_read"]["per_s"]
    assert report["memory_read"]["timing"]["runs"] == 2
    cells = report["results"]
    assert [(c["context"], c["batch_size"]) for c in cells] == [(10, 1), (10, 3), (300, 1), (300, 3)]
    for cell in cells:
        assert cell["weight_bytes"] == (2 * LAYER + 32 + 64 * 32) * size
        assert cell["kv_bytes"] == cell["batch_size"] * (cell["context"] + 1) * 2 * 2 * 16 * size
        seconds = cell["timing"]["median_s"]
        assert cell["bytes_per_s"] == pytest.approx((cell["weight_bytes"] + cell["kv_bytes"]) / seconds)
        assert cell["mbu"] == pytest.approx(cell["bytes_per_s"] / rate)
        assert cell["mbu"] > 0
        assert cell["tokens_per_s"] == pytest.approx(cell["batch_size"] / seconds)
    text = capsys.readouterr().out
    assert "mbu" in text and "a step of the runner" in text


def test_sampling(tmp_path: Path) -> None:
    path = tmp_path / "sampling.json"
    assert run_app(app, "bench", ["micro", "sampling", *SMALL, "--batch-size", "1,3", "--output-json", str(path)]) == 0
    results = json.loads(path.read_text())["results"]
    assert [(one["batch_size"], one["way"]) for one in results] == [(batch, way) for batch in (1, 3) for way in WAYS]
    assert all(one["per_token_s"] == one["timing"]["median_s"] / one["batch_size"] > 0 for one in results)


def test_what_a_step_reads() -> None:
    model = Subject(hf_overrides=TINY).model_config(longest=64)
    assert step_parameters(model) == 2 * LAYER + 32 + 64 * 32
    tied = Subject(hf_overrides=TINY | {"tie_word_embeddings": True}).model_config(longest=64)
    assert step_parameters(tied) == step_parameters(model)  # the embedding is the head


def test_no_two_requests_share_a_block() -> None:
    options = DecodeOptions(batch_sizes=(4, 2), contexts=(256, 255))
    assert options.cells == [(2, 255), (4, 255), (2, 256), (4, 256)]
    assert options.num_blocks == 8  # the new token of 256 takes a second block


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size", "x"], "batch_size='x'; accepted"),
        (["--context", "0"], "input_len='0'; accepted"),
        (["--output-json", "absent/decode.json"], "absent/decode.json cannot be written"),
        (["--load-format", "safetensors"], "load_format='safetensors' without a model"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "bench", ["micro", "decode", *SMALL, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
