"""Hidden states on the emulated device: what a receive waits for, and what it may not wait for."""

from contextlib import nullcontext
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import medha.parallel.control
import medha.parallel.spp
from medha.batch import Batch, Row
from medha.parallel.spp import Digests, StagePipe
from tests.cuda.device import CUDA, Device
from tests.cuda.tensors import Emulated, launch_beside

BATCHES = [Batch(i, (Row(0, 4 * i, 4, is_decode=False, samples=False),)) for i in range(6)]


def pipe_of(**place: Any) -> StagePipe:
    """That of a rank at a place, for hidden states of 8 numbers."""
    ranks: Any = SimpleNamespace(pipe_group=None, tp_group=None, **place)
    return StagePipe(ranks, Digests(None), torch.empty(0, dtype=torch.float16, device=CUDA), dim=8, num_buffers=3)


def make_pipe(device: Device, patch: pytest.MonkeyPatch) -> StagePipe:
    """A pipe of a last stage, to which each batch comes as its id; receives are kernels of a stream of their own."""
    number, digests = iter(BATCHES), iter(BATCHES)
    stream = device.comm["receives"]

    def irecv(tensor: torch.Tensor, *, src: int, group: Any, tag: int = 0) -> Any:
        if not isinstance(tensor, Emulated):
            batch = next(digests)
            tensor.copy_(torch.tensor([batch.batch_id, batch.digest()]))
            return SimpleNamespace(wait=lambda: True)
        value = next(number).batch_id
        return launch_beside(device, stream, "receive", lambda: tensor.raw.fill_(value), (), (tensor,))

    for module in (medha.parallel.control, medha.parallel.spp):
        patch.setattr(module, "dist", SimpleNamespace(irecv=irecv))
    return pipe_of(neighbour={-1: 0}.get, layout=SimpleNamespace(tp=1), tp_rank=0)


def last_receive_waits_for_compute(device: Device, patch: pytest.MonkeyPatch) -> bool:
    """Take the batches one after the other, each posted while the one before computes; returns whether the last
    receive waits for the compute that was launched just before it was posted."""
    pipe, sums = make_pipe(device, patch), []
    pipe.post(BATCHES[0])
    for batch, following in pairwise(BATCHES):
        x_TD = pipe.receive(batch)
        before = device.default.launched
        sums.append((x_TD * 2).sum())
        pipe.post(following)
    sums.append((pipe.receive(BATCHES[-1]) * 2).sum())
    assert [x.item() for x in sums] == [2.0 * 32 * batch.batch_id for batch in BATCHES]
    return bool(device.comm["receives"].clock[device.default] > before)


def test_a_receive_waits_for_the_compute_of_the_batch_before_only_if_posted_on_its_stream(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not last_receive_waits_for_compute(device, monkeypatch)
    monkeypatch.setattr(medha.parallel.spp, "beside", lambda stream, used: nullcontext())
    assert last_receive_waits_for_compute(device, monkeypatch)


def test_compute_does_not_wait_for_sends_until_their_buffers_are_used_again(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what goes is this rank's share, as it was when it was sent."""
    arrived: list[list[float]] = []
    stream = device.comm["sends"]

    def isend(tensor: torch.Tensor, *, dst: int, group: Any, tag: int = 0) -> Any:
        if not isinstance(tensor, Emulated):
            return SimpleNamespace(wait=lambda: True)
        return launch_beside(device, stream, "send", lambda: arrived.append(tensor.raw.view(-1).tolist()), (tensor,))

    monkeypatch.setattr(medha.parallel.control, "dist", SimpleNamespace(isend=isend))
    monkeypatch.setattr(medha.parallel.spp, "all_gather_over", lambda group: None)
    pipe = pipe_of(neighbour={1: 1}.get, layout=SimpleNamespace(tp=2), tp_rank=1)
    waits_for = []
    for batch in BATCHES:
        x_TD = torch.arange(32, device=CUDA).to(torch.float16).view(4, 8) + 100 * batch.batch_id
        pipe.send(batch, x_TD)
        waits_for.append(device.default.clock[stream])
    assert waits_for[:3] == [0, 0, 0] < waits_for[3:]
    assert waits_for[-1] < stream.launched
    pipe._sends.drain()
    pipe.digests.drain()
    torch.cuda.synchronize()
    assert arrived == [[100.0 * batch.batch_id + i for i in range(16, 32)] for batch in BATCHES]
