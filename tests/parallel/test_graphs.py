"""How a rank with graphs ends. That all ranks of a group replay the same ones is shown on the emulated device."""

from types import MethodType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest
import torch

import medha.engine.distributed
import medha.parallel.mesh
from medha.config import ParallelConfig
from medha.engine.build import RankHandle
from medha.engine.distributed import DrivingRunner, Follower
from medha.records import Recorder
from medha.worker.runner import Runner


@pytest.mark.parametrize("part", ["caller", "follower"])
def test_graphs_are_gone_before_the_groups(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """NCCL ends a group when no graph is left that holds its collectives; the last barrier is gloo's."""
    dist = Mock()

    class Graph:
        def __del__(self) -> None:
            dist.graph_ends()

    groups = {"pipe_group": "pipe", "report_group": "gloo", "control_group": "control", "merge_group": "merges"}
    ranks: Any = MagicMock(config=ParallelConfig(tp=2), **groups, transfer_group=None)  # without decode instances
    ranks.monitor.has_failure = False
    runner: Any = SimpleNamespace(model=None, recorder=Recorder(), device=torch.device("cpu"))
    runner.graphs, runner._layers = Graph(), Graph()
    runner.drop_graphs = MethodType(Runner.drop_graphs, runner)
    quiet = Mock()
    monkeypatch.setattr(medha.parallel.mesh, "dist", dist)
    monkeypatch.setattr(medha.engine.distributed, "ControlReceiver", lambda *args, **kwargs: quiet)
    monkeypatch.setattr(Follower, "_follow_to", lambda self, name, kind: None)
    parts: dict[str, Any] = {"caller": DrivingRunner(runner, ranks, quiet), "follower": Follower(runner, ranks)}
    RankHandle(Mock(), None, runner, str, part=parts[part]).close()
    ends = [call.destroy_process_group(name) for name in ("pipe", "gloo", "control", "merges")]
    assert dist.mock_calls == [call.graph_ends(), call.graph_ends(), call.barrier(group="gloo"), *ends]
