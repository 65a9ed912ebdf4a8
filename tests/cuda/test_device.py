"""The emulated device itself: small programs, each once right and once with one thing left out.

What it says of the host and of streams that do not wait: tests/cuda/test_faults.py.
"""

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from tests.cuda.device import CUDA, Device, DeviceError
from tests.cuda.tensors import Emulated


def ones() -> torch.Tensor:
    return torch.ones(64, device=CUDA)


def memory_dropped_early(is_right: bool) -> None:
    aside, x = torch.cuda.Stream(), ones()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        x.mul_(2)
    if is_right:
        torch.cuda.current_stream().wait_stream(aside)
    del x


def captured(run: Callable[[], torch.Tensor], pool: object = None) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        out = run()
    return graph, out


def inputs_of_a_graph(is_right: bool) -> None:
    x = ones()
    graph, out = captured(lambda: (x + 1) * 2)
    if is_right:
        x.fill_(4.0)
    else:
        del x
    graph.replay()
    assert out.tolist() == [10.0] * 64


def copy_in_a_graph(is_right: bool) -> None:
    host = torch.full((64,), 5.0)
    host = host.pin_memory() if is_right else host
    x = ones()
    graph, out = captured(lambda: x.copy_(host, non_blocking=True))
    graph.replay()
    assert out.tolist() == [5.0] * 64


def fork_in_a_graph(is_right: bool) -> None:
    aside, x = torch.cuda.Stream(), ones()

    def run() -> torch.Tensor:
        current = torch.cuda.current_stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            y = x + 1
        if is_right:
            current.wait_stream(aside)
        return y

    graph, out = captured(run)
    graph.replay()
    assert out.tolist() == [2.0] * 64


PROGRAMS = {
    memory_dropped_early: "race: freeing its memory does not wait for mul_ on stream 3",
    inputs_of_a_graph: "freed: add of a graph uses memory that has been freed",
    copy_in_a_graph: "capture: a copy from pageable memory",
    fork_in_a_graph: "capture: {stream 3} had not been joined when it ended",
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_is_left_out_is_reported(device: Device, program: Callable[[bool], None]) -> None:
    program(True)
    assert device.faults == []
    with contextlib.suppress(DeviceError):
        program(False)
    (reported,) = device.reported()
    assert reported.startswith(PROGRAMS[program])


def test_a_replay_overwrites_the_results_of_graphs_that_share_its_pool_and_came_later(device: Device) -> None:
    first, out = captured(ones)
    second, later = captured(ones, first.pool())
    second.replay()
    assert later.sum().item() == 64.0
    first.replay()
    assert out.sum().item() == 64.0 and later.isnan().all().item()


def test_fake_tensors_of_the_device_have_no_memory(device: Device) -> None:
    """DTensor derives shapes from them, in a tensor-parallel layout."""
    with FakeTensorMode():
        x = torch.empty_strided((4, 8), (8, 1), dtype=torch.float16, device=CUDA)
        assert isinstance(x, FakeTensor) and x.device == CUDA and x.add(1).shape == (4, 8)
    assert device.allocated == 0
    assert isinstance(ones(), Emulated)
