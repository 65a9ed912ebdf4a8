"""The KV pool and a rank's block tables: what is written at a position is read back at it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.batch import Batch, Extent, Row
from medha.worker.kv_cache import BlockTables, KVCache, WritePlan

CPU = torch.device("cpu")


def make_cache(
    num_blocks: int = 12, block_size: int = 4, *, num_layers: int = 2, dtype: torch.dtype = torch.float32
) -> KVCache:
    shape = {"num_layers": num_layers, "num_blocks": num_blocks, "block_size": block_size}
    return KVCache(**shape, num_kv_heads=2, head_dim=8, dtype=dtype, device=CPU)


def write_plan(*spans: tuple[int, int, int], singles: tuple[int, ...] = ()) -> WritePlan:
    return WritePlan(torch.tensor(singles, dtype=torch.int64), spans)


def make_tables(block_size: int, *extents: Extent) -> BlockTables:
    tables = BlockTables(block_size)
    tables.apply(Batch(0, (), extents))
    return tables


def read(pool_PKH: torch.Tensor, ranges: tuple[tuple[int, int], ...]) -> torch.Tensor:
    return torch.cat([pool_PKH[first : first + count] for first, count in ranges])


def test_pools_have_the_logical_shape_and_heads_outermost_on_the_cpu() -> None:
    cache = make_cache(12, 4, num_layers=3)
    assert len(cache.k) == len(cache.v) == 3
    for pool in (*cache.k, *cache.v):
        assert pool.shape == (48, 2, 8)
        assert pool.stride() == (8, 48 * 8, 1)
    assert len({pool.data_ptr() for pool in (*cache.k, *cache.v)}) == 6


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    blocks=st.permutations(range(12)),
    lengths=st.lists(st.integers(1, 16), min_size=1, max_size=3),
    chunks=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    one_write=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_chunks_written_at_any_blocks_read_back_in_position_order(
    blocks: list[int], lengths: list[int], chunks: list[int], one_write: bool, seed: int
) -> None:
    cache = make_cache()
    free = iter(blocks)
    extents = [Extent(slot, next(free), 1) for slot, length in enumerate(lengths) for _ in range(-(-length // 4))]
    tables = make_tables(4, *extents)
    generator = torch.Generator().manual_seed(seed)
    data = [torch.randn(2, 2, length, 2, 8, generator=generator) for length in lengths]  # layer, k or v, position
    done = [0] * len(lengths)
    step = 0
    while any(d < length for d, length in zip(done, lengths, strict=True)):
        spans, parts, row = [], [], 0
        for slot, length in enumerate(lengths):
            end = min(length, done[slot] + chunks[step % len(chunks)])
            for first, count in tables.ranges(slot, done[slot], end):
                spans.append((row, first, count))
                row += count
            parts.append(data[slot][:, :, done[slot] : end])
            done[slot] = end
        batch = torch.cat(parts, dim=2)
        singles: tuple[int, ...] = ()
        if one_write and all(count == 1 for _, _, count in spans):  # as the decodes of a batch
            singles, spans = tuple(target for _, target, _ in spans), []
        for layer in range(2):
            cache.write(layer, batch[layer, 0], batch[layer, 1], write_plan(*spans, singles=singles))
        step += 1
    for slot, length in enumerate(lengths):
        ranges = tables.ranges(slot, 0, length)
        for layer in range(2):
            assert torch.equal(read(cache.k[layer], ranges), data[slot][layer, 0])
            assert torch.equal(read(cache.v[layer], ranges), data[slot][layer, 1])


def test_write_touches_only_its_spans_and_its_layer() -> None:
    cache = make_cache()
    for pool in (*cache.k, *cache.v):
        pool.fill_(-1.0)
    k, v = torch.rand(2, 7, 2, 8)
    # Tokens 4 and 5 of the batch are written nowhere.
    cache.write(1, k, v, write_plan((2, 7, 2), (6, 40, 1), singles=(30, 9)))
    for pool, new in ((cache.k[1], k), (cache.v[1], v)):
        want = torch.full((48, 2, 8), -1.0)
        want[30], want[9], want[7:9], want[40] = new[0], new[1], new[2:4], new[6]
        assert torch.equal(pool, want)
    assert torch.equal(cache.k[0], torch.full((48, 2, 8), -1.0))
    assert torch.equal(cache.v[0], torch.full((48, 2, 8), -1.0))


def test_write_rounds_to_the_dtype_of_the_pool() -> None:
    cache = make_cache(1, num_layers=1, dtype=torch.bfloat16)
    k = torch.full((1, 2, 8), 1.001)
    cache.write(0, k, k, write_plan((0, 3, 1)))
    assert torch.equal(cache.k[0][3], k[0].bfloat16())


def test_ranges_across_extents() -> None:
    tables = make_tables(4, Extent(7, 5, 2), Extent(7, 1, 1), Extent(7, 9, 3))
    assert tables.ranges(7, 0, 24) == ((20, 8), (4, 4), (36, 12))
    assert tables.ranges(7, 3, 9) == ((23, 5), (4, 1))
    assert tables.ranges(7, 8, 12) == ((4, 4),)
    assert tables.ranges(7, 11, 13) == ((7, 1), (36, 1))
    assert tables.ranges(7, 5, 5) == ()


def test_apply_frees_before_it_extends() -> None:
    tables = make_tables(4, Extent(1, 0, 2), Extent(2, 2, 1))
    tables.apply(Batch(1, (), (Extent(1, 6, 1), Extent(3, 0, 2)), (1,)))  # slot 1 and its blocks are handed out again
    assert tables.ranges(1, 0, 4) == ((24, 4),)
    assert tables.ranges(3, 0, 8) == ((0, 8),)
    assert tables.ranges(2, 0, 4) == ((8, 4),)
    with pytest.raises(IndexError):
        tables.ranges(1, 0, 5)


def test_a_position_beyond_the_table_is_an_error() -> None:
    tables = make_tables(4, Extent(1, 3, 1), Extent(1, 0, 1))
    assert tables.ranges(3, 0, 0) == ()
    for slot, start, end in ((1, 0, 9), (1, 8, 9), (1, 100, 101), (5, 0, 1)):
        reason = rf"^slot {slot} has blocks for {8 if slot == 1 else 0} tokens, position {end - 1} is asked"
        with pytest.raises(IndexError, match=reason):
            tables.ranges(slot, start, end)


# -- shards of a request that lies on several groups ------------------------------------------------------------------

# Slot 1 grows along groups 0 to 2 in chunks, its last token is a decode; slot 2 stays on group 1.
GROWTH = (
    Batch(0, (Row(1, 0, 6, False, False, 0, 1),), (Extent(1, 4, 2, 0),)),
    Batch(1, (Row(1, 6, 2, False, False, 0, 1), Row(2, 0, 3, False, True, 1, 1)), (Extent(2, 0, 1, 1),)),
    Batch(
        2, (Row(2, 3, 1, True, True, 1, 1), Row(1, 8, 8, False, False, 0, 2)), (Extent(1, 5, 1, 1), Extent(1, 2, 1, 1))
    ),
    Batch(3, (Row(1, 16, 3, False, True, 0, 3),), (Extent(1, 7, 1, 2),)),
    Batch(4, (Row(1, 19, 1, True, True, 0, 3),)),
)


def group_tables(group: int, batches: tuple[Batch, ...] = GROWTH, *, parts: bool) -> BlockTables:
    """The tables of one group's ranks; they need only their part of each batch, and ignore the rest."""
    tables = BlockTables(4, group)
    for batch in batches:
        tables.apply(batch.part_of(group) if parts else batch)
    return tables


