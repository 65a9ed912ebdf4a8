"""The baseline scheduler: small scenarios whose batches are compared whole, and any load against its rules."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.batch import Batch, Row
from medha.config import SchedulerConfig
from medha.kv_cache import BlockTables
from medha.request import SLO
from medha.sched.scheduler import RequestHead, Scheduler

# ---------------------------------------------------------------------------------------------------------------------
# Scenarios


class Play:
    """A scheduler and a pretended engine: a row that samples yields a token, a request ends at ``max_new_tokens``."""

    def __init__(
        self, *, rows: int = 8, tokens: int = 16, chunk: int = 8, depth: int = 1, num_blocks: int = 16
    ) -> None:
        config = SchedulerConfig("sarathi", max_num_seqs=rows, max_batch_tokens=tokens, chunk_size=chunk, depth=depth)
        self.sched = Scheduler(config, num_blocks=num_blocks, block_size=4)
        self.ends: dict[int, int] = {}
        self.cancelled: set[int] = set()

    def add(self, *requests: tuple[int, int, int]) -> None:
        """Queue requests given as (slot, prompt tokens, new tokens)."""
        for slot, num_prompt, num_new in requests:
            self.sched.add(RequestHead(slot, num_prompt, num_new, arrival_s=0.0))
            self.ends[slot] = num_prompt + num_new - 1

    def fill(self) -> str:
        """Schedule until nothing can enter."""
        lines = []
        while (batch := self.sched.schedule(0.0)) is not None:
            lines.append(f"{batch}\n")
        return "".join(lines)

    def complete(self) -> str:
        """Complete the oldest batch."""
        batch = self.sched.in_flight[0]
        results = [
            (r.slot, 1, r.kv_len == self.ends[r.slot]) for r in batch.rows if r.samples and r.slot not in self.cancelled
        ]
        closed = self.sched.complete(batch.batch_id, 0.0, results, 0.0)
        return f"batch {batch.batch_id} complete" + "".join(f", slot {slot} closed" for slot in closed) + "\n"

    def run(self) -> str:
        """Fill the pipeline and complete its oldest batch, over and over."""
        lines = self.fill()
        while self.sched.in_flight:
            lines += self.complete() + self.fill()
        return lines


def test_a_prompt_is_read_in_chunks_then_decoded() -> None:
    play = Play()
    play.add((0, 20, 3))
    assert (
        play.run()
        == """\
batch 0: 1 rows, 8 tokens
  slot 0 prefill [0:8]
  slot 0 + blocks [0:2]
batch 0 complete
batch 1: 1 rows, 8 tokens
  slot 0 prefill [8:16]
  slot 0 + blocks [2:4]
batch 1 complete
batch 2: 1 rows, 4 tokens
  slot 0 prefill [16:20] last
  slot 0 + blocks [4:5]
batch 2 complete
batch 3: 1 rows, 1 tokens
  slot 0 decode [20]
  slot 0 + blocks [5:6]
batch 3 complete
batch 4: 1 rows, 1 tokens
  slot 0 decode [21]
batch 4 complete, slot 0 closed
"""
    )


def test_decodes_come_first_and_prefills_share_what_is_left() -> None:
    play = Play(tokens=10)
    play.add((0, 4, 3))
    assert play.fill() + play.complete() == (
        "batch 0: 1 rows, 4 tokens\n  slot 0 prefill [0:4] last\n  slot 0 + blocks [0:1]\nbatch 0 complete\n"
    )
    play.add((1, 12, 1), (2, 3, 1))
    assert (
        play.run()
        == """\
batch 1: 3 rows, 10 tokens
  slot 0 decode [4]
  slot 1 prefill [0:8]
  slot 2 prefill [0:1]
  slot 0 + blocks [1:2]
  slot 1 + blocks [2:4]
  slot 2 + blocks [5:6]
batch 1 complete
batch 2: 3 rows, 7 tokens
  slot 0 decode [5]
  slot 1 prefill [8:12] last
  slot 2 prefill [1:3] last
  slot 1 + blocks [4:5]
