"""A scheduler on a virtual clock: arrivals, cancels and batches that take a given time, played to their end."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from typing import Any, Self

import numpy as np
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from medha.batch import Batch, Deal, Row
from medha.config import SCHEDULERS, ModelConfig, ParallelConfig, RopeConfig, SchedulerConfig
from medha.cost.coefficients import Coefficients, Curve
from medha.cost.hardware import load_spec
from medha.cost.predictor import Predictor
from medha.cost.roofline import stage_coefficients
from medha.params import SLO
from medha.sched.decision import Admitted, Decision, Observer, Preempted, SchedulerRequest
from medha.sched.memory import KVMemory
from medha.sched.policy import BUILT_IN
from medha.sched.scheduler import Scheduler
from medha.sim.replica import find_model
from tests.sched.costs import FREE

MODEL = ModelConfig("LlamaForCausalLM", 32_000, 1024, 2816, 8, 16, 4, 64, 1 << 24, RopeConfig())
"""A small model, for predicted times of the size that a CPU has: 1,000 tokens take about a second."""


@cache
def _cpu(kvp: int, attention: float) -> Coefficients:
    spec = load_spec("cpu").times(4)
    rates = replace(spec.attention, flops_per_s=attention * spec.attention.flops_per_s)
    spec = replace(spec, attention=rates, gemm=replace(spec.gemm, overlap_power=8.0))
    return stage_coefficients(spec, MODEL, ParallelConfig(kvp=kvp), 0, dtype_bytes=4)


def make_predictor(*, max_tokens: int = 2048, kvp: int = 1, attention: float = 1.0) -> Predictor:
    """That of a CPU of four threads which reads weights while it multiplies, with attention so many times as fast."""
    return Predictor(_cpu(kvp, attention), max_tokens=max_tokens)


def gpu_predictor(
    spec: str = "a100-80g", model: ModelConfig | None = None, *, max_tokens: int = 2048, tp: int = 1
) -> Predictor:
    """That of a GPU, or of so many beside each other, for Llama-3 8B if no other model is given."""
    coefficients = stage_coefficients(load_spec(spec), model or find_model("llama-3-8b"), ParallelConfig(tp=tp), 0)
    return Predictor(coefficients, max_tokens=max_tokens)


def by_tokens() -> Predictor:
    """One of which every token takes a millisecond, whatever it sees."""
    return Predictor(replace(FREE, linear=Curve((1.0, 2.0), (1e-3, 2e-3))), max_tokens=16384)


@dataclass(frozen=True)
class Job:
    """One request: when it comes, its lengths, how many tokens it really yields, and when it is cancelled."""

    arrival_s: float
    num_prompt: int
    max_new: int = 1
    num_new: int | None = None
    slo: SLO | None = None
    priority: int = 2
    cancel_s: float | None = None
    tenant: str = ""
    is_relegated: bool = False

    @property
    def num_kv_tokens(self) -> int:
        return self.num_prompt + self.max_new - 1


@st.composite
def jobs(draw: st.DrawFn, *, max_prompt: int, max_new: int = 6, within_s: float = 8.0) -> Job:
    """Prompts short and long, with and without objectives."""
    times = st.floats(0.0, within_s)
    num_prompt = draw(st.integers(1, max_prompt) | st.integers(1, min(max_prompt, 200)))
    tokens = draw(st.integers(1, max_new))
    ttft_s = draw(st.none() | st.floats(0.01, 30.0))
    tpot_s = draw(st.none() | st.floats(0.01, 1.0))
    slo = SLO(ttft_s, tpot_s) if ttft_s or tpot_s else None
    arrival_s, num_new, priority = draw(times), draw(st.integers(1, tokens)), draw(st.integers(0, 3))
    return Job(arrival_s, num_prompt, tokens, num_new, slo, priority, draw(st.none() | st.none() | times))


POLICIES = (*BUILT_IN, "priority", "priority:edf")
BLOCK = 16


@st.composite
def worlds(
    draw: st.DrawFn, *, any_scheduler: bool = False, thresholds: Sequence[int] = (300, 1000, 8192)
) -> dict[str, Any]:
    """A configuration, pools of little more than the longest request or larger, and a load."""
    load = draw(st.lists(jobs(max_prompt=2500), min_size=1, max_size=8))
    if any_scheduler and draw(st.booleans()):  # decodes that outgrow the pool
        load = draw(st.lists(jobs(max_prompt=400, max_new=80, within_s=1.0), min_size=4, max_size=8))
    num_groups = draw(st.integers(1, 3))
    share = -(-max(job.num_kv_tokens for job in load) // (BLOCK * num_groups))
    options: dict[str, Any] = {}
    if any_scheduler:
        options = {
            "scheduler": draw(st.sampled_from(["medha", *SCHEDULERS])),
            "chunk_size": draw(st.sampled_from([None, 64, 512])),
            "stream": draw(st.booleans()),
            "async_scheduling": draw(st.sampled_from([None, True])),
            "num_swap_blocks": draw(st.sampled_from([0, 3, 40])),
            "swap_block_s": draw(st.sampled_from([0.0, 1e-3, 10.0])),
        }
    config = SchedulerConfig(
        policy=draw(st.sampled_from(POLICIES)),
        max_num_seqs=draw(st.integers(1, 8)),
        max_batch_tokens=draw(st.sampled_from([16, 100, 512, 2048])),
        depth=draw(st.integers(1, 3)),
        t_target_s=draw(st.sampled_from([None, None, 0.02, 0.1, 1.0])),
        quantum_s=draw(st.sampled_from([0.1, 0.25])),
        rho_max=draw(st.sampled_from([0.0, 0.4, 0.9])),
        long_threshold=draw(st.sampled_from(thresholds)),
        late_share=draw(st.sampled_from([0.0, 0.1, 0.5])),
        patience_s=draw(st.sampled_from([0.5, 5.0, math.inf])),
        min_chunk=draw(st.sampled_from([8, 16, 64])),
        chunk_granularity=draw(st.sampled_from([1, 16])),
        max_kv_per_group=share * BLOCK,
        overcommit=draw(st.sampled_from([False, False, False, True])),
        **options,
    )
    num_blocks, seed = share * draw(st.sampled_from([1, 2, 8])), draw(st.integers(0, 2**32))
    return {"config": config, "num_groups": num_groups, "num_blocks": num_blocks, "load": load, "seed": seed}


def new_scheduler(
    scheduler: SchedulerConfig | str = "medha", *, num_blocks: int = 4000, num_groups: int = 1, block_size: int = BLOCK,
    predictor: Predictor | None = None, max_prompt_tokens: int = 10_000_000, **options: Any,
) -> Scheduler:  # fmt: skip
    """One of a configuration, or of its ``options``; what takes how long is predicted for the small model, if no other
    predictor is given."""
    config = SchedulerConfig(scheduler, **options) if isinstance(scheduler, str) else scheduler
    predictor = predictor or make_predictor(max_tokens=config.max_batch_tokens, kvp=num_groups)
    pool = {"num_blocks": num_blocks, "num_groups": num_groups, "block_size": block_size}
    return Scheduler(config, predictor=predictor, max_prompt_tokens=max_prompt_tokens, **pool)


def make_scheduler(world: dict[str, Any]) -> Scheduler:
    """The scheduler of one of :func:`worlds`."""
    sizes = {name: world[name] for name in ("num_blocks", "num_groups", "block_size") if name in world}
    return new_scheduler(world["config"], **sizes, max_prompt_tokens=3000)


def add(
    scheduler: Scheduler, slot: int, num_prompt: int, max_new: int = 1, arrival_s: float = 0.0, **its: Any
) -> Admitted:
    """Queue a request."""
    return scheduler.add(SchedulerRequest(slot, num_prompt, max_new, arrival_s, **its))


def next_batch(scheduler: Scheduler, now_s: float = 0.0) -> Batch:
    """The next one; there has to be one."""
    batch = scheduler.schedule(now_s).batch
    assert batch is not None
    return batch


def finish(
    scheduler: Scheduler, batch: Batch, now_s: float = 0.0, busy_s: float = 0.0, *, ended: Container[int] = ()
) -> tuple[int, ...]:
    """A batch is done, and each row that samples has yielded a token: the last one of those that have ``ended``."""
    results = [(row.slot, 1, row.slot in ended) for row in batch.rows if row.samples]
    return scheduler.complete(batch, now_s, results, busy_s)


def step(scheduler: Scheduler, now_s: float = 0.0, busy_s: float = 0.0, *, ended: Container[int] = ()) -> Batch:
    """The next one, done at once."""
    batch = next_batch(scheduler, now_s)
    finish(scheduler, batch, now_s, busy_s, ended=ended)
    return batch


class Steps:
    """Runs batches one after the other, each for the predicted time; a request ends with its last token,
    and nothing is learned.

    Args:
        scheduler: one that predicts.
        lengths: prompt and new tokens of requests that are there from the start, in slots from 0 on.
        is_still: the clock stays at 0.
    """

    def __init__(self, scheduler: Scheduler, *lengths: tuple[int, int], is_still: bool = False) -> None:
        self.scheduler, self.is_still, self.now_s = scheduler, is_still, 0.0
        self.decision = Decision()
        self.times_s: defaultdict[int, list[float]] = defaultdict(list)  # of each request's tokens, by slot
        for slot, (num_prompt, max_new) in enumerate(lengths):
            self.add(slot, num_prompt, max_new)

    def add(
        self, slot: int, num_prompt: int, max_new: int = 1, slo: SLO | None = None, *, arrival_s: float | None = None
    ) -> Admitted:
        """Queue a request that arrives now, or has arrived before."""
        self.times_s[slot] = []
        arrival_s = self.now_s if arrival_s is None else arrival_s
        return add(self.scheduler, slot, num_prompt, max_new, arrival_s, slo=slo)

    def step(self) -> tuple[Batch, float]:
        """Run the next batch; it, and its predicted seconds."""
        self.decision = self.scheduler.schedule(self.now_s)
        batch, prediction = self.decision.batch, self.decision.prediction
        assert batch is not None and prediction is not None
        self.now_s += 0.0 if self.is_still else prediction.seconds
        sampling = [row.slot for row in batch.rows if row.samples]
        for slot in sampling:
            self.times_s[slot].append(self.now_s)
        running = self.scheduler._queue.running
        ended = [slot for slot in sampling if len(self.times_s[slot]) == running[slot].request.max_new_tokens]
        finish(self.scheduler, batch, self.now_s, ended=ended)
        return batch, prediction.seconds

    def until(self, slot: int) -> Iterator[tuple[Batch, float]]:
        """Run batches until a request has its first token."""
        while not self.times_s[slot]:
            yield self.step()


@dataclass
class Live:
    """A request that is not closed."""

    job: int
    request: SchedulerRequest
    num_prefill: int
    num_tokens: int = 0
    num_scheduled: int = 0
    num_in_flight: int = 0
    on_host: bool = False
    ended: bool = False


@dataclass
class Shard:
    """What a request has on a group: from which position on, and its blocks; of a dealt one, how many tokens."""

    start: int
    blocks: list[int] = field(default_factory=list)
    num_dealt: int = 0


def can_start(memory: KVMemory, first: int, num_tokens: int, kv_len: int, *, set_aside: bool) -> bool:
    """Whether a request of so many tokens in all may begin on a group with its first ``kv_len``, all of its prompt with
    ``set_aside``."""
    memory.start(-2, first, num_tokens)
    can = memory.can_take(Row(-2, 0, kv_len, False, set_aside, first))
    memory.undo_start(-2)
    return can


class Drive:
    """Plays jobs on a scheduler; one batch runs at a time, those scheduled ahead wait for it.

    Args:
        scheduler: any.
        jobs: in any order.
        seconds: how long a batch takes; None is as long as predicted.
        busy: what the stage reports of a batch that took so long; by default the truth.
        observers: are told of every call.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        jobs: Sequence[Job],
        seconds: Callable[[Batch], float] | None,
        *,
        busy: Callable[[float], float] = lambda real_s: real_s,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.scheduler, self.jobs, self.now_s = scheduler, jobs, 0.0
        self.live: dict[int, Live] = {}
        self.first_token_s: dict[int, float] = {}  # by job
        self.finish_s: dict[int, float] = {}
        self.token_s: defaultdict[int, list[float]] = defaultdict(list)  # of all its tokens, by job
        self.batches: list[Batch] = []
        self.gave_way: list[int] = []  # by job, in order
        self.num_decodes = self.num_swapped = 0  # of these
        self.decision = Decision()
        self._seconds, self._busy, self._observers = seconds, busy, observers
        self._in_flight: deque[tuple[Batch, float, float]] = deque()  # batch, its end, its seconds
        self.tables: defaultdict[int, dict[int, Shard]] = defaultdict(dict)  # by slot and group
        memory, size = scheduler.memory, scheduler.memory.block_size
        # Names of the tokens that were written, by group, block and place in it.
        self._cells = [np.zeros((pool.num_blocks, size), np.int64) for pool in memory.pools]
        self._host = [np.zeros((host.pool.num_blocks, size), np.int64) for host in memory.hosts]
        self.num_dealt = self.num_shifts = self.num_computed = self.num_shared = self.num_read_back = 0

    def on_schedule(self, batch: Batch | None) -> None:
        """A batch was scheduled, or nothing could be; what a test looks at, in a subclass."""

    def run(self) -> Self:
        """Play to the end. Every job finishes or is cancelled, nothing is left, and nothing goes on for ever."""
        most = 50 + 4 * sum(job.num_prompt + job.max_new for job in self.jobs)
        most *= len(self.jobs) if self.scheduler.memory.overcommit else 1  # what gave way is computed again
        arrivals = [(job.arrival_s, False, index) for index, job in enumerate(self.jobs)]
        cancels = [(max(j.cancel_s, j.arrival_s), True, i) for i, j in enumerate(self.jobs) if j.cancel_s is not None]
        events = deque(sorted([*arrivals, *cancels]))
        while True:
            while events and events[0][0] <= self.now_s:
                _, is_cancel, job = events.popleft()
                (self._cancel if is_cancel else self._add)(job)
            self._schedule()
            assert len(self.batches) <= most, "a livelock"
            next_event_s = events[0][0] if events else math.inf
            next_end_s = self._in_flight[0][1] if self._in_flight else math.inf
            if min(next_event_s, next_end_s) == math.inf:
                break
            self.now_s = max(self.now_s, min(next_event_s, next_end_s))
            if next_end_s <= next_event_s:
                self._complete()
        self._check_end()
        return self

    def _add(self, index: int) -> None:
        job, slot = self.jobs[index], next(slot for slot in range(len(self.jobs)) if slot not in self.live)
        prefix = self._prefix(slot, index)
        asked = (job.num_prompt, job.max_new, job.arrival_s, job.slo, job.priority)
        request = SchedulerRequest(slot, *asked, job.is_relegated, tenant=job.tenant, prefix=prefix)
        admitted = self.scheduler.add(request)
        self.live[slot] = Live(index, request, job.num_prompt)
        for observer in self._observers:
            observer.added(request, None, admitted, f"job {index}")

    def _prefix(self, slot: int, index: int) -> bytes:
        """The ids of a job that gets a slot."""
        return b""

    def _cancel(self, index: int) -> None:
        for slot, live in list(self.live.items()):
            if live.job == index and not live.ended:
                live.ended = True
                closed = self.scheduler.cancel(slot)
                for observer in self._observers:
                    observer.cancelled(slot, closed)
                self._close(closed)

    def _schedule(self) -> None:
        while True:
            self.decision = self.scheduler.schedule(self.now_s)
            batch = self.decision.batch
            for observer in self._observers:
                observer.scheduled(self.now_s, self.decision)
            self._preempt(self.decision.preempted)
            self.on_schedule(batch)
            if batch is None:
                scheduler = self.scheduler
                assert scheduler.in_flight or not (scheduler.num_waiting or scheduler.num_running), "a deadlock"
                return
            self._check_bounds(batch)
            self._check_batch(batch)
            self.batches.append(batch)
            seconds = self._seconds(batch) if self._seconds else self.decision.prediction.seconds
            start_s = max(self.now_s, self._in_flight[-1][1]) if self._in_flight else self.now_s
            self._in_flight.append((batch, start_s + seconds, seconds))

    def _preempt(self, preempted: Sequence[Preempted]) -> None:
        """Who gave way is somebody who may: with classes anybody, with overcommit alone anybody but the oldest."""
        if not preempted:
            return
        config = self.scheduler.config
        started = [one for one in self.live.values() if one.num_scheduled or one.job in self.gave_way]
        by_class = str(config.policy).startswith("priority")
        oldest = min(started, key=lambda one: (one.request.arrival_s, one.request.slot), default=None)
        for slot, lost_s, swapped_tokens in map(astuple, preempted):
            live = self.live[slot]
            assert by_class or (config.overcommit and live is not oldest), "the oldest never gives way"
            assert not live.num_in_flight and not live.ended and not live.on_host and live.num_scheduled
            if swapped_tokens:
                assert swapped_tokens == live.num_scheduled and lost_s >= 0
                live.on_host = True
            else:
                assert lost_s > 0
                live.num_scheduled = 0
            live.num_prefill = live.request.num_prompt_tokens + live.num_tokens
            self.gave_way.append(live.job)
            self.num_decodes += live.num_tokens > 0
            self.num_swapped += swapped_tokens > 0

    def _complete(self) -> None:
        batch, _, seconds = self._in_flight.popleft()
        results = []
        for row in batch.rows:
            live = self.live[row.slot]
            live.num_in_flight -= 1
            if row.samples and not live.ended:
                results.append((row.slot, 1, self._sampled(live)))
        busy_s = self._busy(seconds)
        closed = self.scheduler.complete(batch, self.now_s, results, busy_s)
        for observer in self._observers:
            observer.completed(batch, self.now_s, results, busy_s, closed)
        self._close(closed)

    def _sampled(self, live: Live) -> bool:
        job = self.jobs[live.job]
        self.first_token_s.setdefault(live.job, self.now_s)
        self.token_s[live.job].append(self.now_s)
        live.num_tokens += 1
        live.ended = live.num_tokens == (job.num_new or job.max_new)
        if live.ended:
            self.finish_s[live.job] = self.now_s
        return live.ended

    def _close(self, closed: Sequence[int]) -> None:
        for slot in closed:
            live = self.live.pop(slot)
            assert live.ended and live.num_in_flight == 0

    # -- rules of any scheduler ------------------------------------------------------------------------------------

    def _check_bounds(self, batch: Batch) -> None:
        """Of tokens on each group and in a row, of rows, and of who runs."""
        config = self.scheduler.config
        assert batch.rows
        assert all(row.is_decode for row in batch.rows[: batch.num_decodes])
        assert len({row.slot for row in batch.rows}) == len(batch.rows)
        assert self.scheduler.num_running <= config.max_num_seqs
        if not config.stream:  # a prompt has one chunk in flight
            chunks = [row.slot for sent in self.scheduler.in_flight for row in sent.chunks]
            assert len(chunks) == len(set(chunks))
        if config.scheduler in ("static", "orca"):
            return
        for group in range(self.scheduler.memory.num_groups):
            assert sum(row.tokens_on(group) for row in batch.rows if row.concerns(group)) <= config.max_batch_tokens
        most = config.chunk_size or config.max_batch_tokens
        assert all(row.is_dealt or row.q_len <= most for row in batch.rows)

    def _check_batch(self, batch: Batch) -> None:
        """Each row of a batch, which is applied as a replica does it, finds in its blocks what its own tokens left."""
        assert batch == Batch.from_ints(batch.to_ints())
        memory = self.scheduler.memory
        for group, first, host_first, count in batch.swaps_out:
            self._host[group][host_first : host_first + count] = self._cells[group][first : first + count]
        for slot in batch.frees:
            del self.tables[slot]
        for shared in batch.shared:
            live = self.live[shared.slot]
            assert live.num_scheduled == shared.start and shared.num_tokens > 0
            self.tables[shared.slot][shared.group] = Shard(shared.start)
            live.num_scheduled += shared.num_tokens
            self.num_shared += shared.num_tokens
        for extent in batch.extents:
            live = self.live[extent.slot]
            new = Shard(0 if live.on_host else live.num_scheduled)
            blocks = range(extent.first, extent.first + extent.count)
            self.tables[extent.slot].setdefault(extent.group, new).blocks.extend(blocks)
        back = [live for live in (self.live[row.slot] for row in batch.rows) if live.on_host]
        num_moved = sum(-(-live.num_scheduled // memory.block_size) for live in back)
        assert batch.shared or num_moved == sum(swap.count for swap in batch.swaps_in)
        for live in back:
            live.on_host = False
        for group, first, host_first, count in batch.swaps_in:
            self._cells[group][first : first + count] = self._host[group][host_first : host_first + count]
            self.num_read_back += count
        for copy in batch.copies:
            assert 0 < copy.num_tokens < memory.block_size
            cells = self._cells[copy.group]
            cells[copy.target, : copy.num_tokens] = cells[copy.source, : copy.num_tokens]
        for row in batch.rows:  # all write before any attends, as a layer does
            self._check_row(row)
            self.num_computed += row.q_len
            if not self._is_dealt(row):
                self._write(row)
        for row in batch.rows:
            if self._is_dealt(row):
                self._check_dealt(row, batch.deals)
            else:
                self._check_reads(row)
        for group in range(memory.num_groups):
            held = [table[group].blocks for table in self.tables.values() if group in table]
            assert memory.used(group) == len(set[int]().union(*held))

    def _is_dealt(self, row: Row) -> bool:
        one = self.live[row.slot].request
        return self.scheduler.memory.dealt_reservation(one.num_kv_tokens, one.num_prompt_tokens) is not None

    def _names(self, slot: int, start: int, end: int) -> ArrayLike:
        """Of some tokens of a request; those that are shared have the same."""
        return np.arange(start, end) + ((self.live[slot].job + 1) << 32)

    def _write(self, row: Row) -> None:
        shard, names = self.tables[row.slot][row.writer], self._names(row.slot, row.position, row.kv_len)
        block, place = np.divmod(np.arange(row.position, row.kv_len) - shard.start, self.scheduler.memory.block_size)
        self._cells[row.writer][np.array(shard.blocks)[block], place] = names

    def _check_reads(self, row: Row) -> None:
        """A row lies on neighbouring groups, each with the blocks for its shard, not one more, and its tokens there."""
        table, size = self.tables[row.slot], self.scheduler.memory.block_size
        assert list(table) == list(row.groups)
        starts = [shard.start for shard in table.values()]
        assert starts[0] == 0
        for (group, shard), end in zip(table.items(), [*starts[1:], row.kv_len], strict=True):
            num_tokens = end - shard.start
            assert 0 < num_tokens <= self.scheduler.memory.max_kv_per_group
            assert len(shard.blocks) == -(-num_tokens // size)
            found = self._cells[group][shard.blocks].ravel()[:num_tokens]
            assert np.array_equal(found, self._names(row.slot, shard.start, end))

    def _check_dealt(self, row: Row, deals: Sequence[Deal]) -> None:
        """A dealt row lies on its groups with what it was dealt and gathered."""
        table, size = self.tables[row.slot], self.scheduler.memory.block_size
        assert row.num_groups > 1
        assert sum(shard.num_dealt for shard in table.values()) == row.position
        for group in row.groups:
            shard = table.setdefault(group, Shard(0))
            if row.is_dealt:
                (deal,) = [deal for deal in deals if (deal.slot, deal.group) == (row.slot, group)]
                assert deal.held == shard.num_dealt
                assert abs(deal.share - row.position / row.num_groups) <= size + 1
                shard.num_dealt = deal.share + row.tokens_on(group)
                self.num_dealt += 1
                if deal.share < deal.held:
                    self.num_shifts += 1
                    del shard.blocks[-(-shard.num_dealt // size) :]
            elif group == row.writer:
                shard.num_dealt += row.q_len
            assert len(shard.blocks) == -(-shard.num_dealt // size)

    def _check_row(self, row: Row) -> None:
        live = self.live[row.slot]
        assert not live.ended and not live.on_host
        assert row.position == live.num_scheduled
        assert row.is_decode == (row.position >= live.num_prefill)
        known = live.request.num_prompt_tokens + live.num_tokens
        known += live.num_in_flight * bool(self.scheduler.config.async_scheduling)  # tokens that are on their way
        assert row.kv_len <= (known if row.is_decode else live.num_prefill)
        assert row.samples == (row.kv_len >= live.num_prefill)
        live.num_scheduled = row.kv_len
        live.num_in_flight += 1

    def _check_end(self) -> None:
        scheduler = self.scheduler
        assert (scheduler.num_waiting, scheduler.num_running, scheduler.in_flight) == (0, 0, ())
        assert not self.live
        memory = scheduler.memory
        assert memory.num_used == 0
        assert all(host.num_free == host.pool.num_blocks for host in memory.hosts)
        longest = (memory.max_request_tokens, memory.max_kv_per_group)
        assert memory.overcommit or can_start(memory, 0, *longest, set_aside=True)
        assert set(self.finish_s) >= {i for i, job in enumerate(self.jobs) if job.cancel_s is None}