@pytest.mark.parametrize("parts", [True, False])
def test_each_group_has_its_shard(parts: bool) -> None:
    first, second, third = (group_tables(group, parts=parts) for group in range(3))
    assert [tables.shard(1) for tables in (first, second, third)] == [(0, 8), (8, 16), (16, 20)]
    assert first.ranges(1, 0, 8) == ((16, 8),)
    assert second.ranges(1, 8, 16) == ((20, 4), (8, 4))
    assert second.ranges(1, 11, 13) == ((23, 1), (8, 1))
    assert third.ranges(1, 16, 20) == ((28, 4),)
    assert second.shard(2) == (0, 4)


def test_a_shard_ends_where_the_last_applied_batch_ends() -> None:
    ends = [group_tables(0, GROWTH[:n], parts=True).shard(1) for n in range(1, 6)]
    assert ends == [(0, 6), (0, 8), (0, 8), (0, 8), (0, 8)]


@pytest.mark.parametrize(
    ("group", "start", "end", "reason"),
    [
        (1, 0, 10, "has positions from 8 here, position 0"),
        (1, 7, 10, "has positions from 8 here, position 7"),
        (2, 15, 18, "has positions from 16 here, position 15"),
        (0, 8, 9, "has blocks for 8 tokens, position 8"),
        (1, 16, 17, "has blocks for 16 tokens, position 16"),
        (2, 20, 21, "has blocks for 20 tokens, position 20"),
    ],
)
def test_a_position_outside_the_shard_is_an_error(group: int, start: int, end: int, reason: str) -> None:
    with pytest.raises(IndexError, match=f"^slot 1 {reason} is asked for$"):
        group_tables(group, parts=True).ranges(1, start, end)


def test_a_freed_slot_forgets_its_shard() -> None:
    """The next request in the slot may begin on another group, and where it begins its shard begins."""
    tables = group_tables(1, parts=True)
    again = Batch(5, (Row(1, 0, 2, False, True, 1, 1),), (Extent(1, 9, 1, 1),), (1, 2))
    tables.apply(again)
    assert tables.shard(1) == (0, 2)
    assert tables.ranges(1, 0, 2) == ((36, 2),)
    with pytest.raises(KeyError):
        tables.shard(2)
    tables.clear()
    with pytest.raises(KeyError):
        tables.shard(1)


def test_sources_say_which_tokens_are_written() -> None:
    """Decodes whose keys another group takes lie between those that are written here."""
    cache = make_cache()
    k, v = torch.rand(2, 4, 2, 8)
    cache.write(0, k, v, WritePlan(torch.tensor([30, 9]), ((3, 40, 1),), torch.tensor([0, 2])))
    for pool, new in ((cache.k[0], k), (cache.v[0], v)):
        assert torch.equal(pool[[30, 9, 40]], new[[0, 2, 3]])


def test_bytes_of_a_block() -> None:
    assert make_cache(num_layers=3).block_bytes == 3 * 2 * (4 * 2 * 8 * 4)
