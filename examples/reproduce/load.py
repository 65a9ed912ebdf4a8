"""Systems under load: what is played (:class:`Load`), on what (:class:`Engine`, :class:`Elastic`), and how it is told.

Setup of v5 section 6.1 and 6.2, v4 section 5.1 and 5.2: Llama-3 8B on 16 A100, Poisson arrivals at 0.25 to 1.75 queries
a second over a window of 60 minutes. Requests arrive over the whole window and the play is stopped at its end, so those
still under way then are not finished: their waits are known only to be at least what they have waited. A quantile that
falls on one of them is *censored*: a lower bound.

What the papers leave open, and what is taken here:

- Medha: LARS, a batch time of 20 ms and ``rho_max`` 0.4 (v5 appendix A), for all else the defaults of the scheduler,
  its guard for the late included. A decode returns with every batch in flight, three of them with two stages.
- The variants change one thing, the policy, and let at most one prefill into a batch (v5 section 6.1): a prompt of any
  length counts as long, and a batch takes one long prefill.
- Sarathi-Serve: chunks of 512 or 2,048 tokens, a budget of as many tokens a batch, pipelined micro-batches, as many as
  there are stages (with one more it completes 30 % more requests at 0.75 QPS with long ones, and decodes 30 % slower).
  vLLM without chunking: whole prompts, first come first served. Neither pays for the activations of long prompts nor
  preempts anybody for want of memory, which favours them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from examples.reproduce.baselines.loongserve import LoongServe, play
from examples.reproduce.result import Options
from examples.reproduce.served import Floats, Served, finite, quantile_s
from examples.reproduce.timing import MODELS, stage_predictors
from medha.config import ParallelConfig, SchedulerConfig
from medha.cost.hardware import load_spec
from medha.cost.predictor import Work
from medha.sim.replica import Replica
from medha.sim.simulator import Simulation
from medha.workload.synth import arrival_times, generators, parse_lengths
from medha.workload.trace import Trace

LONG_TOKENS = 8192
"""Prompts above are long: ``sharegpt4-8k`` has none, and v5 section 6.5 calls those below short."""
SHORT, MIX, MIX_2M = "sharegpt4-8k", "medha-mix", "medha-mix-2m"
Mask = NDArray[np.bool_]

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
            lengths = replace(lengths, long_share=self.long_share)
        for_arrivals, for_lengths = generators(self.seed)
        times = arrival_times("poisson", for_arrivals, qps=self.qps, duration_s=self.window_s)
        return Trace(times, *lengths.sample(for_lengths, len(times)))

    @property
    def says(self) -> str:
        """In a few words."""
        share = "" if self.long_share is None else f" with {100 * self.long_share:g} % long"
        return f"{self.lengths}{share}, {self.qps:g} QPS for {self.window_s / 60:g} min"


@dataclass(frozen=True, slots=True)
class Run:
    """What a load came to on a system.

    Attributes:
        served: by request.
        peak_kv_share: most of the KV blocks that a sample found in use; None where the system tells none.
    """

    served: Served
    peak_kv_share: float | None = None


class System(Hashable, Protocol):
    """What can be loaded; hashable, as runs are kept by it."""

    @property
    def label(self) -> str:
        """Its name in figures."""
        ...

    def play(self, trace: Trace, stop_s: float) -> Run:
        """Serve a trace until a time, from fresh."""
        ...


@dataclass(frozen=True, slots=True)
class Engine:
    """A replica under medha's scheduler or a classical one.

    Attributes:
        label: its name in figures.
        scheduler: who decides.
        model: of :data:`examples.reproduce.timing.MODELS`.
        spec: name of its accelerators' spec.
        parallel: layout.
        max_model_len: tokens of the longest request.
    """

    label: str
    scheduler: SchedulerConfig
    model: str = "Llama-3 8B"
    spec: str = "a100-80g"
    parallel: ParallelConfig = field(default_factory=lambda: ParallelConfig(tp=8, spp=2))
    max_model_len: int = 1 << 20

    def play(self, trace: Trace, stop_s: float) -> Run:
        """See :class:`System`."""
        spec, model = load_spec(self.spec), MODELS[self.model]
        replica = Replica(spec, model, self.parallel, self.scheduler, max_model_len=self.max_model_len)
        scheduler, pipeline = replica.build()
        outcome = Simulation(scheduler, pipeline, trace, stop_s=stop_s).run()
        return Run(Served.of(outcome), max((share for *_, share in outcome.series.rows), default=0.0))


@dataclass(frozen=True, slots=True)
class Elastic:
    """LoongServe, as :mod:`examples.reproduce.baselines.loongserve` models it: TP 2, 8 instances (v5 section 6.2).

    Attributes:
        label: its name in figures.
        reserved: instances kept for short requests (v5 section 6.5).
    """

    label: str
    reserved: int = 0

    def play(self, trace: Trace, stop_s: float) -> Run:
        """See :class:`System`."""
        system = LoongServe(load_spec("a100-80g"), MODELS["Llama-3 8B"], num_instances=8, tp=2, reserved=self.reserved)
        return Run(play(system, trace, stop_s=stop_s))


def window_s(options: Options) -> float:
    """Seconds of a play: the papers' hour; ``quick`` takes five minutes, in which queues grow less."""
    return 300.0 if options.quick else 3600.0


