"""``medha generate --journal`` and ``medha replay``: recorded runs of every kind come to the same decisions again."""

import json
from pathlib import Path

import pytest

from medha.models.needle import make_haystack
from tests.commands import Command, write_lines
from tests.serving import Model

ADA = "The code of Ada is 31-plum.\nThe code of Ada is"
ROWS = [
    {"id": "document", "prompt": make_haystack(3000).prompt},
    {"id": "soon", "prompt": ADA, "arrival_s": 0.05, "slo": {"ttft_s": 2.0, "tpot_s": 0.1}},
    {"id": "wrong", "prompt": ""},
    {"id": "later", "prompt": ADA, "arrival_s": 0.3, "priority": "high"},
]


@pytest.mark.parametrize(
    "options",
    [["--chunk-size", "128", "--policy", "priority"], ["--scheduler", "sarathi", "--block-size", "64"]],
    ids=["medha", "sarathi"],
)
def test_a_run_replays(needle: Model, tmp_path: Path, command: Command, options: list[str]) -> None:
    journal, requests = tmp_path / "run.journal", write_lines(tmp_path / "in.jsonl", *ROWS)
    journal.write_text("what an earlier run left\n")
    given = ["--requests", requests, "--num-kv-blocks", "64", "--log-level", "error", "--journal", journal, *options]
    assert command("generate", needle.folder, *given).code == 3  # a line is wrong
    lines = journal.read_text().splitlines()
    calls = [json.loads(line).get("call") for line in lines]
    assert (calls[0], calls.count("add")) == (None, 3)
    batches = [line for line in lines if '"call":"schedule"' in line and "null" not in line]
    done = command("replay", journal)
    expected = f"{len(batches):,} batches and {len(calls) - 1:,} calls compared: every decision is the same\n"
    assert (done.code, done.out) == (0, expected)
    head = json.loads(lines[0])
    head["config"]["chunk_size"] = 96
    journal.write_text("\n".join([json.dumps(head), *lines[1:]]))
    done = command("replay", journal)
    assert (done.code, done.err, done.out.startswith("after 0 batches and ")) == (1, "", True)
    for text in ("that are the same, line ", "\nrecorded batch 0: ", "\nreplayed batch 0: "):
        assert text in done.out


def test_a_bad_file_is_one_line(tmp_path: Path, command: Command) -> None:
    """What else is no journal: tests/engine/test_journal.py."""
    gone, other = tmp_path / "gone.journal", tmp_path / "other.journal"
    other.write_bytes(b"[" * 100_000)
    said = "is not a medha journal, or is truncated in its first line; accepted: what medha generate --journal wrote"
    for path, message in ((gone, f"journal {gone}: No such file or directory"), (other, f"{other} {said}")):
        done = command("replay", path)
        assert (done.code, done.out, done.err) == (2, "", f"error: ConfigError: {message}\n")
