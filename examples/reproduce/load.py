"""Systems under load: what is played (:class:`Load`), and on what (:class:`Engine`, or LoongServe).

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

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from examples.reproduce.baselines.loongserve import LoongServe
from examples.reproduce.result import Options
from examples.reproduce.served import Bounded, Served
from examples.reproduce.timing import MODELS, stage_predictors
from medha.config import ParallelConfig, SchedulerConfig
from medha.cost.hardware import load_spec
from medha.cost.predictor import Work
from medha.sim.replica import Replica
from medha.sim.simulator import Simulation
from medha.workload.synth import arrival_times, generators, parse_lengths
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


_TWO_NODES = ParallelConfig(tp=8, spp=2)


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
    parallel: ParallelConfig = _TWO_NODES
    max_model_len: int = 1 << 20

    def play(self, trace: Trace, *, stop_s: float) -> Served:
        """See :class:`System`."""
        spec, model = load_spec(self.spec), MODELS[self.model]
        replica = Replica(spec, model, self.parallel, self.scheduler, max_model_len=self.max_model_len)
        return Served.of(Simulation(*replica.build(), trace, stop_s=stop_s).run())


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


# ---------------------------------------------------------------------------------------------------------------------
# The systems

_ONE_PREFILL = 1
"""``long_threshold`` with which a batch takes one prefill: every prompt is long."""


def _medha(**changed: Any) -> SchedulerConfig:
    return SchedulerConfig(t_target_s=0.02, rho_max=0.4, **changed)


def _sarathi(chunk: int) -> SchedulerConfig:
    return SchedulerConfig(scheduler="sarathi", chunk_size=chunk, max_batch_tokens=chunk, stream=False, depth=2)


MEDHA = Engine("Medha", _medha())
FCFS = Engine("Medha-FCFS", _medha(policy="fcfs", long_threshold=_ONE_PREFILL))
EDF = Engine("Medha-EDF", _medha(policy="edf", long_threshold=_ONE_PREFILL))
LRS = Engine("Medha-LRS", _medha(policy="lrs", long_threshold=_ONE_PREFILL))
LARS = Engine("Medha-LARS", _medha(policy="lars", long_threshold=_ONE_PREFILL))
SARATHI_512 = Engine("Sarathi 512", _sarathi(512))
SARATHI_2048 = Engine("Sarathi 2048", _sarathi(2048))
WHOLE = Engine("vLLM, no chunks", SchedulerConfig(scheduler="orca", stream=False, depth=2))
LOONGSERVE = LoongServe()
LOONGSERVE_RESERVED = LoongServe("LoongServe, reserved", reserved=2)


def fixed_batch_s() -> float:
    """Seconds that a batch takes on a stage of Medha however few tokens it has."""
    stages = stage_predictors(load_spec(MEDHA.spec), MODELS[MEDHA.model], MEDHA.parallel)
    return max(stage.predict([Work(1, 0, False)]) for stage in stages)
