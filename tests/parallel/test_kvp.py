"""KV-cache parallelism in real gloo processes: tokens, the same bits on every group, rows that differ."""

import os
import random
import zlib
from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from medha.batch import Batch, Row
from medha.cpu.decoder import PackedLinear
from medha.errors import PlanDivergenceError
from medha.parallel import kvp
from medha.parallel.kvp import Merge, shared_draws, shared_rows
from medha.parallel.shared_memory import share_memory
from medha.parallel.spp import Digests
from tests.parallel.test_layouts import GREEDY, reference
from tests.parallel.test_shared_memory import on_ranks
from tests.parallel.workers import WorkerPool, gloo, merge_of_all, serve

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


@pytest.mark.parametrize(
    "other", [Batch(7, (ROW._replace(position=101),)), Batch(8, (ROW,))], ids=["position", "batch"]
)
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
    own, memory, chance = ranks.rank, share_memory(ranks, group, torch.device("cpu")), random.Random(3)
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
