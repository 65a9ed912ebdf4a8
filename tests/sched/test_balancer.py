"""Which group a request goes to: the least pending prefill work that has memory; and what that is worth."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medha.config import SchedulerConfig
from medha.sched.batch_builder import choose_group, pending_work
from medha.sched.decision import SchedulerRequest
from medha.sched.queue import prefill_work
from medha.sched.scheduler import Scheduler

WORK = st.floats(0.0, 1e6)


def test_work_grows_with_the_context() -> None:
    """A token costs one, plus attention: as much again at 24,576 tokens of context."""
    assert prefill_work(0, 0) == prefill_work(7, 7) == 0.0
    assert prefill_work(0, 1000) == pytest.approx(1000, rel=0.03)
    assert prefill_work(24_575, 24_576) == pytest.approx(2.0, rel=1e-4)
    assert prefill_work(0, 1_000_000) > 20 * 1_000_000


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**7))
def test_work_of_parts_adds_up(a: int, b: int, c: int) -> None:
    first, second, third = sorted((a, b, c))
    whole = prefill_work(first, third)
    assert prefill_work(first, second) + prefill_work(second, third) == pytest.approx(whole, rel=1e-9, abs=1e-6)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), WORK), max_size=8))
def test_shared_work_is_split_over_the_run(prefills: list[tuple[int, int, float]]) -> None:
    work = pending_work(6, prefills)
    assert sum(work) == pytest.approx(sum(left for _, _, left in prefills))
    for group in range(6):
        mine = [left / count for first, count, left in prefills if first <= group < first + count]
        assert work[group] == pytest.approx(sum(mine))


@given(st.lists(WORK, min_size=1, max_size=6), st.data())
def test_the_least_pending_work_that_has_memory(pending: list[float], data: st.DataObject) -> None:
    width = data.draw(st.integers(1, len(pending)))
    firsts = range(len(pending) - width + 1)
    has_memory = {first: data.draw(st.booleans()) for first in firsts}
    chosen = choose_group(pending, width, firsts, has_memory.__getitem__)
    able = [first for first in firsts if has_memory[first]]
    if not able:
        assert chosen is None
        return
    loads = {first: max(pending[first : first + width]) for first in able}
    assert chosen is not None and loads[chosen] == min(loads.values())


def test_of_equal_loads_the_emptier_run_then_the_first() -> None:
    anywhere = lambda first: True  # noqa: E731
    assert choose_group([5.0, 1.0, 5.0, 0.0], 2, range(3), anywhere) == 2
    assert choose_group([5.0, 4.0, 0.0, 5.0], 2, range(3), anywhere) == 1
    assert choose_group([2.0, 2.0, 2.0], 1, range(3), anywhere) == 0


def test_memory_is_asked_for_until_a_group_has_it() -> None:
    asked: list[int] = []

    def has_memory(first: int) -> bool:
        asked.append(first)
        return first == 0

    assert choose_group([3.0, 1.0, 2.0, 0.0], 1, range(4), has_memory) == 0
    assert asked == [3, 1, 2, 0]


# -- through the scheduler ------------------------------------------------------------------------------------

BLOCK = 16


def scheduler(num_groups: int, *, num_blocks: int = 1 << 12, depth: int = 1) -> Scheduler:
    config = SchedulerConfig("sarathi", max_batch_tokens=512, chunk_size=512, depth=depth)
    return Scheduler(config, num_blocks=num_blocks, block_size=BLOCK, num_groups=num_groups)


def groups_of_first_chunks(sched: Scheduler, slots: set[int]) -> dict[int, int]:
    """Run until every slot has started; where each did."""
    groups: dict[int, int] = {}
    while not slots <= set(groups):
        batch = sched.schedule(0.0).batch
        assert batch is not None
        groups |= {row.slot: row.group for row in batch.rows if row.position == 0}
        sched.complete(batch, 0.0, [(row.slot, 1, True) for row in batch.rows if row.samples], 0.0)
    return groups


def test_a_request_is_bound_at_its_first_chunk_not_at_its_arrival() -> None:
    """Of two long and two short ones the short go where nothing is pending; when the long are done that has changed."""
    sched = scheduler(2)
    for slot, length in enumerate((5000, 100, 100, 5000)):
        sched.add(SchedulerRequest(slot, length, 1, 0.0))
    groups = groups_of_first_chunks(sched, {0, 1, 2, 3})
    assert groups == {0: 0, 1: 1, 2: 1, 3: 1}


def test_a_group_without_memory_is_passed_over() -> None:
    sched = scheduler(2, num_blocks=8)
    for slot, length in enumerate((100, 120, 20)):
        sched.add(SchedulerRequest(slot, length, 2, 0.0))
    batch = sched.schedule(0.0).batch
    assert batch is not None
    assert {row.slot: row.group for row in batch.rows} == {0: 0, 1: 1}  # one block is left on group 0, and none on 1
    sched.complete(batch, 0.0, [(0, 1, False), (1, 1, True)], 0.0)
    batch = sched.schedule(0.0).batch
    assert batch is not None
    assert {row.slot: row.group for row in batch.rows} == {0: 0, 2: 1}


# -- what it is worth ------------------------------------------------------------------------------------

NUM_MIXES = 40
