"""medha on the emulated device: the CPU's tokens, and no wait of the host in a steady step."""

import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from medha import LLM
from medha.config import EngineConfig
from medha.cost.predictor import Predictor, Work
from medha.profile.calibrate import Effort, measure
from medha.profile.meter import StageMeter
from medha.worker.step import Lane
from tests.cuda import kernels
from tests.cuda.device import Device, Event
from tests.cuda.serving import POOL, SWAP, Served, add_all, complete, drive, serve
from tests.cuda.tensors import MODE, Everywhere
from tests.engines import drained, submitted
from tests.parallel.workers import WorkerPool, num_ranks


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens_are_the_cpus(model: Path, expected: Served, device: Device, cuda_graphs: bool, is_async: bool) -> None:
    assert serve(model, device="cuda", cuda_graphs=cuda_graphs, async_scheduling=is_async) == expected


@pytest.mark.parametrize("device", [{"capability": (9, 0), "num_sms": 1, "seed": 1}], indirect=True)
def test_chunks_in_fa3(model: Path, expected: Served, device: Device) -> None:
    assert serve(model, device="cuda") == expected
    assert device.launches["fa3"] > 0


@pytest.mark.parametrize("device", [{"capability": (9, 0), "num_sms": 1, "seed": 1}], indirect=True)
def test_what_serves_where_fused_kernels_and_fa3_cannot_be_built(
    model: Path, expected: Served, device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain modules, and FA2."""
    flashinfer, no_compiler = kernels.import_flashinfer(), RuntimeError("Could not find nvcc\nand more")
    get_module = flashinfer.prefill.get_batch_prefill_module

    def without_fa3(backend: str, *args: Any) -> Any:
        if backend == "fa3":
            raise no_compiler
        return get_module(backend, *args)

    monkeypatch.setattr(flashinfer.activation, "get_act_and_mul_module", Mock(side_effect=no_compiler))
    monkeypatch.setattr(flashinfer.prefill, "get_batch_prefill_module", without_fa3)
    with caplog.at_level("INFO", "medha"):
        assert serve(model, device="cuda") == expected
    assert "run unfused: FlashInfer's kernels could not be built: Could not find nvcc" in caplog.text
    assert device.launches["fused_add_rmsnorm"] == 1  # when it was tried
    assert device.launches["fa3"] == 0
    told = "attention flashinfer (what it needs is here; FA2 with a long context in some 1 parts a KV head, for "
    assert told in caplog.text
    assert "no FA3: Could not find nvcc" in caplog.text


def test_swapped_blocks(model: Path, expected: Served, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medha.worker.swap.HostCache.measure_block_s", lambda self: 0.0)
    with LLM(model, device="cuda", dtype="float16", **POOL | SWAP) as llm:
        batches = submitted(llm.engine)
        assert complete(llm) == expected
    assert any(batch.swaps_out for batch in batches)


def test_the_host_does_not_wait_in_a_step(model: Path, device: Device) -> None:
    """Nor is the device idle while it does in a steady one: when an event is waited for, there is work behind it. Small
    batches run from graphs of pieces: one between the attentions of two layers, of which there are two."""
    with LLM(model, device="cuda", dtype="float16", prefix_caching=False, **POOL) as llm:
        for sampling in ({}, {"temperature": 0.8, "top_p": 0.9}, {"repetition_penalty": 1.2, "logprobs": 2}):
            add_all(llm, max_tokens=16, **sampling)
            device.syncs.clear()
            llm.engine.step()  # two batches
            for _ in range(3):
                device.launches.clear()
                llm.engine.step()
                assert device.launches["plan"] > 0
                assert device.launches["replay"] == 3
            for _ in range(6):
                llm.engine.step()
            device.stalls.clear()
            device.launches.clear()
            for _ in range(4):
                llm.engine.step()
            assert device.launches["replay"] == 4
            assert device.syncs == device.stalls == {}, sampling
            drained(llm.engine)


def test_launches_of_a_layer(model: Path, device: Device) -> None:
    """In eager decode: two norms with the sums before them, four products, RoPE, the write of keys and values,
    attention, silu. With the plain modules there are 42. With chunks attention takes more."""
    with LLM(model, device="cuda", dtype="float16", cuda_graphs=False, **POOL) as llm:
        seen: list[Counter[str]] = []
        layer = llm.engine.runner.model.model["layers"]["1"]  # type: ignore[attr-defined]
        forward = layer.forward

        def counted(*args: Any) -> Any:
            before = device.launches.copy()
            out = forward(*args)
            seen.append(device.launches - before)
            return out

        layer.forward = counted
        add_all(llm, max_tokens=16)
        for _ in range(12):
            llm.engine.step()
    assert device.launches["replay"] == 0
    assert seen[-1].total() == 10, seen[-1]
    assert max(launched.total() for launched in seen) == 11


def test_a_profile_of_whole_steps(model: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a millisecond here, so none of it is attention."""
    monkeypatch.setattr("medha.profile.calibrate.fill_pools", lambda *args, **how: None)  # there is no generator
    config = EngineConfig.from_flat(str(model), device="cuda", dtype="float16", num_kv_blocks=40, block_size=16)
    effort = Effort(chunks=(16, 64), batches=(1, 4), lengths=(64, 256), total_s=1e-3, min_repeats=1, max_repeats=1)
    found = measure(config, effort, max_kv=500)
    assert found is not None
    predictor = Predictor(found[0])
    for work in ([Work(64, 300, False)], [Work(1, 70, True)] * 4):
        assert predictor.predict(work) == pytest.approx(1e-3, rel=0.02)
    assert device.launches["replay"] > 0


def test_a_profile_times_both_ends_of_a_merge(device: Device) -> None:
    runner = Mock(device=torch.device("cuda"), **{"merge.start.return_value": list})
    meter = StageMeter(runner)
    assert runner.merge.start() and runner.merge.start()() == []
    assert [what for what, _, _ in meter._calls] == ["merge"] * 3


KVP = {"kvp": 2, "max_kv_per_group": 96}


HANDED = {"decode_replicas": 1, "decode_tp": 2}  # of one rank: that another's KV is written is known by its token alone
SLOW = pytest.param(KVP | {"tp": 2}, marks=pytest.mark.slow)


@pytest.mark.parametrize("layout", [KVP, {"spp": 2}, {"tp": 2}, HANDED, SLOW])
def test_several_ranks(model: Path, expected: Served, workers: WorkerPool, layout: dict[str, int]) -> None:
    """In a call of all ranks, and where rank 0 drives the engine. What launches batches waits for no token where all
    that embed it draw it, or are given it on the device."""
    kernels.import_flashinfer()
    found = workers.run(serve_on_ranks, num_ranks(layout), str(model), layout)
    assert found[0][0] == [expected, expected]
    if layout == {"tp": 2}:
        assert found[0][4] == {"MainThread"}  # not what launches
        assert found[1][4] == set()
    for _, faults, launches, waits, _ in found:
        assert faults == []
        assert (launches["transfers"] > 10) == ("kvp" in layout)
        if layout in ({"spp": 2}, {"tp": 2}):  # elsewhere a group has rows of its own
            assert launches["replay"] == found[0][2]["replay"] >= 8
        assert waits == []


def serve_on_ranks(
    folder: str, layout: dict[str, int]
) -> tuple[list[Served], list[str], Counter[str], list[str], set[str]]:
    """On each rank, as if it were alone on its node: what it generates, twice, its device's faults and launches, where
    in what sends and receives tensors the host waits for the device, and which threads wait for a batch. The second
    time kernels are loaded when they are first launched, which may wait for all that the device has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        device = kernels.install(patch)
        device.progress()
        run = Lane._run

        def run_emulated(self: Lane) -> None:
            with Everywhere():  # a mode is a thread's
                run(self)

        launch, loaded = device.launch, set[str]()

        def load(name: str, *args: Any, **how: Any) -> None:
            if device.capturing is None and "elsewhere" not in how and name not in loaded:
                loaded.add(name)
                for stream in list(device.streams):
                    device.wait(stream.mark())
            launch(name, *args, **how)

        synchronize, threads = Event.synchronize, set[str]()

        def wait(self: Event) -> None:
            if sys._getframe(1).f_code.co_name == "result":  # of a batch
                threads.add(threading.current_thread().name)
            synchronize(self)

        patch.setattr(Event, "synchronize", wait)
        patch.setattr(Lane, "_run", run_emulated)
        with MODE, LLM(Path(folder), device="cuda", dtype="float16", **POOL | layout) as llm:
            assert not llm.is_driver or llm.engine.scheduler.depth > 1  # one runs, and one is launched behind it
            tokens = [complete(llm)]
            patch.setattr(device, "launch", load)
            tokens.append(drive(llm))
        waits = [place for place in device.syncs if " at medha/parallel" in place]
        return tokens, device.faults, device.launches, waits, threads
