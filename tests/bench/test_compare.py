"""``medha bench compare`` at a toy size: both sides run, agree and are reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medha.bench.cli import app
from medha.command import run_app
from tests.bench.shapes import TINY


def test_table_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "compare.json"
    options = ["--prompt-lens", "40", "--batch-size", "2", "--decode-len", "4", "--num-iters", "2"]
    threads = ["--num-threads", "1", "--hf-overrides", json.dumps(TINY)]
    assert run_app(app, "bench", ["compare", *options, *threads, "--output-json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [r["name"] for r in report["results"]] == ["prefill 40", "decode of 2"]
    assert all(r["same_tokens"] and r["ratio"] > 0 and r["medha"]["runs"] == 2 for r in report["results"])
    assert report["model"]["hidden_size"] == TINY["hidden_size"]
    assert "2 layers, 32 wide, GQA 2" in capsys.readouterr().out


def test_a_report_that_cannot_be_written_is_found_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "absent" / "compare.json"
    assert run_app(app, "bench", ["compare", "--output-json", str(path)]) == 2
    assert "cannot be written" in capsys.readouterr().err
