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

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from examples.reproduce.load import MIX, Load
from medha.config import ParallelConfig, SchedulerConfig
from medha.cost.hardware import load_spec
from medha.engine import replay
from medha.sched.decision import Admitted, Decision, SchedulerRequest
from medha.sched.scheduler import Scheduler
from medha.sim.replica import Replica, find_model
from medha.sim.simulator import Simulation

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
    """A scheduler that keeps what it said and what became of it in :attr:`ended`."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.prefills: dict[int, _Prefill] = {}
        self.ended: list[_Prefill] = []

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


def table(ended: list[_Prefill]) -> str:
    """Relative errors, by when it was said and how long the prompts are, in Markdown."""
    lines = [f"| said | prompts | number | median | median of sizes | P90 of sizes |\n|{' --- |' * 6}"]
    several = [one for one in ended if len(one.busy_s) > 1]
    for is_long, name in ((False, f"below {LONG:,}"), (True, f"{LONG:,} and more")):
        group = [one for one in several if (one.request.num_prompt_tokens >= LONG) == is_long]
        errors = {
            "when queued": [one.at_arrival_s / sum(one.busy_s) - 1 for one in group],
            "with the first chunk": [(one.at_first_s or 0.0) / sum(one.busy_s[1:]) - 1 for one in group],
        }
        for said, found in errors.items():
            sizes = np.abs(found) if found else np.full(1, np.nan)
            cells = (np.median(found or [np.nan]), np.median(sizes), np.percentile(sizes, 90))
            lines.append(f"| {said} | {name} | {len(found)} | {' | '.join(f'{100 * x:.1f} %' for x in cells)} |")
    return "\n".join(lines)


def simulated(given: argparse.Namespace) -> Watched:
    """A scheduler that has served medha-mix on 8 A100s."""
    config = SchedulerConfig(policy=given.policy)
    scheduler, pipeline = Replica(load_spec("a100-80g"), find_model("llama-3-8b"), ParallelConfig(tp=8), config).build()
    trace = Load(MIX, given.qps, given.duration, seed=given.seed).trace()
    if given.tpot_s is not None:
        trace = replace(trace, tpot_slo_s=np.full(len(trace), given.tpot_s))
    watched = Watched(scheduler.config, predictor=scheduler.predictor, **scheduler.sizes)
    Simulation(watched, pipeline, trace, stop_s=given.duration).run()
    return watched


def replayed(journal: Path) -> list[Watched]:
    """The schedulers of a journal, played again."""
    watched: list[Watched] = []

    def make(*given: Any, **named: Any) -> Watched:
        watched.append(Watched(*given, **named))
        return watched[-1]

    with mock.patch.object(replay, "Scheduler", make):
        found = replay.replay(journal)
    if found.mismatch is not None:
        raise SystemExit(f"the journal is of another version: {found.mismatch}")
    return watched


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--qps", type=float, default=0.5)
    parser.add_argument("--duration", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tpot-s", type=float)
    parser.add_argument("--policy", default="priority")
    given = parser.parse_args()
    watched = [simulated(given)] if given.journal is None else replayed(given.journal)
    print(table([one for scheduler in watched for one in scheduler.ended]))


if __name__ == "__main__":
    main()
