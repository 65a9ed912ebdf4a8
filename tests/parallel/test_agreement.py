"""Ranks agree on kernels: what one of them cannot build none uses, and the first rank's log says which and why."""

import logging
import os
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from medha.config import EngineConfig
from medha.cpu.library import library
from medha.engine.build import build_role
from tests.parallel.workers import WorkerPool


def start(folder: str, broken: int | None, options: dict[str, Any]) -> tuple[str, str, bool, str]:
    """On each rank, of which one may have no compiler: which attention serves, whose products, whether by fused norms
    and RoPE, and the log."""
    handler, logger = logging.StreamHandler(said := StringIO()), logging.getLogger("medha")
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANK"] == str(broken):
            patch.setenv("PATH", "")
            patch.delenv("CXX", raising=False)
            library.cache_clear()
        logger.addHandler(handler)
        level = logger.level
        logger.setLevel(logging.INFO)  # which forgets what the logger found to be off before
        try:
            with build_role(EngineConfig.from_flat(folder, num_kv_blocks=8, **options)) as role:
                runner = (role.follower or role.engine.runner).runner  # type: ignore[union-attr]
                product = runner.model.model["layers"]["0"].self_attn._qkv
                owner = getattr(product, "func", product).__module__
                return runner.backend.name, owner, runner.model.fused is not None, said.getvalue()
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
            library.cache_clear()


@pytest.mark.parametrize("layout", [{"tp": 2}, {"kvp": 2}], ids=lambda layout: next(iter(layout)))
def test_a_rank_without_a_compiler_leaves_all_without_our_kernels(
    workers: WorkerPool, model: Path, layout: dict[str, int]
) -> None:
    found = workers.run(start, 2, str(model), 1, layout)
    assert {name for name, *_ in found} == {"torch"}
    assert not any(owner.startswith("medha.cpu") for _, owner, *_ in found)
    assert not any(is_fused for *_, is_fused, _ in found)
    why = "a C++ compiler (c++, g++, clang++ or $CXX) (rank 1)"
    assert f"attention_backend='auto': cpu needs {why}; torch serves" in found[0][-1]
    assert f"products, norms and RoPE by torch: the CPU's own need {why}" in found[0][-1]


def test_where_every_rank_has_them_all_use_them(workers: WorkerPool, model: Path) -> None:
    for name, owner, is_fused, said in workers.run(start, 2, str(model), None, {"tp": 2}):
        assert (name, owner, is_fused) == ("cpu", "medha.cpu.decoder", True)
        assert "torch serves" not in said
