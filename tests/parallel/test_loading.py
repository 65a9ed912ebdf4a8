"""Each rank reads and holds only its own part of a checkpoint, as the dry run foretells, and uses kernels that all of
them can build: what one cannot none uses, and the first rank's log says which and why."""

import logging
import os
import re
from contextlib import ExitStack
from io import StringIO
from math import prod
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from rich.console import Console

from medha.config import EngineConfig, ParallelConfig
from medha.cpu.decoder import PackedLinear
from medha.cpu.library import library
from medha.engine.build import build_role
from medha.generate.layout import run_dry
from medha.models.hf_config import load_model_config
from medha.models.layers import local_part
from medha.models.weights import Checkpoint, load_parameters
from medha.worker import shard
from medha.worker.shard import ModelShard
from tests.checkpoints import make_checkpoint
from tests.parallel.workers import WorkerPool


def load(folder: Path, options: dict[str, Any]) -> tuple[int, int]:
    """On each rank: (bytes read from the checkpoint, bytes of parameters held)."""
    read: list[int] = []

    def counted(parameters: Any, checkpoint: Checkpoint, **options: Any) -> None:
        load_parameters(parameters, checkpoint, **options)
        read.append(checkpoint.bytes_read)

    with mock.patch.object(shard, "load_parameters", counted):
        role = build_role(EngineConfig.from_flat(str(folder), num_kv_blocks=2, **options))
    with role:
        held = {id(p): local_part(p).numel() * p.element_size() for p in role.runner.model.parameters()}
    return sum(read), sum(held.values())


@pytest.mark.parametrize(
    ("family", "tied", "tp", "spp"), [("qwen2", False, 4, 1), ("qwen3", False, 1, 3), ("llama-bias", True, 2, 2)]
)
def test_each_rank_reads_only_its_part(
    workers: WorkerPool, tmp_path: Path, family: str, tied: bool, tp: int, spp: int
) -> None:
    make_checkpoint(tmp_path, family, tied=tied)
    options = {"tp": tp, "spp": spp, "tp_forward": "dtensor"}  # which keeps the parameters as they were loaded
    answers = workers.run(load, tp * spp, tmp_path, options)
    model = load_model_config(tmp_path)
    odd_vocab = model.hidden_size * 4  # 211 rows do not divide: a rank may hold one more than its share
    for rank, (read, held) in enumerate(answers):
        assert read == held
        weight_bytes = ModelShard.at(model, ParallelConfig(tp=tp, spp=spp), rank, torch.float32).weight_bytes
        assert abs(held - weight_bytes) <= 2 * odd_vocab
    with Checkpoint(tmp_path) as checkpoint:
        whole = sum(4 * prod(info.shape) for info in checkpoint.tensors.values())  # float32
    replicas = 1.5 if tied or family == "qwen2" else 1.1  # tied heads, KV heads and norms are held more than once
    assert whole <= sum(read for read, _ in answers) <= replicas * whole


def test_dry_run_prints_rank_map_memory_and_longest_context(folder: Path) -> None:
    console = Console(record=True, width=100)
    options = {"tp": 2, "spp": 3, "kv_memory": 1 << 20, "block_size": 64}
    assert run_dry(EngineConfig.from_flat(str(folder), **options), console) == 0
    text = console.export_text()
    assert text.strip().startswith("LlamaForCausalLM on 6 ranks")
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert [row[:5] for row in rows] == [
        [str(rank), "0", str(rank // 2), str(rank % 2), f"{rank // 2}-{rank // 2}"] for rank in range(6)
    ]
    # one layer, one KV head of 16, keys and values, float32
    assert {row[6] for row in rows} == {f"{2 * 16 * 4} bytes"}
    assert text.rstrip().endswith("Longest context: 8,192 tokens (the model allows 8,192).")


def build(folder: Path, broken: int | None, options: dict[str, Any]) -> tuple[str, float, bool, str]:
    """On each rank, of which one may have no compiler: which attention serves, how many products are our own, by those
    of a model of its layers, whether by fused norms and RoPE, and the log."""
    logger, said = logging.getLogger("medha"), StringIO()
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(logger, "handlers", [logging.StreamHandler(said)])
        patch.setattr(logger, "isEnabledFor", lambda level: True)
        if os.environ["RANK"] == str(broken):
            patch.setenv("PATH", "")
            patch.delenv("CXX", raising=False)
            library.cache_clear()
            stack.callback(library.cache_clear)
        packed = stack.enter_context(
            mock.patch.object(PackedLinear, "__init__", autospec=True, side_effect=PackedLinear.__init__)
        )
        with build_role(EngineConfig.from_flat(str(folder), num_kv_blocks=8, **options)) as role:
            runner = role.runner
            share = packed.call_count / (4 * runner.model.config.num_layers + 1)
            return runner.backend.name, share, runner.model.fused is not None, said.getvalue()


@pytest.mark.parametrize("layout", [{"tp": 2}, {"kvp": 2}], ids=lambda layout: next(iter(layout)))
def test_a_rank_without_a_compiler_leaves_all_without_our_kernels(
    workers: WorkerPool, model: Path, layout: dict[str, int]
) -> None:
    found = workers.run(build, 2, model, 1, layout)
    for name, share, is_fused, _ in found:
        assert (name, share, is_fused) == ("torch", 0.0, False)
    why = "a C++ compiler (c++, g++, clang++ or $CXX) (rank 1)"
    assert f"attention_backend='auto': cpu needs {why}; torch serves" in found[0][-1]
    assert f"products, norms and RoPE by torch: the CPU's own need {why}" in found[0][-1]


def test_where_every_rank_has_them_all_use_them(workers: WorkerPool, model: Path) -> None:
    for name, share, is_fused, said in workers.run(build, 2, model, None, {"tp": 2}):
        assert (name, share, is_fused) == ("cpu", 1.0, True)
        assert "torch serves" not in said
