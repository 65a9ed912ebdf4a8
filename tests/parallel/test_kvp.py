"""KV-cache parallelism in real gloo processes: tokens, the same bits on every group, rows that differ."""

import os
import random
import resource
import zlib
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from medha.attention.interface import LayerShape
from medha.batch import Batch, Extent, Row, Shared
from medha.config import RopeConfig
from medha.cpu.decoder import PackedLinear
from medha.errors import PlanDivergenceError
from medha.models.layers import cos_sin, inverse_frequencies, rotate
from medha.parallel import kvp
from medha.parallel.kvp import Merge, shared_draws, shared_rows
from medha.parallel.shared_memory import share_memory
from medha.parallel.spp import Digests
from medha.verify.kernels import largest_error
from medha.worker.kv_cache import KVCache
from medha.worker.runner import Runner
from medha.worker.shard import choose_backend
from medha.worker.step_input import DeviceStep
from tests.parallel.test_layouts import GREEDY, reference
from tests.parallel.test_shared_memory import on_ranks
from tests.parallel.workers import WorkerPool, gloo, merge_of_all, serve

CPU = torch.device("cpu")

# -- merges by themselves ------------------------------------------------------------------------------------


@gloo()
def merge_different_rows(*batches: Batch) -> str:
    """On each rank: merge the rows of the batch that this rank has; returns what is wrong with it."""
    (shared,) = shared_rows(batches[dist.get_rank()])
    empty = torch.zeros(shared.tokens.stop, 2, 8)
    pending = merge_of_all().start([(shared, (empty, empty[..., 0]))], compare=True)
    with pytest.raises(PlanDivergenceError) as caught:
        pending()
    return str(caught.value)


ROW = Row(3, 100, 2, False, False, 0, 3)


@pytest.mark.parametrize("other", [Batch(7, (ROW._replace(position=101),)), Batch(8, (ROW,))], ids=["place", "batch"])
def test_other_rows_on_one_rank_are_a_divergence(workers: WorkerPool, other: Batch) -> None:
    """Every rank of the run refuses, and the two of the same mind name the third."""
    same = Batch(7, (ROW, Row(9, 0, 5, False, False, 0, 1)))  # rows of a group alone are not compared
    digests = [zlib.crc32(Batch(b.batch_id, tuple(r for r in b.rows if r.is_shared)).to_ints()) for b in (same, other)]
    messages = workers.run(merge_different_rows, 3, same, same, other)
    ours, theirs = (f"{digest:08x}" for digest in digests)
    others = f"group 2 merges rows of batch {other.batch_id} with digest {theirs}, this one has 7 with {ours}"
    assert messages[:2] == [f"batch 7: {others}"] * 2
    assert messages[2].startswith(f"batch {other.batch_id}: group 0 merges rows of batch 7 with digest {ours}")


# -- parts of logits -----------------------------------------------------------------------------------------


class Counting(PackedLinear):
    """Counts products of a part of the outputs, and of all."""

    products: Counter[bool]

    def __call__(self, x: torch.Tensor, outputs: range | None = None) -> torch.Tensor:
        self.products[outputs is not None] += 1
        return super().__call__(x, outputs)


@patch.object(kvp, "MOST_BYTES", 1500)  # of some runs it is too long a message
def draw_in_parts(ranks: Any, group: Any) -> Counter[bool]:
    """On each rank: batches whose logits must be those of the whole head; the products."""
    own, memory, chance = ranks.rank, share_memory(ranks, group, CPU), random.Random(3)
    merge = Merge(group, Digests(group), ranks=range(4), own=own, memory=memory)
    weight = torch.randn(300, 16, generator=torch.Generator().manual_seed(1))
    whole, head = PackedLinear(weight), Counting(weight)
    head.products = Counter()
    for batch_id in range(200):
        runs = [sorted(chance.choices(range(4), k=2)) for _ in range(chance.randint(1, 4))]
        rows = [
            Row(slot, 0, chance.randint(1, 2), False, chance.random() < 0.8, first, last - first + 1)
            for slot, (first, last) in enumerate(runs)
        ]
        part = Batch(batch_id, tuple(rows)).part_of(own)
        spans = shared_rows(part)
        sizes = [span.tokens.stop - span.tokens.start for span in spans]
        parts = [(torch.zeros(size, 1, 4), torch.zeros(size, 1)) for size in sizes]
        merge.start(list(zip(spans, parts, strict=True)), compare=True)()
        values = [10 * batch_id + row.slot + token / 2 for row in part.rows for token in range(row.q_len)]
        x_TD = torch.tensor(values)[:, None] * weight[:1]
        ends = accumulate(row.q_len for row in part.rows)
        drawn = [end - 1 for row, end in zip(part.rows, ends, strict=True) if row.samples and row.group == own]
        if draws := merge.draws(shared_draws(part), head, 4):
            others = [token for one in draws if one.groups[0] != own for token in one.tokens]
            found = merge.logits(x_TD[drawn + others], draws, head)
            assert len(found) == len(drawn)
            assert not drawn or torch.equal(found, whole(x_TD[drawn]))
    return head.products


