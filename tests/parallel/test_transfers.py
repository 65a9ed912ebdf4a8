"""What travels between ranks, by a counting transport: bytes and messages of hidden states and of merges."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from medha import LLM, SamplingParams
from medha.parallel import kvp
from medha.parallel.kvp import Merge
from medha.parallel.shared_memory import MOST_BYTES, SharedMemory
from medha.parallel.spp import StagePipe
from tests.parallel.workers import WorkerPool, generate, num_ranks
from tests.serving import random_ids

OPTIONS = {"block_size": 16, "num_kv_blocks": 64, "chunk_size": 37, "max_batch_tokens": 64, "dtype": "float32"}
PROMPTS = [random_ids(length, seed=8) for length in (150, 5, 61)]
DIGEST_BYTES = 16


def count(folder: Path, layout: dict[str, int], most_bytes: int = MOST_BYTES) -> tuple[list[list[int]], Counter[str]]:
    """On each rank: tokens, and the messages and bytes by which hidden states or parts of attention go, beside what was
    to be sent; parts of more than ``most_bytes`` go by the group."""
    counts = Counter[str]()
    isend, put, send, start = dist.isend, SharedMemory.put, StagePipe.send, Merge.start
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype in (torch.float32, torch.uint8):  # else a digest
            counts.update(messages=1, bytes=tensor.nbytes)
        return isend(tensor, *args, **kwargs)

    def written(self: SharedMemory, rank: int, x: torch.Tensor) -> None:
        if x.nbytes > DIGEST_BYTES:
            counts.update(messages=1, bytes=x.nbytes, shared=1)
        put(self, rank, x)

    @contextmanager
    def counting() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SharedMemory, "put", written)
            patch.setattr(dist, "isend", counted)
            patch.setattr(dist.distributed_c10d, "isend", counted)
            yield

    def sent(self: StagePipe, batch: Any, x_TD: torch.Tensor) -> None:
        counts.update(batches=1, whole=x_TD.nbytes)
        with counting():
            send(self, batch, x_TD)

    def started(self: Merge, parts: Any, *, compare: bool) -> Any:
        for shared, (out_TNH, lse_TN) in parts:
            num_others = len(shared.groups) - 1
            counts.update(spans=1, peers=num_others, whole=num_others * (out_TNH.nbytes + lse_TN.nbytes))
        with counting():
            return start(self, parts, compare=compare)

    with LLM(folder, **OPTIONS | layout) as llm, pytest.MonkeyPatch.context() as patch:  # which is warm by then
        patch.setattr(StagePipe, "send", sent)
        patch.setattr(Merge, "start", started)
        patch.setattr(kvp, "MOST_BYTES", most_bytes)
        return generate(llm, PROMPTS, params), counts


@cache
def alone(model: Path) -> Any:
    """The tokens of one rank, which sends nothing."""
    tokens, counts = count(model, {})
    assert counts == Counter()
    return tokens


def found(workers: WorkerPool, model: Path, most_bytes: int = MOST_BYTES, **layout: int) -> list[Counter[str]]:
    answers = workers.run(count, num_ranks(layout), model, layout, most_bytes)
    assert answers[0][0] == alone(model)
    return [counts for _, counts in answers]


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_sends_its_share_of_the_hidden_states_in_one_message(workers: WorkerPool, model: Path, tp: int) -> None:
    """Before, every tensor-parallel rank sent all of them, and the digest in the same message."""
    counts = found(workers, model, tp=tp, spp=2)
    for sender in counts[:tp]:
        assert sender["messages"] == sender["batches"] >= 8
        assert sender["bytes"] * tp == sender["whole"] > 0
    assert all(last == Counter() for last in counts[tp:])


@pytest.mark.parametrize("most_bytes", [0, 1000, MOST_BYTES])
def test_a_rank_sends_its_parts_to_each_other_rank_once(workers: WorkerPool, model: Path, most_bytes: int) -> None:
    """As many bytes as a ring's all-gather sends, in one step for as many steps as there are others; short ones through
    the memory that they share."""
    for merges in found(workers, model, most_bytes, kvp=3, max_kv_per_group=64):
        assert merges["peers"] >= merges["messages"] >= merges["peers"] - merges["spans"] > 10
        assert (merges["shared"] > 0) == (most_bytes > 0)
        assert (merges["shared"] < merges["messages"]) == (most_bytes < MOST_BYTES)
        assert 0 <= merges["bytes"] - merges["whole"] < 16 * merges["messages"]
