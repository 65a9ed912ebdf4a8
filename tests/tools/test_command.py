"""What the tools' command lines and live tools share, and the plots of ``plot_ttft``."""

import json
from pathlib import Path

import numpy as np
import pytest

from medha.errors import ConfigError
from tools.command import chosen, numbers, print_head, print_row, run_tool
from tools.live import SHORT_FROM_S, SHORT_LENS, long_and_short, random_llama
from tools.plot_ttft import plot_ttft


def shout(word: str, times: int = 2, ends: str = "!") -> None:
    """Say a word."""
    print(word * times + ends)


def test_parameters_are_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tool(shout, ["ha", "--times", "3"]) == 0
    assert capsys.readouterr().out == "hahaha!\n"
    assert run_tool(shout, ["ha", "--times", "x"]) == 2
    assert "python -m tests.tools.test_command --help" in capsys.readouterr().err


def test_lists_in_options() -> None:
    assert chosen("loads", "b,a", {"a": 1, "b": 2}) == ["b", "a"]
    with pytest.raises(ConfigError, match=r"^loads='c'; accepted: of a; b, with ';' between$"):
        chosen("loads", "a;c", ("a", "b"), ";")
    assert numbers("rates", "1,0.5") == [1.0, 0.5]
    with pytest.raises(ConfigError, match=r"^rates='1,x'; accepted: numbers with commas between$"):
        numbers("rates", "1,x")
    with pytest.raises(ConfigError, match=r"^hf_overrides '\{': not JSON"):
        random_llama("{")


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    print_head("a", "b")
    print_row(1, "x")
    assert capsys.readouterr().out == "| a | b |\n| --- | --- |\n| 1 | x |\n"


def test_short_requests_are_the_same_beside_long_ones() -> None:
    alone, beside = (
        long_and_short(3, vocab_size=100, long_len=1000, long_at_s=at_s, num_short=20, rate=2.0)
        for at_s in ([], [0.0, 4.0])
    )
    assert [one.arrival_s for one in beside] == sorted(one.arrival_s for one in beside)
    shorts = [one for one in beside if one.tenant == "short"]
    assert len(beside) == 22 and {len(one.prompt) for one in beside if one.tenant == "long"} == {1000}
    for one, other in zip(alone, shorts, strict=True):
        assert one.arrival_s == other.arrival_s >= SHORT_FROM_S
        assert np.array_equal(one.prompt, other.prompt)
        assert SHORT_LENS[0] <= len(one.prompt) <= SHORT_LENS[1]


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
