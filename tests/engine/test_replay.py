"""``medha generate --journal`` and ``medha replay``: recorded runs of every kind come to the same decisions again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medha.__main__ import app
from medha.cli.command import run_app
from medha.models.needle import make_haystack
from tests.serving import Model

ADA = "The code of Ada is 31-plum.\nThe code of Ada is"
ROWS = [
    {"id": "document", "prompt": make_haystack(3000).prompt},
    {"id": "soon", "prompt": ADA, "arrival_s": 0.05, "slo": {"ttft_s": 2.0, "tpot_s": 0.1}},
    {"id": "wrong", "prompt": ""},
    {"id": "later", "prompt": ADA, "arrival_s": 0.3, "priority": "high"},
]


def generate(folder: Path, tmp_path: Path, *options: str | Path) -> int:
    requests = tmp_path / "in.jsonl"
    requests.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    arguments = ["generate", folder, "--requests", requests, "--num-kv-blocks", "64", "--log-level", "error", *options]
    return run_app(app, "medha", [str(argument) for argument in arguments])


def replay(path: Path) -> int:
    return run_app(app, "medha", ["replay", str(path)])


def calls_of(path: Path) -> list[str | None]:
    return [json.loads(line).get("call") for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    "options",
    [["--chunk-size", "128", "--policy", "priority"], ["--scheduler", "sarathi", "--block-size", "64"]],
    ids=["medha", "sarathi"],
)
def test_a_recorded_run_replays(
    needle: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    journal = tmp_path / "run.journal"
    journal.write_text("what an earlier run left\n")
    assert generate(needle.folder, tmp_path, "--journal", journal, *options) == 3  # a line is wrong
    calls = calls_of(journal)
    assert calls[0] is None
    assert calls.count("add") == 3
    lines = journal.read_text().splitlines()
    batches = [line for line in lines if '"call":"schedule"' in line and "null" not in line]
    capsys.readouterr()
    assert replay(journal) == 0
    expected = f"{len(batches):,} batches and {len(calls) - 1:,} calls compared: every decision is the same\n"
    assert capsys.readouterr().out == expected
    head = json.loads(lines[0])
    head["config"]["chunk_size"] = 96
    journal.write_text("\n".join([json.dumps(head), *lines[1:]]))
    assert replay(journal) == 1
    out, err = capsys.readouterr()
    assert err == "" and out.startswith("after 0 batches and ") and "that are the same, line " in out
    assert "\nrecorded batch 0: " in out and "\nreplayed batch 0: " in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "error: ConfigError: journal {path}: No such file or directory"),
        (b"", "error: ConfigError: {path} is not a medha journal, or is truncated in its first line; accepted: "),
        (b"[" * 100_000, "error: ConfigError: {path} is not a medha journal, or "),
        (
            b'{"format":"medha-journal","version":1,',
            "error: ConfigError: {path} is not a medha journal, or is truncated in its first line",
        ),
        (b'{"format":"medha-journal","version":9}\n', "error: ConfigError: journal line 1 cannot be read: ValueError"),
    ],
)
def test_a_bad_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    path = tmp_path / "run.journal"
    if content is not None:
        path.write_bytes(content)
    assert replay(path) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(message.format(path=path))
    assert captured.err.count("\n") == 1
