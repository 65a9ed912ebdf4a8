"""Faults put into small programs and into medha's CUDA path, one at a time: the emulated device reports each."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda.device import CUDA, Device, DeviceError, Event, Graph, Stream, now
from tests.cuda.serving import SWAP, serve


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
    with suppress(DeviceError):
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


# -- medha's CUDA path ------------------------------------------------------------------------------------------------


Patch = pytest.MonkeyPatch


def no_new_plan(patch: Patch) -> None:
    """Attention in a graph is planned when it is captured, not before each replay."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper as Wrapper

    plan = Wrapper.plan

    def once(self: Any, *args: Any, **kwargs: Any) -> None:
        if not self.is_cuda_graph_enabled or getattr(self, "_plan_info", None) is None:
            plan(self, *args, **kwargs)

    patch.setattr(Wrapper, "plan", once)


def early_host(patch: Patch) -> None:
    """The host waits for no event: it plans a wrapper again before its last plan has left its pinned buffer, and reads
    tokens before they are copied."""
    patch.setattr(Event, "synchronize", lambda self: None)
    patch.setattr(Event, "elapsed_time", lambda self, end: 1.0)


def sync_in_a_capture(patch: Patch) -> None:
    """A captured layer looks at a value on the host."""
    linear = torch.nn.functional.linear

    def looking(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if now().capturing is not None:
            x.sum().item()
        return linear(x, *args, **kwargs)

    patch.setattr(torch.nn.functional, "linear", looking)


def dropped_wait(patch: Patch) -> None:
    """Streams do not wait for the events of others."""
    patch.setattr(Stream, "wait_event", lambda self, event: None)


def overwritten_pinned_buffer(patch: Patch) -> None:
    """Each step's integers are written to the pinned buffer of the last, whose copy has not run."""
    empty, buffer = torch.empty, torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)

    def same(*size: Any, **kwargs: Any) -> torch.Tensor:
        is_staging = kwargs.get("pin_memory") and kwargs.get("dtype") == torch.uint8 and kwargs.get("device") == "cpu"
        return buffer[: size[0]] if is_staging else empty(*size, **kwargs)

    patch.setattr(torch, "empty", same)


def freed_graph(patch: Patch) -> None:
    """A graph's own buffers go as soon as it is captured."""
    end = Graph.capture_end

    def ended(self: Graph) -> None:
        end(self)
        self.reset()

    patch.setattr(Graph, "capture_end", ended)


FAULTS: list[tuple[Callable[[Patch], None], str, dict[str, Any]]] = [
    (no_new_plan, "plan: a graph is replayed without a new plan", {}),
    (early_host, "race: the host does not wait for plan", {}),
    (early_host, "race: the host does not wait for to host", {"num_requests": 1}),
    (sync_in_a_capture, "capture: _local_scalar_dense makes the host wait", {}),
    (dropped_wait, "race: ", SWAP | {"cuda_graphs": False}),
    (overwritten_pinned_buffer, "pinned: memory was overwritten before", {}),
    (freed_graph, "freed: a graph is replayed that has been reset", {}),
]


@pytest.mark.parametrize(("fault", "report", "options"), FAULTS)
def test_fault_is_reported(
    model: Path, device: Device, fault: Callable[[Patch], None], report: str, options: dict[str, Any]
) -> None:
    with pytest.MonkeyPatch.context() as patch, suppress(Exception):
        patch.setattr("medha.worker.swap.HostCache.measure_block_s", lambda self: 0.0)
        fault(patch)
        serve(model, device="cuda", **options)
    assert report in device.reported()[0]
