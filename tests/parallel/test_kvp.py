"""KV-cache parallelism in real gloo processes: merges of shards, the same bits everywhere, and errors that are noticed.

A layout is (kvp, spp, tp).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist

import medha.parallel.kvp as kvp
from medha.attention.interface import Segment
from medha.attention.merge import merge_partials
from medha.attention.torch_backend import TorchBackend
from medha.batch import Batch, Row
from medha.config import ParallelConfig
from medha.engine.engine import Engine
from medha.errors import PlanDivergenceError
from medha.outputs import RequestOutput
from medha.parallel.kvp import Merge, Pending, shared_rows
from medha.parallel.mesh import _run_groups
from medha.params import SamplingParams
from medha.worker.kv_cache import BlockTables
from tests.attention.reference import assert_attention_close
from tests.checkpoints import make_checkpoint, random_prompt
from tests.engines import load_decoder, make_engine
from tests.parallel.workers import WorkerPool

LOG2_E = 1.4426950408889634
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Array = npt.NDArray[Any]

# -- mutations: each is applied on every rank of a job ------------------------------------------------------------


def no_mutation(patch: pytest.MonkeyPatch) -> None:
    """The library as it is."""


def base_2_lse(patch: pytest.MonkeyPatch) -> None:
    """The parts' log-sum-exps come in base 2."""
    patch.setattr(kvp, "merge_partials", lambda parts: merge_partials([(out, lse * LOG2_E) for out, lse in parts]))


def dropped_shard(patch: pytest.MonkeyPatch) -> None:
    """The first shard of a run is not merged."""
    patch.setattr(kvp, "merge_partials", lambda parts: merge_partials(parts[1:]))


def shifted_shard(patch: pytest.MonkeyPatch) -> None:
    """A full shard is read from one position too early; at the pool's start from one too far on."""
    segment = BlockTables.segment

    def shifted(self: BlockTables, row: Row, start: int) -> Segment:
        whole = segment(self, row, start)
        (first, count), *rest = whole.ranges
        return whole if whole.causal else replace(whole, ranges=((first - 1 if first else 1, count), *rest))

    patch.setattr(BlockTables, "segment", shifted)


def order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    """Each rank merges its own part first, which it has first."""
    result = Pending.result

    def own_first(self: Pending, *, compare: bool) -> torch.Tensor:
        self.work.wait()
        own = next(i for i, row in enumerate(self.everyone) if torch.equal(row, self.mine))
        return result(replace(self, everyone=self.everyone.roll(-own, 0)), compare=compare)

    patch.setattr(Pending, "result", own_first)


MUTATIONS = {m.__name__: m for m in (no_mutation, base_2_lse, dropped_shard, shifted_shard, order_of_arrival)}


