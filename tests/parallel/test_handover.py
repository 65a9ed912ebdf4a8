"""What passes between ranks when a decode instance takes over a request: the pure function by brute force, and the
transfer itself in real gloo processes, with pools filled by hand."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import medha.worker.transfer as transfer
from medha.attention.interface import LayerShape
from medha.batch import Batch, Extent
from medha.config import ModelConfig, ParallelConfig, RopeConfig
from medha.errors import ParallelConfigError
from medha.parallel.mesh import _tp_neighbours, check_layout
from medha.worker.kv_cache import KVCache
from medha.worker.shard import ModelShard
from medha.worker.step_input import Slots
from medha.worker.transfer import TransferLine, kv_heads_of, parts_of, pieces_of
from tests.parallel.workers import WorkerPool, gloo

MODEL = ModelConfig("LlamaForCausalLM", 64, 64, 128, 5, 8, 2, 8, 4096, RopeConfig())
H, BLOCK, NUM_BLOCKS = 8, 16, 24


def layout(decode_tp: int, tp: int = 1, spp: int = 1, kvp: int = 1, replicas: int = 1) -> ParallelConfig:
    return ParallelConfig(tp=tp, spp=spp, kvp=kvp, decode_replicas=replicas, decode_tp=decode_tp)


# -- where ranks are -------------------------------------------------------------------------------------------------


def test_decode_instances_are_groups_of_their_own_size_behind_the_others() -> None:
    config = layout(4, tp=2, spp=3, kvp=2, replicas=2)
    assert (config.world_size, config.num_prefill_ranks, config.num_groups) == (20, 12, 4)
    places = [config.coordinates(rank) for rank in range(20)]
    assert places[:12] == [(g, s, t) for g in range(2) for s in range(3) for t in range(2)]
    assert places[12:] == [(g, 0, t) for g in (2, 3) for t in range(4)]
    for rank, (group, stage, tp_rank) in enumerate(places):
        assert config.rank_of(stage=stage, tp_rank=tp_rank, kvp_rank=group) == rank
    assert config.of_group(1) == ParallelConfig(tp=2, spp=3, kvp=2)
    assert config.of_group(3) == ParallelConfig(tp=4)
    pairs = tuple((first, first + 1) for first in range(0, 12, 2))
    assert _tp_neighbours(config) == (*pairs, (12, 13, 14, 15), (16, 17, 18, 19))


def test_a_decode_rank_holds_all_layers_and_its_share_of_the_heads() -> None:
    config = layout(4, spp=2)
    shards = [ModelShard.at(MODEL, config, rank, torch.float32) for rank in range(config.world_size)]
    assert [shard.layers for shard in shards] == [range(3), range(3, 5), *[range(5)] * 4]
    assert [(one.tp, one.tp_rank, one.num_kv_heads) for one in shards[2:]] == [(4, rank, 1) for rank in range(4)]


@pytest.mark.parametrize(
    ("config", "world_size", "message"),
    [
        (layout(2), 2, r"^tp=1 x spp=1 x kvp=1 \+ 1 x decode_tp=2 is 3 ranks, and 2 were started; .* whose sum is 2"),
        (layout(3), 4, r"^decode_tp=3 does not divide 8 query heads, 2 KV heads and 128 MLP features; accepted: 1, 2,"),
    ],
)
def test_a_layout_that_cannot_work_is_refused(config: ParallelConfig, world_size: int, message: str) -> None:
    with pytest.raises(ParallelConfigError, match=message):
        check_layout(config, MODEL, world_size)


# -- what goes where -------------------------------------------------------------------------------------------------

LAYOUTS = [
    layout(decode_tp, tp, spp, kvp, 2)
    for decode_tp, tp, (spp, kvp) in itertools.product((1, 2, 4, 8), (1, 2, 4, 8), ((1, 1), (2, 1), (1, 3), (3, 2)))
]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_every_decode_rank_gets_each_token_of_each_of_its_heads_once(num_kv_heads: int) -> None:
    for config in LAYOUTS:
        held = [(group, 3 + 2 * group) for group in range(config.kvp)]
        target, num_tokens = config.kvp + 1, sum(count for _, count in held)
        tp = config.of_group(target).tp
        parts = parts_of(config, dataclasses.replace(MODEL, num_kv_heads=num_kv_heads), held, target)
        arrived: Counter[tuple[int, int, int, int]] = Counter()
        for part in parts:
            group, stage, tp_rank = config.coordinates(part.source)
            _, _, to = config.coordinates(part.target)
            assert config.coordinates(part.target) == (target, 0, to)
            assert part.layers == config.layers_of(stage, 5)
            has = kv_heads_of(tp_rank, config.tp, num_kv_heads)
            wants = kv_heads_of(to, tp, num_kv_heads)
            assert set(part.heads) <= set(has) & set(wants)
            assert part.num_tokens == dict(held)[group]
            assert part.start == sum(count for before, count in held if before < group)
            tokens = range(part.start, part.start + part.num_tokens)
            arrived.update(itertools.product([part.target], part.layers, part.heads, tokens))
        wanted: Counter[tuple[int, int, int, int]] = Counter()
        for to in range(tp):
            rank, heads = config.rank_of(stage=0, tp_rank=to, kvp_rank=target), kv_heads_of(to, tp, num_kv_heads)
            wanted.update(itertools.product([rank], range(5), heads, range(num_tokens)))
        assert arrived == wanted, config


def test_ranks_that_hold_the_same_head_share_the_sending() -> None:
    parts = parts_of(layout(4, tp=4), dataclasses.replace(MODEL, num_layers=2), [(0, 9)], 1)
    sent = sorted((part.source, part.target, part.heads[0]) for part in parts)
    assert sent == [(0, 4, 0), (1, 5, 0), (2, 6, 1), (3, 7, 1)]


# -- on ranks --------------------------------------------------------------------------------------------------------

Held = list[tuple[int, int]]


def values(layer: int, heads: range, group: int, tokens: range, slot: int) -> torch.Tensor:
    """What a group has [T, K, H] of its tokens of a request, the same whichever rank holds the head."""
    layer_head = 100 * layer + torch.tensor(list(heads))[:, None]
    token = 1000.0 * (100 * slot + 10 * group) + torch.tensor(list(tokens))[:, None, None]
    return (token + layer_head) + torch.arange(H) / 16


@gloo()
def hand_over(config: ParallelConfig, requests: Sequence[tuple[Held, int]], num_buffers: int) -> Any:
    """On each rank: fill the pools of the groups, hand the requests over, and compare what the targets then hold; the
    most bytes in staging buffers, and how many messages were on their way at once."""
    transfer.PIECE_TOKENS = 40
    rank = dist.get_rank()
    group, _, _ = config.coordinates(rank)
    shard = ModelShard.at(MODEL, config, rank, torch.float32)
    heads = kv_heads_of(shard.tp_rank, shard.tp, MODEL.num_kv_heads)
    shape = LayerShape(1, shard.num_kv_heads, H, torch.float32)
    cache = KVCache(
        shape, num_layers=len(shard.layers), num_blocks=NUM_BLOCKS, block_size=BLOCK, device=torch.device("cpu")
    )
    for pool in (*cache.k, *cache.v):
        pool.fill_(-1.0)
    slots = Slots(BLOCK, group)
    free = [(7 * i) % NUM_BLOCKS for i in range(NUM_BLOCKS)]
    config = dataclasses.replace(config, transfer_buffers=num_buffers)
    ranks: Any = SimpleNamespace(transfer_group=dist.new_group(), report_group=None, rank=rank, config=config)
    runner: Any = SimpleNamespace(cache=cache)
    line = TransferLine(ranks, runner, shard)
    tables: list[list[int]] = []
    reports = []
    for slot, (held, target) in enumerate(requests):
        count = dict(held).get(group, sum(tokens for _, tokens in held) if group == target else 0)
        extents = tuple(Extent(slot, free.pop(), 1, group) for _ in range(-(-count // BLOCK)))
        slots.prepare(Batch(slot, (), extents))
        tables.append([extent.first * BLOCK + at for extent in extents for at in range(BLOCK)][:count])
        if group in dict(held):
            for at, layer in enumerate(shard.layers):
                found = values(layer, heads, group, range(count), slot)
                cache.k[at][tables[-1]], cache.v[at][tables[-1]] = found, -found
        pieces = list(pieces_of(parts_of(config, MODEL, held, target), rank, shard, slots, slot))
        line._lane.submit(partial(line._run, pieces))
        line._lane.submit(partial(reports.append, slot))
    line.close()
    for slot, (held, target) in enumerate(requests):
        if group == target:
            for layer in shard.layers:
                whole = torch.cat([values(layer, heads, source, range(count), slot) for source, count in held])
                assert torch.equal(cache.k[layer][tables[slot]], whole), (layer, slot)
                assert torch.equal(cache.v[layer][tables[slot]], -whole), (layer, slot)
    own = {token for table in tables for token in table}
    others = [token for token in range(NUM_BLOCKS * BLOCK) if token not in own]
    assert all((pool[others] == -1.0).all() for pool in (*cache.k, *cache.v))
    return reports, max(buffer.nbytes for buffer in line._buffers), len(line._buffers)


CASES = [
    (layout(2), [([(0, 53)], 1), ([(0, 100)], 1)]),
    (layout(4), [([(0, 90)], 1), ([(0, 1)], 1)]),  # heads that ranks have twice
    (layout(1, kvp=2), [([(0, 64), (1, 37)], 2), ([(1, 20)], 2), ([(0, 45)], 2)]),
    (layout(1, tp=2), [([(0, 100)], 1)]),
    (layout(1, tp=4), [([(0, 100)], 1)]),
    (layout(2, spp=3), [([(0, 100)], 1), ([(0, 41)], 1)]),
    (layout(1, kvp=2, replicas=2), [([(0, 50), (1, 50)], 3), ([(0, 33)], 2), ([(1, 70)], 3), ([(0, 60)], 2)]),
]


@pytest.mark.parametrize("num_buffers", [1, 3])
@pytest.mark.parametrize(("config", "requests"), CASES, ids=[str(config) for config, _ in CASES])
def test_a_decode_instance_holds_what_the_prefill_ranks_held(
    workers: WorkerPool, config: ParallelConfig, requests: Sequence[tuple[Held, int]], num_buffers: int
) -> None:
    answers = workers.run(hand_over, config.world_size, config, requests, num_buffers)
    assert [reports for reports, _, _ in answers] == [list(range(len(requests)))] * config.world_size
    most = 2 * 40 * 2 * H * 4  # keys and values of a piece of two heads, float32
    assert max(size for _, size, _ in answers) <= most
    assert [count for _, _, count in answers] == [num_buffers] * config.world_size
