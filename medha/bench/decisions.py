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

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike

from medha.batch import Batch
from medha.bench.harness import Report, Shown, report_head, rows_of
from medha.bench.verb import ANY_COUNT, COUNT, asked, counted, lengths, verb, warmups
from medha.config import CacheConfig, ModelConfig, ParallelConfig, RopeConfig, SchedulerConfig
from medha.config.fields import integer
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
_LONGEST_SHORT = SchedulerConfig().long_threshold - 1  # tokens of a prompt that is not long
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
    """What is measured: each policy over each queue. With too few KV blocks fewer decode than are to; the waiting ones
    have arrived within ``backlog_s`` seconds."""

    waiting: tuple[int, ...] = lengths(
        "num_waiting", "1000,10000,100000", "Requests that wait, comma separated; each is measured."
    )
    policies: tuple[str, ...] = asked(
        ("lars",), "May be repeated; lars by default.", name="policy", kind=list[str], read=tuple
    )
    num_decoding: int = asked(256, "Requests that decode.", COUNT, name="num_running")
    num_prefilling: int = asked(
        16, "Places for prefills under way beside them.", integer(2, 65536), name="num_prefills"
    )
    num_blocks: int | None = asked(
        None, "KV blocks of 256 tokens.", COUNT, name="num_kv_blocks", shown="enough for all"
    )
    warmup: int = warmups(50, "Decisions")
    runs: int = counted(500, "Decisions")
    seed: int = asked(0, "Of lengths, arrivals, objectives and classes.", ANY_COUNT)
    backlog_s: float = 60.0

    def __post_init__(self) -> None:
        for policy in self.policies:
            load_policy(policy)  # an unknown one is an error before anything is measured
        least = -(-(_LONG_TOKENS + _MAX_NEW_TOKENS) // _BLOCK_SIZE)
        if self.num_blocks is not None and self.num_blocks < least:
            raise ConfigError(f"num_kv_blocks={self.num_blocks}; accepted: at least {least}, one long request")

    @property
    def num_runs(self) -> int:
        """Queues."""
        return len(self.waiting) * len(self.policies)


def bench_decisions(options: DecisionOptions, *, on_run: Callable[[], None] = lambda: None) -> Report:
    """Time of one scheduling decision as the queue grows; no model runs."""
    results, load = [], os.getloadavg()[0]
    for policy in options.policies:
        for waiting in options.waiting:
            results.append(_measure(policy, waiting, options))
            on_run()
    return report_head("micro scheduler", asdict(options), load) | {"results": results}


def _measure(policy: str, waiting: int, options: DecisionOptions) -> Report:
    """One policy over one queue: milliseconds of the calls, and the mean rows of a batch by kind."""
    load = _Load(policy, options)
    load.begin(waiting)
    for _ in range(options.warmup):
        load.step()
    load.clear()
    for _ in range(options.runs):
        load.step()
    decoding, prefilling = np.mean(load.num_rows, axis=0).tolist()
    schedule_s, complete_s = np.array(load.seconds).T
    limits = [limit_ms for most, limit_ms in LIMITS_MS.items() if waiting <= most]
    return {
        "policy": policy,
        "waiting": load.scheduler.num_waiting,
        "decoding": decoding,
        "prefilling": prefilling,
        "decisions": options.runs,
        "schedule": spread(schedule_s),
        "complete": spread(complete_s),
        "both": spread(schedule_s + complete_s),
        "limit_ms": min(limits, default=None),
    }


def spread(seconds: ArrayLike) -> dict[str, float]:
    """Milliseconds of calls."""
    found = np.percentile(np.asarray(seconds), [50, 90, 99, 100]) * 1e3
    return dict(zip(("median_ms", "p90_ms", "p99_ms", "max_ms"), found.tolist(), strict=True))


class _Load:
    """Requests on a scheduler, whose numbers stay as they are.

    Attributes:
        scheduler: the one that is measured.
        seconds: of its two calls, for each decision.
        num_rows: (decodes, chunks) of each batch.
    """

    def __init__(self, policy: str, options: DecisionOptions) -> None:
        self.options = options
        self.scheduler = _scheduler(policy, options)
        self.seconds: list[tuple[float, float]] = []
        self.num_rows: list[tuple[int, int]] = []
        self._random = np.random.default_rng(options.seed)
        self._now_s = 0.0
        self._free: list[int] = []
        self._num_slots = 0
        self._decoding: dict[int, int] = {}  # tokens still to come, who decodes longest first

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
        self.seconds.clear()
        self.num_rows.clear()

    def step(self, *, refill: bool = True) -> None:
        """One decision, and the arrivals that keep the queue as long as it was."""
        start_s = time.perf_counter()
        decision = self.scheduler.schedule(self._now_s)
        scheduled_s = time.perf_counter() - start_s
        batch, prediction = decision.batch, decision.prediction
        assert batch is not None and prediction is not None, "an overloaded scheduler always has a batch"
        self._now_s += prediction.seconds
        results = self._results(batch)
        start_s = time.perf_counter()
        closed = self.scheduler.complete(batch, self._now_s, results, prediction.seconds)
        self.seconds.append((scheduled_s, time.perf_counter() - start_s))
        self._free += closed
        self.num_rows.append((batch.num_decodes, len(batch.rows) - batch.num_decodes))
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

    def _add(self, arrival_s: float, *, may_be_long: bool) -> None:
        """One request arrives: most are chats, one in a hundred is a document."""
        slot = self._free.pop() if self._free else self._num_slots
        self._num_slots = max(self._num_slots, slot + 1)
        random = self._random
        length = int(np.clip(random.lognormal(6.9, 0.8), 16, _LONGEST_SHORT))  # 1,000 tokens in the median
        if may_be_long and random.random() < _LONG_SHARE:
            length = int(random.uniform(0.2, 1.0) * _LONG_TOKENS)
        slo = SLO(ttft_s=float(random.uniform(0.5, 300.0)), tpot_s=0.5) if random.random() < 0.3 else None
        self.scheduler.add(SchedulerRequest(slot, length, _MAX_NEW_TOKENS, arrival_s, slo, int(random.integers(0, 4))))


def _scheduler(policy: str, options: DecisionOptions) -> Scheduler:
    config = SchedulerConfig(policy=policy, max_num_seqs=options.num_decoding + options.num_prefilling)
    coefficients = stage_coefficients(load_spec("a100-80g"), _MODEL, ParallelConfig(), 0)
    predictor = Predictor(coefficients, max_tokens=config.max_batch_tokens)
    most = config.max_num_seqs * (_LONG_TOKENS + _MAX_NEW_TOKENS)
    num_blocks = options.num_blocks or -(-most // _BLOCK_SIZE)
    return Scheduler(config, num_blocks=num_blocks, block_size=_BLOCK_SIZE, predictor=predictor)


def shown(report: Report) -> Shown:
    """What is printed of the report."""
    calls = ("schedule", "complete", "both")
    rows = [line | {"call": call, **line[call]} for line in report["results"] for call in calls]
    columns = ("policy", "waiting", "call", "median_ms", "p90_ms", "p99_ms", "max_ms", "limit_ms")
    options = report["options"]
    notes = [f"{options['warmup']} decisions of warm-up, {options['runs']} counted; limit: of the P99 of both"]
    return {"decisions": rows_of(rows, columns)}, notes


verb("scheduler", DecisionOptions, bench_decisions, shown)
