"""Where the KV block pool puts blocks; that nobody's are lost or given twice is seen under any load on a scheduler."""

import pytest
from hypothesis import given, settings, strategies as st

from medha.batch import Extent
from medha.sched.blocks import BlockPool


def blocks_of(extents: list[Extent]) -> list[int]:
    return [block for extent in extents for block in range(extent.first, extent.first + extent.count)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    reserved=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    spare=st.integers(0, 10),
    growth=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 8)), max_size=40),
)
def test_requests_whose_reservations_fit_get_one_extent_each(
    reserved: list[int], spare: int, growth: list[tuple[int, int]]
) -> None:
    pool = BlockPool(sum(reserved) + spare)
    tables: dict[int, list[int]] = {slot: [] for slot in range(len(reserved))}
    for slot, count in [*growth, *((slot, 20) for slot in tables)]:
        left = reserved[slot] - len(tables[slot]) if slot in tables else 0
        if left > 0:
            tables[slot] += blocks_of(pool.allocate(slot, min(count, left), reserved=left))
    assert [len(table) for table in tables.values()] == reserved
    assert all(table == [*range(table[0], table[0] + len(table))] for table in tables.values())
    assert pool.num_used == sum(reserved)
    for slot in tables:
        pool.release(slot)
    assert pool.allocate(9, pool.num_blocks, reserved=pool.num_blocks) == [Extent(9, 0, pool.num_blocks)]


def test_first_block_goes_into_the_smallest_run_that_holds_what_is_reserved() -> None:
    pool = BlockPool(20)
    for slot, count in enumerate((6, 1, 3, 1, 4, 5)):
        pool.allocate(slot, count, reserved=count)
    for slot in (0, 2, 4):
        pool.release(slot)  # free: [0, 6), [7, 10), [11, 15)
    assert pool.allocate(10, 1, reserved=4) == [Extent(10, 11, 1)]
    assert pool.allocate(11, 1, reserved=3) == [Extent(11, 7, 1)]
    assert pool.allocate(12, 1, reserved=6) == [Extent(12, 0, 1)]


def test_a_promise_never_causes_a_refusal() -> None:
    pool = BlockPool(10)
    assert pool.allocate(0, 1, reserved=10) == [Extent(0, 0, 1)]
    assert pool.num_free == 9
    # Nothing is left but the promise [1, 10): its second half goes first, then half of what remains, and so on.
    assert pool.allocate(1, 9, reserved=9) == [Extent(1, 5, 5), Extent(1, 3, 2), Extent(1, 2, 1), Extent(1, 1, 1)]
    with pytest.raises(RuntimeError, match=r"^slot 0 asks for 1 KV blocks, 0 are free$"):
        pool.allocate(0, 1, reserved=9)
    pool.release(1)
    assert pool.allocate(0, 9, reserved=9) == [Extent(0, 1, 9)]


def test_growth_goes_on_where_the_table_ends_when_those_blocks_are_free_by_then() -> None:
    pool = BlockPool(10)
    for slot, count in enumerate((2, 1, 3, 4)):
        pool.allocate(slot, count, reserved=count)
    pool.release(0)
    pool.release(2)  # free: [0, 2), [3, 6)
    assert pool.allocate(9, 3, reserved=5) == [Extent(9, 3, 3)]
    pool.release(3)  # free: [0, 2), [6, 10)
    assert pool.allocate(9, 2, reserved=2) == [Extent(9, 6, 2)]
