"""Plots from the reports of a simulation and of a convoy."""

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from tools.command import run_tool
from tools.plot_ttft import plot_ttft

RUN = {"label": "lars", "start_times": [0.0, 1.0, 2.0], "ttfts": [0.5, None, 9.0], "input_lens": [10, 20, 9000]}
REQUESTS = [{"arrival_s": 0.0, "ttft_s": 0.5, "input_len": 10}, {"arrival_s": 1.0, "ttft_s": None, "input_len": 9000}]


@pytest.mark.parametrize(
    "report",
    [
        {"runs": [RUN, RUN | {"label": "edf"}]},
        {name: value for name, value in RUN.items() if name != "label"} | {"runs": 1},
        {"systems": [{"system": name, "requests": REQUESTS} for name in ("EDF", "LRS", "LARS", "Sarathi-512")]},
    ],
    ids=["simulate", "serve", "convoy"],
)
def test_a_panel_a_system(report: dict[str, object], tmp_path: Path) -> None:
    path, picture = tmp_path / "report.json", tmp_path / "ttft.svg"
    path.write_text(json.dumps(report))
    assert run_tool(plot_ttft, [str(path), str(picture)]) == 0
    drawn = picture.read_text()
    num_panels = max(1, str(report).count("'label'"), str(report).count("'system'"))
    assert len(drawn) > 5000 and drawn.count('id="axes_') >= num_panels