# -- merges by themselves ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shards:
    """Attention of one chunk whose context lies on a run of groups, shard after shard.

    Attributes:
        first: first group.
        sizes: keys on each group of the run; the last holds the chunk's own.
        q_len: queries of the chunk.
    """

    first: int
    sizes: tuple[int, ...]
    q_len: int

    @property
    def row(self) -> Row:
        kv_len = sum(self.sizes)
        return Row(0, kv_len - self.q_len, self.q_len, False, False, self.first, len(self.sizes))

    def qkv(self, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + sum(self.sizes))
        q_LNH = torch.randn(self.q_len, 4, 16, generator=generator)
        k_SKH, v_SKH = torch.randn(2, sum(self.sizes), 2, 16, generator=generator)
        return q_LNH.to(dtype), k_SKH.to(dtype), v_SKH.to(dtype)

    def partial(self, group: int, seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """What a group computes over its shard alone."""
        index = group - self.first
        start = sum(self.sizes[:index])
        segment = Segment(0, self.q_len, ((start, self.sizes[index]),), causal=group == self.row.holder)
        q_LNH, k_SKH, v_SKH = self.qkv(seed, dtype)
        backend = TorchBackend()
        return backend.run(q_LNH, k_SKH, v_SKH, backend.plan([segment]))


def merge_batches(num_groups: int, batches: list[tuple[list[Shards], str]], mutation: str) -> list[list[Array]]:
    """On each rank, one a group: start every merge of a batch that concerns the group, then finish each; returns the
    merged outputs as float32, batch by batch and row by row."""
    rank = _join()
    groups = _run_groups(ParallelConfig(kvp=num_groups), rank, timedelta(seconds=30))
    merges = {run: Merge(group, 1 + run[1] - run[0]) for run, group in groups.items()}
    results = []
    with pytest.MonkeyPatch.context() as patch:
        MUTATIONS[mutation](patch)
        for batch_id, (shards, dtype) in enumerate(batches):
            results.append(_merge_batch(batch_id, shards, DTYPES[dtype], rank, merges))
    _leave()
    return results


def _merge_batch(
    batch_id: int, shards: list[Shards], dtype: torch.dtype, rank: int, merges: dict[tuple[int, int], Merge]
) -> list[Array]:
    batch = Batch(batch_id, tuple(s.row._replace(slot=slot) for slot, s in enumerate(shards))).part_of(rank)
    parts = [shards[row.slot].partial(rank, row.slot, dtype) for row in batch.rows]
    if not parts:
        return []
    out_TNH, lse_TN = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    pending = [
        merges[shared.run].start(shared, (out_TNH[shared.tokens], lse_TN[shared.tokens]))
        for shared in shared_rows(batch, torch.device("cpu"))
    ]
    for merge in pending:
        out_TNH[merge.shared.tokens] = merge.result(compare=True)
    return [out.float().numpy() for out in out_TNH.split([row.q_len for row in batch.rows])]


def _join() -> int:
    """Meet the other ranks; returns this rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    return dist.get_rank()


def _leave() -> None:
    dist.barrier()
    dist.destroy_process_group()


# Of a decode and of chunks, long and short, on two and more groups; empty shards, and a shard of the chunk alone.
ALONE = [
    Shards(0, (40, 9), 4),
    Shards(0, (64, 64, 64), 1),
    Shards(1, (33, 17), 16),
    Shards(0, (0, 30), 5),
    Shards(0, (25, 0, 12), 12),
    Shards(0, (0, 0, 3), 3),
    Shards(0, (300, 1), 1),
]
# All distinct runs of three groups in one batch, two rows on one of them, and rows that are not shared between.
TOGETHER = [
    Shards(2, (20,), 3),
    Shards(1, (16, 9), 4),
    Shards(0, (16, 16, 5), 1),
    Shards(0, (12,), 12),
    Shards(0, (16, 7), 7),
    Shards(1, (32, 2), 1),
]
BATCHES = [([shards], dtype) for dtype in DTYPES for shards in ALONE] + [(TOGETHER, dtype) for dtype in DTYPES]


def rows_of(results: list[list[list[Array]]], batch: int) -> list[list[Array]]:
    """Of each row of a batch: its output on every group of its run, first group first."""
    shards, _ = BATCHES[batch]
    places = [[s.row.concerns(group) for s in shards] for group in range(len(results))]
    return [
        [results[g][batch][sum(places[g][:slot])] for g in range(len(results)) if places[g][slot]]
        for slot in range(len(shards))
    ]


def check_same_bits(results: list[list[list[Array]]]) -> None:
    """Every group of a run has the same bits of each merged row."""
    for batch in range(len(BATCHES)):
        for outputs in rows_of(results, batch):
            assert all(np.array_equal(outputs[0], other) for other in outputs[1:])


def check_whole_attention(results: list[list[list[Array]]]) -> None:
    """Merged rows are attention over the whole context, as near as one shard would be (the rule of the backends)."""
    for batch, (shards, dtype) in enumerate(BATCHES):
        for slot, (one, outputs) in enumerate(zip(shards, rows_of(results, batch), strict=True)):
            qkv = one.qkv(slot, DTYPES[dtype])
            num_keys = sum(one.sizes)
            mask_LS = torch.ones(one.q_len, num_keys, dtype=torch.bool).tril(num_keys - one.q_len)
            backend = TorchBackend()
            plan = backend.plan([Segment(0, one.q_len, ((0, num_keys),), causal=True)])
            lse_LN = backend.run(*qkv, plan)[1]
            for out in outputs:
                assert_attention_close(torch.from_numpy(out).to(DTYPES[dtype]), lse_LN, qkv, mask_LS)


def test_merges_are_attention_over_all_shards_with_the_same_bits_everywhere(workers: WorkerPool) -> None:
    results = workers.run(merge_batches, 3, 3, BATCHES, "no_mutation")
    check_whole_attention(results)
    check_same_bits(results)


@pytest.mark.parametrize("mutation", ["base_2_lse", "dropped_shard"])
def test_wrong_merges_are_not_attention(workers: WorkerPool, mutation: str) -> None:
    results = workers.run(merge_batches, 3, 3, BATCHES, mutation)
    with pytest.raises(AssertionError, match="is off by"):
        check_whole_attention(results)
    check_same_bits(results)  # wrong alike: only the comparison of values can tell


def test_merges_in_order_of_arrival_differ_in_bits(workers: WorkerPool) -> None:
    results = workers.run(merge_batches, 3, 3, BATCHES, "order_of_arrival")
    check_whole_attention(results)  # right on every rank: only the comparison of bits can tell
    with pytest.raises(AssertionError):
        check_same_bits(results)


def merge_different_rows(num_groups: int, batches: dict[int, Batch]) -> str:
    """On each rank: merge the rows of the batch that this rank has; returns what is wrong with it."""
    rank = _join()
    group = _run_groups(ParallelConfig(kvp=num_groups), rank, timedelta(seconds=30))[0, num_groups - 1]
    (shared,) = shared_rows(batches[rank], torch.device("cpu"))
    empty = torch.zeros(len(shared.tokens), 2, 8)
    message = ""
    try:
        Merge(group, num_groups).start(shared, (empty, empty[..., 0])).result(compare=True)
    except PlanDivergenceError as error:
        message = str(error)
    _leave()
    return message


ROW = Row(3, 100, 2, False, False, 0, 3)


@pytest.mark.parametrize(
    "other",
    [
        Batch(7, (ROW._replace(position=101),)),
        Batch(7, (ROW._replace(q_len=1), ROW._replace(slot=4, q_len=1))),
        Batch(8, (ROW,)),
    ],
    ids=["position", "rows", "batch"],
)
def test_other_rows_on_one_rank_are_a_divergence(workers: WorkerPool, other: Batch) -> None:
    """Every rank of the run refuses, and the two of the same mind name the third."""
    same = Batch(7, (ROW, Row(9, 0, 5, False, False, 0, 1)))  # rows of a group alone are not compared
    digests = [zlib.crc32(Batch(b.batch_id, tuple(r for r in b.rows if r.is_shared)).to_ints()) for b in (same, other)]
    messages = workers.run(merge_different_rows, 3, 3, {0: same, 1: same, 2: other})
    assert (
        messages[0]
        == messages[1]
        == (
            f"batch 7: group 2 merges rows of batch {other.batch_id} with digest {digests[1]:08x}, "
            f"this one has 7 with {digests[0]:08x}"
        )
    )
    assert messages[2].startswith(
        f"batch {other.batch_id}: group 0 merges rows of batch 7 with digest {digests[0]:08x}"
    )


def test_same_rows_are_no_divergence(workers: WorkerPool) -> None:
    same = Batch(7, (ROW._replace(num_groups=2),))
    assert workers.run(merge_different_rows, 2, 2, {0: same, 1: same}) == ["", ""]


# -- through the engine ------------------------------------------------------------------------------------

SHARE = 128
# Growth at once, inside the prompt, inside a decode, at its first decode; and two that stay on one group.
LENGTHS = (2 * SHARE - 20, SHARE + 1, SHARE - 3, SHARE, 5, 60)
NUM_TOKENS = 6
TOLERANCE = 1e-4
OPTIONS = {
    "scheduler": "sarathi",
    "chunk_size": 48,
    "max_batch_tokens": 96,
    "block_size": 16,
    "num_kv_blocks": 24,
    "max_kv_per_group": SHARE,
}
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=8, output_kind="final_only")
Logprobs = list[list[dict[int, float]]]  # of each prompt, at each token, by token id
Merges = dict[tuple[int, tuple[int, int], int], list[int]]
"""Checksums of what came of each layer's merge, by batch, run, and place (stage and tensor-parallel index)."""


def logprobs_of(outputs: Sequence[RequestOutput]) -> Logprobs:
    return [
        [{token: entry.logprob for token, entry in step.items()} for step in output.outputs[0].logprobs or ()]
        for output in outputs
    ]


def on_one_rank(engine: Engine, prompts: list[list[int]]) -> Logprobs:
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, PARAMS)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step()}
    return logprobs_of([outputs[str(i)] for i in range(len(prompts))])


