"""``python -m tools.predictor`` on small made-up tables in every format."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from medha.cli.command import run_app
from medha.errors import ConfigError
from tests.tools import write
from tools.predictor import SPLITS, app, bench_predictor
from tools.tables import read_tables

CHUNKS = tuple(range(64, 1025, 64))
KVS = tuple(range(0, 4097, 256))
BATCHES = (1, 2, 4, 8, 16, 32, 64)


def prefill_s(chunk: float, kv: float) -> float:
    return 1e-5 + 2e-10 * chunk * kv + 1e-10 * chunk**2 + (2e-6 if kv else 0.0)


def decode_s(batch: float, kv: float) -> float:
    return 1e-5 + 1e-9 * batch * kv


def linear_s(tokens: float) -> float:
    return max(1e-4, tokens * 1e-6)


def mixed_s(chunk: float, kv: float, count: float, kv_decode: float) -> float:
    return max(prefill_s(chunk, kv) + count * (1e-6 + 3e-9 * kv_decode), 2e-8 * kv_decode)


def vidur_attention(path: Path) -> Path:
    rows: list[tuple[object, ...]] = [(True, 1, c, kv, prefill_s(c, kv) * 1e3, "") for c in CHUNKS for kv in KVS]
    rows += [(False, n, 0, kv, "", decode_s(n, kv) * 1e3) for n in BATCHES for kv in KVS[1:]]
    rows += [(True, 1, 64, 0, 0.0, "")]  # a failed one
    header = "is_prefill,batch_size,prefill_chunk_size,kv_cache_size"
    times = "time_stats.attn_prefill.median,time_stats.attn_decode.median"
    return write(path, f"num_tensor_parallel_workers,{header},{times}", [(2, *row) for row in rows])


def vidur_mlp(path: Path) -> Path:
    header = "time_stats.emb.median,time_stats.mlp_up_proj.median,time_stats.mlp_down_proj.median"
    rows = [
        (100.0, linear_s(tokens) * 600 / tp, linear_s(tokens) * 400 / tp, tokens, tp)
        for tp in (1, 2)
        for tokens in range(32, 2049, 32)
    ]
    return write(path, f"{header},num_tokens,num_tensor_parallel_workers", rows)


def chunk_sample(path: Path) -> Path:
    rows = [(chunk, kv, prefill_s(chunk, kv) * 1e3) for chunk in CHUNKS for kv in KVS]
    return write(path, "prefill_chunk_size,kv_cache_size,attn_prefill_median_ms", rows)


AICONFIGURATOR = "batch_size,isl,num_heads,num_key_value_heads,step,latency"


def aiconfigurator_context(path: Path) -> Path:
    rows = [(n, isl, 32, kv, 0, n * prefill_s(isl, 0) * 1e3) for kv in (1, 8) for n in (1, 2) for isl in CHUNKS]
    return write(path, AICONFIGURATOR, rows)


def aiconfigurator_generation(path: Path) -> Path:
    rows = [(n, 1, 32, 8, step, decode_s(n, step) * 1e3) for n in BATCHES for step in KVS[1:]]
    return write(path, AICONFIGURATOR, rows)


SERVINGSIM = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"


def servingsim_attention(path: Path) -> Path:
    before, decodes = (0, 512, 1024, 4096), list(product((1, 4, 16, 64), (16, 256, 1024, 2048, 8192)))
    chunks = list(product((64, 256, 512, 1024), before))
    rows = [(c, kv, 0, 0, prefill_s(c, kv) * 1e6) for c, kv in chunks]
    rows += [(0, 0, n, kv, decode_s(n, kv) * 1e6) for n, kv in decodes]
    rows += [(c, kv, n, own, mixed_s(c, kv, n, own) * 1e6) for c, kv in chunks for n, own in decodes]
    return write(path, SERVINGSIM, rows)


def servingsim_dense(path: Path) -> Path:
    layers, sizes = ("qkv_proj", "down_proj", "embedding"), range(16, 1025, 16)
    rows = [(layer, tokens, linear_s(tokens) * 5e5) for layer, tokens in product(layers, sizes)]
    return write(path, "layer,tokens,time_us", rows)


FORMATS: dict[str, tuple[Callable[[Path], Path], dict[str, float]]] = {
    "vidur_attention.csv.gz": (vidur_attention, {"prefill": 0.02, "decode": 0.01}),
    "mlp.csv": (vidur_mlp, {"linear": 0.01}),
    "sample.csv": (chunk_sample, {"prefill": 0.02}),
    "context.csv.gz": (aiconfigurator_context, {"prefill": 0.05}),
    "generation.csv": (aiconfigurator_generation, {"decode": 0.01}),
    "attention.csv": (servingsim_attention, {"prefill": 0.1, "decode": 0.02, "mixed": 0.25}),
    "dense.csv.gz": (servingsim_dense, {"linear": 0.02}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_held_out_rows_of_a_kernel_of_the_form_are_predicted(name: str, tmp_path: Path) -> None:
    make, bounds = FORMATS[name]
    results = bench_predictor([make(tmp_path / name)])
    assert {r.table for r in results} == {f"{tmp_path.name}/{name}, {kind}" for kind in bounds}
    for r in results:
        assert r.rows > 0 and r.split in SPLITS
        bound = bounds[r.table.rpartition(" ")[2]]
        assert r.median_error <= r.p90_error <= r.p99_error
        assert r.median_error < bound and abs(r.total_error) < 2 * bound, r


def test_rows_are_read_in_seconds_and_failed_ones_left_out(tmp_path: Path) -> None:
    prefill, decode = read_tables(vidur_attention(tmp_path / "a.csv"))
    assert (prefill.kind, prefill.group, decode.kind) == ("prefill", "tp2", "decode")
    assert len(prefill.seconds) == len(CHUNKS) * len(KVS)
    np.testing.assert_allclose(prefill.seconds, [prefill_s(*row) for row in prefill.sizes])
    np.testing.assert_allclose(decode.seconds, [decode_s(*row) for row in decode.sizes])
    one, two = read_tables(vidur_mlp(tmp_path / "m.csv"))
    np.testing.assert_allclose(one.seconds, [linear_s(tokens) for (tokens,) in one.sizes])  # no embedding
    np.testing.assert_allclose(two.seconds * 2, one.seconds)
    (dense,) = read_tables(servingsim_dense(tmp_path / "d.csv"))
    np.testing.assert_allclose(dense.seconds, [linear_s(tokens) for (tokens,) in dense.sizes])


def test_table_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_path = tmp_path / "report.json"
    table = str(vidur_mlp(tmp_path / "mlp.csv"))
    assert run_app(app, "predictor", ["--table", table, "--output-json", str(report_path)]) == 0
    report = json.loads(report_path.read_text())
    assert report["benchmark"] == "predictor" and report["options"]["seed"] == 0
    assert [r["split"] for r in report["results"]] == list(SPLITS)
    assert "linear" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("none.csv", None, r"table .*none\.csv cannot be read"),
        ("broken.csv.gz", b"not gzip", r"broken\.csv\.gz cannot be read"),
        ("other.csv", b"a,b\n1,2\n", r"other\.csv is of no known format; accepted are columns"),
        ("words.csv", b"layer,tokens,time_us\nx,many,1.0\n", r"words\.csv has a value that is no number"),
        ("empty.csv", b"", "no known format"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, name: str, data: bytes | None, message: str) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        bench_predictor([tmp_path / name])


def test_mixed_rows_need_their_parts(tmp_path: Path) -> None:
    rows = [(64, 0, n, kv, 10.0) for n in BATCHES for kv in KVS]
    with pytest.raises(ConfigError, match="needs rows of a chunk alone and of decodes alone"):
        bench_predictor([write(tmp_path / "mixed.csv", SERVINGSIM, rows)])
