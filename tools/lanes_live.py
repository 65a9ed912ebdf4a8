"""Lanes and decode instances live, forwards replaced by sleeps of predicted length, or with ``--real`` run.

Sleeping ranks need no CPU, so on few cores they show what scheduler, control and hand-over add to what was planned:

torchrun --nproc-per-node 5 -m tools.lanes_live --kvp 4 --sp-sizes 1,2
torchrun --nproc-per-node 8 -m tools.lanes_live --kvp 4 --sp-sizes 1,2 --decode-replicas 2 --decode-tp 2
torchrun --nproc-per-node 3 -m tools.lanes_live --real --kvp 2 --sp-sizes 1

Printed are the TTFT of a short prompt beside long chunks that leave groups idle, over alone; gaps between tokens while
long prompts are read, over idle; and, with sleeps, the TTFT of a load over what its plans say.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from medha.bench.cli import Report
from medha.bench.harness import Local, on_ranks, random_prompt
from medha.bench.load import fixed_output, serve_load
from medha.config import CDSP
from medha.cost.chunk_times import ChunkTimes
from medha.cost.improvement import LoadWindow
from medha.engine import build
from medha.engine.arrivals import Arrival
from medha.worker.runner import Runner
from medha.worker.sampling import Sampled
from medha.worker.step import PendingStep, StepResult
from medha.worker.step_input import StepInput
from medha.workload.metrics import Outcome
from tools.best_rates import played_ttft_s
from tools.command import check_launched, main, numbers
from tools.live import random_llama

RATE, DECODE_S = 0.1, 0.02
_SHORT, _GAPS = 100, 60


def times_of(sizes: tuple[int, ...]) -> ChunkTimes:
    """What chunks take on so many groups."""
    return ChunkTimes(sizes, tuple((0.02, 1e-3 / n, 2e-7 / n, 1e-7 / n, 0.0) for n in sizes))


def sleep_instead(times: ChunkTimes, runner: Runner, step: StepInput) -> PendingStep | None:
    """A forward that takes what is predicted and draws token 7."""
    if not (rows := step.batch.rows):
        return None
    row = rows[0]
    busy_s = DECODE_S if row.is_decode else times.seconds(row.num_groups, row.position, row.q_len)
    time.sleep(busy_s)
    result = StepResult(step.drawn_rows, [Sampled(7, finite=True)] * len(step.drawn_rows), busy_s)
    return PendingStep(lambda: result) if runner.samples else None


class Live:
    """Loads on one engine."""

    def __init__(self, local: Local, long_len: int) -> None:
        self.local, self.long_len, self._chance = local, long_len, np.random.default_rng(0)

    def asked(self, name: str, length: int, at_s: float, new: int = 1) -> Arrival:
        """A request of random tokens that has so many new ones."""
        prompt = random_prompt(length, self.local.model.vocab_size, self._chance)
        return Arrival(name, prompt, fixed_output(new), arrival_s=at_s)

    def served(self, *arrivals: Arrival) -> tuple[Outcome, ...]:
        """What became of requests."""
        return serve_load(self.local.engine, sorted(arrivals, key=lambda one: one.arrival_s)).outcomes

    def ttft_s(self, *arrivals: Arrival) -> dict[str, float]:
        """TTFT by request."""
        return {one.request_id: one.ttft_s or 0.0 for one in self.served(*arrivals)}

    def filling(self, runs: int) -> list[str]:
        """TTFT of a short prompt while long chunks leave one run of groups, over alone, as lines."""
        alone = [self.ttft_s(self.asked("short", _SHORT, 0.0))["short"] for _ in range(runs + 1)][1:]
        most = self.local.config.parallel.kvp // max(self.local.config.scheduler.sp_sizes or (1,)) - 1
        long = [self.asked(f"long-{i}", self.long_len, 0.0) for i in range(most)]
        beside = [self.ttft_s(*long, self.asked("short", _SHORT, 0.5)) for _ in range(runs)]
        long_s = float(np.median([one["long-0"] for one in beside]))
        what = f"TTFT of a short prompt beside chunks of {long_s:.1f} s / alone"
        return ratios(what, [one["short"] for one in beside], alone, 50)

    def gaps_s(self, num_long: int) -> list[float]:
        """Gaps between the tokens of four requests that decode, while so many long prompts are read."""
        long = [self.asked(f"long-{i}", self.long_len, 0.3) for i in range(num_long)]
        decodes = [self.asked(f"decode-{i}", 50, 0.0, _GAPS) for i in range(4)]
        return [gap_s for one in self.served(*decodes, *long) for gap_s in one.itl_s[6:]]

    def load(self, num_requests: int) -> tuple[list[float], list[float]]:
        """TTFT of a Poisson load, and as planned."""
        planner = self.local.engine.scheduler.planner
        assert planner is not None, "cdsp plans"
        lengths = self._chance.integers(50, 2000, num_requests).tolist()
        every_s = float(np.mean([times_of((1,)).seconds(1, 0, n) for n in lengths])) / planner.num_groups / 0.6
        arrivals_s = np.cumsum(self._chance.exponential(every_s, num_requests)).tolist()
        asked = [self.asked(str(i), n, at_s, 4) for i, (n, at_s) in enumerate(zip(lengths, arrivals_s, strict=True))]
        live, planned = self.ttft_s(*asked), played_ttft_s(planner, arrivals_s, lengths, LoadWindow(RATE))
        return [live[str(i)] for i in range(num_requests)], planned.tolist()


def ratios(what: str, ours: Sequence[float], others: Sequence[float], *quantiles: int) -> list[str]:
    """Quantiles of some seconds over those of others, as lines."""
    found = [(q, float(np.percentile(ours, q)), float(np.percentile(others, q))) for q in quantiles]
    return [f"{what}, P{q}: {one:.4f} s / {other:.4f} s = {one / other:.3f}" for q, one, other in found]


def run(local: Local, *, long_len: int, runs: int, num_requests: int, is_real: bool) -> Report:
    """What is printed, as lines."""
    live, lines = Live(local, long_len), list[str]()
    if local.config.parallel.kvp > max(local.config.scheduler.sp_sizes or (1,)):
        lines += live.filling(runs)
    _, idle, busy = (live.gaps_s(num_long) for num_long in (0, 0, 3))  # the first connects ranks
    lines += ratios("gaps between tokens beside prefill / idle", busy, idle, 50, 99)
    lines += [] if is_real else ratios("TTFT of a load live / simulated", *live.load(num_requests), 50, 90)
    return {"lines": lines}


def lanes_live(
    kvp: int = 4,
    sp_sizes: str = "1,2",
    decode_replicas: int = 1,
    decode_tp: int = 1,
    real: bool = False,
    long_len: int = 3000,
    runs: int = 5,
    num_requests: int = 60,
    hf_overrides: str = "{}",
) -> None:
    """Measure; every rank of the layout runs this."""
    sizes, longest = tuple(int(size) for size in numbers("sp_sizes", sp_sizes)), max(long_len, 4000) + _GAPS
    if not real:
        check_launched()
        times = times_of(sizes)
        Runner.run = lambda self, step: sleep_instead(times, self, step)  # type: ignore[method-assign]
        build.fitted_times = lambda *_, **__: times  # type: ignore[attr-defined]
    options: dict[str, Any] = {"scheduler": CDSP, "kvp": kvp, "sp_sizes": sizes, "improvement_rate": RATE}
    options |= {"decode_replicas": decode_replicas, "decode_tp": decode_tp, "num_kv_blocks": longest // 32}
    work = partial(run, long_len=long_len, runs=runs, num_requests=num_requests, is_real=real)
    found = on_ranks(random_llama(hf_overrides), work, longest=longest, num_threads=1, block_size=256, **options)
    if found is not None:
        print("\n".join(found["lines"]))


if __name__ == "__main__":
    main(lanes_live)