def generate(folder: str, options: dict[str, Any], prompts: list[list[int]], mutation: str) -> tuple[Logprobs, Merges]:
    """On each rank: the log probabilities of each token and its rivals, and the merges in which it took part."""
    from medha import LLM

    merges: Merges = {}
    with pytest.MonkeyPatch.context() as patch:
        MUTATIONS[mutation](patch)
        _record_merges(patch, merges, place=int(os.environ["RANK"]) % (options["spp"] * options["tp"]))
        with LLM(folder, **options) as llm:
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS)
    return logprobs_of(outputs), merges


def _record_merges(patch: pytest.MonkeyPatch, merges: Merges, *, place: int) -> None:
    result = Pending.result

    def recorded(self: Pending, *, compare: bool) -> torch.Tensor:
        out_TNH = result(self, compare=compare)
        key = (self.shared.batch_id, self.shared.run, place)
        merges.setdefault(key, []).append(zlib.crc32(out_TNH.contiguous().view(torch.uint8).numpy().tobytes()))
        return out_TNH

    patch.setattr(Pending, "result", recorded)


def check_close(got: Logprobs, want: Logprobs) -> None:
    """The same tokens are the likeliest, and each is as likely, to ``TOLERANCE``."""
    for ours, theirs in zip(got, want, strict=True):
        for step, truth in zip(ours, theirs, strict=True):
            assert max(step, key=step.__getitem__) == max(truth, key=truth.__getitem__)
            common = step.keys() & truth.keys()
            assert len(common) >= len(truth) - 1  # the last two may change places
            error = max(abs(step[token] - truth[token]) for token in common)
            assert error <= TOLERANCE, f"a log probability is off by {error:.2g}"


