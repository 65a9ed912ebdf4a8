"""``python -m tools.predictor`` on small made-up tables in every format."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest

from medha.cli.command import run_app
from medha.errors import ConfigError
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


def write(path: Path, rows: Iterable[dict[str, object]]) -> Path:
    rows = list(rows)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def vidur_attention(path: Path) -> Path:
    def row(prefill: bool, size: int, kv: int, seconds: float) -> dict[str, object]:
        return {
            "time_stats.attn_decode.median": "" if prefill else seconds * 1e3,
            "time_stats.attn_prefill.median": seconds * 1e3 if prefill else "",
            "num_tensor_parallel_workers": 2,
            "batch_size": 1 if prefill else size,
            "prefill_chunk_size": size if prefill else 0,
            "kv_cache_size": kv,
            "is_prefill": prefill,
        }

    rows = [row(True, chunk, kv, prefill_s(chunk, kv)) for chunk in CHUNKS for kv in KVS]
    rows += [row(False, batch, kv, decode_s(batch, kv)) for batch in BATCHES for kv in KVS[1:]]
    return write(path, [*rows, row(True, 64, 0, 0.0)])  # a failed one


def vidur_mlp(path: Path) -> Path:
    return write(
        path,
        [
            {
                "time_stats.emb.median": 100.0,
                "time_stats.mlp_up_proj.median": linear_s(tokens) * 600 / tp,
                "time_stats.mlp_down_proj.median": linear_s(tokens) * 400 / tp,
                "num_tokens": tokens,
                "num_tensor_parallel_workers": tp,
            }
            for tp in (1, 2)
            for tokens in range(32, 2049, 32)
        ],
    )


def chunk_sample(path: Path) -> Path:
    return write(
        path,
        [
            {"prefill_chunk_size": chunk, "kv_cache_size": kv, "attn_prefill_median_ms": prefill_s(chunk, kv) * 1e3}
            for chunk in CHUNKS
            for kv in KVS
        ],
    )


def aiconfigurator_context(path: Path) -> Path:
    return write(
        path,
        [
            {
                "batch_size": batch,
                "isl": isl,
                "num_heads": 32,
                "num_key_value_heads": kv_heads,
                "step": 0,
                "latency": batch * prefill_s(isl, 0) * 1e3,
            }
            for kv_heads in (1, 8)
            for batch in (1, 2)
            for isl in CHUNKS
        ],
    )


def aiconfigurator_generation(path: Path) -> Path:
    return write(
        path,
        [
            {
                "batch_size": batch,
                "isl": 1,
                "num_heads": 32,
                "num_key_value_heads": 8,
                "step": step,
                "latency": decode_s(batch, step) * 1e3,
            }
            for batch in BATCHES
            for step in KVS[1:]
        ],
    )


def servingsim_attention(path: Path) -> Path:
    chunks, kvs, counts = (0, 64, 256, 512, 1024), (0, 512, 1024, 4096), (0, 1, 4, 16, 64)
    rows: list[dict[str, object]] = []
    for chunk in chunks:
        for kv in kvs if chunk else (0,):
            for count in counts:
                for kv_decode in (16, 256, 1024, 2048, 8192) if count else (0,):
                    if chunk and count:
                        seconds = mixed_s(chunk, kv, count, kv_decode)
                    elif chunk or count:
                        seconds = prefill_s(chunk, kv) if chunk else decode_s(count, kv_decode)
                    else:
                        continue
                    rows.append(
                        {
                            "prefill_chunk": chunk,
                            "kv_prefill": kv,
                            "n_decode": count,
                            "kv_decode": kv_decode,
                            "time_us": seconds * 1e6,
                        }
                    )
    return write(path, rows)


def servingsim_dense(path: Path) -> Path:
    return write(
        path,
        [
            {"layer": layer, "tokens": tokens, "time_us": linear_s(tokens) * 5e5}
            for layer in ("qkv_proj", "down_proj", "embedding")
            for tokens in range(16, 1025, 16)
        ],
    )


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
    rows: list[dict[str, object]] = [
        {"prefill_chunk": 64, "kv_prefill": 0, "n_decode": n, "kv_decode": kv, "time_us": 10.0}
        for n in BATCHES
        for kv in KVS
    ]
    with pytest.raises(ConfigError, match="needs rows of a chunk alone and of decodes alone"):
        bench_predictor([write(tmp_path / "mixed.csv", rows)])
