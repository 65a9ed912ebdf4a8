"""What half the transfer buffers cost: prefill groups, hand-overs and decode instances on a virtual clock.

The engine's own schedulers and :class:`medha.engine.decode.HandOvers` decide, batches take what the simulator's
pipelines say. A hand-over is over when the slowest of its links is done, each source group's and the instance's; links
take hand-overs in the order of their grants, as :mod:`medha.worker.transfer` does. Printed are the mean seconds from
arrival to the second token, the first behind the hand-over (Tetris, Fig. 14f, halves its buffers):

python -m tools.transfer_buffers --lengths tetris-medium --qps 1.5 --gbit 50
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from medha.batch import Batch
from medha.config import CDSP, ParallelConfig, SchedulerConfig
from medha.cost.hardware import load_spec
from medha.engine.decode import DecodeInstance, HandOvers
from medha.sched.decision import SchedulerRequest
from medha.sched.scheduler import Scheduler
from medha.sim.pipeline import Pipeline
from medha.sim.replica import Replica, find_model, kv_bytes_per_token
from medha.workload.synth import synthesize
from medha.workload.trace import Trace
from tools.command import main, numbers, print_head, print_row

Side = tuple[Scheduler, Pipeline]


@dataclass
class Play:
    """One load on prefill groups and decode instances behind them.

    Attributes:
        link_s: seconds in which the link of a prefill group, and that of an instance, takes a token.
        tokens_s: by slot, when each of its tokens was drawn.
        granted_s: by slot, when it was granted.
    """

    prefills: Side
    decodes: list[Side]
    buffers: int
    link_s: tuple[float, float]
    tokens_s: dict[int, list[float]] = field(default_factory=dict)
    granted_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first = self.prefills[0].memory.num_groups
        self.instances = [DecodeInstance(first + at, scheduler) for at, (scheduler, _) in enumerate(self.decodes)]
        self.waits = HandOvers(self.instances, self.buffers)
        self._free_s = dict.fromkeys(range(first + len(self.decodes)), 0.0)  # by group, when its link is
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()

    def run(self, requests: list[SchedulerRequest]) -> None:
        """Play requests, in the order of their arrival, until all have ended."""
        self._wanted = {one.slot: one for one in requests}
        for one in requests:
            head = SchedulerRequest(one.slot, one.num_prompt_tokens, 1, one.arrival_s)
            self._at(one.arrival_s, partial(self.prefills[0].add, head))
        while self._events:
            now_s, _, event = heapq.heappop(self._events)
            event(now_s)
            if not self._events or self._events[0][0] > now_s:
                self._fill(now_s)
        short = [slot for slot, one in self._wanted.items() if len(self.tokens_s.get(slot, ())) < one.max_new_tokens]
        used = [side[0].memory.num_used for side in (self.prefills, *self.decodes)]
        assert not short and not any(used), f"requests {short} have not ended; blocks in use {used}"

    def waited_s(self, trace: Trace, token: int) -> list[float]:
        """From the arrival of each request of a trace to a token of its, seconds."""
        return [self.tokens_s[slot][token] - at for slot, at in enumerate(trace.arrival_s.tolist())]

    def _at(self, time_s: float, event: Callable[[float], Any]) -> None:
        heapq.heappush(self._events, (time_s, next(self._numbers), event))

    def _fill(self, now_s: float) -> None:
        for request, grant in self.waits.grants():
            self._hand_over(request, grant.shared[0].group, now_s)
        for side in (*self.decodes, self.prefills):
            scheduler, pipeline = side
            while (batch := scheduler.schedule(now_s).batch) is not None:
                passage = pipeline.send(batch, scheduler.memory, now_s)
                self._at(passage.end_s, partial(self._done, side, batch, passage.busy_s))

    def _hand_over(self, request: SchedulerRequest, target: int, now_s: float) -> None:
        self.granted_s[request.slot] = now_s
        length = request.num_prompt_tokens
        held = self.prefills[0].memory.held_by_group(request.slot, length)
        parts = [*((group, tokens, self.link_s[0]) for group, tokens in held), (target, length, self.link_s[1])]
        for link, tokens, token_s in parts:
            self._free_s[link] = max(now_s, self._free_s[link]) + tokens * token_s
        end_s = max(self._free_s[link] for link, _, _ in parts)
        self._at(end_s, lambda _: self._arrive(request.slot, target))

    def _arrive(self, slot: int, target: int) -> None:
        self.prefills[0].let_go(slot)
        instance = next(one for one in self.instances if one.group == target)
        instance.scheduler.arrived(instance.coming.pop(slot), wanted=True)

    def _done(self, side: Side, batch: Batch, busy_s: float, now_s: float) -> None:
        is_first, results = side is self.prefills, []
        for slot in [row.slot for row in batch.rows if row.samples]:
            self.tokens_s.setdefault(slot, []).append(now_s)
            ends = len(self.tokens_s[slot]) == self._wanted[slot].max_new_tokens
            results.append((slot, int(ends or not is_first), ends))
        side[0].complete(batch, now_s, results, busy_s)
        for slot in [slot for slot, _, ends in results if is_first and not ends]:
            self.waits.keep(side[0], self._wanted[slot])


def played(prefills: Replica, trace: Trace, *, gbit: float, buffers: int, num_instances: int = 2, tp: int = 8) -> Play:
    """A trace on prefill groups, of which each accelerator has a link of so many Gbit/s, and on decode instances."""
    spec, model, alone = prefills.spec, prefills.model, SchedulerConfig(prefix_caching=False)
    decodes = Replica(spec, model, ParallelConfig(tp=tp), alone, prefills.max_model_len)
    link_s = kv_bytes_per_token(model, prefills.parallel, 0) * 8 / (gbit * 1e9)
    play = Play(prefills.build(), [decodes.build() for _ in range(num_instances)], buffers, (link_s, link_s / tp))
    asked = ((row.prompt_tokens, max(row.output_tokens, 2), row.arrival_s or 0.0) for row in trace.rows())
    play.run([SchedulerRequest(slot, *one) for slot, one in enumerate(asked)])
    return play


def transfer_buffers(
    lengths: str = "tetris-medium",
    qps: float = 1.5,
    gbit: str = "50,20",
    buffers: int = 4,
    num_requests: int = 300,
    num_seeds: int = 3,
) -> None:
    """Print the mean seconds to the second token with all of the transfer buffers, and with half of them: Llama-3 8B
    on A100s, 16 prefill groups of tp 1 and two decode instances of tp 8, each accelerator with a link of --gbit."""
    spec, model, parallel = load_spec("a100-80g"), find_model("llama-3-8b"), ParallelConfig(kvp=16)
    config = SchedulerConfig(CDSP, improvement_rate=0.3)
    print_head("Gbit/s", "seed", f"{buffers} buffers", f"{buffers // 2}", "overhead")
    for rate in numbers("gbit", gbit):
        for seed in range(num_seeds):
            trace = synthesize(lengths, qps=qps, num_requests=num_requests, seed=seed)
            replica = Replica(spec, model, parallel, config, trace.longest)
            plays = [played(replica, trace, gbit=rate, buffers=number) for number in (buffers, buffers // 2)]
            whole, half = (np.mean(play.waited_s(trace, 1)) for play in plays)
            print_row(f"{rate:g}", seed, f"{whole:.3f} s", f"{half:.3f} s", f"{100 * (half / whole - 1):+.2f} %")


if __name__ == "__main__":
    main(transfer_buffers)
