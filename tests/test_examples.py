"""Each example runs as printed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ENVIRONMENT, LIMIT_S, run_python

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def run(*command: str | Path) -> str:
    environment = ENVIRONMENT | {"PYTHON": sys.executable}
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_quickstart() -> None:
    """Nor does it wait for what torch loads of its compiler, which takes as long as torch itself."""
    done = run_python("-X", "importtime", EXAMPLES / "quickstart.py")
    assert done.stdout == "The answer is 31-plum.\nThe answer is 07-jade.\n", done.stderr
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "torch" in loaded and not {"torch._dynamo", "torch.distributed.tensor", "sympy"} & loaded


def test_serve_and_ask() -> None:
    code, *progress, answer = run(sys.executable, "-m", "examples.serve_and_ask").splitlines()
    assert (code, answer) == (" 31.", " 7429-amber.")
    assert progress and all(re.fullmatch(r"[\d,]+ of 8,000 tokens read, [\d.]+ s to go", line) for line in progress)


def test_ask_again() -> None:
    first, second = run(sys.executable, "-m", "examples.ask_again", "--num-tokens", "1000").splitlines()
    assert first.startswith("0 tokens cached, ")
    assert re.fullmatch(r"(992|1008) tokens cached, TTFT [\d.]+ s, answer ' 7429-amber.'", second)


def test_drive_the_engine() -> None:
    lines = run(sys.executable, EXAMPLES / "drive_the_engine.py").splitlines()
    ends = [
        match.groups() for line in lines if (match := re.fullmatch(r" *(\w+)  (\w+): (\d+ \+ \d+) tokens, .*", line))
    ]
    assert [(name, reason) for name, reason, _ in ends] == [
        ("question", "stop"),
        ("endless", "abort"),
        ("document", "stop"),
    ]
    assert [lengths for *_, lengths in ends if not lengths.startswith("12 ")] == ["46 + 10", "4096 + 13"]
    text = "".join(line.split("'")[1] for line in lines if line.startswith("document  '"))
    assert text == " 7429-amber."


def test_batch_file() -> None:
    shown = run("bash", EXAMPLES / "batch_file.sh")
    answers = {row["id"]: row for row in map(json.loads, re.findall(r"^\{.*\}$", shown, flags=re.MULTILINE))}
    assert {name: row["text"] for name, row in answers.items()} == {
        "ada": " 31-plum.",
        "bruno": " 58-fern",
        "ids": "!ab",
        "later": " 07-jade.",
    }
    assert len(answers["bruno"]["logprobs"]) == 8
    assert all(row["error"] is None for row in answers.values())


def test_simulate_policy() -> None:
    lines = run(sys.executable, EXAMPLES / "simulate_policy.py").splitlines()
    shape = r"(.*): TTFT P50 and P99 of short prompts (.*) and (.*) s, of long prompts .* and .* s; \d+% in time"
    found = [match.groups() for line in lines if (match := re.fullmatch(shape, line))]
    assert [name for name, *_ in found] == ["LARS", "old and short first"]
    assert all(0 < float(p50) < float(p99) for _, p50, p99 in found)


FILES = sorted(path for path in EXAMPLES.iterdir() if path.is_file())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_examples_are_short_and_tested(path: Path) -> None:
    names = {"quickstart.py", "drive_the_engine.py", "requests.jsonl", "batch_file.sh", "simulate_policy.py"} | {
        "serve_and_ask.py",
        "ask_again.py",
    }
    assert path.name in names
    assert len(path.read_text().splitlines()) < 100


def test_the_committed_report_shows_every_figure() -> None:
    """``python -m examples.reproduce all`` in full: its table, and the pictures that it shows."""
    from examples.reproduce.claims import load_claims
    from examples.reproduce.report import FIGURES

    folder = EXAMPLES / "reproduce" / "results"
    text = (folder / "REPORT.md").read_text(encoding="utf-8")
    assert all(f"({name}.png)" in text and (folder / f"{name}.png").is_file() for name in FIGURES)
    assert all(claim.says.replace("|", "/") in text for claim in load_claims())
    assert {path.name for path in folder.glob("*.png")} == {f"{name}.png" for name in FIGURES}