batch 2 complete, slot 0 closed, slot 1 closed, slot 2 closed
"""
    )


def test_chunks_of_a_prompt_follow_each_other_through_the_pipeline() -> None:
    play = Play(depth=3, chunk=4)
    play.add((0, 18, 3))
    # The decode waits until the last chunk is out of the pipeline, the next decode until that one is.
    assert (
        play.run()
        == """\
batch 0: 1 rows, 4 tokens
  slot 0 prefill [0:4]
  slot 0 + blocks [0:1]
batch 1: 1 rows, 4 tokens
  slot 0 prefill [4:8]
  slot 0 + blocks [1:2]
batch 2: 1 rows, 4 tokens
  slot 0 prefill [8:12]
  slot 0 + blocks [2:3]
batch 0 complete
batch 3: 1 rows, 4 tokens
  slot 0 prefill [12:16]
  slot 0 + blocks [3:4]
batch 1 complete
batch 4: 1 rows, 2 tokens
  slot 0 prefill [16:18] last
  slot 0 + blocks [4:5]
batch 2 complete
batch 3 complete
batch 4 complete
batch 5: 1 rows, 1 tokens
  slot 0 decode [18]
batch 5 complete
batch 6: 1 rows, 1 tokens
  slot 0 decode [19]
batch 6 complete, slot 0 closed
"""
    )


def test_decodes_are_dealt_over_the_batches_in_flight() -> None:
    play = Play(depth=2)
    play.add((0, 2, 3), (1, 2, 3), (2, 2, 3))
    assert (
        play.run()
        == """\
batch 0: 3 rows, 6 tokens
  slot 0 prefill [0:2] last
  slot 1 prefill [0:2] last
  slot 2 prefill [0:2] last
  slot 0 + blocks [0:1]
  slot 1 + blocks [1:2]
  slot 2 + blocks [2:3]
batch 0 complete
batch 1: 2 rows, 2 tokens
  slot 0 decode [2]
  slot 1 decode [2]
batch 2: 1 rows, 1 tokens
  slot 2 decode [2]
batch 1 complete
batch 3: 2 rows, 2 tokens
  slot 0 decode [3]
  slot 1 decode [3]
batch 2 complete
batch 4: 1 rows, 1 tokens
  slot 2 decode [3]
batch 3 complete, slot 0 closed, slot 1 closed
batch 4 complete, slot 2 closed
"""
    )


def test_a_claim_that_does_not_fit_waits_and_is_not_overtaken() -> None:
    play = Play(num_blocks=5)
    play.add((0, 8, 2), (1, 12, 1), (2, 1, 1))
    # 3 blocks are claimed by slot 0, so the 3 of slot 1 wait, and slot 2 behind it.
    assert play.fill() == "batch 0: 1 rows, 8 tokens\n  slot 0 prefill [0:8] last\n  slot 0 + blocks [0:2]\n"
    assert (play.sched.num_running, play.sched.num_waiting) == (1, 2)
    assert (
        play.run()
        == """\
batch 0 complete
batch 1: 1 rows, 1 tokens
  slot 0 decode [8]
  slot 0 + blocks [2:3]
batch 1 complete, slot 0 closed
batch 2: 2 rows, 9 tokens
  slot 1 prefill [0:8]
  slot 2 prefill [0:1] last
  slot 1 + blocks [0:2]
  slot 2 + blocks [3:4]
  slot 0 freed
batch 2 complete, slot 2 closed
batch 3: 1 rows, 4 tokens
  slot 1 prefill [8:12] last
  slot 1 + blocks [2:3]
  slot 2 freed
batch 3 complete, slot 1 closed
"""
    )


def test_two_requests_that_need_most_of_the_pool_each_run_one_after_the_other() -> None:
    play = Play(num_blocks=10, chunk=24, tokens=24)
    play.add((0, 23, 2), (1, 22, 3))
    assert (
        play.run()
        == """\
