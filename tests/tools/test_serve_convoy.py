"""The convoy over HTTP: what it prints and draws of a run that was written down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.command import run_tool
from tools.serve_convoy import serve_convoy


def test_a_run_that_was_written_is_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [[0.0, 1000, 8, True], *([float(at), 100, 8, False] for at in range(1, 6))]
    runs = {"medha": [[[5.0, 5.7], *([0.1 * at, 0.1 * at + 0.07] for at in range(1, 6))]] * 2}
    (tmp_path / "run.json").write_text(json.dumps({"asked": asked, "runs": runs}))
    arguments = ["--from-json", str(tmp_path / "run.json"), "--plot", str(tmp_path / "plot.png")]
    assert run_tool(serve_convoy, arguments) == 0
    (row,) = capsys.readouterr().out.splitlines()[2:]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    # 1,000 + 5 * 100 + 6 * 8 tokens until the last one, of the first request or of the last
    assert cells == ["medha", "0.300 s", "0.496 s", "10.0 ms", "10.0 ms", "5.0 s", f"{1548 / 5.7:,.0f}"]
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
