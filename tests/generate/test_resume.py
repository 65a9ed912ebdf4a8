"""``--resume``: what a batch that was cut short is like when it has been gone on with."""

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import medha.engine.build
from medha.cli.command import run_app
from medha.engine.jsonl import read_requests
from medha.engine.replay import replay
from medha.errors import ConfigError
from medha.generate.__main__ import app
from medha.generate.work import read_earlier
from tests.commands import ENVIRONMENT, LIMIT_S, parse, wait_until, write_lines
from tests.serving import Model

ROWS = [{"id": f"r{i}", "prompt": f"Question {i}", "max_tokens": 10 + i % 7, "temperature": 1.0} for i in range(24)]


def tokens(path: Path) -> dict[str, list[int]]:
    return {row["id"]: row["token_ids"] for row in parse(path.read_text())}


def line(request_id: str, finish_reason: str = "length", **fields: Any) -> dict[str, Any]:
    return {"id": request_id, "finish_reason": finish_reason, "token_ids": [], "error": None, **fields}


def generate(*arguments: str | Path) -> int:
    return run_app(app, "medha", [*map(str, arguments), "--log-level", "error", "--num-kv-blocks", "32"])


def test_a_run_that_was_killed_goes_on(bytes_model: Model, tmp_path: Path) -> None:
    requests = write_lines(tmp_path / "in.jsonl", *ROWS)
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    options = ["--requests", requests, "--max-num-seqs", "3", "--seed", "7"]
    assert generate(bytes_model.folder, *options, "--output", whole) == 0
    rows = [row if at < 12 else row | {"arrival_s": 1e5} for at, row in enumerate(ROWS)]  # it does not end before
    options[1] = write_lines(tmp_path / "slow.jsonl", *rows)
    slow = [bytes_model.folder, *options, "--num-kv-blocks", "32", "--output", output, "--journal", tmp_path / "run"]
    command = [sys.executable, "-m", "medha.generate", *map(str, slow)]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL) as process, ExitStack() as stack:
        stack.callback(process.kill)
        wait_until(lambda: process.poll() is not None or (output.exists() and output.read_text().count("\n") >= 4))
        process.terminate()
        assert process.wait(LIMIT_S) == -signal.SIGTERM
    recorded = replay(tmp_path / "run")
    assert (recorded.mismatch, recorded.num_batches > 3) == (None, True)
    before = output.read_bytes()
    assert 4 <= before.count(b"\n") < len(ROWS)
    options[1] = requests
    output.write_bytes(before + b'{"id": "r23", "text": "half a')  # as a kill within a write would leave it
    assert generate(bytes_model.folder, *options, "--output", output, "--resume") == 0
    assert output.read_bytes().startswith(before)
    assert len(parse(output.read_text())) == len(ROWS)
    assert tokens(output) == tokens(whole)


def test_what_is_run_again(bytes_model: Model, tmp_path: Path) -> None:
    """Whatever was lost with the run, and nothing that was the request's own doing."""
    requests = write_lines(tmp_path / "in.jsonl", *ROWS[:6], {"id": "wrong"})
    whole, output = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert generate(bytes_model.folder, "--requests", requests, "--output", whole) == 3
    own = {"type": "ContextLengthError", "message": "too long"}
    earlier = [
        line("r1", "abort", token_ids=[1]),
        line("r4", "error", error=own),
        line("r2", "stop"),
        line("r0", "error", error={"type": "EngineDeadError", "message": "a step failed"}),
        line("r3", "error", error={"type": "RankFailedError", "message": "rank 1 died"}),
        line("r5", outputs=[{"finish_reason": "length"}, {"finish_reason": "abort"}]),
    ]
    write_lines(output, *earlier)
    output.chmod(0o640)
    assert generate(bytes_model.folder, "--requests", requests, "--output", output, "--resume") == 3
    rows = parse(output.read_text())
    assert rows[:2] == [earlier[1], earlier[2]]
    assert sorted(row["id"] for row in rows[2:]) == ["r0", "r1", "r3", "r5", "wrong"]
    expected = tokens(whole)
    assert all(row["token_ids"] == expected[row["id"]] for row in rows[2:])
    assert output.stat().st_mode & 0o777 == 0o640
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "whole.jsonl"]


def test_nothing_left_loads_nothing(bytes_model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(medha.engine.build, "build_role", lambda *_, **__: pytest.fail("the model is loaded"))
    requests = write_lines(tmp_path / "in.jsonl", *ROWS[:2])
    own = {"type": "NonFiniteLogitsError"}  # of another completion of the request
    for last, code in ((line("r1"), 0), (line("r1", "error", error=own), 3), (line("r1", error=own), 3)):
        output = write_lines(tmp_path / "out.jsonl", line("r0"), last)
        before = output.read_bytes()
        assert generate(bytes_model.folder, "--requests", requests, "--output", output, "--resume") == code
        assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["what is this", line("r0")], r"out\.jsonl line 1: b'what is this.*is no output line"),
        ([{"some": "json"}, line("r0")], r"line 1: .* is no output line; accepted: what a run"),
        ([line("other")], "line 1: id 'other' is not among the requests"),
        (["a note of mine"], r"line 1: .* is no output line"),
        ([line("r0")] * 2, "line 2: id 'r0' is there twice"),
        *(([{"id": "r0", "finish_reason": "stop", "outputs": its}], "line 1") for its in (None, 5, [1])),
    ],
)
def test_another_file_is_left_alone(tmp_path: Path, lines: list[Any], message: str) -> None:
    requests = read_requests(write_lines(tmp_path / "in.jsonl", *ROWS[:2]), {})
    with pytest.raises(ConfigError, match=message):
        read_earlier(write_lines(tmp_path / "out.jsonl", *lines), requests)


def test_arrivals_go_on_from_the_first_that_is_left(tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "prompt": "x", "arrival_s": 10 * i} for i in range(4)]
    requests = read_requests(write_lines(tmp_path / "in.jsonl", *rows), {})
    earlier = read_earlier(write_lines(tmp_path / "out.jsonl", line("r0"), line("r1")), requests)
    assert [(a.request_id, a.arrival_s) for a in earlier.left(requests)] == [("r2", 0.0), ("r3", 10.0)]
    assert read_earlier(tmp_path / "gone.jsonl", requests).left(requests) == requests
