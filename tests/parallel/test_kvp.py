"""KV-cache parallelism in real gloo processes: merges of shards, the same bits everywhere, and errors that are noticed.

A layout is (kvp, spp, tp).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import medha.parallel.kvp as kvp
from medha.attention.merge import merge_partials
from medha.batch import Batch, Row
from medha.config import ParallelConfig
from medha.engine.engine import Engine
from medha.errors import PlanDivergenceError
from medha.outputs import RequestOutput
from medha.parallel.kvp import Merge, Pending, shared_rows
from medha.parallel.mesh import _run_groups
from medha.params import SamplingParams
from medha.worker.step_input import Slots, StepInput
from tests.checkpoints import make_checkpoint, random_prompt
from tests.engines import load_decoder, make_engine
from tests.parallel.workers import WorkerPool

# -- mutations: each is applied on every rank of a job; tests/parallel/test_verify.py has more of a merge -------------


def dropped_shard(patch: pytest.MonkeyPatch) -> None:
    """The first shard of a run is not merged."""
    patch.setattr(kvp, "merge_partials", lambda parts: merge_partials(parts[1:]))


def wrong_block(patch: pytest.MonkeyPatch) -> None:
    """Of a full shard the second block is read twice, the first not at all."""
    prepare = Slots.prepare

    def mistaken(self: Slots, batch: Batch) -> StepInput:
        step = prepare(self, batch)
        if (rows := step.shared) is not None:
            firsts = rows.page_indptr[:-1][~rows.causal]
            rows.pages[firsts] = rows.pages[firsts + 1]
        return step

    patch.setattr(Slots, "prepare", mistaken)


MUTATIONS = {m.__name__: m for m in (dropped_shard, wrong_block)}


# -- merges by themselves ------------------------------------------------------------------------------------


def merge_different_rows(num_groups: int, batches: dict[int, Batch]) -> str:
    """On each rank: merge the rows of the batch that this rank has; returns what is wrong with it."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    group = _run_groups(ParallelConfig(kvp=num_groups), rank, timedelta(seconds=30))[0, num_groups - 1]
    (shared,) = shared_rows(batches[rank])
    empty = torch.zeros(shared.tokens.stop, 2, 8)
    message = ""
    try:
        Merge(group, num_groups).start(shared, (empty, empty[..., 0])).result(compare=True)
    except PlanDivergenceError as error:
        message = str(error)
    dist.barrier()
    dist.destroy_process_group()
    return message


ROW = Row(3, 100, 2, False, False, 0, 3)


@pytest.mark.parametrize(
    "other", [Batch(7, (ROW._replace(position=101),)), Batch(8, (ROW,))], ids=["position", "batch"]
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
        if mutation:
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


def run_layout(workers: WorkerPool, served: Served, layout: tuple[int, int, int], mutation: str = "") -> Any:
    num_groups, spp, tp = layout
    options = OPTIONS | {"kvp": num_groups, "spp": spp, "tp": tp}
    answers = workers.run(generate, num_groups * spp * tp, str(served.folder), options, served.prompts, mutation)
    return answers[0][0], [merges for _, merges in answers]


@pytest.mark.parametrize("layout", [(3, 1, 1), (2, 2, 1), (2, 1, 2)], ids=str)
def test_logprobs_are_those_of_one_rank(workers: WorkerPool, served: Served, layout: tuple[int, int, int]) -> None:
    logprobs, merges = run_layout(workers, served, layout)
    check_close(logprobs, served.expected)
    assert check_merges(merges, layout[0]) > 20


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_merge_turns_the_comparison_with_one_rank_red(
    workers: WorkerPool, served: Served, mutation: str
) -> None:
    logprobs, merges = run_layout(workers, served, (2, 1, 1), mutation)
    check_merges(merges, 2)  # wrong alike
    with pytest.raises(AssertionError):
        check_close(logprobs, served.expected)
