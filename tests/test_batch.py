"""The plan of a step: how it prints, travels as integers, and stays as it is."""

from array import array

import pytest
from hypothesis import given, settings, strategies as st

from medha.batch import Batch, Copy, Deal, Extent, Row, Shared, Swap, shifts

FULL = Batch(
    batch_id=8,
    rows=(
        Row(5, 900, 1, True, True, 1, 3),
        Row(6, 40, 1, True, True),
        Row(4, 20, 11, False, True, 1, 2, True),
        Row(0, 64, 16, False, False, 0, 2),
        Row(1, 0, 4, False, True, 3, 1),
    ),
    extents=(Extent(0, 5, 2, 1), Extent(1, 0, 1, 3), Extent(4, 6, 1, 2), Extent(2, 4, 1)),
    frees=(9, 3),
    swaps_out=(Swap(0, 8, 0, 2), Swap(1, 5, 7, 1)),
    swaps_in=(Swap(0, 3, 2, 3),),
    shared=(Shared(7, 1, 64, 32),),
    copies=(Copy(1, 3, 4, 16),),
    deals=(Deal(4, 1, 20, 10), Deal(4, 2, 0, 10)),
)
INT32 = st.integers(-(2**31), 2**31 - 1)
FOUR = (INT32, INT32, INT32, INT32)
EXTENTS, SWAPS = (st.lists(st.builds(kind, *FOUR), max_size=4).map(tuple) for kind in (Extent, Swap))
SHARES, COPIES = (st.lists(st.builds(kind, *FOUR), max_size=2).map(tuple) for kind in (Shared, Copy))
ROW = st.builds(Row, INT32, INT32, INT32, st.booleans(), st.booleans(), INT32, INT32, st.just(False))
ROWS, FREES = (st.lists(one, max_size=4).map(tuple) for one in (ROW, INT32))
NONE = st.just(())
BATCHES = st.builds(
    Batch, INT32, ROWS, EXTENTS, FREES, NONE | SWAPS, NONE | SWAPS, NONE | SHARES, NONE | COPIES, NONE, st.none()
)
PRINTED = """\
batch 8: 5 rows, 33 tokens
  slot 5 decode [900] on groups 1-3
  slot 6 decode [40]
  slot 4 prefill [20:31] last dealt to groups 1-2
  slot 0 prefill [64:80] on groups 0-1
  slot 1 prefill [0:4] last on group 3
  slot 0 + blocks [5:7] of group 1
  slot 1 + blocks [0:1] of group 3
  slot 4 + blocks [6:7] of group 2
  slot 2 + blocks [4:5]
  slot 9 freed
  slot 3 freed
  out: blocks [8:10], host blocks [0:2]
  out: blocks [5:6], host blocks [7:8] of group 1
  in: blocks [3:6], host blocks [2:5]
  slot 7 shares [64:96] on group 1
  16 tokens of block 3 to block 4 of group 1
  slot 4 holds 20 on group 1, then 10
  slot 4 holds 0 on group 2, then 10
batch 0: 0 rows, 0 tokens"""


def test_printing_moves_and_runs() -> None:
    assert "\n".join(map(str, (FULL, Batch(0, ())))) == PRINTED
    assert FULL.moves and not Batch(0, FULL.rows, FULL.extents, FULL.frees).moves
    assert [FULL.num_moved_blocks(group) for group in range(3)] == [5, 1, 0]
    runs = [(row.span, row.writer, row.is_shared) for row in FULL.rows if not row.is_dealt]
    assert runs == [((1, 3), 3, True), ((0, 0), 0, False), ((0, 1), 1, True), ((3, 3), 3, False)]
    assert FULL.groups == {0, 1, 2, 3}


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_parts_make_the_whole(runs: list[tuple[int, int]], holders: list[int]) -> None:
    rows = tuple(Row(slot, 0, 1, False, False, *run) for slot, run in enumerate(runs))
    extents = tuple(Extent(slot, slot, 1, group) for slot, group in enumerate(holders))
    swaps = tuple(Swap(group, slot, 9, 1) for slot, group in enumerate(holders))
    parts = [Batch(3, rows, extents, (7,), swaps, swaps[::2]).part_of(group) for group in range(7)]
    for row in rows:
        assert [group for group, part in enumerate(parts) if row in part.rows] == list(row.groups)
    for group, part in enumerate(parts):
        assert (part.batch_id, part.frees) == (3, (7,))
        assert part.extents == tuple(extent for extent in extents if extent.group == group)
        assert part.swaps_out == tuple(swap for swap in swaps if swap.group == group)
        assert part.swaps_in == tuple(swap for swap in swaps[::2] if swap.group == group)
        assert part.part_of(group) == part == Batch.from_ints(part.to_ints())


