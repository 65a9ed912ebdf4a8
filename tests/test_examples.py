"""Each example runs as printed."""

import io
import json
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from unittest.mock import patch

from medha.models.needle import make_haystack
from medha.workload.synth import synthesize
from tests.commands import ENVIRONMENT, LIMIT_S, run_python

EXAMPLES = Path(__file__).parents[1] / "examples"


def lines_of(name: str, *arguments: str) -> list[str]:
    """What an example prints as a program with arguments, in this process."""
    with patch.object(sys, "argv", [name, *arguments]), redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return out.getvalue().splitlines()


def test_quickstart() -> None:
    """Nor does it wait for what torch loads of its compiler, which takes as long as torch itself."""
    done = run_python("-X", "importtime", EXAMPLES / "quickstart.py")
    assert done.stdout == "The answer is 31-plum.\nThe answer is 07-jade.\n", done.stderr
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "torch" in loaded and not {"torch._dynamo", "torch.distributed.tensor", "sympy"} & loaded


def test_serve_and_ask() -> None:
    """With a document of half the length."""
    with patch("medha.models.needle.make_haystack", lambda length, **more: make_haystack(length // 2, **more)):
        code, *progress, answer = lines_of("serve_and_ask")
    assert (code, answer) == (" 31.", " 7429-amber.")
    assert progress and all(re.fullmatch(r"[\d,]+ of 4,000 tokens read, [\d.]+ s to go", line) for line in progress)


def test_ask_again() -> None:
    first, second = lines_of("ask_again", "--num-tokens", "1000")
    assert first.startswith("0 tokens cached, ")
    assert re.fullmatch(r"(992|1008) tokens cached, TTFT [\d.]+ s, answer ' 7429-amber.'", second)


def test_drive_the_engine() -> None:
    lines = lines_of("drive_the_engine")
    ends = re.findall(r"^ *(\w+)  (\w+): (\d+ \+ \d+) tokens, .*$", "\n".join(lines), re.MULTILINE)
    assert [end[:2] for end in ends] == [("question", "stop"), ("endless", "abort"), ("document", "stop")]
    assert [lengths for *_, lengths in ends if not lengths.startswith("12 ")] == ["46 + 10", "4096 + 13"]
    text = "".join(line.split("'")[1] for line in lines if line.startswith("document  '"))
    assert text == " 7429-amber."


def test_batch_file() -> None:
    command, environment = ["bash", str(EXAMPLES / "batch_file.sh")], ENVIRONMENT | {"PYTHON": sys.executable}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    lines = (line for line in done.stdout.splitlines() if re.fullmatch(r"\{.*\}", line))
    answers = {row["id"]: row for row in map(json.loads, lines)}
    said = {"ada": " 31-plum.", "bruno": " 58-fern", "ids": "!ab", "later": " 07-jade."}
    assert {name: row["text"] for name, row in answers.items()} == said
    assert len(answers["bruno"]["logprobs"]) == 8
    assert all(row["error"] is None for row in answers.values())


def test_simulate_policy() -> None:
    """Of fewer requests than it asks for, among them a long one."""
    with patch("medha.workload.synth.synthesize", lambda *of, **more: synthesize(*of, **more | {"num_requests": 20})):
        lines = lines_of("simulate_policy")
    shape = r"(.*): TTFT P50 and P99 of short prompts (.*) and (.*) s, of long prompts .* and .* s; \d+% in time"
    found = [match.groups() for line in lines if (match := re.fullmatch(shape, line))]
    assert [name for name, *_ in found] == ["LARS", "old and short first"]
    assert all(0 < float(p50) < float(p99) for _, p50, p99 in found)


def test_examples_are_short_and_tested() -> None:
    names = {"quickstart.py", "drive_the_engine.py", "requests.jsonl", "batch_file.sh", "simulate_policy.py"}
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.iterdir() if path.is_file()}
    assert set(lengths) == names | {"serve_and_ask.py", "ask_again.py"}
    assert max(lengths.values()) < 100, lengths


def test_the_committed_report_shows_every_figure() -> None:
    """``python -m examples.reproduce all`` in full: its table, and the pictures that it shows."""
    from examples.reproduce.claims import load_claims
    from examples.reproduce.report import FIGURES

    folder = EXAMPLES / "reproduce" / "results"
    text = (folder / "REPORT.md").read_text(encoding="utf-8")
    assert all(f"({name}.png)" in text and (folder / f"{name}.png").is_file() for name in FIGURES)
    assert all(claim.says.replace("|", "/") in text for claim in load_claims())
    assert {path.name for path in folder.glob("*.png")} == {f"{name}.png" for name in FIGURES}
