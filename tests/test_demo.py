"""The demo, on a short document."""

from __future__ import annotations

import io
from dataclasses import replace
from statistics import median

import pytest
from rich.console import Console
from rich.table import Table

from medha import demo
from medha.models.needle import encode_bytes, expected_continuation
from medha.request import RequestOutput


def test_every_answer_is_right_and_questions_do_not_wait_for_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    finished: list[RequestOutput] = []
    table = demo.results_table

    def keep(outputs: list[RequestOutput], *, expected: dict[str, str]) -> Table:
        finished.extend(outputs)
        return table(outputs, expected=expected)

    monkeypatch.setattr(demo, "results_table", keep)
    out = io.StringIO()
    assert demo.run_demo(long_prompt_tokens=2048, console=Console(file=out, width=80), live=False) == 0

    text = out.getvalue()
    assert all(len(line) <= 80 for line in text.splitlines())
    assert text.startswith("One document of 2,048 tokens with a fact hidden in it is read,")
    assert text.endswith("6 of 6 answers right.\n")
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in text.splitlines() if line[:1] == "│"]
    assert [row[0] for row in rows] == ["document", "chat-1", "chat-2", "chat-3", "chat-4", "chat-5"]
    assert rows[0][1:3] == ["2,048", "0.0 s"]
    assert [row[5] for row in rows] == ["7429-amber.", "31-plum.", "58-fern.", "07-jade.", "92-rust.", "64-opal."]
    assert {row[6] for row in rows} == {"right"}

    document, *shorts = [output.metrics for output in finished]
    assert all(0 < short.arrival < document.first_token for short in shorts)
    assert median(short.ttft for short in shorts) < document.ttft / 3


def test_a_wrong_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    right = demo.questions(1024)
    monkeypatch.setattr(demo, "questions", lambda _: [replace(right[0], answer=" 1234-amber."), *right[1:]])
    assert demo.run_demo(long_prompt_tokens=1024, console=Console(file=out), live=False) == 3
    assert "wrong" in out.getvalue()
    assert out.getvalue().endswith("5 of 6 answers right.\n")


def test_answers_are_what_the_model_must_say() -> None:
    for question in demo.questions(2000):
        ids = encode_bytes(question.prompt)
        assert bytes(expected_continuation(ids, 48)).decode() == question.answer + "\n"
