"""What every benchmark prints and writes: configuration, hardware, versions, warm-up, runs, median and spread."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from medha.cost.machine import environment
from medha.errors import ConfigError

DEFINITIONS = {
    "TTFT": "arrival to first token, queueing included",
    "TPOT": "(last - first token) / (tokens - 1) of a request; does not exist for one token",
    "ITL": "gap between successive tokens of a request",
    "E2EL": "arrival to last token",
    "goodput": "completed requests a second that met every objective they had",
    "SLO attainment": "share, of the requests with an objective, that completed and met all of theirs",
}
"""What the terms of serving mean here; other tools differ."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of repeated runs of one thing.

    Attributes:
        median_s: median over the runs.
        min_s, max_s: spread.
        runs: how many counted, warm-up apart.
    """

    median_s: float
    min_s: float
    max_s: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Summarise the runs."""
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))

    def cells_ms(self) -> tuple[str, str]:
        """Median and spread in milliseconds, for a table."""
        return f"{self.median_s * 1e3:,.1f}", f"{self.min_s * 1e3:,.0f}-{self.max_s * 1e3:,.0f}"


def timed(run: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def in_turn(
    contestants: Mapping[str, Callable[[], float]],
    *,
    warmup: int,
    runs: int,
    on_run: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Let several callables that tell their seconds take turns (a b c a b c ...), so that a slow spell hits all alike.

    Args:
        contestants: by name; each call is one run.
        warmup: turns that do not count.
        runs: turns that count.
        on_run: called after each run, warm-up included.

    Returns:
        Seconds of the runs that count, in order, by name.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(warmup + runs):
        for name, run in contestants.items():
            elapsed_s = run()
            on_run()
            if i >= warmup:
                seconds[name].append(elapsed_s)
    return seconds


def interleaved(
    contestants: Mapping[str, Callable[[], object]],
    *,
    warmup: int,
    runs: int,
    on_run: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Time several callables that take turns; arguments as of :func:`in_turn`."""
    clocked = {name: partial(timed, run) for name, run in contestants.items()}
    seconds = in_turn(clocked, warmup=warmup, runs=runs, on_run=on_run)
    return {name: Timing.of(values) for name, values in seconds.items()}


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr while this is open; yields what is to be called as each of ``total`` parts is done."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def stamp() -> dict[str, Any]:
    """Date, hardware and versions of a run."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), **environment()}


def machine_line() -> str:
    """Hardware and versions on one line, for below a table."""
    facts = environment()
    versions = ", ".join(f"{name} {facts['packages'][name]}" for name in ("torch", "transformers"))
    return f"{facts['cpu']}, {facts['cpus']} cores, medha {facts['medha']}, {versions}"


def check_writable(path: Path | None) -> None:
    """Find out before a run that its report cannot be written.

    Raises:
        ConfigError: the folder is missing or not writable.
    """
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"report file {path} cannot be written; accepted: a file in a writable folder")


def write_report(path: Path | None, report: dict[str, Any]) -> None:
    """Write a report as JSON, replacing a former one whole."""
    if path is not None:
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(report, indent=2, default=_plain) + "\n")
        partial.replace(path)


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, Timing) else str(value)
