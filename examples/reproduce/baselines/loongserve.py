"""LoongServe under load: elastic sequence parallelism, played on a virtual clock.

Source: LoongServe (Wu et al., arXiv:2404.09526), and its published code where the paper leaves something open. It is
what section 6 of arXiv:2409.17264v5 compares with; the reserved pool is that of its section 6.5. Instances of ``tp``
accelerators form groups. A prefill runs whole on one group and is never interrupted; a group decodes until its
requests end. The manager takes four steps:

1. Dispatching (:func:`examples.reproduce.baselines.loongserve_plan.select`), when no prefill runs, and not before every
   group has decoded ten steps since. Up to four times in a row, later requests may pass one that cannot go. Who arrives
   while prefills run waits for all of them, unless idle instances can prefill it before the last of them ends.
2. Allocation: groups move together while one more instance saves the prefill more than the move takes; groups stop for
   the prefill where memory wants it, or where that saves more per prompt token than it costs per token produced.
3. Batching (:func:`examples.reproduce.baselines.loongserve_plan.plan_batches`).
4. Scaling: a prefill keeps its keys and values on the fewest instances that hold them, and the others are free when it
   ends. Decodes take another instance where memory ends, or where a master would have more than 128 requests.

Simplified, and kinder than the system: groups do not wait for each other between steps; any idle instance may prefill
what fits in the time left; nobody is evicted, since a request is admitted only with room for its whole output, which is
known; the manager takes no time. A prompt that all instances together cannot hold, the activations of the whole prompt
included, is refused and never gets a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from examples.reproduce.baselines.loongserve_cost import EspCosts
from examples.reproduce.baselines.loongserve_manager import Manager
from examples.reproduce.load import Served
from examples.reproduce.timing import A100, LLAMA_8B
from medha.config import ModelConfig
from medha.sim.outcome import Gaps
from medha.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class LoongServe:
    """A system of elastic instances.

    Attributes:
        label: its name in figures.
        model: what runs on them.
        num_instances: in all.
        tp: accelerators of each.
        reserved: instances for prompts below ``reserved_below`` tokens; the others serve the rest. 0 for no such pool.
        reserved_below: tokens.
        utilization: share of the memory that may be used.
    """

    label: str = "LoongServe"
    model: ModelConfig = LLAMA_8B
    num_instances: int = 8
    tp: int = 2
    reserved: int = 0
    reserved_below: int = 8192
    utilization: float = 0.9

    def play(self, trace: Trace, *, stop_s: float = math.inf) -> Served:
        """Play a trace, to the end or until a time; the same trace gives the same result.

        Raises:
            ConfigError: the model does not fit an instance.
        """
        is_stopped, count = False, self.num_instances
        first_token_s, finish_s = np.full((2, len(trace)), np.nan)
        served = Served(trace, first_token_s, finish_s, stop_s, Gaps())
        costs = EspCosts(A100, self.model, num_instances=count, tp=self.tp, utilization=self.utilization)
        pools = [(range(count), np.ones(len(trace), np.bool_))]
        if self.reserved:
            is_short = trace.prompt_tokens < self.reserved_below
            pools = [(range(self.reserved), is_short), (range(self.reserved, count), ~is_short)]
        for instances, mask in pools:
            is_stopped |= Manager(costs, served, instances).play(np.flatnonzero(mask).tolist(), stop_s)
        if not is_stopped:
            return replace(served, end_s=float(np.nanmax(finish_s, initial=0.0)))
        for times in (first_token_s, finish_s):
            times[times > stop_s] = np.nan  # the last step of a run that the manager interrupted
        return served