batch 0: 1 rows, 23 tokens
  slot 0 prefill [0:23] last
  slot 0 + blocks [0:6]
batch 0 complete
batch 1: 1 rows, 1 tokens
  slot 0 decode [23]
batch 1 complete, slot 0 closed
batch 2: 1 rows, 22 tokens
  slot 1 prefill [0:22] last
  slot 1 + blocks [0:6]
  slot 0 freed
batch 2 complete
batch 3: 1 rows, 1 tokens
  slot 1 decode [22]
batch 3 complete
batch 4: 1 rows, 1 tokens
  slot 1 decode [23]
batch 4 complete, slot 1 closed
"""
    )


def test_cancel_in_flight_drains_and_the_slot_is_used_again() -> None:
    play = Play(depth=2, chunk=4, num_blocks=5)
    play.add((0, 16, 5))
    assert (
        play.fill()
        == """\
batch 0: 1 rows, 4 tokens
  slot 0 prefill [0:4]
  slot 0 + blocks [0:1]
batch 1: 1 rows, 4 tokens
  slot 0 prefill [4:8]
  slot 0 + blocks [1:2]
"""
    )
    assert play.sched.cancel(0) == ()
    play.cancelled.add(0)
    assert play.complete() + play.fill() + play.complete() == "batch 0 complete\nbatch 1 complete, slot 0 closed\n"
    assert play.sched.memory.num_used == 0
    play.cancelled.clear()
    play.add((0, 3, 1))
    assert (
        play.run()
        == """\
batch 2: 1 rows, 3 tokens
  slot 0 prefill [0:3] last
  slot 0 + blocks [0:1]
  slot 0 freed
batch 2 complete, slot 0 closed
"""
    )


def test_the_next_in_line_gets_the_blocks_of_a_cancelled_request() -> None:
    play = Play(num_blocks=5)
    play.add((0, 4, 16), (1, 4, 13))
    play.fill()
    play.complete()
    assert play.sched.cancel(0) == (0,)
    assert (
        play.fill()
        == """\
batch 1: 1 rows, 4 tokens
  slot 1 prefill [0:4] last
  slot 1 + blocks [0:1]
  slot 0 freed
"""
    )


def test_row_budget() -> None:
    play = Play(rows=2)
    play.add((0, 1, 1), (1, 1, 2), (2, 1, 1))
    assert (
        play.run()
        == """\
batch 0: 2 rows, 2 tokens
  slot 0 prefill [0:1] last
  slot 1 prefill [0:1] last
  slot 0 + blocks [0:1]
  slot 1 + blocks [1:2]
batch 0 complete, slot 0 closed
batch 1: 2 rows, 2 tokens
  slot 1 decode [1]
  slot 2 prefill [0:1] last
  slot 2 + blocks [0:1]
  slot 0 freed
