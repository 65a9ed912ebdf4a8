"""The one renderer of reports: what is printed of them, how wide, and where they are written."""

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

import medha
from medha.cli.report import STDOUT, check_writable, deliver, print_report, print_rows, stamp, text_of, write_report
from medha.errors import ConfigError
from medha.parallel.own_ranks import launch_environment


def spread(*seconds: float) -> dict[str, float]:
    return dict(zip(("median_s", "min_s", "max_s"), seconds, strict=True))


REPORT = {
    "benchmark": "latency of one request",
    "format": "medha-latency",
    "environment": stamp(),
    "options": {"hidden": 1},
    "num_prompts": 1200,
    "kv_bytes": 3 << 20,
    "hit_share": 0.25,
    "note": None,
    "load": {"before": 0.5, "wait_s": 0.002},
    "points": [
        {"input_len": 128, "ttft": spread(0.0123, 0.0119, 0.013), "speedup_ratio": 1.5, "samples_s": [1, 2]},
        {"input_len": 4096, "ttft": spread(0.5, 0.5, 0.5), "speedup_ratio": 2, "usage": {"busy_share": 0.5}},
    ],
    "metrics": {"ttft": {"p50_ms": 1.25, "ok": True}, "tpot": {"p50_ms": 3.0, "ok": False}},
    "notes": ["TTFT: arrival to first token"],
}


def test_a_report_is_printed_by_its_names(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(REPORT)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]
    head, told = lines[0], [line for line in lines if set(line) != {"─"}]
    assert head == "latency of one request"
    for line in (
        "num prompts: 1,200",
        "kv: 3 MiB",
        "hit share: 25.0%",
        "load: before 0.5, wait 2 ms",
        "input len ttft speedup ratio usage busy share",
        "128 12.3 ms (11.9-13) 1.50x -",
        "4,096 500 ms 2.00x 50.0%",
        "ttft 1.25 yes",
        "tpot 3 no",
        "TTFT: arrival to first token",
    ):
        assert line in told
    assert f"medha {medha.__version__}, torch " in told[-1]
    assert not any("hidden" in line or "note:" in line or "samples" in line for line in told)


def test_a_report_goes_to_a_file_or_alone_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = {"benchmark": "x", "at": tmp_path, "timing": spread(1.0, 1.0, 1.0)}
    deliver(report, tmp_path / "report.json", shown={"title": "d[/x] data[old].jsonl"})
    assert capsys.readouterr().out == "d[/x] data[old].jsonl\n"  # no markup
    deliver(report, STDOUT)
    written = (tmp_path / "report.json").read_text()
    assert capsys.readouterr().out == written
    assert json.loads(written)["timing"] == spread(1.0, 1.0, 1.0)
    check_writable(STDOUT)
    check_writable(tmp_path / "new.json")
    for wrong in (tmp_path, tmp_path / "missing" / "report.json"):
        with pytest.raises(ConfigError, match="cannot be written; accepted: a file in a writable folder"):
            check_writable(wrong)


def test_ranks_of_other_nodes_leave_the_report_to_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of its node refuse what it refuses, before they begin to do anything."""
    for name, value in launch_environment(1, 2, 29500).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError):
        check_writable(tmp_path)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    check_writable(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("ttft_s", 90.0, "90 s"),
        ("ttft_s", 2e-5, "20 us"),
        ("tokens_per_s", 1234.5, "1,234"),
        ("prediction_error", 0.034, "3.4%"),
        ("rate", float("inf"), "inf"),
        ("is_right", True, "yes"),
        ("values", [1, 2], ""),
        ("name", "text", "text"),
    ],
)
def test_a_figure_by_its_name(name: str, value: object, text: str) -> None:
    assert text_of(name, value) == text


def test_a_report_leaves_pipes_and_links_as_they_are(tmp_path: Path) -> None:
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("target.json")
    write_report(link, {"a": 1})
    assert link.is_symlink() and (tmp_path / "target.json").exists()
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_report(pipe, {"a": 1})
    assert pipe.is_fifo() and b'"a": 1' in os.read(end, 100)
    os.close(end)
    with pytest.raises(ConfigError, match="report file /dev/full cannot be written: No space left"):
        write_report(Path("/dev/full"), {"a": 1})


@pytest.mark.parametrize("width", [30, 300])
def test_a_table_is_whole_on_a_narrow_console(width: int) -> None:
    rows = [{"policy": "lars", "what it is": "a word of advice"} | {f"schedule p{at}_ms": 0.7909 for at in range(9)}]
    console = Console(width=width, file=io.StringIO())
    print_rows(console, "results", rows)
    lines = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    assert ["lars", "a", "word", "of", "advice", *["0.7909"] * 9] in lines
    assert ("schedule" in lines[2] and "p8" in lines[2]) == (width == 300)  # headings have several lines
