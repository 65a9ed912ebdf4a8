"""Graphs in a tensor-parallel group: every rank replays the same sizes, collectives within them.

With substitutes for FlashInfer and for graphs, which run the captured function again; real ones need several GPUs.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import medha.engine.distributed
import medha.parallel.mesh
from medha.config import ParallelConfig
from medha.engine.build import RankHandle
from medha.engine.distributed import DrivingRunner, Follower
from medha.params import SamplingParams
from tests.parallel.workers import WorkerPool
from tests.serving import random_ids


def generate(folder: str, options: dict[str, Any], prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """On each rank: tokens, and how many batches ran from a graph."""
    import medha.engine.build as build
    from medha import LLM
    from medha.worker import shard
    from tests.attention.test_torch_backend import make_flashinfer
    from tests.worker.test_graphs import Repeating

    makers: list[Repeating] = []

    def make(device: object) -> Repeating:
        makers.append(Repeating())
        return makers[-1]

    with pytest.MonkeyPatch.context() as patch:
        if options.get("cuda_graphs"):
            patch.setattr(shard, "wants_graphs", lambda *_: True)
            patch.setattr(shard, "CudaGraphs", make)
            patch.setattr(
                build, "choose_backend", lambda *_, block_size, **__: (make_flashinfer(block_size=block_size), "")
            )
        with LLM(folder, **options) as llm:
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in prompts], SamplingParams(temperature=0.0, max_tokens=6)
            )
    return [list(output.outputs[0].token_ids) for output in outputs], sum(len(maker.replayed) for maker in makers)


def test_a_tensor_parallel_group_replays_graphs(workers: WorkerPool, model: Path) -> None:
    prompts = [random_ids(length, seed=8) for length in (30, 5, 61)]
    options = {"tp": 2, "max_num_seqs": 4, "block_size": 16, "num_kv_blocks": 64}
    eager = workers.run(generate, 2, str(model), options | {"cuda_graphs": False}, prompts)
    captured = workers.run(generate, 2, str(model), options | {"cuda_graphs": True}, prompts)
    assert [tokens for tokens, _ in captured] == [tokens for tokens, _ in eager]
    assert len(captured[0][0]) == len(prompts)
    replayed = [number for _, number in captured]
    assert replayed[0] == replayed[1] >= 4
    assert all(number == 0 for _, number in eager)


@pytest.mark.parametrize("part", ["caller", "follower"])
def test_graphs_are_gone_before_the_groups(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """NCCL ends a group when no graph is left that holds its collectives; the last barrier is gloo's."""
    order: list[str] = []

    class Graph:
        def __del__(self) -> None:
            order.append("graph")

    groups: dict[str, Any] = {
        "pipe_group": "pipe",
        "report_group": "gloo",
        "control_group": "control",
        "merge_group": "merges",
    }
    groups["transfer_group"] = None  # of decode instances alone
    monitor = SimpleNamespace(leave=lambda: True, doing=lambda activity: None)
    places = {"first_stage_ranks": lambda group: [0, 1], "of_groups": lambda groups: [0, 1]}
    ranks: Any = SimpleNamespace(config=ParallelConfig(tp=2), **places, **groups, monitor=monitor)
    runner: Any = SimpleNamespace(graphs=Graph())
    quiet: Any = SimpleNamespace(send=lambda message: None, drain=lambda: None)
    dist = SimpleNamespace(
        barrier=lambda *, group: order.append(f"barrier of {group}"),
        destroy_process_group=lambda group: order.append(f"end of {group}"),
    )
    monkeypatch.setattr(medha.parallel.mesh, "dist", dist)
    monkeypatch.setattr(medha.engine.distributed, "ControlReceiver", lambda group, prepare: quiet)
    monkeypatch.setattr(Follower, "_follow_to", lambda self, name, kind: None)
    parts: dict[str, Any] = {"caller": DrivingRunner(runner, ranks, quiet), "follower": Follower(runner, ranks)}
    no_limits: Any = None
    RankHandle(no_limits, None, runner, **{part: parts[part]}).close()
    assert order == ["graph", "barrier of gloo", "end of pipe", "end of gloo", "end of control", "end of merges"]
