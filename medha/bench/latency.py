"""``medha bench latency``: how long one request takes by itself, over prompt lengths.

The whole engine runs: scheduler, paged cache, sampler. One request is there at a time; the lengths take turns. The
fields of a length are those of ``vllm bench latency`` (``avg_latency``, ``latencies``, ``percentiles``: end to end,
seconds), with the time to the first token and between tokens apart.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from medha.bench.harness import Local, Subject, loaded, random_prompt, terms, title_of
from medha.bench.load import fixed_output, serve_load
from medha.bench.timing import Timing, in_turn
from medha.cli.report import check_writable, progress, write_report
from medha.cli.table import figures_table, report_console
from medha.engine.arrivals import Arrival
from medha.errors import ConfigError
from medha.workload.metrics import Outcome

PERCENTILES = (10, 25, 50, 75, 90, 99)
"""Those of ``vllm bench latency``."""


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """What is measured.

    Attributes:
        input_lens: prompt tokens.
        output_len: tokens that each request generates.
        warmup, runs: requests of each length that do not count, and that do.
        seed: of prompts.
    """

    subject: Subject = field(default_factory=Subject)
    input_lens: tuple[int, ...] = (128, 1024, 4096)
    output_len: int = 16
    warmup: int = 1
    runs: int = 5
    seed: int = 0


@dataclass(frozen=True, slots=True)
class LengthLatency:
    """One prompt length; times in seconds.

    Attributes:
        e2els, ttfts, tpots: of each run in order; ``tpots`` is empty where one token is generated.
    """

    input_len: int
    output_len: int
    e2els: tuple[float, ...]
    ttfts: tuple[float, ...]
    tpots: tuple[float, ...]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> LengthLatency:
        """From the requests of one length, which have completed."""
        first = outcomes[0]
        ttfts = tuple(one.ttft_s for one in outcomes if one.ttft_s is not None)
        tpots = tuple(one.tpot_s for one in outcomes if one.tpot_s is not None)
        return cls(first.input_len, first.output_len, tuple(one.e2el_s for one in outcomes), ttfts, tpots)

    def report(self) -> dict[str, Any]:
        """The fields of ``vllm bench latency``, and medha's."""
        return {
            "input_len": self.input_len,
            "output_len": self.output_len,
            "num_iters": len(self.e2els),
            "avg_latency": statistics.fmean(self.e2els),
            "std_latency": statistics.pstdev(self.e2els),
            "latencies": self.e2els,
            "percentiles": {str(percent): float(np.percentile(self.e2els, percent)) for percent in PERCENTILES},
            "avg_ttft": statistics.fmean(self.ttfts),
            "ttfts": self.ttfts,
            "avg_tpot": statistics.fmean(self.tpots) if self.tpots else None,
            "tpots": self.tpots,
            "e2el": asdict(Timing.of(self.e2els)),
            "ttft": asdict(Timing.of(self.ttfts)),
            "tpot": asdict(Timing.of(self.tpots)) if self.tpots else None,
        }


def latency(
    options: LatencyOptions, *, output_json: Path | None = None, on_run: Callable[[], None] = lambda: None
) -> tuple[Local, list[LengthLatency]]:
    """Run the measurement.

    Args:
        options: what to run.
        output_json: where to write the report.
        on_run: called after each request, warm-up included.

    Raises:
        ConfigError: the options are wrong.
    """
    load = os.getloadavg()[0]
    if len(set(options.input_lens)) < len(options.input_lens):
        raise ConfigError(f"input_lens={options.input_lens}; accepted: different lengths")
    with loaded(options.subject, longest=max(options.input_lens) + options.output_len) as local:
        results = _measure(local, options, on_run)
        found = [one.report() for one in results]
        report = local.report("latency", asdict(options), load) | {"results": found}
    # of a single length, the fields stand where vLLM's own report has them
    write_report(output_json, report | (found[0] if len(found) == 1 else {}))
    return local, results


def _measure(local: Local, options: LatencyOptions, on_run: Callable[[], None]) -> list[LengthLatency]:
    chance = np.random.default_rng(options.seed)
    outcomes: dict[str, list[Outcome]] = {}
    contestants = {}
    for length in options.input_lens:
        name = str(length)
        prompt = random_prompt(length, local.model.vocab_size, chance)
        arrival = Arrival(name, prompt, fixed_output(options.output_len))
        outcomes[name] = []
        contestants[name] = _request(local, arrival, outcomes[name])
    in_turn(contestants, warmup=options.warmup, runs=options.runs, on_run=on_run)
    return [LengthLatency.of(found[options.warmup :]) for found in outcomes.values()]


def _request(local: Local, arrival: Arrival, found: list[Outcome]) -> Callable[[], float]:
    """Serves the request alone and notes what became of it; returns its seconds."""

    def run() -> float:
        (outcome,) = serve_load(local.engine, [arrival]).outcomes
        if not outcome.is_completed:
            raise ConfigError(f"a request of {outcome.input_len} tokens has failed: {outcome.error}")
        found.append(outcome)
        return outcome.e2el_s

    return run


def run_and_print(options: LatencyOptions, output_json: Path | None) -> int:
    """Run with a progress bar on stderr, print the table on stdout; returns 0."""
    check_writable(output_json)
    with progress("serving", (options.warmup + options.runs) * len(options.input_lens)) as advance:
        local, results = latency(options, output_json=output_json, on_run=advance)
    console = report_console()
    console.print(_table(local, options, results))
    console.print(terms("TTFT", "TPOT", "E2EL"), highlight=False)
    runs = f"median of {options.runs} after {options.warmup} warm-up, one request at a time, in turn"
    console.print(local.footer(runs), highlight=False)
    return 0


def _table(local: Local, options: LatencyOptions, results: Sequence[LengthLatency]) -> Table:
    title = f"one request of {options.output_len} output tokens: {title_of(local.subject, local.model)}"
    table = figures_table(title, ("prompt", "TTFT ms", "min-max", "E2EL ms", "min-max", "TPOT ms"))
    for result in results:
        ttft, e2el = (Timing.of(seconds).cells_ms() for seconds in (result.ttfts, result.e2els))
        tpot = Timing.of(result.tpots).cells_ms()[0] if result.tpots else "-"
        table.add_row(f"{result.input_len:,}", *ttft, *e2el, tpot)
    return table
