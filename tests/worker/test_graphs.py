"""Graphs of decodes: padding, buffers and plans, with a substitute that replays by running again; real ones on a GPU.

The substitute repeats the captured function, so it reads what lies in the buffers at the time of the replay, as a graph
does; attention is FlashInfer's wrappers over kernels in torch, which do as the last plan says.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from medha.attention.flashinfer_backend import FixedDecodes
from medha.batch import Batch
from medha.config import EngineConfig, SchedulerConfig
from medha.engine.engine import Engine
from medha.errors import ConfigError
from medha.params import SamplingParams
from medha.worker.graphs import CudaGraphs, Replay, graph_sizes
from medha.worker.swap import HostCache
from tests.attention.test_torch_backend import make_flashinfer
from tests.engines import build_engine, drained, make_engine, run_to_end, submitted
from tests.serving import NUM_TOKENS, Case, Model

SIZES = (1, 2, 4, 8)


class Repeating(CudaGraphs):
    """Captures a function and replays it by calling it; some sizes find no memory."""

    def __init__(self, *, refused: Sequence[int] = (), is_alone: bool = True) -> None:
        self._is_alone = is_alone
        self.captured: list[int] = []
        self.replayed: list[int] = []
        self._refused = refused

    def capture(self, run: Callable[[Replay], torch.Tensor]) -> tuple[torch.Tensor, list[Replay]]:
        def cut() -> None:
            raise AssertionError("graphs of decodes are whole")

        out = run(cut)
        size = len(out)
        if size in self._refused:
            raise torch.OutOfMemoryError("none left")
        self.captured.append(size)

        def replay() -> None:
            self.replayed.append(size)
            with torch.inference_mode():
                out.copy_(run(cut))

        return out, [replay]


def with_graphs(
    case: Case, *, sizes: Sequence[int] = SIZES, refused: Sequence[int] = (), block_size: int = 16, **scheduler: int
) -> tuple[Engine, Repeating]:
    options = {"chunk_size": 120, "max_batch_tokens": 240, "num_blocks": -(-1600 // block_size)} | scheduler
    backend = make_flashinfer(block_size=block_size)
    engine = make_engine(case.decoder, backend=backend, has_scratch=True, block_size=block_size, **options)
    maker = Repeating(refused=refused)
    engine.runner.capture(maker, sizes)  # type: ignore[attr-defined]
    return engine, maker


# -- graphs ----------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    sizes=st.sets(st.integers(1, 8), min_size=1),
    chosen=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    block_size=st.sampled_from([16, 48, 256]),
    async_scheduling=st.booleans(),
    chunk_size=st.sampled_from([60, 200]),
)
def test_tokens_are_those_of_eager_execution(case: Case, sizes: set[int], chosen: list[int], **options: int) -> None:
    engine, maker = with_graphs(case, sizes=sorted(sizes), num_blocks=240, **options)
    got = run_to_end(engine, [case.prompts[i] for i in chosen], NUM_TOKENS)
    assert got == [case.expected[i] for i in chosen]
    assert maker.captured == sorted(sizes, reverse=True)


def test_graphs_of_all_sizes_have_one_buffer_of_logits(case: Case) -> None:
    engine, _ = with_graphs(case)
    graphs = engine.runner.graphs  # type: ignore[attr-defined]
    outs = [graph.out for graph in graphs._graphs.values()]
    assert sorted(len(out) for out in outs) == sorted(SIZES)
    assert {out.untyped_storage().data_ptr() for out in outs} == {graphs._out.untyped_storage().data_ptr()}
    assert graphs._out.shape == (max(SIZES), case.decoder.config.vocab_size)


def test_a_batch_whose_long_context_a_graph_starves_runs_eagerly(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FixedDecodes, "starves", lambda self, rows: len(rows) == 2)
    engine, maker = with_graphs(case)
    assert run_to_end(engine, case.prompts[:2], NUM_TOKENS) == case.expected[:2]
    assert 2 not in maker.replayed


def test_a_batch_is_filled_up_to_the_next_size_and_larger_ones_run_eagerly(case: Case) -> None:
    engine, maker = with_graphs(case, sizes=(2, 4))
    batches = submitted(engine)
    for i in range(6):
        params = SamplingParams(temperature=0.0, max_tokens=2 + 2 * i, output_kind="final_only")
        engine.add_request(str(i), [1, 2, 3 + i], params)
    drained(engine)
    # All six decode together, then as one after the other ends every two tokens fewer.
    rows = [len(batch.rows) for batch in batches if len(batch.rows) <= 4]
    found = list(zip(rows, maker.replayed, strict=True))
    assert found == [(4, 4), (4, 4), (3, 4), (3, 4), (2, 2), (2, 2), (1, 2), (1, 2)]


def test_sizes_for_which_there_is_no_memory_are_left_out(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """Unless other ranks wait for them."""
    engine, maker = with_graphs(case, refused=(8, 4))
    assert maker.captured == [2, 1]
    assert sorted(engine.runner.graphs._graphs) == [1, 2]  # type: ignore[attr-defined]
    assert ["no memory for the CUDA graph of 8 decodes" in r.getMessage() for r in caplog.records] == [True, False]
    assert run_to_end(engine, case.prompts, NUM_TOKENS) == case.expected
    with pytest.raises(ConfigError, match=r"CUDA graph of 4 decodes; accepted: .*enforce_eager"):
        engine.runner.capture(Repeating(refused=(4,), is_alone=False), SIZES)  # type: ignore[attr-defined]


def test_graph_sizes() -> None:
    decodes = [graph_sizes(SchedulerConfig(max_num_seqs=most))[0] for most in (1, 2, 7, 40, 9999)]
    assert decodes[:3] == [(1,), (1, 2), (1, 2, 4, 7)]
    assert decodes[3:] == [(1, 2, 4, 8, 16, 32, 40), (1, 2, 4, 8, *range(16, 257, 16))]
    pieces = [graph_sizes(SchedulerConfig(max_batch_tokens=most))[1] for most in (16, 100, 9999)]
    assert pieces == [(16,), (16, 32, 64, 100), (16, 32, 64, 128, 256, 384, 512)]


# -- CUDA ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_graphs_eager_execution_and_swapping_agree_on_a_gpu(
    async_scheduling: bool, needle: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The needle model continues a repetition with a wide margin, so that no rounding decides a token."""
    pytest.importorskip("flashinfer")
    monkeypatch.setattr(HostCache, "measure_block_s", lambda self: 0.0)
    prompts = [[65 + (i * j) % 26 for j in range(40 + 97 * i)] for i in range(6)]
    shared = {"device": "cuda", "dtype": "bfloat16", "block_size": 16, "async_scheduling": async_scheduling}
    found, batches = [], list[Batch]()
    for options in ({}, {"cuda_graphs": False}, {"num_kv_blocks": 48, "overcommit": True, "swap_space": "64MiB"}):
        config = EngineConfig.from_flat(str(needle.folder), **{"num_kv_blocks": 1024, **shared, **options})
        engine = build_engine(config)
        assert (engine.runner.graphs is not None) == ("cuda_graphs" not in options)  # type: ignore[attr-defined]
        batches = submitted(engine)
        found.append(run_to_end(engine, prompts, 60))
    assert found[0] == found[1] == found[2] and any(batch.swaps_out for batch in batches)


@pytest.mark.gpu
def test_collectives_of_one_rank_can_be_captured(tmp_path: Path) -> None:
    """A smoke test: the sum and the gathering of a tensor-parallel group over NCCL, read anew at each replay."""
    import torch.distributed as dist

    from medha.parallel.tp import all_gather_over, all_reduce_over

    device = torch.device("cuda", 0)
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[no-untyped-call]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    try:
        replay = None
        reduce, gather = all_reduce_over(dist.group.WORLD), all_gather_over(dist.group.WORLD)
        given = torch.ones(4, 8, device=device)
        out, (replay,) = CudaGraphs(device).capture(lambda cut: gather(reduce(given * 2) + 1))
        for value in (1.0, 5.0):
            given.fill_(value)
            replay()
            assert torch.equal(out, torch.full((4, 8), 2 * value + 1, device=device))
    finally:
        replay = None  # NCCL would wait for the graph that holds its collectives
        dist.destroy_process_group()
