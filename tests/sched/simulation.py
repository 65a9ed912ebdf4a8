"""Any load on the scheduler, played to its end; every rule is checked at every call against a model of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import strategies as st

from medha.batch import Batch, Row
from medha.config import SchedulerConfig
from medha.params import SLO
from medha.sched.batch_builder import pending_work
from medha.sched.decision import SchedulerRequest
from medha.sched.queue import prefill_work
from medha.sched.scheduler import Scheduler
from medha.worker.kv_cache import BlockTables
from tests.sched.banker import Claimant, blocks_by_group, is_safe

LAST_TICK = 25  # of arrivals and cancels
MAX_PROMPT = 40
MAX_NEW = 12


@dataclass(frozen=True)
class Request:
    """One drawn request: lengths asked for, tokens until it really ends, ticks at which it arrives and is cancelled."""

    num_prompt: int
    max_new: int
    num_new: int
    arrival: int
    cancel: int | None

    @property
    def num_kv_tokens(self) -> int:
        return self.num_prompt + self.max_new - 1


@dataclass(frozen=True)
class Load:
    """Requests, budgets and pools."""

    config: SchedulerConfig
    num_groups: int
    num_blocks: int
    block_size: int
    requests: tuple[Request, ...]
    eager: tuple[bool, ...]  # at each tick, in turn: schedule if possible, rather than complete the oldest batch
    reports_cancelled: bool  # rows of cancelled requests report the token they sampled too

    @property
    def max_kv_per_group(self) -> int:
        return self.config.max_kv_per_group or self.num_blocks * self.block_size

    def blocks(self, first: int, num_tokens: int) -> list[int]:
        """Blocks of each group under the first tokens of a request that begins at ``first``."""
        return blocks_by_group(
            num_tokens,
            first=first,
            num_groups=self.num_groups,
            max_kv_per_group=self.max_kv_per_group,
            block_size=self.block_size,
        )


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Prompts from one token to many."""
    max_new = draw(st.integers(1, MAX_NEW))
    num_new = draw(st.integers(1, max_new))
    ticks = st.integers(0, LAST_TICK)
    num_prompt = draw(st.integers(1, MAX_PROMPT) | st.integers(1, 6))
    return Request(num_prompt, max_new, num_new, draw(ticks), draw(st.none() | ticks))


