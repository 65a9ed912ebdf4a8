"""What the tests of benchmarks share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medha.bench import timing as rates
from tests.bench.shapes import ON_TINY
from tests.commands import Command, Done

Bench = Callable[..., tuple[dict[str, Any], Done]]


@pytest.fixture
def bench(command: Command, tmp_path: Path) -> Bench:
    """Runs ``medha bench`` on the smallest model, which must end so; its report, and what was printed."""

    def run(*arguments: object, code: int = 0, of: list[str] = ON_TINY) -> tuple[dict[str, Any], Done]:
        done = command("bench", *arguments, *of, "--output-json", tmp_path / "report.json")
        assert done.code == code, done.err
        return json.loads((tmp_path / "report.json").read_text()), done

    return run


@pytest.fixture
def _small_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small product, so that measuring the machine takes no time."""
    monkeypatch.setattr(rates, "_CPU_PRODUCT", (192, 192, 192))