@cache
def serve(system: System, load: Load) -> Run:
    """Play a load on a system; once in a process, as several figures ask for the same."""
    print(f"  playing {system.label}: {load.says}", file=sys.stderr, flush=True)
    return system.play(load.trace(), load.window_s)


def run_of(system: System, lengths: str, qps: float, options: Options, long_share: float | None = None) -> Run:
    """A load over the papers' window, on a system."""
    return serve(system, Load(lengths, qps, window_s(options), options.seed, long_share))


def runs_of(systems: Sequence[System], lengths: str, rates: Sequence[float], options: Options) -> dict[str, list[Run]]:
    """The same at some rates, by the label of each system."""
    return {system.label: [run_of(system, lengths, qps, options) for qps in rates] for system in systems}


# ---------------------------------------------------------------------------------------------------------------------
# The systems

_ONE_PREFILL = 1
"""``long_threshold`` with which a batch takes one prefill: every prompt is long."""


def _medha(**changed: Any) -> SchedulerConfig:
    return SchedulerConfig(t_target_s=0.02, rho_max=0.4, **changed)


def _sarathi(chunk: int, **changed: Any) -> SchedulerConfig:
    return SchedulerConfig(
        scheduler="sarathi", chunk_size=chunk, max_batch_tokens=chunk, stream=False, depth=2, **changed
    )


MEDHA = Engine("Medha", _medha())
FCFS = Engine("Medha-FCFS", _medha(policy="fcfs", long_threshold=_ONE_PREFILL))
EDF = Engine("Medha-EDF", _medha(policy="edf", long_threshold=_ONE_PREFILL))
LRS = Engine("Medha-LRS", _medha(policy="lrs", long_threshold=_ONE_PREFILL))
LARS = Engine("Medha-LARS", _medha(policy="lars", long_threshold=_ONE_PREFILL))
SARATHI_512 = Engine("Sarathi 512", _sarathi(512))
SARATHI_2048 = Engine("Sarathi 2048", _sarathi(2048))
WHOLE = Engine("vLLM, no chunks", SchedulerConfig(scheduler="orca", stream=False, depth=2))
LOONGSERVE = Elastic("LoongServe")
LOONGSERVE_RESERVED = Elastic("LoongServe, reserved", reserved=2)


def fixed_batch_s() -> float:
    """Seconds that a batch takes on a stage of Medha however few tokens it has."""
    stages = stage_predictors(load_spec(MEDHA.spec), MODELS[MEDHA.model], MEDHA.parallel)
    return max(stage.predict([Work(1, 0, False)]) for stage in stages)


# ---------------------------------------------------------------------------------------------------------------------
# What is told of a run


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


