"""The improvement rate of CDSP: how much of its time to the first token a request must save to get more groups.

Source: Tetris, sections 5.1 and 7.1. Under light load a small rate is best, as groups would idle; under heavy load a
larger one, as groups that one request gets the next has to wait for. So the rate that gives the least mean TTFT is
found ahead for each load, by ``python -m tools.best_rates``. The table says for which machine, model and layout it was
made. :class:`LoadWindow` reads the load of the last minute, every 30 s, and takes the nearest entry. While less than
30 s are known it reads whenever that has doubled: what comes first would else be taken for light load.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from medha.config.fields import check_number
from medha.cost.json_form import JsonFile
from medha.errors import ConfigError

MAX_RATE = 0.75
_WINDOW_S, _UPDATE_S = 60.0, 30.0


@dataclass(frozen=True, slots=True)
class RateTable(JsonFile):
    """The best rate of each load, and what it was found for; what ``tools.best_rates`` writes."""

    format = "medha-improvement-rates"

    hardware: str
    model: str
    layout: str  # degrees, SP sizes and the most chunks
    load: str  # the requests that were played
    qps: tuple[float, ...]  # loads, requests a second, ascending
    rates: tuple[float, ...]  # of each
    mean_ttft_s: tuple[float, ...]  # with it

    def __post_init__(self) -> None:
        if not self.qps or len(self.qps) != len(self.rates) or list(self.qps) != sorted(self.qps):
            raise ConfigError(f"qps={self.qps!r}; accepted: ascending loads, as many as rates")
        for rate in self.rates:
            check_number("rates", rate, 0.0, MAX_RATE)

    def at(self, qps: float) -> float:
        """The rate of the nearest load."""
        return min(zip(self.qps, self.rates, strict=True), key=lambda entry: abs(entry[0] - qps))[1]


def read_rates(rate: float | str, **its: str) -> float | RateTable:
    """A rate, or the table of a file; ConfigError for one of another ``hardware``, ``model`` or ``layout``."""
    if not isinstance(rate, str):
        return float(rate)
    try:
        table = RateTable.from_json(Path(rate).read_text(encoding="utf-8", errors="replace"), source=rate)
    except OSError as error:
        what = f"improvement_rate={rate!r} ({error.strerror})"
        raise ConfigError(f"{what}; accepted: a number from 0 to below 1, or a file of tools.best_rates") from error
    for name, value in its.items():
        if (made_for := getattr(table, name)) != value:
            raise ConfigError(f"the improvement rates are for {name} {made_for!r}; accepted: {value!r}")
    return table


class LoadWindow:
    """The improvement rate of the moment: a number for good, or a table's for the load of the last minute."""

    def __init__(self, rates: float | RateTable) -> None:
        self._table = None if isinstance(rates, float) else rates
        self.rate = rates if isinstance(rates, float) else rates.rates[0]
        self._arrivals_s: deque[float] = deque()
        self._next_s = -math.inf

    def arrived(self, arrival_s: float) -> None:
        """A request has arrived."""
        if self._table is None:
            return
        if arrival_s > self._next_s:
            while self._arrivals_s and self._arrivals_s[0] <= arrival_s - _WINDOW_S:
                self._arrivals_s.popleft()
            known_s = arrival_s - self._arrivals_s[0] if self._arrivals_s else 0.0
            self.rate = self._table.at(len(self._arrivals_s) / known_s if known_s else 0.0)
            self._next_s = arrival_s + min(known_s, _UPDATE_S)
        self._arrivals_s.append(arrival_s)
