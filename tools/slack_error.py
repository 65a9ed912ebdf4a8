"""What the scheduler says of the seconds that a prefill needs, its slack therefore, against what happened.

python -m tools.slack_error                      # simulated: Llama-3 8B, tp 8, medha-mix
python -m tools.slack_error --tpot-s 0.03        # every request with that objective
python -m tools.slack_error --journal FILE       # live: what ``medha generate --journal FILE`` wrote

A slack is what is left until the deadline less what the prefill is said to need. Said when it is queued (all of it) and
with its first chunk (what is left behind that). What happened: the busy seconds of the batches that had its chunks, so
that waits for others, which the slack is for, do not count. Of prefills of several chunks; errors are relative to what
happened, signed in the median: below 0 needs were said to be smaller than they were, and the slack larger.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np

from examples.reproduce.load import MIX, Load
from examples.reproduce.timing import A100, LLAMA_8B
from medha.config import ParallelConfig, SchedulerConfig
from medha.engine import replay
from medha.errors import ConfigError
from medha.sched.decision import Admitted, Decision, SchedulerRequest
from medha.sched.scheduler import Scheduler
from medha.sim.replica import Replica
from medha.sim.simulator import Simulation
from tools.command import main, print_head, print_row

LONG = 8192


@dataclass
class _Prefill:
    """One request: seconds said at two times, and those of its batches."""

    request: SchedulerRequest
    at_arrival_s: float
    deadline_s: float
    at_first_s: float | None = None
    busy_s: list[float] = field(default_factory=list)


class Watched(Scheduler):
    """A scheduler that keeps what it said and what became of it in :attr:`ended`, which all share."""

    ended: ClassVar[list[_Prefill]] = []

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.prefills: dict[int, _Prefill] = {}

    def add(self, request: SchedulerRequest, now_s: float | None = None) -> Admitted:
        admitted = super().add(request, now_s)
        said_s = admitted.deadline_s - admitted.slack_s
        self.prefills[request.slot] = _Prefill(request, said_s, request.arrival_s + admitted.deadline_s)
        return admitted

    def schedule(self, now_s: float) -> Decision:
        decision = super().schedule(now_s)
        chunks = [] if decision.batch is None else [row for row in decision.batch.rows if not row.is_decode]
        for row, slack_s in zip(chunks, decision.slack_s, strict=True):
            if (prefill := self.prefills.get(row.slot)) is not None and prefill.at_first_s is None:
                prefill.at_first_s = prefill.deadline_s - now_s - slack_s
        return decision

    def complete(self, batch: Any, now_s: float, results: Any, busy_s: float) -> tuple[int, ...]:
        for row in batch.rows:
            if not row.is_decode and (prefill := self.prefills.get(row.slot)) is not None:
                prefill.busy_s.append(busy_s)
                if row.samples:
                    self.ended.append(self.prefills.pop(row.slot))
        return super().complete(batch, now_s, results, busy_s)


def show(ended: list[_Prefill]) -> None:
    """Print relative errors, by when it was said and how long the prompts are."""
    print_head("said", "prompts", "number", "median", "median of sizes", "P90 of sizes")
    several = [one for one in ended if len(one.busy_s) > 1]
    for is_long, name in ((False, f"below {LONG:,}"), (True, f"{LONG:,} and more")):
        group = [one for one in several if (one.request.num_prompt_tokens >= LONG) == is_long]
        errors = {
            "when queued": [one.at_arrival_s / sum(one.busy_s) - 1 for one in group],
            "with the first chunk": [(one.at_first_s or 0.0) / sum(one.busy_s[1:]) - 1 for one in group],
        }
        for said, found in errors.items():
            signed = found or [np.nan]
            sizes = np.abs(signed)
            cells = (np.median(signed), np.median(sizes), np.percentile(sizes, 90))
            print_row(said, name, len(found), *(f"{100 * x:.1f} %" for x in cells))


def play_again(journal: Path) -> None:
    """Play the schedulers of a journal."""
    with mock.patch.object(replay, "Scheduler", Watched):
        found = replay.replay(journal)
    if found.mismatch is not None:
        raise ConfigError(f"journal={str(journal)!r} is of another version: {found.mismatch}; accepted: one of this")


def slack_error(
    journal: Path | None = None,
    qps: float = 0.5,
    duration: float = 600.0,
    seed: int = 0,
    tpot_s: float | None = None,
    policy: str = "priority",
) -> None:
    """Hold what the scheduler said to what happened, in a journal or in a simulation of medha-mix on 8 A100s."""
    Watched.ended.clear()
    if journal is not None:
        play_again(journal)
    else:
        config = SchedulerConfig(policy=policy)
        scheduler, pipeline = Replica(A100, LLAMA_8B, ParallelConfig(tp=8), config).build()
        trace = Load(MIX, qps, duration, seed=seed).trace()
        if tpot_s is not None:
            trace = replace(trace, tpot_slo_s=np.full(len(trace), tpot_s))
        watched = Watched(scheduler.config, predictor=scheduler.predictor, **scheduler.sizes)
        Simulation(watched, pipeline, trace, stop_s=duration).run()
    show(Watched.ended)


if __name__ == "__main__":
    main(slack_error)