def check_merges(by_rank: list[Merges], num_groups: int) -> int:
    """Every rank of a run has the same bits of every merge; returns the number of merges compared."""
    everywhere: dict[tuple[int, tuple[int, int], int], list[list[int]]] = {}
    for merges in by_rank:
        for key, checksums in merges.items():
            everywhere.setdefault(key, []).append(checksums)
    num_merges = 0
    for (batch_id, run, _), (first, *others) in everywhere.items():
        if batch_id >= 0:  # else it warms the communicators
            assert len(others) == run[1] - run[0] < num_groups
            assert all(other == first for other in others), f"run {run}: the groups have different bits"
            num_merges += len(first)
    return num_merges


@dataclass(frozen=True)
class Served:
    """A checkpoint, prompts for it, and what one rank says."""

    folder: Path
    prompts: list[list[int]]
    expected: Logprobs


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("kvp")
    make_checkpoint(folder, "llama", seed=1)
    prompts = [random_prompt(length, seed=11) for length in LENGTHS]
    engine = make_engine(load_decoder(folder), chunk_size=48, max_batch_tokens=96, block_size=16, num_blocks=100)
    return Served(folder, prompts, on_one_rank(engine, prompts))


def run_layout(workers: WorkerPool, served: Served, layout: tuple[int, int, int], mutation: str) -> Any:
    num_groups, spp, tp = layout
    options = OPTIONS | {"kvp": num_groups, "spp": spp, "tp": tp}
    answers = workers.run(generate, num_groups * spp * tp, str(served.folder), options, served.prompts, mutation)
    return answers[0][0], [merges for _, merges in answers]


@pytest.mark.parametrize("layout", [(3, 1, 1), (2, 2, 1), (2, 1, 2)], ids=str)
def test_logprobs_are_those_of_one_rank(workers: WorkerPool, served: Served, layout: tuple[int, int, int]) -> None:
    logprobs, merges = run_layout(workers, served, layout, "no_mutation")
    check_close(logprobs, served.expected)
    assert check_merges(merges, layout[0]) > 20


def test_a_shifted_shard_turns_the_comparison_with_one_rank_red(workers: WorkerPool, served: Served) -> None:
    logprobs, merges = run_layout(workers, served, (2, 1, 1), "shifted_shard")
    check_merges(merges, 2)
    with pytest.raises(AssertionError):
        check_close(logprobs, served.expected)


def test_order_of_arrival_turns_the_comparison_of_bits_red(workers: WorkerPool, served: Served) -> None:
    """No tolerance shows it: each group is right, and the groups drift apart."""
    logprobs, merges = run_layout(workers, served, (3, 1, 1), "order_of_arrival")
    check_close(logprobs, served.expected)
    with pytest.raises(AssertionError, match="the groups have different bits"):
        check_merges(merges, 3)
