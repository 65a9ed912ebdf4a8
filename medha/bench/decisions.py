"""``medha bench micro scheduler``: the time of one decision of the scheduler, as the queue of waiting requests grows.

A decision is what the engine pays for a batch beside computing it: :meth:`~medha.sched.scheduler.Scheduler.schedule`,
and :meth:`~medha.sched.scheduler.Scheduler.complete` when it is done. The scheduler, its predictor (the stated default
for a model of 8B parameters on one A100) and its options are those of an engine; no model runs, and a batch takes the
seconds that were predicted of it on a clock of its own.

The state is that of an overloaded engine: a fixed number of requests decode, beside them prefills are under way, among
them long ones, and others wait. Whoever has decoded longest ends when one more would decode, and for each that ends
another arrives, so the numbers stay as they are. The garbage collector is left as the engine runs it.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from medha.batch import Batch
from medha.bench.harness import Report, Shown, report_head, rows_of
from medha.config import CacheConfig, ModelConfig, ParallelConfig, RopeConfig, SchedulerConfig
from medha.cost.hardware import load_spec
from medha.cost.predictor import Predictor
from medha.cost.roofline import stage_coefficients
from medha.errors import ConfigError
from medha.params import SLO
from medha.sched.decision import SchedulerRequest
from medha.sched.policy import load_policy
from medha.sched.scheduler import Scheduler

LIMITS_MS = {10_000: 1.0, 100_000: 10.0}
"""Most that the 99th percentile of a decision may take, by waiting requests."""

_BLOCK_SIZE = CacheConfig().block_size
_MAX_NEW_TOKENS = 1024
_LONG_TOKENS = 100_000
_LONG_SHARE = 0.01
_MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=1 << 24,
    rope=RopeConfig(),
    dtype="bfloat16",
)


@dataclass(frozen=True, slots=True)
class DecisionOptions:
    """What is measured.

    Attributes:
        waiting: numbers of requests that have not started, each measured by itself.
        policies: names, each measured by itself.
        num_decoding: requests that decode.
        num_prefilling: places for prefills under way beside them.
        num_decisions: counted decisions.
        warmup: decisions before them, from where as many decode as are to.
        num_blocks: KV blocks; None is enough that nobody is refused memory. With too few, fewer decode.
        backlog_s: seconds over which the waiting ones have arrived.
        seed: of lengths, arrivals, objectives and classes.
    """

    waiting: tuple[int, ...] = (1_000, 10_000, 100_000)
    policies: tuple[str, ...] = ("lars",)
    num_decoding: int = 256
    num_prefilling: int = 16
    num_decisions: int = 500
    warmup: int = 50
    num_blocks: int | None = None
    backlog_s: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        for policy in self.policies:
            load_policy(policy)  # an unknown one is an error before anything is measured
        least = -(-(_LONG_TOKENS + _MAX_NEW_TOKENS) // _BLOCK_SIZE)
        if self.num_blocks is not None and self.num_blocks < least:
            raise ConfigError(f"num_kv_blocks={self.num_blocks}; accepted: at least {least}, one long request")


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds of one call, over the counted decisions.

    Attributes:
        median_ms, p90_ms, p99_ms, max_ms: of the wall clock.
        cpu_p99_ms: 99th percentile of the thread's own CPU time, in which other programs do not show.
    """

    median_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    cpu_p99_ms: float

    @classmethod
    def of(cls, wall_s: Sequence[float], cpu_s: Sequence[float]) -> Spread:
        """Summarise seconds of calls."""
        median, p90, p99, most = np.percentile(wall_s, [50, 90, 99, 100]) * 1e3
        return cls(float(median), float(p90), float(p99), float(most), float(np.percentile(cpu_s, 99) * 1e3))


@dataclass(frozen=True, slots=True)
class Decisions:
    """Decision times with one policy over one queue.

    Attributes:
        policy: its name.
        waiting: requests that had not started.
        decoding, prefilling: mean rows of a batch, by kind.
        under_way: mean number of prefills that had begun.
        long_under_way: the same of those of at least ``long_threshold`` tokens.
        decisions: counted ones.
        schedule, complete, both: of a call of either, and of the two together.
        limit_ms: what the 99th percentile of both may take; None where nothing was set for so many.
        collections, collections_ms: runs of the garbage collector within the counted calls, and their longest.
    """

    policy: str
    waiting: int
    decoding: float
    prefilling: float
    under_way: float
    long_under_way: float
    decisions: int
    schedule: Spread
    complete: Spread
    both: Spread
    limit_ms: float | None
    collections: int
    collections_ms: float


