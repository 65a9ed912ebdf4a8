"""What a step sends and waits for on several ranks, by counts and records: the machine may be busy otherwise."""

from collections import Counter
from collections.abc import Callable, Iterator
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
from medha.records import RankRecords
from medha.sched.scheduler import Scheduler
from medha.worker.runner import Runner
from tests.checkpoints import random_prompt
from tests.commands import wait_until
from tests.engines import drained
from tests.parallel.workers import WorkerPool, generate, num_ranks

# -- what is sent: hidden states and merges ---------------------------------------------------------------------------


OPTIONS = {"block_size": 16, "num_kv_blocks": 64, "chunk_size": 37, "max_batch_tokens": 64, "dtype": "float32"}
PROMPTS = [random_prompt(length, seed=8, vocab=256) for length in (150, 5, 61)]
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


# -- what goes on at once: two stages, and the next batch beside one that runs ----------------------------------------


NUM_CHUNKS = 10
CHUNK_SIZE = 128


def read_prompts(folder: Path, layout: dict[str, int]) -> list[list[RankRecords]]:
    """On each rank: prefill the same prompt twice; rank 0 returns the records of each."""
    prompt = random_prompt(NUM_CHUNKS * CHUNK_SIZE, seed=0)
    sizes = {"num_kv_blocks": 24, "chunk_size": CHUNK_SIZE, "max_batch_tokens": CHUNK_SIZE}
    with LLM(folder, scheduler="sarathi", prefix_caching=False, **sizes, **layout) as llm:
        taken = []
        for name in ("first", "second") if llm.is_driver else ():
            llm.engine.add_request(name, prompt, SamplingParams(max_tokens=2, ignore_eos=True))
            drained(llm.engine)
            taken.append(llm.engine.runner.gather_records())
    return taken


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    """A model whose chunks take some milliseconds in each stage."""
    return checkpoint(hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8)


def overlaps(stages: list[RankRecords]) -> list[bool]:
    """Of each chunk but the last: whether the next one was in stage 0 while it was in stage 1."""
    first, second = (stage.batches[:NUM_CHUNKS] for stage in stages)
    pairs = zip(first[1:], second[:-1], strict=True)
    return [later.start_s < earlier.end_s and earlier.start_s < later.end_s for later, earlier in pairs]


def test_both_stages_run_every_batch_one_after_the_other(workers: WorkerPool, folder: Path) -> None:
    """The next chunk is in stage 0 while this one is in stage 1; how many overlap is the machine's affair. With one
    batch in flight, the schedule without a pipeline, none does."""
    for stages in workers.run(read_prompts, 2, folder, {"spp": 2})[0]:
        assert [(stage.rank, stage.stage) for stage in stages] == [(0, 0), (1, 1)]
        ids = [[record.batch_id for record in stage.batches] for stage in stages]
        assert ids[0] == ids[1] == list(range(ids[0][0], ids[0][0] + NUM_CHUNKS + 1))  # and one decode
        for before, after in zip(*(stage.batches for stage in stages), strict=True):
            assert before.start_s < before.end_s <= after.start_s < after.end_s
        assert any(overlaps(stages))
        # batch k enters stage 0 after batch k - 3, the depth, has left stage 1, although most batches sample nothing
        first, second = (stage.batches for stage in stages)
        assert all(enters.start_s >= left.end_s for enters, left in zip(first[3:], second, strict=False))

    for stages in workers.run(read_prompts, 2, folder, {"spp": 2, "depth": 1})[0]:
        assert not any(overlaps(stages))


STEADY = range(8, 28)  # batches of decodes
GATED = {"num_kv_blocks": 40, "max_num_seqs": 8, "async_scheduling": True, "prefix_caching": False}


def decode_gated(folder: Path, layout: dict[str, int]) -> list[RankRecords]:
    """On each rank: decode where a forward ends once the next batch is here and prepared, and on rank 0 a batch is
    decided once the forward of the one before has begun; raises what did not come; on rank 0 the records."""
    begun = set[int]()
    run, schedule = Runner.run, Scheduler.schedule

    def gated_run(self: Any, step: Any) -> Any:
        begun.add(batch_id := step.batch.batch_id)
        if batch_id in STEADY:
            wait_until(lambda: num_prepared() > 0, 60.0, told=lambda: f"no batch behind {batch_id} while that runs")
        return run(self, step)

    def gated_schedule(self: Any, now_s: float) -> Any:
        decision = schedule(self, now_s)
        if decision.batch is not None and (batch_id := decision.batch.batch_id) in STEADY:
            wait_until(lambda: batch_id - 1 in begun, 60.0, told=lambda: f"no forward before {batch_id} is decided")
        return decision

    with pytest.MonkeyPatch.context() as patch, LLM(folder, **GATED, **layout) as llm:
        part: Any = llm._open_role.part
        num_prepared = (part._own._calls if llm.is_driver else part._receiver.arrived).qsize
        patch.setattr(Runner, "run", gated_run)
        patch.setattr(Scheduler, "schedule", gated_schedule)
        if not llm.is_driver:
            return []
        for index in range(4):
            params = SamplingParams(max_tokens=2 * STEADY.stop, ignore_eos=True)
            llm.engine.add_request(str(index), [1 + index] * 9, params)
        drained(llm.engine)
        return llm.engine.runner.gather_records()


@pytest.mark.parametrize("layout", [{"tp": 2}, {"kvp": 2}, {"spp": 2}], ids=str)
def test_the_next_batch_is_prepared_while_one_runs(workers: WorkerPool, folder: Path, layout: dict[str, int]) -> None:
    """In every layout and on each rank; rank 0 decides it while it computes itself, so that a KV-parallel group that
    decodes for itself need not wait for more than rank 0's forwards."""
    for rank in workers.run(decode_gated, 2, folder, layout)[0]:
        assert len([record for record in rank.batches if record.batch_id in STEADY[1:]]) == len(STEADY) - 1
