"""How wide reports are where no terminal says it."""

from __future__ import annotations

import pytest
from rich.table import Table

from medha.cli.console import counted, report_console


def test_text_in_a_file_has_80_columns_and_tables_what_they_need(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    console = report_console()
    table = Table()
    for i in range(10):
        table.add_column(f"column {i}", no_wrap=True)
    table.add_row(*["1,234,567.89"] * 10)
    console.print("word " * 40)
    console.print(table)
    console.print("word " * 40)
    text, row, _ = capsys.readouterr().out.partition("1,234,567.89 │" + " 1,234,567.89 │" * 9)
    assert row
    lines = [line for line in text.splitlines() if "word" in line]
    assert 60 < max(map(len, lines)) <= 80


def test_numbers_of_things() -> None:
    assert [counted(number, "thread") for number in (0, 1, 2, 1000)] == [
        "0 threads",
        "1 thread",
        "2 threads",
        "1,000 threads",
    ]
