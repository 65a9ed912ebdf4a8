"""``medha bench needle`` on short documents: the facts are found, and time and memory reported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medha.bench.cli import app
from medha.bench.needle import find_needle
from medha.cli.command import run_app
from medha.config import ParallelConfig


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
    assert all(len(r["kv_bytes"]) == len(r["peak_memory_bytes"]) == 1 for r in report["results"])
    assert "right" in capsys.readouterr().out


@pytest.mark.parametrize(("kvp", "spp"), [(2, 2), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_no_rank_holds_more_than_its_share(kvp: int, spp: int) -> None:
    """The fact lies in the first group's shard, the question in the last one's."""
    result = find_needle(8192, 0.25, layout=ParallelConfig(kvp=kvp, spp=spp), show_progress=False)
    assert result.found, result.answer
    assert len(result.kv_bytes) == len(result.peak_memory_bytes) == kvp * spp
    assert result.largest_share <= 1.1 / (kvp * spp)
    assert sum(result.kv_bytes) >= result.whole_kv_bytes


@pytest.mark.parametrize("tokens", ["", "1024,", "-5", "many"])
def test_lengths_that_are_no_numbers_are_refused(tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(app, "bench", ["needle", "--tokens", tokens]) == 2
    assert "positive integers such as 2048 or 16K, comma separated" in capsys.readouterr().err
