"""What all schedulers share: where requests begin, and what wrong calls do."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from medha.batch import Row
from medha.sched.decision import SchedulerRequest
from medha.sched.scheduler import Scheduler
from tests.sched.virtual import by_tokens, new_scheduler


class Play:
    """A scheduler and a pretended engine: a row that samples yields a token, a request ends at ``max_new_tokens``."""

    def __init__(
        self, scheduler: str = "sarathi", *, rows: int = 8, tokens: int = 16, chunk: int = 8, depth: int = 1,
        num_blocks: int = 16, num_groups: int = 1, share: int | None = None,
    ) -> None:  # fmt: skip
        sizes = {"max_num_seqs": rows, "max_batch_tokens": tokens, "chunk_size": chunk, "max_kv_per_group": share}
        pool = {"num_blocks": num_blocks, "block_size": 4, "num_groups": num_groups}
        self.sched = new_scheduler(scheduler, predictor=by_tokens(), depth=depth, **pool, **sizes)
        self.ends: dict[int, int] = {}

    def add(self, *requests: tuple[int, int, int]) -> None:
        """Queue requests given as (slot, prompt tokens, new tokens)."""
        for slot, num_prompt, num_new in requests:
            self.sched.add(SchedulerRequest(slot, num_prompt, num_new, arrival_s=0.0))
            self.ends[slot] = num_prompt + num_new - 1

    def fill(self) -> list[str]:
        """Schedule until nothing can enter; the rows of each batch."""
        steps = []
        while (batch := self.sched.schedule(0.0).batch) is not None:
            steps.append(" ".join(map(shown, batch.rows)))
        return steps

    def complete(self) -> tuple[int, ...]:
        """Complete the oldest batch; the slots closed by that."""
        batch = self.sched.in_flight[0]
        results = [(row.slot, 1, row.kv_len == self.ends[row.slot]) for row in batch.rows if row.samples]
        return self.sched.complete(batch, 0.0, results, 0.0)

    def steps(self) -> list[str]:
        """Play to the end; the rows of each batch."""
        steps = self.fill()
        while self.sched.in_flight:
            self.complete()
            steps += self.fill()
        return steps


def shown(row: Row) -> str:
    """``slot@position`` of a decode, ``slot[from:to]`` of a chunk, with a point if it ends its prompt; the groups."""
    span = f"/{row.group}-{row.writer}" if row.is_shared else ""
    if row.is_decode:
        return f"{row.slot}@{row.position}{span}"
    return f"{row.slot}[{row.position}:{row.kv_len}]{'.' * row.samples}{span}"


# ---------------------------------------------------------------------------------------------------------------------
# Groups


def in_chunks(num_groups: int, num_blocks: int = 1 << 12, **options: int) -> Scheduler:
    options = {"max_batch_tokens": 512, "chunk_size": 512, "depth": 1} | options
    return new_scheduler("sarathi", num_blocks=num_blocks, num_groups=num_groups, predictor=by_tokens(), **options)


def first_groups(sched: Scheduler, *lengths: int) -> dict[int, int]:
    """Where requests begin that are there at once; each ends with its first token."""
    groups: dict[int, int] = {}
    for slot, length in enumerate(lengths):
        sched.add(SchedulerRequest(slot, length, 1, 0.0))
    while (batch := sched.schedule(0.0).batch) is not None:
        groups |= {row.slot: row.group for row in batch.rows if row.position == 0}
        sched.complete(batch, 0.0, [(row.slot, 1, True) for row in batch.rows if row.samples], 0.0)
    return groups


def test_a_request_begins_where_least_work_is_pending_at_its_first_chunk() -> None:
    """Of two long and two short ones the short go where nothing is pending; when the long are done that has changed."""
    assert list(first_groups(in_chunks(2), 5000, 100, 100, 5000).items()) == [(0, 0), (1, 1), (2, 1), (3, 1)]
    # The work of one that lies on two groups is split between them: each has less to do than the third.
    assert first_groups(in_chunks(3, max_kv_per_group=4000), 7000, 3900, 100) == {0: 0, 1: 2, 2: 1}


def test_decodes_are_spread_over_the_groups() -> None:
    """Chats that come one by one, while nothing is pending anywhere, go where the least is to be read."""
    sched, groups = in_chunks(4), []
    for slot in range(12):
        sched.add(SchedulerRequest(slot, 200 + 10 * slot, 50, 0.0))
        batch = sched.schedule(0.0).batch
        assert batch is not None
        groups += [row.group for row in batch.rows if row.slot == slot]
        sched.complete(batch, 0.0, [(row.slot, 1, False) for row in batch.rows], 0.0)
    assert [groups.count(group) for group in range(4)] == [3, 3, 3, 3]


def test_a_group_without_memory_is_passed_over() -> None:
    sched = in_chunks(2, num_blocks=8)
    for slot, length in enumerate((100, 120, 20)):
        sched.add(SchedulerRequest(slot, length, 2, 0.0))
    batch = sched.schedule(0.0).batch
    assert batch is not None
    assert {row.slot: row.group for row in batch.rows} == {0: 0, 1: 1}  # one block is left on group 0, and none on 1
    sched.complete(batch, 0.0, [(0, 1, False), (1, 1, True)], 0.0)
    batch = sched.schedule(0.0).batch
    assert batch is not None and {row.slot: row.group for row in batch.rows} == {0: 0, 2: 1}


# ---------------------------------------------------------------------------------------------------------------------
# Wrong calls


def test_complete_out_of_order_is_refused() -> None:
    play = Play(depth=2, chunk=4)
    play.add((0, 8, 1))
    play.fill()
    first, second = play.sched.in_flight
    for wrong in (second, replace(first, batch_id=7)):
        with pytest.raises(ValueError, match=rf"^batch {wrong.batch_id} completed, but the oldest of its groups is 0$"):
            play.sched.complete(wrong, 0.0, [], 0.0)
    assert play.sched.complete(first, 0.0, [], 0.0) == ()
    with pytest.raises(ValueError, match=r"^batch 0 completed, but the oldest of its groups is 1$"):
        play.sched.complete(first, 0.0, [], 0.0)
    assert play.complete() == (0,)
    with pytest.raises(ValueError, match=r"^batch 1 completed, but it is not in flight$"):
        play.sched.complete(second, 0.0, [], 0.0)


def test_batches_of_groups_that_have_nothing_in_common_complete_in_any_order() -> None:
    options = {"max_batch_tokens": 8, "depth": 3, "stream": False}
    sched = new_scheduler("sarathi", num_blocks=16, block_size=4, num_groups=2, predictor=by_tokens(), **options)
    batches = []
    for slot in range(3):  # each on the group with the least to do; the chunks in flight hold back the rest
        sched.add(SchedulerRequest(slot, 16, 1, 0.0))
        batches.append(sched.schedule(0.0).batch)
    first, second, third = batches
    assert first and second and third
    assert (first.groups, second.groups, third.groups) == ({0}, {1}, {0})
    with pytest.raises(ValueError, match=r"^batch 2 completed, but the oldest of its groups is 0$"):
        sched.complete(third, 0.0, [], 0.0)
    for batch in (second, first, third):
        assert sched.complete(batch, 0.0, [], 0.0) == ()
    assert sched.in_flight == ()
    last = sched.schedule(0.0).batch
    assert last is not None and {row.position for row in last.rows} == {8}


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
    play.sched.complete(play.sched.in_flight[0], 0.0, [], 0.0)
    play.add((0, 1, 1))


def test_a_reservation_beyond_the_pool_is_refused() -> None:
    play = Play(num_blocks=5)
    play.add((0, 20, 1), (1, 1, 20))  # the last token sampled is never written, so 20 tokens fill 5 blocks
    for num_prompt, num_new in ((21, 1), (20, 2), (1, 21), (10**9, 1)):
        with pytest.raises(ValueError, match=r"slot=2.*: needs \d+ KV tokens, at most 20 fit$"):
            play.add((2, num_prompt, num_new))
    assert play.sched.num_waiting == 2


def test_cancel_unknown_or_twice_does_nothing() -> None:
    play = Play(rows=1)
    assert play.sched.cancel(0) == ()
    play.add((0, 8, 2), (1, 8, 2))
    play.fill()
    assert play.sched.cancel(1) == (1,)  # waiting
    assert play.sched.cancel(1) == ()
    assert play.sched.cancel(0) == ()  # in flight
    assert play.sched.cancel(0) == ()
    assert play.sched.complete(play.sched.in_flight[0], 0.0, [], 0.0) == (0,)
    assert play.sched.cancel(0) == ()
    assert (play.sched.num_running, play.sched.num_waiting, play.sched.memory.num_used) == (0, 0, 0)
    assert play.fill() == []


def test_those_who_wait_are_not_all_tried_while_one_is_on_its_way_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory comes back without a batch."""
    scheduler = new_scheduler(num_blocks=10, policy="fcfs", late_share=0.0, max_prompt_tokens=1000)
    scheduler.add(SchedulerRequest(0, 150, 1, 0.0))
    batch = scheduler.schedule(0.0).batch
    assert batch is not None
    scheduler.keep(0)
    scheduler.complete(batch, 0.0, [(0, 1, False)], 0.1)
    for slot in range(1, 1000):
        scheduler.add(SchedulerRequest(slot, 150, 1, 0.0))
    asked = mock.Mock(wraps=scheduler._queue.order)
    monkeypatch.setattr(scheduler._queue, "order", asked)
    assert scheduler.schedule(0.0).batch is None and asked.call_count <= 2
    assert scheduler.let_go(0) == (0,)
    assert scheduler.schedule(0.0).batch is not None
