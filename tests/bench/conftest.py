"""What the tests of benchmarks share."""

import pytest

from medha.bench import timing as rates


@pytest.fixture
def _small_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small product, so that measuring the machine takes no time."""
    monkeypatch.setattr(rates, "_CPU_PRODUCT", (192, 192, 192))