def test_groups_compute_parts_of_the_logits_for_the_one_that_draws(workers: WorkerPool) -> None:
    for products in workers.run(on_ranks, 4, draw_in_parts):
        assert min(products[True], products[False]) > 10


# -- through the engine -----------------------------------------------------------------------------------


Merges = dict[tuple[int, range, int], list[int]]
"""Checksums of what came of each layer's merge, by batch, groups, and place (stage and tensor-parallel index)."""


def serve_and_record(folder: Path, options: dict[str, Any], prompts: list[list[int]]) -> Any:
    """On each rank: the tokens, and the merges in which it took part."""
    merges: Merges = {}
    place, start = int(os.environ["RANK"]) % (options["spp"] * options["tp"]), Merge.start

    def recorded(self: Merge, parts: Any, *, compare: bool) -> Callable[[], list[torch.Tensor]]:
        result = start(self, parts, compare=compare)

        def outputs() -> list[torch.Tensor]:
            outs = result()
            for (shared, _), out_TNH in zip(parts, outs, strict=True):
                key = (shared.batch_id, shared.groups, place)
                merges.setdefault(key, []).append(zlib.crc32(out_TNH.contiguous().view(torch.uint8).numpy().tobytes()))
            return outs

        return outputs

    with patch.object(Merge, "start", recorded):
        return serve(folder, options, (prompts, GREEDY)).tokens, merges


def check_merges(by_rank: list[Merges], num_groups: int) -> None:
    """Every rank of a run has the same bits of every merge."""
    everywhere: dict[tuple[int, range, int], list[list[int]]] = {}
    for merges in by_rank:
        for key, checksums in merges.items():
            if key[0] >= 0:  # else it warms the communicators
                everywhere.setdefault(key, []).append(checksums)
    assert len(everywhere) > 10
    for (_, groups, _), (first, *others) in everywhere.items():
        assert len(others) == len(groups) - 1 < num_groups
        assert all(other == first for other in others), f"{groups}: the groups have different bits"