def bench_decisions(options: DecisionOptions, *, on_run: Callable[[], None] = lambda: None) -> Report:
    """Measure each policy over each queue, one after the other.

    Args:
        options: what to run.
        on_run: called after each queue.
    """
    results, load = [], os.getloadavg()[0]
    for policy in options.policies:
        for waiting in options.waiting:
            results.append(_measure(policy, waiting, options))
            on_run()
    return report_head("micro scheduler", asdict(options), load) | {
        "gc": {"is_enabled": gc.isenabled(), "thresholds": gc.get_threshold(), "frozen": gc.get_freeze_count()},
        "results": [asdict(result) for result in results],
        "growth": list(growth(results)),
    }


def growth(results: Sequence[Decisions]) -> Iterator[dict[str, Any]]:
    """What the median and the 99th percentile grow by at each step to a longer queue."""
    for before, after in pairwise(results):
        if before.policy == after.policy and after.waiting > before.waiting:
            yield {
                "policy": after.policy,
                "from_waiting": before.waiting,
                "waiting": after.waiting,
                "waiting_ratio": after.waiting / before.waiting,
                "median_ratio": after.both.median_ms / before.both.median_ms,
                "p99_ratio": after.both.p99_ms / before.both.p99_ms,
            }


def _measure(policy: str, waiting: int, options: DecisionOptions) -> Decisions:
    load = _Load(policy, options)
    load.begin(waiting)
    for _ in range(options.warmup):
        load.step()
    load.clear()
    with _collector() as pauses:
        for _ in range(options.num_decisions):
            load.step()
    schedule, complete = (Spread.of(*times) for times in (load.schedule.columns(), load.complete.columns()))
    sums = (np.add(*pair) for pair in zip(load.schedule.columns(), load.complete.columns(), strict=True))
    limits = [limit_ms for most, limit_ms in LIMITS_MS.items() if waiting <= most]
    rows, begun = np.mean(load.num_rows, axis=0).tolist(), np.mean(load.num_begun, axis=0).tolist()
    return Decisions(
        policy=policy,
        waiting=load.scheduler.num_waiting,
        decoding=rows[0],
        prefilling=rows[1],
        under_way=begun[0],
        long_under_way=begun[1],
        decisions=options.num_decisions,
        schedule=schedule,
        complete=complete,
        both=Spread.of(*(column.tolist() for column in sums)),
        limit_ms=min(limits, default=None),
        collections=len(pauses),
        collections_ms=max(pauses, default=0.0) * 1e3,
    )


@dataclass(slots=True)
class _Times:
    """Seconds of calls, on the wall clock and of the thread's CPU time."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def columns(self) -> tuple[list[float], list[float]]:
        return self.wall_s, self.cpu_s

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Time the body."""
        cpu_s, wall_s = time.thread_time(), time.perf_counter()
        yield
        self.wall_s.append(time.perf_counter() - wall_s)
        self.cpu_s.append(time.thread_time() - cpu_s)


