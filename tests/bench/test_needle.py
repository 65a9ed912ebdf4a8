"""``medha bench needle`` on short documents: the facts are found, and time and memory reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medha.bench.cli import app
from medha.command import run_app


def test_table_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "needle.json"
    arguments = ["needle", "--tokens", "1024,1536", "--depth", "0.25", "--output-json", str(path)]
    assert run_app(app, "bench", arguments) == 0
    report = json.loads(path.read_text())
    assert [(r["num_tokens"], r["depth"], r["found"]) for r in report["results"]] == [
        (1024, 0.25, True),
        (1536, 0.25, True),
    ]
    assert report["peak_memory_bytes"] > 0
    assert "right" in capsys.readouterr().out


@pytest.mark.parametrize("tokens", ["", "1024,", "-5", "many"])
def test_lengths_that_are_no_numbers_are_refused(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "bench", ["needle", "--tokens", tokens]) == 2
    assert "positive integers, comma separated" in capsys.readouterr().err