def is_long(trace: Trace) -> Mask:
    """Which requests have a prompt above 8192 tokens."""
    return np.asarray(trace.prompt_tokens > LONG_TOKENS)


def is_early(trace: Trace, stop_s: float) -> Mask:
    """Which requests arrived in the first half of a window, and so had at least the other half to be served."""
    return np.asarray(trace.arrival_s < stop_s / 2)


def waited_s(served: Served) -> Floats:
    """Seconds to the first token, or to the end of the play where there was none: no more than the true TTFT."""
    return np.minimum(served.ttft_s, served.end_s - served.trace.arrival_s)


def ttft_quantile(served: Served, share: float, *, among: Mask | None = None) -> Bounded:
    """A quantile of the TTFT, of all requests or some; a lower bound where it falls on one without a first token."""
    ttft_s, least_s = served.ttft_s, waited_s(served)
    if among is not None:
        ttft_s, least_s = ttft_s[among], least_s[among]
    value_s = quantile_s(ttft_s, share)
    return Bounded(quantile_s(least_s, share), True) if math.isinf(value_s) else Bounded(value_s)


def ratio_says(over: Bounded, under: Bounded) -> str:
    """How to read the ratio of two times: the words before the number."""
    words = {
        (False, False): "",
        (True, False): "at least ",
        (False, True): "at most ",
        (True, True): "of two lower bounds ",
    }
    return words[over.is_least, under.is_least]


def num_active(served: Served, times_s: Floats) -> list[int]:
    """Requests that have arrived and not finished, queued ones included, at some times."""
    ends_s = np.sort(served.finish_s[served.is_finished])
    arrived = np.searchsorted(served.trace.arrival_s, times_s, side="right")
    return [int(count) for count in arrived - np.searchsorted(ends_s, times_s, side="right")]


def stretches_s(arrival_s: Floats, is_slow: Mask) -> list[float]:
    """Seconds of arrivals without a break that were all slow: from the first to the last of each run of them."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_slow, [False]]).astype(np.int8)))
    return [float(arrival_s[last - 1] - arrival_s[first]) for first, last in zip(edges[::2], edges[1::2], strict=True)]


SHARES = (0.5, 0.9, 0.99)
_CURVE = tuple(np.linspace(0.0, 1.0, 101).tolist())


def curve(values: Floats) -> list[float | None]:
    """101 quantiles from the least to the most; None where it is not over, or there is none."""
    return [finite(quantile_s(values, share)) for share in _CURVE]


def told(run: Run) -> dict[str, Any]:
    """The numbers of a run for a JSON file; None for what had not happened, NaN and inf being no JSON."""
    served = run.served
    trace, long = served.trace, is_long(served.trace)
    kinds = {"all": np.ones(len(trace), np.bool_), "short": ~long, "long": long}
    return {
        "requests": {name: int(among.sum()) for name, among in kinds.items()},
        "finished": {name: int(served.is_finished[among].sum()) for name, among in kinds.items()},
        "ttft_s": {name: _quantiles(served.ttft_s[among]) for name, among in kinds.items()},
        "ttft_at_least_s": [ttft_quantile(served, p).seconds for p in SHARES],
        "tpot_s": _quantiles(served.tpot_s),
        "tbt_s": [finite(served.gaps.quantile_s(p)) for p in SHARES],
        "peak_kv_share": run.peak_kv_share,
    }


def told_of(runs: Mapping[str, Sequence[Run]]) -> dict[str, list[dict[str, Any]]]:
    """The numbers of several runs."""
    return {name: [told(run) for run in row] for name, row in runs.items()}


def _quantiles(values: Floats) -> list[float | None]:
    return [finite(quantile_s(values, share)) for share in SHARES]


def finished_share(served: Served, *, among: Mask | None = None) -> float:
    """Share of the requests, or of some, that have finished; NaN of none."""
    finished = served.is_finished if among is None else served.is_finished[among]
    return float(finished.mean()) if len(finished) else math.nan