@st.composite
def loads(draw: st.DrawFn, *, min_groups: int = 1, max_groups: int = 1) -> Load:
    """Up to seven requests on pools that are as small as may be, somewhat larger, or large enough for all."""
    block_size = draw(st.sampled_from((1, 2, 4, 7)))
    num_groups = draw(st.integers(min_groups, max_groups))
    drawn = tuple(draw(st.lists(requests(), min_size=1, max_size=7)))
    longest = max(request.num_kv_tokens for request in drawn)
    share = -(-longest // (num_groups * block_size))  # blocks of the longest on each group, at least
    share *= draw(st.sampled_from((1, 1, 2)))
    num_blocks = draw(st.sampled_from((share, share * 5 // 3, share * len(drawn))))
    is_limited = num_groups > 1 or draw(st.booleans())
    config = SchedulerConfig(
        "sarathi",
        max_num_seqs=draw(st.integers(1, 5)),
        max_batch_tokens=draw(st.integers(1, 20)),
        chunk_size=draw(st.integers(1, 16)),
        depth=draw(st.sampled_from((1, 2, 4))),
        max_kv_per_group=share * block_size if is_limited else None,
    )
    eager = draw(st.lists(st.booleans(), min_size=1, max_size=12))
    return Load(config, num_groups, num_blocks, block_size, drawn, tuple(eager), draw(st.booleans()))


@dataclass
class Live:
    """What the simulation knows of one request that is not closed."""

    request: int
    asked: SchedulerRequest
    num_new: int
    group: int | None = None  # the first of its run; None before its first chunk
    num_scheduled: int = 0
    num_tokens: int = 0
    num_in_flight: int = 0
    ended: bool = False

    @property
    def can_prefill(self) -> bool:
        return not self.ended and self.num_scheduled < self.asked.num_prompt_tokens

    @property
    def can_decode(self) -> bool:
        num_prompt = self.asked.num_prompt_tokens
        return not self.ended and num_prompt <= self.num_scheduled < num_prompt + self.num_tokens

    @property
    def is_decoding(self) -> bool:
        return not self.ended and not self.can_prefill


class Simulation:
    """Drives a scheduler through a load, batches completing in order."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.sched = Scheduler(
            load.config, num_blocks=load.num_blocks, block_size=load.block_size, num_groups=load.num_groups
        )
        self.waiting: dict[int, Live] = {}
        self.running: dict[int, Live] = {}
        self.in_flight: deque[Batch] = deque()
        self.num_batches = 0
        self.tables = [BlockTables(load.block_size, group) for group in range(load.num_groups)]
        self.owned: dict[tuple[int, int], list[int]] = {}  # blocks of each (slot, group), in order of execution
        self.to_free: list[int] = []
        self.finished: set[int] = set()
        self.groups: dict[int, set[int]] = {}  # of each request: those that had a row of it
        self.log: list[str] = []

    def run(self) -> list[str]:
        """Play the load to its end; returns what was scheduled and closed."""
        requests = self.load.requests
        num_ticks = LAST_TICK + 2 * sum(r.num_prompt + r.num_new for r in requests)
        for tick in range(num_ticks + 1):
            for index, request in enumerate(requests):
                if request.arrival == tick:
                    self.add(index, request)
            for index, request in enumerate(requests):
                if request.cancel == tick:
                    self.cancel(index)
            batch = None
            if not self.in_flight or self.load.eager[tick % len(self.load.eager)]:
                batch = self.schedule(float(tick))
            if batch is None and self.in_flight:
                self.complete(float(tick))
        # Each tick scheduled or completed a batch of at least one token while there was one: nobody may be left.
        assert (self.sched.num_waiting, self.sched.num_running, self.sched.in_flight) == (0, 0, ())
        self.check_nothing_is_left()
        assert self.finished >= {i for i, r in enumerate(requests) if r.cancel is None}
        return self.log

    def check_nothing_is_left(self) -> None:
        """No block is held or claimed: a request as large as the pools may begin, and on any single group."""
        memory = self.sched.memory
        assert memory.num_used == 0
        whole = memory.max_request_tokens
        assert memory.can_start(0, whole, memory.max_kv_per_group, set_aside=True)
        for group in range(memory.num_groups):
            share = memory.max_kv_per_group
            assert memory.can_start(group, share, share, set_aside=True)

    # -- calls ---------------------------------------------------------------------------------------------------

    def add(self, index: int, request: Request) -> None:
        slot = next(s for s in range(len(self.load.requests)) if s not in self.waiting and s not in self.running)
        asked = SchedulerRequest(slot, request.num_prompt, request.max_new, float(request.arrival), SLO(ttft_s=1.0))
        self.sched.add(asked)
        self.waiting[slot] = Live(index, asked, request.num_new)

    def cancel(self, index: int) -> None:
        slot = next((s for s, live in (self.waiting | self.running).items() if live.request == index), 1000)
        closed = self.sched.cancel(slot)
        live = self.running.get(slot)
        if slot in self.waiting:
            assert closed == (slot,)
            del self.waiting[slot]
        elif live is not None and live.num_in_flight == 0:
            assert closed == (slot,)
            self.close(slot)
        else:
            assert closed == ()
            if live is not None:
                live.ended = True
        assert self.sched.cancel(slot) == ()
        self.log.append(f"cancel {slot}: {closed}")
        self.check_counts()

    def schedule(self, now: float) -> Batch | None:
        batch = self.sched.schedule(now).batch
        if len(self.in_flight) == self.load.config.depth:
            assert batch is None
            return None
        self.check_rows(() if batch is None else batch.rows)
        if batch is None:
            assert self.in_flight or not (self.waiting or self.running), "a deadlock"
            return None
        assert batch.batch_id == self.num_batches
        self.apply_blocks(batch)
        self.in_flight.append(batch)
        self.num_batches += 1
        assert self.sched.in_flight == tuple(self.in_flight)
        assert Batch.from_ints(batch.to_ints()) == batch
        self.log.append(str(batch))
        self.check_counts()
        return batch

    def complete(self, now: float) -> None:
        batch = self.in_flight.popleft()
        results = []
        for row in batch.rows:
            live = self.running[row.slot]
            live.num_in_flight -= 1
            if row.samples and not live.ended:
                live.num_tokens += 1
                live.ended = live.num_tokens == live.num_new
                results.append((row.slot, 1, live.ended))
                if live.ended:
                    self.finished.add(live.request)
            elif row.samples and self.load.reports_cancelled:
                results.append((row.slot, 1, False))
        closed = self.sched.complete(batch, now, results, 0.001)
        gone = [r.slot for r in batch.rows if self.running[r.slot].ended and self.running[r.slot].num_in_flight == 0]
        assert sorted(closed) == sorted(gone)
        for slot in closed:
            self.close(slot)
        for row in batch.rows:
            if row.slot not in closed:
                assert self.sched._queue.running[row.slot].num_computed_tokens == row.kv_len
        self.log.append(f"complete {batch.batch_id}: {closed}")
        self.check_counts()

    def close(self, slot: int) -> None:
        del self.running[slot]
        self.to_free.append(slot)

    # -- whose turn it is ------------------------------------------------------------------------------------------

    def check_rows(self, rows: tuple[Row, ...]) -> None:
        """Decodes first, then chunks of what has begun, then first chunks: every row that may be, and no other."""
        left = [self.load.config.max_batch_tokens] * self.load.num_groups
        num_decodes = sum(row.is_decode for row in rows)
        assert all(row.is_decode for row in rows[:num_decodes])
        self.check_decodes(rows[:num_decodes], left)
        rest = deque(rows[num_decodes:])
        for slot in [slot for slot, live in self.running.items() if live.can_prefill]:
            expected = self.next_chunk(slot, left)
            if expected is not None:
                assert rest.popleft() == expected
                self.send(expected, left)
        while self.waiting and len(self.running) < self.load.config.max_num_seqs:
            slot = next(iter(self.waiting))
            starts = self.first_chunks(slot, left)
            if not starts:
                break
            row = rest.popleft()
            assert row == starts.get(row.group)
            loads = {first: self.load_of_run(slot, first) for first in starts}
            assert loads[row.group] == min(loads.values())
            self.running[slot] = self.waiting.pop(slot)
            self.running[slot].group = row.group
            self.send(row, left)
        assert not rest

    def check_decodes(self, rows: tuple[Row, ...], left: list[int]) -> None:
        """Each group's decodes are dealt over the batches in flight; none is left out while its groups have a share."""
        decoding = {slot: live for slot, live in self.running.items() if live.is_decoding}
        ready = {slot: self.row_at(slot, 1) for slot, live in decoding.items() if live.can_decode}
        places = [self.row_at(slot, 1).run for slot in decoding]
        num_decoding = [sum(low <= g <= high for low, high in places) for g in range(self.load.num_groups)]
        depth = self.sched.depth
        shares = [min(-(-n // depth), tokens) for n, tokens in zip(num_decoding, left, strict=True)]
        for row in rows:
            assert row == ready.pop(row.slot, None)
            assert self.running[row.slot].num_in_flight == 0  # its token is out of the pipeline before the next goes in
            for group in range(row.group, row.holder + 1):
                shares[group] -= 1
            self.send(row, left)
        assert min(shares) >= 0
        for row in ready.values():
            assert not all(shares[row.group : row.holder + 1])

    def next_chunk(self, slot: int, left: list[int]) -> Row | None:
        """The chunk that a prefill gets: as long as budgets and its shard allow, if the state stays safe."""
        row = self.row_at(slot, 1)
        q_len = min(self.chunk_size(self.running[slot], row, left), self.room(row.position))
        if q_len == 0:
            return None
        row = self.row_at(slot, q_len)
        return row if is_safe(self.load.num_blocks, self.claimants(slot, row)) else None

    def first_chunks(self, slot: int, left: list[int]) -> dict[int, Row]:
        """The first chunks that a request may get, by the group where its run would begin."""
        live = self.waiting[slot]
        width = -(-live.asked.num_kv_tokens // self.load.max_kv_per_group)
        rows = {}
        for first in range(self.load.num_groups - width + 1):
            live.group = first
            row = self.row_of(live, 1)
            q_len = min(self.chunk_size(live, row, left), self.room(0))
            if q_len > 0:
                row = self.row_of(live, q_len)
                if is_safe(self.load.num_blocks, self.claimants(slot, row)):
                    rows[first] = row
        live.group = None
        return rows

    def load_of_run(self, slot: int, first: int) -> tuple[float, float]:
        """The most pending prefill work of a group on the run of a request, and the sum over the run."""
        width = -(-self.waiting[slot].asked.num_kv_tokens // self.load.max_kv_per_group)
        work = pending_work(self.load.num_groups, self.pending())[first : first + width]
        return max(work), sum(work)

    def pending(self) -> Iterator[tuple[int, int, float]]:
        for live in self.running.values():
            if live.can_prefill:
                assert live.group is not None
                width = -(-live.asked.num_kv_tokens // self.load.max_kv_per_group)
                yield live.group, width, prefill_work(live.num_scheduled, live.asked.num_prompt_tokens)

    def chunk_size(self, live: Live, row: Row, left: list[int]) -> int:
        budget = min(left[row.group : row.holder + 1])
        return min(live.asked.num_prompt_tokens - live.num_scheduled, self.load.config.chunk_size or budget, budget)

    def room(self, position: int) -> int:
        return self.load.max_kv_per_group - position % self.load.max_kv_per_group

    def row_at(self, slot: int, q_len: int) -> Row:
        return self.row_of(self.running[slot], q_len)

    def row_of(self, live: Live, q_len: int) -> Row:
        """The next row of a request."""
        assert live.group is not None
        start = live.num_scheduled
        samples = live.is_decoding or start + q_len == live.asked.num_prompt_tokens
        last = min(start, live.asked.num_kv_tokens - 1)  # of one that has nothing more to write
        num_groups = last // self.load.max_kv_per_group + 1
        return Row(live.asked.slot, start, q_len, live.is_decoding, samples, live.group, num_groups)

    def send(self, row: Row, left: list[int]) -> None:
        live = self.running[row.slot]
        live.num_scheduled = row.kv_len
        live.num_in_flight += 1
        self.groups.setdefault(live.request, set()).update(range(row.group, row.holder + 1))
        for group in range(row.group, row.holder + 1):
            left[group] -= row.q_len
            assert left[group] >= 0

    def claimants(self, slot: int, row: Row) -> list[Claimant]:
        """Everybody that holds blocks or may take them, once a row of ``slot`` is scheduled."""
        result = []
        lives = {**self.running, slot: self.running.get(slot) or self.waiting[slot]}
        for other, live in lives.items():
            assert live.group is not None
            num_tokens = row.kv_len if other == slot else live.num_scheduled
            claim = self.load.blocks(live.group, live.asked.num_kv_tokens)
            held = self.load.blocks(live.group, num_tokens)
            result.append(Claimant(claim, held, num_tokens >= live.asked.num_prompt_tokens))
        return result

    # -- blocks ------------------------------------------------------------------------------------------------------

    def apply_blocks(self, batch: Batch) -> None:
        """What the ranks of each group do with the delta, in order of execution."""
        assert sorted(batch.frees) == sorted(self.to_free)
        self.to_free.clear()
        self.owned = {place: blocks for place, blocks in self.owned.items() if place[0] not in batch.frees}
        taken = {(group, block) for (_, group), blocks in self.owned.items() for block in blocks}
        holders = {row.slot: row.holder for row in batch.rows}
        for extent in batch.extents:
            blocks = range(extent.first, extent.first + extent.count)
            assert holders[extent.slot] == extent.group
            assert set(blocks) <= set(range(self.load.num_blocks))
            assert not taken & {(extent.group, block) for block in blocks}
            taken |= {(extent.group, block) for block in blocks}
            self.owned.setdefault((extent.slot, extent.group), []).extend(blocks)
        for group, tables in enumerate(self.tables):
            tables.apply(batch.part_of(group))
        for row in batch.rows:
            self.check_tables(row)

    def check_tables(self, row: Row) -> None:
        """Each group of a row's run has blocks for its shard, and for no token more."""
        size, share = self.load.block_size, self.load.max_kv_per_group
        for group in range(row.group, row.holder + 1):
            start = (group - row.group) * share
            end = min(row.kv_len, start + share)
            blocks = self.owned[row.slot, group]
            assert len(blocks) == -(-(end - start) // size)
            assert self.tables[group].shard(row.slot) == (start, end)
            ranges = self.tables[group].ranges(row.slot, start, end)
            tokens = [t for first, n in ranges for t in range(first, first + n)]
            assert tokens == [block * size + i for block in blocks for i in range(size)][: end - start]

    def check_counts(self) -> None:
        assert (self.sched.num_running, self.sched.num_waiting) == (len(self.running), len(self.waiting))
        used = [0] * self.load.num_groups
        for (slot, group), blocks in self.owned.items():
            used[group] += len(blocks) * (slot not in self.to_free)
        assert [pool.num_used for pool in self.sched.memory.pools] == used
        assert self.sched.memory.num_used == sum(used)
        assert max(used) <= self.load.num_blocks
