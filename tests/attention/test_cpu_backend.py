"""The CPU's own kernel: what a query's result depends on, every width of vector, and machines that cannot build it.

tests/attention/test_torch_backend.py holds it to dense attention over any batch.
"""

import os
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from medha.attention.cpu_backend import CpuBackend
from medha.attention.interface import AttentionRows, LayerShape
from medha.cpu import library
from medha.errors import ConfigError
from medha.worker.shard import choose_backend
from tests.attention.reference import assert_rows_close
from tests.attention.test_torch_backend import CPU, DTYPES, Model, Shape, build, run
from tests.engines import on_threads

SHAPE = LayerShape(8, 2, 64, torch.float32)


@pytest.mark.parametrize("width", [4, 8, 16])
def test_every_width_of_vector(width: int, anew: pytest.MonkeyPatch) -> None:
    anew.setattr(library, "_FLAGS", (*library._FLAGS, f"-DMEDHA_WIDTH={width}"))
    batch = [Shape(1, (3000, 7), True), Shape(150, (64, 200), True), Shape(13, (70,), False), Shape(2, (), False)]
    for model in (Model(6, 1, 80), Model(8, 2, 64, sharpness=4.0), Model(16, 1, 16), Model(4, 4, 48, head_major=False)):
        (q_TNH, k, v), rows = build(model, batch, page_size=16, seed=width)
        assert_rows_close(run((q_TNH, k, v), rows, CpuBackend()), (q_TNH, k, v), rows)
        if model.head_dim == 64:  # any NaN is one
            k[int(rows.pages[0]) * 16 + 5] = torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32)
            assert run((q_TNH, k, v), rows, CpuBackend())[0][0].isnan().all()


def one_row(q_len: int, kv_len: int, table: np.ndarray) -> AttentionRows:
    return AttentionRows.of(np.array([q_len]), np.array([kv_len]), np.array([True]), [table], 16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_company_nor_threads_nor_chunks_change_a_bit(dtype: torch.dtype) -> None:
    """A prompt of 700 tokens in chunks, beside decodes, over scattered pages, is the prompt read whole."""
    model = Model(8, 2, 64, dtype=dtype)
    company = [Shape(1, (5000,), True), Shape(40, (90,), True)]
    qkv, rows = build(model, [Shape(700, (256, 444), True), *company], page_size=16)
    whole = run(qkv, rows, CpuBackend())
    for _ in on_threads(1, 2, 3):
        assert all(torch.equal(x, y) for x, y in zip(run(qkv, rows, CpuBackend()), whole, strict=True))
    table = rows.pages[rows.page_indptr[0] : rows.page_indptr[1]]
    for first, end in ((0, 100), (100, 164), (164, 700)):
        chunk = one_row(end - first, end, table)
        for x, y in zip(run((qkv[0][first:end], *qkv[1:]), chunk, CpuBackend()), whole, strict=True):
            assert torch.equal(x, y[first:end])
    alone = one_row(1, 5000, rows.pages[rows.page_indptr[1] : rows.page_indptr[2]])
    assert torch.equal(run((qkv[0][700:701], *qkv[1:]), alone, CpuBackend())[0], whole[0][700:701])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_len", [90, 40_000])
def test_what_is_no_number_is_not_taken_for_no_key(kv_len: int, dtype: torch.dtype) -> None:
    """Of one key, over which only those attend that come behind it; with few queries it is in one part of several."""
    for q_len in (1, 70):
        (q_TNH, k, v), rows = build(Model(8, 2, 64, dtype=dtype), [Shape(q_len, (kv_len,), True)], page_size=16)
        at = int(rows.pages[rows.page_indptr[0]]) * 16 + 5
        for pool in (k, v):
            pool[at] = torch.nan
        for found in run((q_TNH, k, v), rows, CpuBackend()):
            assert found.isnan().all()


# -- where it cannot be built ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (None, r"needs a C\+\+ compiler \(c\+\+, g\+\+, clang\+\+ or \$CXX\)"),
        ('[ "$1" = --version ] || { echo "x.cpp:1: error: no shuffles here" >&2; exit 1; }', "error: no shuffles here"),
        ("sleep 100", "timed out"),
    ],
)
def test_torch_serves_where_it_cannot_be_built(
    script: str | None, why: str, anew: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    anew.setattr(library, "_BUILD_S", 0.5)
    anew.delenv("CXX", raising=False)
    anew.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    anew.setenv("PATH", str(tmp_path) if script is None else f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    if script is not None:
        (tmp_path / "c++").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "c++").chmod(0o700)
    backend, said = choose_backend("auto", SHAPE, CPU)
    assert backend.name == "torch"
    with pytest.raises(ConfigError, match=f"attention_backend='cpu'.*{why}.*accepted here: auto, torch"):
        choose_backend("cpu", SHAPE, CPU)
    assert said.startswith("cpu needs")
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_heads_and_devices_that_it_does_not_serve() -> None:
    assert choose_backend("cpu", LayerShape(8, 2, 72, torch.float32), CPU)[0].name == "torch"
    with pytest.raises(ConfigError, match="needs a CPU, not cuda"):
        choose_backend("cpu", SHAPE, torch.device("cuda"))


def test_torch_serves_a_user_without_a_home(anew: pytest.MonkeyPatch) -> None:
    anew.delenv("XDG_CACHE_HOME", raising=False)
    anew.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    assert choose_backend("auto", SHAPE, CPU)[0].name == "torch"


def test_a_compiler_with_arguments(anew: pytest.MonkeyPatch, tmp_path: Path) -> None:
    anew.setenv("XDG_CACHE_HOME", str(tmp_path))
    anew.setenv("CXX", "c++ --no-such-flag")
    assert "no-such-flag" in (library.library()[1] or "")