batch 1 complete, slot 1 closed, slot 2 closed
"""
    )


# ---------------------------------------------------------------------------------------------------------------------
# Wrong calls


def test_complete_out_of_order_is_refused() -> None:
    play = Play(depth=2, chunk=4)
    with pytest.raises(ValueError, match=r"^batch 0 completed, but the oldest in flight is None$"):
        play.sched.complete(0, 0.0, [], 0.0)
    play.add((0, 8, 1))
    play.fill()
    for wrong in (1, 2, -1):
        with pytest.raises(ValueError, match=rf"^batch {wrong} completed, but the oldest in flight is 0$"):
            play.sched.complete(wrong, 0.0, [], 0.0)
    assert play.sched.complete(0, 0.0, [], 0.0) == ()
    with pytest.raises(ValueError, match=r"^batch 0 completed, but the oldest in flight is 1$"):
        play.sched.complete(0, 0.0, [], 0.0)
    assert play.complete() == "batch 1 complete, slot 0 closed\n"


def test_add_with_a_slot_in_use_is_refused() -> None:
    play = Play(rows=1)
    play.add((0, 8, 2), (1, 8, 2))
    play.fill()
    for slot in (0, 1):  # running, waiting
        with pytest.raises(ValueError, match=f"^slot {slot} is in use$"):
            play.add((slot, 1, 1))
    play.sched.cancel(0)  # still in flight
    with pytest.raises(ValueError, match=r"^slot 0 is in use$"):
        play.add((0, 1, 1))
    play.sched.complete(0, 0.0, [], 0.0)
    play.add((0, 1, 1))


@pytest.mark.parametrize(("num_prompt", "num_new"), [(0, 1), (1, 0), (-1, 1), (1, -1)])
def test_lengths_below_one_are_refused(num_prompt: int, num_new: int) -> None:
    play = Play()
    with pytest.raises(ValueError, match="lengths must be at least 1"):
        play.add((0, num_prompt, num_new))
    assert play.sched.num_waiting == 0


def test_a_claim_beyond_the_pool_is_refused() -> None:
    play = Play(num_blocks=5)
    play.add((0, 20, 1), (1, 1, 20))  # the last token sampled is never written, so 20 tokens fill 5 blocks
    for num_prompt, num_new in ((21, 1), (20, 2), (1, 21), (10**9, 1)):
        with pytest.raises(ValueError, match=r"slot=2.*: needs \d+ KV blocks, the pool has 5$"):
            play.add((2, num_prompt, num_new))
    assert play.sched.num_waiting == 2


def test_claim_blocks() -> None:
    sched = Play().sched
    assert [sched.claim_blocks(p, n) for p, n in ((1, 1), (4, 1), (4, 2), (1, 4), (1, 5), (8, 9))] == [1, 1, 2, 1, 2, 4]


def test_cancel_unknown_or_twice_does_nothing() -> None:
    play = Play(rows=1)
    assert play.sched.cancel(0) == ()
    play.add((0, 8, 2), (1, 8, 2))
    play.fill()
    assert play.sched.cancel(1) == (1,)  # waiting
    assert play.sched.cancel(1) == ()
    assert play.sched.cancel(0) == ()  # in flight
    assert play.sched.cancel(0) == ()
    assert play.sched.complete(0, 0.0, [], 0.0) == (0,)
    assert play.sched.cancel(0) == ()
    assert (play.sched.num_running, play.sched.num_waiting, play.sched.memory.num_used) == (0, 0, 0)
    assert play.fill() == ""


def test_num_computed_tokens_moves_when_a_batch_is_complete() -> None:
    play = Play(depth=2)
    play.add((0, 12, 2))
    seen = [play.sched.num_computed_tokens(0)]
    play.fill()
    while play.sched.in_flight:
        seen.append(play.sched.num_computed_tokens(0))
        play.complete()
        play.fill()
    assert seen == [0, 0, 8, 12]
    assert play.sched.num_computed_tokens(0) == 0  # closed


# ---------------------------------------------------------------------------------------------------------------------
# Any load

LAST_TICK = 25  # of arrivals and cancels


@dataclass(frozen=True)
class Request:
    """One drawn request: lengths asked for, tokens until it really ends, ticks at which it arrives and is cancelled."""

    num_prompt: int
    max_new: int
    num_new: int
    arrival: int
    cancel: int | None


@dataclass(frozen=True)
class Load:
    config: SchedulerConfig
    num_blocks: int
    block_size: int
    requests: tuple[Request, ...]
    eager: tuple[bool, ...]  # at each tick, in turn: schedule if possible, rather than complete the oldest batch
    reports_cancelled: bool  # rows of cancelled requests report the token they sampled too


@st.composite
def loads(draw: st.DrawFn) -> Load:
    block_size = draw(st.sampled_from((1, 2, 4, 7)))
    ticks = st.integers(0, LAST_TICK)
    requests = []
    for _ in range(draw(st.integers(1, 7))):
        max_new = draw(st.integers(1, 6))
        num_new = draw(st.integers(1, max_new))
        cancel = draw(st.none() | ticks)
        requests.append(Request(draw(st.integers(1, 40)), max_new, num_new, draw(ticks), cancel))
    config = SchedulerConfig(
        "sarathi",
        max_num_seqs=draw(st.integers(1, 5)),
        max_batch_tokens=draw(st.integers(1, 20)),
        chunk_size=draw(st.integers(1, 16)),
        depth=draw(st.sampled_from((1, 2, 4))),
    )
    claims = [-(-(r.num_prompt + r.max_new - 1) // block_size) for r in requests]
    # The pool: the longest request alone, the longest taking 60 %, or room for all.
    num_blocks = draw(st.sampled_from((max(claims), max(claims) * 5 // 3, sum(claims))))
    eager = draw(st.lists(st.booleans(), min_size=1, max_size=12))
    return Load(config, num_blocks, block_size, tuple(requests), tuple(eager), draw(st.booleans()))


@dataclass
class Live:
    """What the simulation knows of one request that is not closed."""

    request: int
    head: RequestHead
    num_new: int
    claim: int
    num_scheduled: int = 0
    num_tokens: int = 0
    num_in_flight: int = 0
    ended: bool = False

    @property
    def can_prefill(self) -> bool:
        return not self.ended and self.num_scheduled < self.head.num_prompt_tokens

    @property
    def can_decode(self) -> bool:
        num_prompt = self.head.num_prompt_tokens
        return not self.ended and num_prompt <= self.num_scheduled < num_prompt + self.num_tokens


class Simulation:
    """Drives a scheduler through a load, batches completing in order, and checks every rule at every call."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.sched = Scheduler(load.config, num_blocks=load.num_blocks, block_size=load.block_size)
        self.waiting: dict[int, Live] = {}
        self.running: dict[int, Live] = {}
        self.in_flight: deque[Batch] = deque()
        self.num_batches = 0
        self.tables = BlockTables(load.block_size)
        self.owned: dict[int, list[int]] = {}  # blocks of each slot, in order of execution
        self.to_free: list[int] = []
        self.finished: set[int] = set()
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
        assert self.sched.memory.num_used == 0
        assert self.finished >= {i for i, r in enumerate(requests) if r.cancel is None}
        return self.log

    def add(self, index: int, request: Request) -> None:
        slot = next(s for s in range(len(self.load.requests)) if s not in self.waiting and s not in self.running)
        head = RequestHead(slot, request.num_prompt, request.max_new, float(request.arrival), SLO(ttft_s=1.0))
        claim = -(-(request.num_prompt + request.max_new - 1) // self.load.block_size)
        assert self.sched.claim_blocks(request.num_prompt, request.max_new) == claim
        self.sched.add(head)
        self.waiting[slot] = Live(index, head, request.num_new, claim)

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
        batch = self.sched.schedule(now)
        if len(self.in_flight) == self.load.config.depth:
            assert batch is None
            return None
        self.admit()
        if batch is None:
            assert not any(live.can_prefill or live.can_decode for live in self.running.values())
            return None
        self.check_rows(batch)
        self.apply_blocks(batch)
        self.in_flight.append(batch)
        self.num_batches += 1
        assert self.sched.in_flight == tuple(self.in_flight)
        assert Batch.from_ints(batch.to_ints()) == batch
        self.log.append(str(batch))
        self.check_counts()
        return batch

    def admit(self) -> None:
        """Admission, as specified: in order of arrival, while a row and the whole claim fit."""
        while self.waiting and len(self.running) < self.load.config.max_num_seqs:
            slot = next(iter(self.waiting))
            if sum(live.claim for live in self.running.values()) + self.waiting[slot].claim > self.load.num_blocks:
                break
            self.running[slot] = self.waiting.pop(slot)

    def check_rows(self, batch: Batch) -> None:
        config = self.load.config
        assert batch.batch_id == self.num_batches
        assert 1 <= batch.num_tokens <= config.max_batch_tokens
        assert 1 <= len(batch.rows) <= config.max_num_seqs
        assert len({row.slot for row in batch.rows}) == len(batch.rows)
        kinds = [row.is_decode for row in batch.rows]
        assert kinds == sorted(kinds, reverse=True)
        # Decodes: the dealt share of them, and never none while one could run.
        ready = [slot for slot, live in self.running.items() if live.can_decode]
        num_decoding = sum(not live.ended and not live.can_prefill for live in self.running.values())
        assert min(1, len(ready)) <= batch.num_decodes <= -(-num_decoding // config.depth)
        # Prefills: in order of admission, each as long as it may be, until the tokens are spent.
        prefills = [slot for slot, live in self.running.items() if live.can_prefill]
        left = config.max_batch_tokens - batch.num_decodes
        expected = []
        for slot in prefills:
            start, end = self.running[slot].num_scheduled, self.running[slot].head.num_prompt_tokens
            q_len = min(end - start, config.chunk_size, left)
            if q_len:
                expected.append(Row(slot, start, q_len, False, start + q_len == end))
            left -= q_len
        assert list(batch.rows[batch.num_decodes :]) == expected
        for row in batch.rows:
            live = self.running[row.slot]
            if row.is_decode:
                assert row.slot in ready
                assert (row.position, row.q_len, row.samples) == (live.num_scheduled, 1, True)
                assert live.num_in_flight == 0  # its token must be out of the pipeline before the next goes in
            live.num_scheduled = row.kv_len
            live.num_in_flight += 1

    def apply_blocks(self, batch: Batch) -> None:
        """What a rank does with the delta, in order of execution."""
        assert sorted(batch.frees) == sorted(self.to_free)
        self.to_free.clear()
        for slot in batch.frees:
            del self.owned[slot]
        taken = {block for blocks in self.owned.values() for block in blocks}
        for extent in batch.extents:
            blocks = set(range(extent.first, extent.first + extent.count))
            assert blocks <= set(range(self.load.num_blocks))
            assert not blocks & taken
            taken |= blocks
            self.owned.setdefault(extent.slot, []).extend(sorted(blocks))
        assert {extent.slot for extent in batch.extents} <= {row.slot for row in batch.rows}
        self.tables.apply(batch)
        size = self.load.block_size
        for row in batch.rows:
            blocks = self.owned[row.slot]
            assert len(blocks) == -(-row.kv_len // size) <= self.running[row.slot].claim
            tokens = [t for first, n in self.tables.ranges(row.slot, 0, row.kv_len) for t in range(first, first + n)]
            assert tokens == [block * size + i for block in blocks for i in range(size)][: row.kv_len]

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
        closed = self.sched.complete(batch.batch_id, now, results, 0.001)
        gone = [r.slot for r in batch.rows if self.running[r.slot].ended and self.running[r.slot].num_in_flight == 0]
        assert sorted(closed) == sorted(gone)
        for slot in closed:
            self.close(slot)
        for row in batch.rows:
            if row.slot not in closed:
                assert self.sched.num_computed_tokens(row.slot) == row.kv_len
        self.log.append(f"complete {batch.batch_id}: {closed}")
        self.check_counts()

    def close(self, slot: int) -> None:
        live = self.running.pop(slot)
        if live.num_scheduled:
            self.to_free.append(slot)

    def check_counts(self) -> None:
        assert (self.sched.num_running, self.sched.num_waiting) == (len(self.running), len(self.waiting))
        used = sum(len(blocks) for slot, blocks in self.owned.items() if slot not in self.to_free)
        assert self.sched.memory.num_used == used <= self.load.num_blocks


@settings(max_examples=250, deadline=None, derandomize=True)
@given(loads())
def test_any_load_keeps_the_rules_and_ends(load: Load) -> None:
    Simulation(load).run()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(loads())
def test_same_calls_same_batches(load: Load) -> None:
    assert Simulation(load).run() == Simulation(load).run()