# (kvp, spp, tp, tokens a group): the longest prompt needs every group.
@pytest.mark.parametrize(
    "layout",
    [
        *((3, 1, 1, 256), (2, 2, 2, 384)),
        *(pytest.param(slow, marks=pytest.mark.slow) for slow in ((4, 1, 1, 192), (2, 2, 1, 384), (2, 1, 2, 384))),
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers(workers: WorkerPool, tmp_path: Path, layout: tuple[int, ...]) -> None:
    """Growth inside a prefill, inside a decode and at its first decode; several long requests at once on different
    runs, short ones beside."""
    kvp, spp, tp, share = layout
    lengths = (1, share - 3, 700, 2, share, share + 1, 33, 2 * share - 7, share - 1, 129)
    prompts, expected = reference(tmp_path, "llama", False, lengths, num_layers=3)
    options = {"kvp": kvp, "spp": spp, "tp": tp, "max_kv_per_group": share, "chunk_size": 97, "block_size": 64}
    options |= {"max_batch_tokens": 160, "num_kv_blocks": 40, "async_scheduling": True}
    answers = workers.run(serve_and_record, kvp * spp * tp, tmp_path, options, prompts)
    assert answers[0][0] == expected
    check_merges([merges for _, merges in answers], kvp)


# -- ten million positions on two groups: the past filled by hand, a chunk and decodes held to float64 -------

BLOCK = 256
CHUNK = 32
NUM_DECODES = 20
SHAPE = LayerShape(2, 1, 16, torch.float32)
ROPE = RopeConfig(theta=5e5)
AT_A_TIME = 1 << 18  # keys of the reference


@gloo()
def attend_on_two_ranks(share: int, backend: str) -> tuple[list[float], list[int], float]:
    """On each rank, with ``share`` tokens of the past on each of two groups: of every batch how far its attention is
    from float64, and its last position; and the most memory of this process, in GiB."""
    rank = dist.get_rank()
    cache = KVCache(SHAPE, num_layers=1, num_blocks=share // BLOCK + 1, block_size=BLOCK, device=CPU)
    past = torch.Generator().manual_seed(rank)
    cache.k[0][:share].normal_(generator=past)
    cache.v[0][:share].normal_(1.0 + rank, generator=past)  # so that a shard left out, or read twice, shows
    model: Any = SimpleNamespace(config=SimpleNamespace(rope=ROPE, head_dim=SHAPE.head_dim))
    attention, _ = choose_backend(backend, SHAPE, CPU, block_size=BLOCK)
    runner = Runner(model, cache, attention, CPU, merge=merge_of_all(), group=rank)
    inv_freq, new = inverse_frequencies(ROPE, SHAPE.head_dim), torch.Generator().manual_seed(7)
    errors, positions, position = [], [], 2 * share
    for batch_id, q_len in enumerate([CHUNK] + [1] * NUM_DECODES):
        filled: dict[str, Any] = {}
        if batch_id == 0:
            filled["extents"] = tuple(Extent(0, 0, share // BLOCK + g, g) for g in range(2))
            filled["shared"] = tuple(Shared(0, g, g * share, share) for g in range(2))
        row = Row(0, position, q_len, is_decode=q_len == 1, samples=True, num_groups=2)
        step = runner.slots.prepare(Batch(batch_id, (row,), **filled).part_of(rank))
        sent = DeviceStep.of(step, CPU)
        q_TNH = torch.randn(q_len, 2, 16, generator=new)
        k_TKH = 3.5 * q_TNH[:, :1] + 0.1 * torch.randn(q_len, 1, 16, generator=new)  # with some weight among so many
        v_TKH = torch.randn(q_len, 1, 16, generator=new)
        q_TNH, k_TKH = (rotate(x, cos_sin(sent.positions, inv_freq)) for x in (q_TNH, k_TKH))
        out_TNH = runner._attention(step, sent, [])(0, q_TNH, k_TKH, v_TKH)
        want_TNH = in_float64(q_TNH, cache, int(step.shared.kv_len[0]), is_last=rank == 1)
        errors.append(largest_error(out_TNH, want_TNH))
        positions.append(int(step.positions[-1]))
        position += q_len
    return errors, positions, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def in_float64(q_TNH: torch.Tensor, cache: KVCache, num_keys: int, *, is_last: bool) -> torch.Tensor:
    """Attention over the first tokens of both ranks' pools; the newest of them, on the last rank, are the queries'."""
    T, N, H = q_TNH.shape
    q_RH = q_TNH.double().flatten(0, 1) * H**-0.5
    sums_R1, outs_RH = torch.zeros(T * N, 1, dtype=torch.float64), torch.zeros(T * N, H, dtype=torch.float64)
    own = torch.arange(T).repeat_interleave(N)[:, None] + num_keys - T  # the last key that a row sees
    for first in range(0, num_keys, AT_A_TIME):
        at = slice(first, min(first + AT_A_TIME, num_keys))
        weights_RS = torch.exp(q_RH @ cache.k[0][at, 0].double().T)  # scores are small enough for float64
        if is_last:
            weights_RS.masked_fill_(torch.arange(at.start, at.stop) > own, 0.0)
        sums_R1 += weights_RS.sum(-1, keepdim=True)
        outs_RH += weights_RS @ cache.v[0][at, 0].double()
    whole = torch.cat([outs_RH, sums_R1], -1)
    dist.all_reduce(whole)
    return (whole[:, :H] / whole[:, H:]).view(T, N, H)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("share", [64 * BLOCK, pytest.param(19_532 * BLOCK, marks=pytest.mark.slow)])
def test_a_chunk_and_decodes_over_two_groups(workers: WorkerPool, share: int, backend: str) -> None:
    for errors, positions, memory_gib in workers.run(attend_on_two_ranks, 2, share, backend, limit_s=900.0):
        assert len(errors) == 1 + NUM_DECODES
        assert positions[-1] == 2 * share + CHUNK + NUM_DECODES - 1
        assert max(errors) < 2e-5, errors
        assert memory_gib < 4.0