def test_layout_of_the_integers() -> None:
    # Ranks of different builds must agree on it: header, rows (flags: 1 decode, 2 samples, 4 dealt), frees, the rest.
    header = (8, 5, 2, 4, 2, 1, 1, 1, 2)
    rows = [
        *(5, 900, 1, 3, 1, 3),
        *(6, 40, 1, 3, 0, 1),
        *(4, 20, 11, 6, 1, 2),
        *(0, 64, 16, 0, 0, 2),
        *(1, 0, 4, 2, 3, 1),
    ]
    extents = [*(0, 5, 2, 1), *(1, 0, 1, 3), *(4, 6, 1, 2), *(2, 4, 1, 0)]
    moves = [*(0, 8, 0, 2), *(1, 5, 7, 1), *(0, 3, 2, 3), *(7, 1, 64, 32), *(1, 3, 4, 16)]
    deals = [*(4, 1, 20, 10), *(4, 2, 0, 10)]
    assert FULL.to_ints() == array("i", [*header, *rows, *(9, 3), *extents, *moves, *deals])
    assert Batch.from_ints(FULL.to_ints()) == FULL


def test_a_dealt_row() -> None:
    parts = [FULL.part_of(group) for group in range(3)]
    assert [part.num_tokens for part in parts] == [1 + 16, 1 + 16 + 5, 1 + 6]
    assert [part.rows[-1].slot for part in parts] == [0, 4, 4]  # behind the shared ones
    assert [part.deals for part in parts] == [(), FULL.deals, FULL.deals]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 99), st.integers(2, 9), st.integers(0, 5), st.integers(0, 200))
def test_a_zigzag_covers_a_row(position: int, count: int, group: int, more: int) -> None:
    row = Row(0, position, 2 * count + more, False, True, group, count, True)
    pieces = [row.spans(one) for one in row.groups]
    assert sorted(at for spans in pieces for span in spans for at in span) == list(range(position, row.kv_len))
    lows, highs = zip(*pieces, strict=True)
    assert [*lows, *highs[::-1]] == sorted([*lows, *highs], key=lambda span: span.start)
    assert max(map(len, (*lows, *highs))) - min(map(len, (*lows, *highs))) <= 1
    assert highs[0][-1] == row.kv_len - 1  # the first group samples


@pytest.mark.parametrize(
    ("held", "share", "expected"),
    [
        ((20, 0), (10, 10), [(3, 4, 10)]),
        ((0, 21), (11, 10), [(4, 3, 11)]),
        ((10, 10, 0, 0), (5, 5, 5, 5), [(3, 5, 5), (4, 6, 5)]),
        ((0, 16, 4, 0), (5, 5, 5, 5), [(4, 3, 5), (4, 5, 1), (4, 6, 5)]),
        ((7, 7), (7, 7), []),
    ],
)
def test_how_history_moves(held: tuple[int, ...], share: tuple[int, ...], expected: list[tuple[int, int, int]]) -> None:
    deals = [Deal(9, group, *both) for group, both in enumerate(zip(held, share, strict=True), start=3)]
    assert shifts(deals) == expected


@settings(max_examples=100, deadline=None, derandomize=True)
@given(BATCHES)
def test_round_trip(batch: Batch) -> None:
    ints = batch.to_ints()
    assert ints.itemsize == 4
    parts = batch.extents, batch.swaps_out, batch.swaps_in, batch.shared, batch.copies, batch.deals
    assert len(ints) == 9 + 6 * len(batch.rows) + len(batch.frees) + 4 * sum(map(len, parts))
    for form in (ints, list(ints), tuple(ints)):
        back = Batch.from_ints(form)
        assert back == batch
        assert str(back) == str(batch)
        assert all(type(row.is_decode) is bool and type(row.samples) is bool for row in back.rows)


def test_every_wrong_length_is_refused() -> None:
    ints, header = list(FULL.to_ints()), r"header \(8, 5, 2, 4, 2, 1, 1, 1, 2\)"
    for length in range(len(ints)):
        message = f"at least 9 integers, got {length}" if length < 9 else f"{header} cannot have {length} integers"
        with pytest.raises(ValueError, match=message):
            Batch.from_ints(ints[:length])
    with pytest.raises(ValueError, match=f"cannot have {len(ints) + 1} integers"):
        Batch.from_ints([*ints, 0])
    for at, count in ((2, -2), (4, 3), (4, -1), (5, 2**31 - 1)):
        with pytest.raises(ValueError, match=f"cannot have {len(ints)} integers"):
            Batch.from_ints([*ints[:at], count, *ints[at + 1 :]])
    with pytest.raises(ValueError, match="cannot have"):  # the sum is right
        Batch.from_ints([*ints[:4], 4, -1, *ints[6:]])


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**63, 10**30])
def test_numbers_beyond_32_bits_are_refused(value: int) -> None:
    batches = [Batch(value, ()), Batch(0, (), frees=(value,))]
    for field, part in (
        ("rows", Row(0, 0, 1, False, False)),
        ("extents", Extent(0, 0, 1)),
        ("swaps_out", Swap(0, 0, 0, 1)),
        ("swaps_in", Swap(0, 0, 0, 1)),
    ):
        numbers = [name for name, its in part._asdict().items() if type(its) is int]
        wrong = [part._replace(**{name: value}) for name in numbers]
        batches += [Batch(0, **{"rows": (), field: (one,)}) for one in wrong]
    assert len(batches) == 2 + 5 + 4 + 4 + 4
    for batch in batches:
        with pytest.raises(OverflowError):
            batch.to_ints()
