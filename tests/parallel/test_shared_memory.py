"""Memory that ranks share: every message arrives whole and in order; without it, and where a rank fails, all go on."""

import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import medha.parallel.shared_memory as shared_memory
from medha.parallel.control import ControlReceiver, ControlSender, Message
from medha.parallel.launch import read_launch
from medha.parallel.shared_memory import MOST_BYTES, PAGE_BYTES, share_lines, share_memory
from medha.parallel.tp import all_gather_over, all_reduce_over
from tests.parallel.workers import TIMEOUT_S, WorkerPool, gloo

CPU = torch.device("cpu")


@gloo()
def on_ranks(work: Callable[[Any, Any], Any]) -> Any:
    """On each rank: work with what a job's ranks know, and a group of all."""
    rank, job = dist.get_rank(), SimpleNamespace(launch=read_launch(), store=dist.distributed_c10d._get_default_store())
    monitor = SimpleNamespace(has_failure=False, first_error=lambda: "rank 1 has died")
    config = SimpleNamespace(dist_timeout_s=TIMEOUT_S, world_size=dist.get_world_size())
    ranks = SimpleNamespace(rank=rank, report_group=dist.new_group(), job=job, monitor=monitor, config=config)
    return work(ranks, dist.new_group())


def message(sender: int, receiver: int, number: int, size: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(number * 64 + sender * 8 + receiver)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=chance)


def exchange(ranks: Any, group: Any) -> None:
    """Messages among changing ranks arrive whole and in order; the file is gone before the first of them."""
    memory = share_memory(ranks, group, CPU)
    path = ranks.job.store.get(f"memory/{dist.get_process_group_ranks(group)}").decode()
    assert ranks.rank != 0 or not os.path.exists(path)  # of who made it
    chance = torch.Generator().manual_seed(5)
    for number in range(500):  # every rank draws the same runs of ranks and sizes
        first, last = sorted(torch.randint(0, dist.get_world_size(), (2,), generator=chance).tolist())
        size = int(torch.randint(1, MOST_BYTES if number % 50 == 0 else 300, (1,), generator=chance))
        if not first <= ranks.rank <= last:
            continue
        others = [rank for rank in range(first, last + 1) if rank != ranks.rank]
        for part in range(2):  # as many as may be on their way
            for rank in others:
                memory.put(rank, message(ranks.rank, rank, 2 * number + part, size))
        for part in range(2):
            for rank in others:
                sent = message(rank, ranks.rank, 2 * number + part, size)
                assert torch.equal(memory.receive(rank, size), sent), (number, rank)


def combine(ranks: Any, group: Any) -> None:
    """Sums are of the parts in order of rank, and gathered parts lie in it."""
    memory = share_memory(ranks, group, CPU)
    add_up, side_by_side = all_reduce_over(group, memory), all_gather_over(group, memory)
    for width in (1, 7, 2048, MOST_BYTES // 4, MOST_BYTES // 4 + 1):  # the last one goes by gloo
        parts = [torch.randn(2, width, generator=torch.Generator().manual_seed(r)).bfloat16() for r in range(3)]
        assert torch.equal(side_by_side(parts[ranks.rank]), torch.cat(parts, dim=1)), width
        total = add_up(parts[ranks.rank].clone())
        assert torch.equal(total, parts[0] + parts[1] + parts[2]) or 4 * width > MOST_BYTES, width


def lack(ranks: Any, group: Any) -> tuple[list[bool], int]:
    """Whether it is there, and how often the rank warns."""
    is_there, warned = list[bool](), list[Any]()
    for lacking in (0, 1, None):  # the rank that makes the file, and one that opens it
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_memory.logger, "warning", lambda *args: warned.append(args))
            if ranks.rank == lacking == 0:
                patch.setattr(shared_memory, "_FOLDER", "/nowhere")
            if ranks.rank == lacking == 1:
                patch.setattr(shared_memory.mmap, "mmap", lambda *_: (_ for _ in ()).throw(OSError("no memory")))
            ranks.job.store = dist.PrefixStore(str(lacking), dist.distributed_c10d._get_default_store())
            is_there.append(share_memory(ranks, group, CPU) is not None)
    return is_there, len(warned)


def test_where_one_rank_cannot_have_it_none_has(workers: WorkerPool) -> None:
    assert workers.run(on_ranks, 2, lack) == [([False, False, True], 1), ([False, False, True], 0)]


def talk(ranks: Any, _: Any) -> None:
    """Lines carry messages whole and in order and wait for who is behind: messages of lines, and control messages, of
    which one takes many pages, more than there are."""
    lines = share_lines(ranks, CPU)
    sizes = torch.randint(1, PAGE_BYTES + 1, (100,), generator=torch.Generator().manual_seed(4)).tolist()
    for other, its in lines.items():
        for line, sender, receiver in ((its.control, 0, other), (its.reports, other, 0)):
            for number, size in enumerate(sizes):
                sent = message(sender, receiver, number, size)
                if (ranks.rank == 0) == (sender == 0):
                    line.send(sent)
                else:
                    time.sleep(0.05 if number % 40 == 0 else 0.0)  # so long that the sender comes to the ring's end
                    with torch.inference_mode(number % 2 == 0):  # as of a program that is in it now and then
                        into = torch.empty(size, dtype=torch.uint8)
                    assert torch.equal(line.receive(into), sent), (other, number)
    messages = [Message("records", token_ids=np.arange(n, dtype=np.int32)) for n in (3, 40 * PAGE_BYTES, 1)]
    if ranks.rank == 0:
        driver = ControlSender(ranks.report_group, [1, 2], {rank: its.control for rank, its in lines.items()})
        for one in messages:
            driver.send(one)
        return
    line = lines[ranks.rank].control
    follower = ControlReceiver(ranks.report_group, lambda one: one.token_ids, line, in_turn=ranks.rank == 1)
    assert all(np.array_equal(follower.receive(), one.token_ids) for one in messages)


@pytest.mark.parametrize(("work", "num_ranks"), [(exchange, 4), (combine, 3), (talk, 3)])
def test_each_rank_finds_what_was_sent(workers: WorkerPool, work: Callable[..., None], num_ranks: int) -> None:
    workers.run(on_ranks, num_ranks, work)


def fail(ranks: Any, group: Any) -> list[str]:
    memory, messages = share_memory(ranks, group, CPU), []
    for has_failure, limit_s in ((True, 60.0), (False, 0.15)):
        ranks.monitor.has_failure, ranks.config.dist_timeout_s = has_failure, limit_s
        with pytest.raises(RuntimeError) as caught:
            memory.receive(1 - ranks.rank, 8)
        messages.append(str(caught.value))
    return messages


def test_who_waits_hears_of_a_rank_that_has_failed_and_waits_no_longer_than_for_a_transfer(workers: WorkerPool) -> None:
    for rank, messages in enumerate(workers.run(on_ranks, 2, fail)):
        assert messages == [
            f"Timed out waiting for rank {1 - rank}: a rank has failed",
            f"Timed out waiting 0 s for rank {1 - rank} (--dist-timeout)",
        ]
