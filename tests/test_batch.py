"""The plan of a step: how it prints, travels as integers, and stays as it is."""

from __future__ import annotations

import dataclasses
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.batch import Batch, Extent, Row

BATCH = Batch(
    batch_id=7,
    rows=(Row(2, 40, 1, True, True), Row(0, 0, 16, False, False), Row(1, 16, 4, False, True)),
    extents=(Extent(0, 5, 2), Extent(1, 9, 1)),
    frees=(3, 4),
)
INT32 = st.integers(-(2**31), 2**31 - 1)
BATCHES = st.builds(
    Batch,
    INT32,
    st.lists(st.builds(Row, INT32, INT32, INT32, st.booleans(), st.booleans()), max_size=4).map(tuple),
    st.lists(st.builds(Extent, INT32, INT32, INT32), max_size=4).map(tuple),
    st.lists(INT32, max_size=4).map(tuple),
)


def test_printing() -> None:
    assert (
        str(BATCH)
        == """\
batch 7: 3 rows, 21 tokens
  slot 2 decode [40]
  slot 0 prefill [0:16]
  slot 1 prefill [16:20] last
  slot 0 + blocks [5:7]
  slot 1 + blocks [9:10]
  slot 3 freed
  slot 4 freed"""
    )
    assert str(Batch(0, ())) == "batch 0: 0 rows, 0 tokens"


def test_counts() -> None:
    assert (BATCH.num_tokens, BATCH.num_decodes) == (21, 1)
    assert [row.kv_len for row in BATCH.rows] == [41, 16, 20]


def test_layout_of_the_integers() -> None:
    # Ranks of different builds must agree on it: header, rows (flags: 1 decode, 2 samples), extents, frees.
    assert BATCH.to_ints() == array(
        "i", [7, 3, 2, 2, *(2, 40, 1, 3), *(0, 0, 16, 0), *(1, 16, 4, 2), *(0, 5, 2), *(1, 9, 1), 3, 4]
    )


@settings(max_examples=100, deadline=None, derandomize=True)
@given(BATCHES)
def test_round_trip(batch: Batch) -> None:
    ints = batch.to_ints()
    assert ints.itemsize == 4
    assert len(ints) == 4 + 4 * len(batch.rows) + 3 * len(batch.extents) + len(batch.frees)
    for form in (ints, list(ints), tuple(ints)):
        back = Batch.from_ints(form)
        assert back == batch
        assert str(back) == str(batch)
        assert all(type(row.is_decode) is bool and type(row.samples) is bool for row in back.rows)


def test_every_wrong_length_is_refused() -> None:
    ints = list(BATCH.to_ints())
    for length in range(4):
        with pytest.raises(ValueError, match=f"at least 4 integers, got {length}"):
            Batch.from_ints(ints[:length])
    for length in range(4, len(ints)):
        with pytest.raises(ValueError, match=rf"header \(7, 3, 2, 2\) cannot have {length} integers"):
            Batch.from_ints(ints[:length])
    with pytest.raises(ValueError, match=f"cannot have {len(ints) + 1} integers"):
        Batch.from_ints([*ints, 0])


@pytest.mark.parametrize(
    "ints",
    [(0, -1, 0, 4), (0, 0, -1, 3), (0, 1, 0, -4), (0, -3, 4, 0), (0, 2**31 - 1, 0, 0)],
    ids=["rows", "extents", "frees", "rows-that-cancel", "huge"],
)
def test_header_that_lies_is_refused(ints: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cannot have 4 integers"):
        Batch.from_ints(ints)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.integers(-3, 5), max_size=24))
def test_garbage_gives_a_batch_or_a_value_error(ints: list[int]) -> None:
    try:
        batch = Batch.from_ints(ints)
    except ValueError:
        return
    assert len(batch.to_ints()) == len(ints)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**63, 10**30])
def test_numbers_beyond_32_bits_are_refused(value: int) -> None:
    row, extent = Row(0, 0, 1, False, False), Extent(0, 0, 1)
    batches = [Batch(value, ()), Batch(0, (), frees=(value,))]
    batches += [Batch(0, (dataclasses.replace(row, **{name: value}),)) for name in ("slot", "position", "q_len")]
    batches += [Batch(0, (), (dataclasses.replace(extent, **{n: value}),)) for n in ("slot", "first", "count")]
    for batch in batches:
        with pytest.raises(OverflowError):
            batch.to_ints()


@pytest.mark.parametrize("thing", [BATCH, BATCH.rows[0], BATCH.extents[0]], ids=lambda thing: type(thing).__name__)
def test_immutable(thing: Batch | Row | Extent) -> None:
    for field in dataclasses.fields(thing):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field.name, 0)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(thing, field.name)
    assert not hasattr(thing, "__dict__")
    assert hash(thing) == hash(dataclasses.replace(thing))
