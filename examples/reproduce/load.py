"""Loads under which :mod:`examples.reproduce.systems` are compared, and the plays of a process.

Setup of v5 section 6.1 and 6.2, v4 section 5.1 and 5.2: Llama-3 8B on 16 A100, Poisson arrivals at 0.25 to 1.75 queries
a second over a window of 60 minutes. Requests arrive over the whole window and the play is stopped at its end, so those
still under way then are not finished: their waits are known only to be at least what they have waited. A quantile that
falls on one of them is *censored*: a lower bound.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from examples.reproduce.result import Options
from examples.reproduce.served import Bounded, Served
from medha.workload.synth import Lengths, arrival_times, generators, parse_lengths
from medha.workload.trace import Trace

SHORT, MIX, MIX_2M = "sharegpt4-8k", "medha-mix", "medha-mix-2m"

RATES_QPS = (0.25, 0.75, 1.25, 1.75)
"""The loads of v5 section 6.2."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that arrive over a window.

    Attributes:
        lengths: of :func:`medha.workload.synth.parse_lengths`.
        qps: of the Poisson arrivals.
        window_s: seconds over which they arrive, and at the end of which the play stops.
        seed: of arrivals and lengths; another rate or share of long requests draws the same numbers.
        long_share: of the long requests of a mix; None is the mix's own.
    """

    lengths: str
    qps: float
    window_s: float
    seed: int = 0
    long_share: float | None = None

    def trace(self) -> Trace:
        """The requests."""
        lengths = parse_lengths(self.lengths)
        if self.long_share is not None:
            assert isinstance(lengths, Lengths), f"{self.lengths} has no long requests"
            lengths = replace(lengths, long_share=self.long_share)
        for_arrivals, for_lengths = generators(self.seed)
        times = arrival_times("poisson", for_arrivals, qps=self.qps, duration_s=self.window_s)
        return Trace(times, *lengths.sample(for_lengths, len(times)))


class System(Protocol):
    """What can be loaded; plays are kept by its label."""

    @property
    def label(self) -> str:
        """Its name in figures."""
        ...

    def play(self, trace: Trace, *, stop_s: float) -> Served:
        """Serve a trace until a time, from fresh."""
        ...


def window_s(options: Options) -> float:
    """Seconds of a play: the papers' hour; ``quick`` takes five minutes, in which queues grow less."""
    return 300.0 if options.quick else 3600.0


_PLAYED: dict[tuple[str, Load], Served] = {}


def serve(system: System, load: Load) -> Served:
    """Play a load on a system; once in a process, as several figures ask for the same."""
    if (system.label, load) not in _PLAYED:
        share = "" if load.long_share is None else f" with {100 * load.long_share:g} % long"
        says = f"{load.lengths}{share}, {load.qps:g} QPS for {load.window_s / 60:g} min"
        print(f"  playing {system.label}: {says}", file=sys.stderr, flush=True)
        _PLAYED[system.label, load] = system.play(load.trace(), stop_s=load.window_s)
    return _PLAYED[system.label, load]


def run_of(system: System, lengths: str, qps: float, options: Options, long_share: float | None = None) -> Served:
    """A load over the papers' window, on a system."""
    return serve(system, Load(lengths, qps, window_s(options), options.seed, long_share))


def runs_of(
    systems: Sequence[System], lengths: str, rates: Sequence[float], options: Options
) -> dict[str, list[Served]]:
    """The same at some rates, by the label of each system."""
    return {system.label: [run_of(system, lengths, qps, options) for qps in rates] for system in systems}


def ratio_says(over: Bounded, under: Bounded) -> str:
    """How to read the ratio of two times: the words before the number."""
    if over.is_least and under.is_least:
        return "of two lower bounds "
    return "at least " if over.is_least else "at most " if under.is_least else ""
