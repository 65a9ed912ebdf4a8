"""The systems that are compared under load: Medha, its variants, Sarathi-Serve, vLLM and LoongServe.

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

from dataclasses import dataclass, replace

from examples.reproduce.baselines.loongserve import LoongServe
from examples.reproduce.load import Served
from examples.reproduce.timing import A100, LLAMA_8B, stage_predictors
from medha.config import ParallelConfig, SchedulerConfig
from medha.cost.predictor import Work
from medha.sim.replica import Replica
from medha.sim.simulator import Simulation
from medha.workload.trace import Trace

_TWO_NODES = Replica(A100, LLAMA_8B, ParallelConfig(tp=8, spp=2))


@dataclass(frozen=True, slots=True)
class Engine:
    """A replica under medha's scheduler or a classical one.

    Attributes:
        label: its name in figures.
        scheduler: who decides.
        replica: what it decides for, with whatever scheduler.
    """

    label: str
    scheduler: SchedulerConfig
    replica: Replica = _TWO_NODES

    def play(self, trace: Trace, *, stop_s: float) -> Served:
        """Serve a trace until a time, from fresh."""
        replica = replace(self.replica, scheduler=self.scheduler)
        return Served.of(Simulation(*replica.build(), trace, stop_s=stop_s).run())


MEDHA = Engine("Medha", SchedulerConfig(policy="lars", t_target_s=0.02, rho_max=0.4, late_share=0.1))
MEDHA_TOKEN = Engine("Medha, 20 ms a token", replace(MEDHA.scheduler, t_target_s=0.02 / 3))
"""Sensitivity: the papers' 20 ms as a bound on a token, which takes three batches on two stages."""
_ONE_BY_ONE = replace(MEDHA.scheduler, long_threshold=1)  # every prompt is long, and a batch takes one long prefill
FCFS = Engine("Medha-FCFS", replace(_ONE_BY_ONE, policy="fcfs"))
EDF = Engine("Medha-EDF", replace(_ONE_BY_ONE, policy="edf"))
LRS = Engine("Medha-LRS", replace(_ONE_BY_ONE, policy="lrs"))
LARS = Engine("Medha-LARS", _ONE_BY_ONE)
WHOLE = Engine("vLLM, no chunks", SchedulerConfig(scheduler="orca", stream=False, depth=2))
_SARATHI = replace(WHOLE.scheduler, scheduler="sarathi")
SARATHI_512 = Engine("Sarathi 512", replace(_SARATHI, chunk_size=512, max_batch_tokens=512))
SARATHI_2048 = Engine("Sarathi 2048", replace(_SARATHI, chunk_size=2048, max_batch_tokens=2048))
LOONGSERVE = LoongServe()
LOONGSERVE_RESERVED = LoongServe("LoongServe, reserved", reserved=2)


def fixed_batch_s() -> float:
    """Seconds that a batch takes on a stage of Medha however few tokens it has."""
    stages = stage_predictors(A100, MEDHA.replica.model, MEDHA.replica.parallel)
    return max(stage.predict([Work(1, 0, False)]) for stage in stages)
