"""The demo, on a short document."""

import io
import json
import tempfile
from pathlib import Path
from statistics import median
from unittest.mock import Mock

import pytest
from rich.console import Console

from medha.verify import demo


def test_every_answer_is_right_and_questions_do_not_wait_for_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    results, comparison = Mock(wraps=demo.results), Mock(wraps=demo.comparison)
    monkeypatch.setattr(demo, "results", results)
    monkeypatch.setattr(demo, "comparison", comparison)
    out = io.StringIO()
    assert demo.run_demo(long_prompt_tokens=2048, console=Console(file=out, width=80), live=False) == 0

    text = out.getvalue()
    lines = text.splitlines()
    traces = [Path(line) for line in lines if line.endswith(".json")]
    assert all(len(line) <= 80 for line in lines if Path(line) not in traces)
    assert text.startswith("One document of 2,048 tokens with a fact hidden in it is read,")
    assert text.endswith("6 of 6 answers right.\n")

    names = ["document", "chat-1", "chat-2", "chat-3", "chat-4", "chat-5"]
    finished, expected = results.call_args.args
    again, *others = comparison.call_args.args
    rows = results(finished, expected)
    assert rows[0]["prompt_tokens"] == 2048 and {row[""] for row in rows} == {"right"}
    rows = comparison(again, *others)
    assert [row["request"] for row in rows] == names and {row["answers"] for row in rows} == {"right"}
    answers = [output.outputs[0].text.strip() for output in finished]
    assert answers == ["7429-amber.", "31-plum.", "58-fern.", "07-jade.", "92-rust.", "64-opal."]

    document, *shorts = [output.metrics for output in finished]
    assert all(0 < short.arrival < document.first_token for short in shorts)
    # most are answered before the document is read; how much sooner is for the clock to say, not for a test
    assert median(short.first_token for short in shorts) < document.first_token

    assert [output.request_id for output in again] == names
    for output, metrics in zip(again, (document, *shorts), strict=True):
        start = again[0].metrics.arrival
        assert output.metrics.arrival - start == pytest.approx(metrics.arrival - document.arrival)
    assert again[0].metrics.num_chunks == 1  # whole
    for trace in traces:
        events = json.loads(trace.read_text())["traceEvents"]
        assert set(names) <= {event["args"].get("name") for event in events if event["ph"] == "M"}
    assert [trace.name for trace in traces] == ["fcfs.json", "lars.json"]


def test_a_wrong_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    right = demo.questions(1024)
    monkeypatch.setattr(demo, "questions", lambda _: [right[0]._replace(answer=" 1234-amber."), *right[1:]])
    assert demo.run_demo(long_prompt_tokens=1024, console=Console(file=out), live=False) == 3
    assert "wrong" in out.getvalue()
    assert out.getvalue().endswith("5 of 6 answers right.\n")
