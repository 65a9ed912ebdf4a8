"""Runs systems on traces, one after the other, and keeps what reports and plots need of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from medha.errors import ConfigError
from medha.sim.pipeline import Pipeline, Segment
from medha.sim.report import Report, System, alone_seconds, report
from medha.sim.simulator import Outcome, Simulation
from medha.workload.trace import Trace

WINDOW = 60
"""Batches on each stage that a plot of the stages shows."""


@dataclass(frozen=True, slots=True)
class Run:
    """One system and one trace.

    Attributes:
        report: figures.
        outcome: of the requests.
        segments: batches on the stages: all of them, or some from when the longest prompt arrived.
        wall_s: seconds that the simulation took on this machine; no part of the report.
        interrupted: it was broken off.
    """

    report: Report
    outcome: Outcome
    segments: list[Segment]
    wall_s: float
    interrupted: bool = False


@dataclass(slots=True)
class _Window:
    """Keeps so many segments from a time on, then no longer looks on."""

    pipeline: Pipeline | None = None
    start_s: float = 0.0
    most: int = 1 << 62
    segments: list[Segment] = field(default_factory=list)

    def add(self, segment: Segment) -> None:
        if segment.start_s >= self.start_s:
            self.segments.append(segment)
        if len(self.segments) >= self.most and self.pipeline is not None:
            self.pipeline.on_segment = None


@dataclass(frozen=True, slots=True)
class _Progress:
    """Counts on from the runs before."""

    on_progress: Callable[[int], None]
    before: int

    def tell(self, count: int) -> None:
        self.on_progress(self.before + count)


@dataclass(frozen=True, slots=True)
class Study:
    """Systems, each to be run on the trace of its rate.

    Attributes:
        systems: what runs.
        traces: by rate; those of :attr:`System.qps`.
        stop_s: virtual time at which a run stops; None is the end.
        skips: whether stretches of steady decoding are stepped over.
        keeps: which batches on the stages are kept: none, those of a plot, or all.
    """

    systems: Sequence[System]
    traces: dict[float | None, Trace]
    stop_s: float | None = None
    skips: bool = True
    keeps: Literal["none", "window", "all"] = "none"

    @property
    def num_requests(self) -> int:
        """Over all runs."""
        return sum(len(self.traces[system.qps]) for system in self.systems)

    def check(self) -> None:
        """Build every system once.

        Raises:
            ConfigError: something does not fit.
        """
        for system in self.systems:
            try:
                system.replica.build()
            except ConfigError:
                raise
            except ValueError as error:  # what the pool does not hold
                raise ConfigError(f"{system.name}: {error}") from error

    def runs(self, on_progress: Callable[[int], None] = lambda count: None) -> Iterator[Run]:
        """Run one after the other; an interrupt ends the present one, and with it all.

        Args:
            on_progress: told of requests closed, over all runs so far.
        """
        before = 0
        alone = {qps: alone_seconds(self.systems[0].replica, trace.prompt_tokens) for qps, trace in self.traces.items()}
        for system in self.systems:
            trace = self.traces[system.qps]
            window = self._window(system, trace)
            scheduler, pipeline = system.replica.build(on_segment=None if self.keeps == "none" else window.add)
            window.pipeline = pipeline
            simulation = Simulation(
                scheduler,
                pipeline,
                trace,
                stop_s=self.stop_s,
                skips=self.skips,
                on_progress=_Progress(on_progress, before).tell,
            )
            start_s, interrupted = time.perf_counter(), False
            try:
                outcome = simulation.run()
            except KeyboardInterrupt:
                outcome, interrupted = simulation.outcome(), True
            wall_s = time.perf_counter() - start_s
            figures = report(system, outcome, alone[system.qps], interrupted=interrupted)
            yield Run(figures, outcome, window.segments, wall_s, interrupted)
            if interrupted:
                return
            before += len(trace)

    def _window(self, system: System, trace: Trace) -> _Window:
        if self.keeps == "all":
            return _Window()
        parallel = system.replica.parallel
        start_s = float(trace.arrival_s[trace.prompt_tokens.argmax()])
        return _Window(start_s=start_s, most=WINDOW * parallel.spp * parallel.kvp)
