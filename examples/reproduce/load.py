"""Loads under which :mod:`examples.reproduce.systems` are compared, the plays of a process, and what became of each.

Setup of v5 section 6.1 and 6.2, v4 section 5.1 and 5.2: Llama-3 8B on 16 A100, Poisson arrivals at 0.25 to 1.75 queries
a second over a window of 60 minutes. Requests arrive over the whole window and the play is stopped at its end, so those
still under way then are not finished: their waits are known only to be at least what they have waited. A quantile that
falls on one of them is *censored*: a lower bound.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from examples.reproduce.result import Options
from medha.sim.outcome import Gaps, Outcome
from medha.workload.metrics import Flags, Floats, TokenTimes, percentile
from medha.workload.synth import synthesize
from medha.workload.trace import Trace

LONG_TOKENS = 8192
"""Prompts above are long: ``sharegpt4-8k`` has none, and v5 section 6.5 calls those below short."""
_CURVE = tuple(np.linspace(0.0, 1.0, 101).tolist())


@dataclass(frozen=True, slots=True)
class Bounded:
    """A time in seconds, or only a bound on it.

    Attributes:
        seconds: the time.
        is_least: the true one is this or more, as it was not over when the play was stopped.
    """

    seconds: float
    is_least: bool = False

    def __str__(self) -> str:
        number = f"{self.seconds:.3g}" if self.seconds < 1000 else f"{self.seconds:,.0f}"
        return f"{'at least ' if self.is_least else ''}{number} s"

    def ratio_says(self, under: Bounded) -> str:
        """How to read the ratio of this time over another: the words before the number."""
        if self.is_least and under.is_least:
            return "of two lower bounds "
        return "at least " if self.is_least else "at most " if under.is_least else ""


@dataclass(frozen=True, slots=True)
class Served:
    """A trace that was played, by its row; seconds of the virtual clock, NaN for what had not happened at the end.

    Attributes:
        trace: what was asked, in order of arrival.
        first_token_s, finish_s: times of the first and the last token.
        end_s: when the play ended: with the last token, or where it was stopped.
        gaps: waits between tokens, over all tokens.
    """

    trace: Trace
    first_token_s: Floats
    finish_s: Floats
    end_s: float
    gaps: Gaps

    @classmethod
    def of(cls, outcome: Outcome) -> Served:
        """What a simulation of medha's scheduler came to."""
        first_s = float(outcome.trace.arrival_s[0]) if len(outcome.trace) else 0.0
        requests = outcome.requests
        return cls(outcome.trace, requests.first_token_s, requests.finish_s, first_s + outcome.duration_s, outcome.gaps)

    @property
    def ttft_s(self) -> Floats:
        """Seconds to the first token; inf where there was none: a quantile is then no less than it would have been."""
        waited_s = self.first_token_s - self.trace.arrival_s
        return np.where(np.isnan(waited_s), np.inf, waited_s)

    @property
    def tpot_s(self) -> Floats:
        """Mean seconds between the tokens of each request that ended and has several; NaN for the others."""
        trace = self.trace
        return TokenTimes(trace.arrival_s, self.first_token_s, self.finish_s, trace.output_tokens).tpot_s

    @property
    def is_finished(self) -> Flags:
        """Which requests got their last token."""
        return ~np.isnan(self.finish_s)

    @property
    def is_long(self) -> Flags:
        """Which requests have a long prompt."""
        return np.asarray(self.trace.prompt_tokens > LONG_TOKENS)

    def ttft_quantile(self, share: float, among: Flags | None = None) -> Bounded:
        """A quantile of the TTFT, of all requests or some; a bound where it falls on one without a first token."""
        chosen = slice(None) if among is None else among
        value_s = quantile_s(self.ttft_s[chosen], share)
        if math.isfinite(value_s) or math.isnan(value_s):
            return Bounded(value_s)
        waited_s = np.minimum(self.ttft_s, self.end_s - self.trace.arrival_s)  # no more than the true one
        return Bounded(quantile_s(waited_s[chosen], share), True)

    def finished_share(self, early_s: float) -> float:
        """Share of the requests that arrived before a time that have finished; NaN of none."""
        finished = self.is_finished[self.trace.arrival_s < early_s]
        return float(finished.mean()) if len(finished) else math.nan


def quantile_s(values: Floats, share: float) -> float:
    """The quantile of a share, linear; inf where it is for ever; NaN are left out."""
    known = values[~np.isnan(values)]
    found = percentile(known, 100 * share)
    return found if found is not None else math.inf if len(known) else math.nan


def curve(values: Floats) -> list[float | None]:
    """101 quantiles from the least to the most; None where it is not over, or there is none."""
    return [percentile(values[~np.isnan(values)], 100 * share) for share in _CURVE]


SHORT, MIX, MIX_1, MIX_2M = "sharegpt4-8k", "medha-mix", "medha-mix-1", "medha-mix-2m"

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
    """

    lengths: str
    qps: float
    window_s: float
    seed: int = 0

    def trace(self) -> Trace:
        """The requests."""
        return synthesize(self.lengths, qps=self.qps, duration_s=self.window_s, seed=self.seed)


class System(Protocol):
    """What can be loaded; plays are kept by its label."""

    @property
    def label(self) -> str:
        """Its name in figures."""
        ...

    def play(self, trace: Trace, *, stop_s: float) -> Served:
        """Serve a trace until a time, from fresh."""
        ...


_PLAYED: dict[tuple[str, Load], Served] = {}


def serve(system: System, load: Load) -> Served:
    """Play a load on a system; once in a process, as several figures ask for the same."""
    if (system.label, load) not in _PLAYED:
        says = f"{load.lengths}, {load.qps:g} QPS for {load.window_s / 60:g} min"
        print(f"  playing {system.label}: {says}", file=sys.stderr, flush=True)
        _PLAYED[system.label, load] = system.play(load.trace(), stop_s=load.window_s)
    return _PLAYED[system.label, load]


def run_of(system: System, lengths: str, qps: float, options: Options) -> Served:
    """A load over the papers' window, on a system."""
    return serve(system, Load(lengths, qps, options.window_s, options.seed))


def runs_of(systems: Sequence[System], lengths: str, options: Options) -> dict[str, list[Served]]:
    """The same at the rates of v5, by the label of each system."""
    return {system.label: [run_of(system, lengths, qps, options) for qps in RATES_QPS] for system in systems}