class _Load:
    """Requests on a scheduler, whose numbers stay as they are.

    Attributes:
        scheduler: the one that is measured.
        schedule, complete: times of its calls.
        num_rows: (decodes, chunks) of each batch.
        num_begun: (prefills begun, those of them that are long) at each batch.
    """

    def __init__(self, policy: str, options: DecisionOptions) -> None:
        self.options = options
        self.scheduler = _scheduler(policy, options)
        self.schedule, self.complete = _Times(), _Times()
        self.num_rows: list[tuple[int, int]] = []
        self.num_begun: list[tuple[int, int]] = []
        self._random = np.random.default_rng(options.seed)
        self._now_s = 0.0
        self._free: list[int] = []
        self._num_slots = 0
        self._decoding: dict[int, int] = {}  # tokens still to come, who decodes longest first
        self._lengths: dict[int, int] = {}
        self._begun: dict[int, bool] = {}  # prefills under way; whether each is long

    def begin(self, waiting: int) -> None:
        """Bring everybody to where they are to be: some decode, prefills are under way, and the others wait."""
        self._now_s = self.options.backlog_s
        for _ in range(self.options.num_decoding):
            self._add(self._now_s, may_be_long=False)
        while self.scheduler.num_waiting or len(self._decoding) < self.scheduler.num_running:
            self.step(refill=False)
            if not self.num_rows[-1][1]:
                break  # there is no memory for more
        arrivals = np.sort(self._now_s - self._random.uniform(0.0, self.options.backlog_s, waiting))
        for arrival_s in arrivals.tolist():
            self._add(arrival_s, may_be_long=True)
        for _ in range(self.options.num_prefilling // 2):
            self.step(refill=False)
        while self.scheduler.num_waiting < waiting:
            self._add(self._now_s, may_be_long=True)
        self._target = waiting

    def clear(self) -> None:
        """Forget the times so far."""
        self.schedule, self.complete = _Times(), _Times()
        self.num_rows.clear()
        self.num_begun.clear()

    def step(self, *, refill: bool = True) -> None:
        """One decision, and the arrivals that keep the queue as long as it was."""
        with self.schedule.measured():
            decision = self.scheduler.schedule(self._now_s)
        batch, prediction = decision.batch, decision.prediction
        assert batch is not None and prediction is not None, "an overloaded scheduler always has a batch"
        self._now_s += prediction.seconds
        results = self._results(batch)
        with self.complete.measured():
            closed = self.scheduler.complete(batch, self._now_s, results, prediction.seconds)
        self._free += closed
        self._note(batch)
        while refill and self.scheduler.num_waiting < self._target:
            self._add(self._now_s, may_be_long=True)

    def _results(self, batch: Batch) -> list[tuple[int, int, bool]]:
        """A token for each row that samples; who has decoded longest ends where one more would decode."""
        sampling = [row.slot for row in batch.rows if row.samples]
        for row in batch.rows:
            if row.samples and not row.is_decode:
                self._decoding[row.slot] = _MAX_NEW_TOKENS
        surplus = max(len(self._decoding) - self.options.num_decoding, 0)
        ended = {slot for slot in sampling if self._decoding[slot] == 1}
        ended.update([slot for slot in self._decoding if slot in set(sampling)][:surplus])
        for slot in sampling:
            self._decoding[slot] -= 1
            if slot in ended:
                del self._decoding[slot]
        return [(slot, 1, slot in ended) for slot in sampling]

    def _note(self, batch: Batch) -> None:
        threshold = self.scheduler.config.long_threshold
        for row in batch.rows[batch.num_decodes :]:
            if row.samples:
                self._begun.pop(row.slot, None)
            else:
                self._begun[row.slot] = self._lengths[row.slot] >= threshold
        self.num_rows.append((batch.num_decodes, len(batch.rows) - batch.num_decodes))
        self.num_begun.append((len(self._begun), sum(self._begun.values())))

    def _add(self, arrival_s: float, *, may_be_long: bool) -> None:
        """One request arrives: most are chats, one in a hundred is a document."""
        slot = self._free.pop() if self._free else self._num_slots
        self._num_slots = max(self._num_slots, slot + 1)
        random = self._random
        length = int(np.clip(random.lognormal(6.9, 0.8), 16, _longest_short()))  # 1,000 tokens in the median
        if may_be_long and random.random() < _LONG_SHARE:
            length = int(random.uniform(0.2, 1.0) * _LONG_TOKENS)
        self._lengths[slot] = length
        slo = SLO(ttft_s=float(random.uniform(0.5, 300.0)), tpot_s=0.5) if random.random() < 0.3 else None
        self.scheduler.add(SchedulerRequest(slot, length, _MAX_NEW_TOKENS, arrival_s, slo, int(random.integers(0, 4))))


@contextmanager
def _collector() -> Iterator[list[float]]:
    """Seconds of each run of the garbage collector in the body."""
    pauses: list[float] = []
    started = [0.0]

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            started[0] = time.perf_counter()
        else:
            pauses.append(time.perf_counter() - started[0])

    gc.callbacks.append(note)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(note)


def _scheduler(policy: str, options: DecisionOptions) -> Scheduler:
    config = SchedulerConfig(policy=policy, max_num_seqs=options.num_decoding + options.num_prefilling)
    coefficients = stage_coefficients(load_spec("a100-80g"), _MODEL, ParallelConfig(), 0)
    predictor = Predictor(coefficients, max_tokens=config.max_batch_tokens)
    most = config.max_num_seqs * (_LONG_TOKENS + _MAX_NEW_TOKENS)
    num_blocks = options.num_blocks or -(-most // _BLOCK_SIZE)
    return Scheduler(config, num_blocks=num_blocks, block_size=_BLOCK_SIZE, predictor=predictor)


def _longest_short() -> int:
    """Tokens of a prompt that is not long."""
    return SchedulerConfig().long_threshold - 1


def shown(report: Report) -> Shown:
    """What is printed of the report."""
    calls = ("schedule", "complete", "both")
    rows = [line | {"call": call, **line[call]} for line in report["results"] for call in calls]
    columns = ("policy", "waiting", "call", "median_ms", "p90_ms", "p99_ms", "max_ms", "limit_ms")
    options = report["options"]
    notes = [f"{options['warmup']} decisions of warm-up, {options['num_decisions']} counted; limit: of the P99 of both"]
    return {"decisions": rows_of(rows, columns), "growth": report["growth"]}, notes
