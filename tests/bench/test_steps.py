"""Steps over a long context at a toy size: what is held, what runs, and what the figures are made of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medha.bench.cli import app
from medha.bench.job import Job
from medha.bench.model import write_config
from medha.bench.steps import ONE_RANK, Parts, StepOptions, step_scaling
from medha.cli.command import run_app
from medha.config import ParallelConfig
from medha.profile.held import Held
from tests.bench.shapes import TINY

SMALL = {**TINY, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(("mode", "q_len"), [("decode", 1), ("chunk", 16)])
def test_table_and_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: str, q_len: int) -> None:
    path = tmp_path / "steps.json"
    options = ["--mode", mode, "--context", "2048", "--num-iters", "1", "--hf-overrides", json.dumps(SMALL)]
    options += ["--chunk-size", "16"] if mode == "chunk" else []
    assert run_app(app, "bench", ["scaling", *options, "--output-json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [(r["context"], r["layout"], r["num_ranks"]) for r in report["results"]] == [
        (2048, ONE_RANK, 1),
        (2048, "kvp2", 2),
    ]
    assert report["model"]["max_position_embeddings"] == 2048 + q_len
    one, two = report["results"]
    assert one["ratio"] == 1.0
    assert one["path"]["merge_s"] == 0.0 < two["path"]["merge_s"]
    for result in report["results"]:
        assert len(result["seconds"]) == result["timing"]["runs"] == 10
        assert len(result["ranks"]) == result["num_ranks"]
        for parts in (result["path"], *result["ranks"]):
            assert parts["attention_s"] > 0 and parts["replicated_s"] > 0
    text = capsys.readouterr().out
    assert "kvp2" in text and "replicated" in text


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["kvp2spp2", "kvp2tp2", "kvp3"])
def test_other_layouts(layout: str) -> None:
    options = StepOptions(None, (1024, 2048), (layout,), hf_overrides=SMALL, runs=1, steps=2, block_size=64)
    results = step_scaling(options)
    assert [(r.context, r.layout) for r in results] == [
        (context, name) for context in (1024, 2048) for name in (ONE_RANK, layout)
    ]
    assert all(r.path.merge_s > 0 for r in results[1::2])


def test_what_the_ranks_hold_and_measure(tmp_path: Path) -> None:
    """Each of two groups holds its share of the context in whole blocks, and measures its attention alone."""
    held = Held(context=1000, q_len=1, is_decode=True)
    write_config(tmp_path, {**SMALL, "max_position_embeddings": 1001})
    options = {"load_format": "dummy", "dtype": "float32", "block_size": 64, "num_kv_blocks": 8, "device": "cpu"}
    fields = {"context": 1000, "q_len": 1, "is_decode": True}
    with Job(str(tmp_path), ParallelConfig(kvp=2), options, held=fields) as job:
        answer = job.ask("steps", held=fields, steps=3)
        words = job.end()
    assert len(answer["seconds"]) == 3
    block_bytes = 2 * 2 * 64 * 2 * 8 * 4  # keys and values, layers, tokens, KV heads, head dimension, float32
    assert [held.num_blocks(group, num_groups=2, block_size=64) for group in (0, 1)] == [8, 8]
    assert [one.kv_bytes for one in words] == [8 * block_bytes] * 2
    for one in words:
        assert one.peak_memory_bytes > 0
        counts = {what: sum(span[0] == what for span in one.spans) for what in ("attention", "packing")}
        # of four batches and two layers; the shared rows and the others, of which there are none, are apart
        assert counts == {"attention": 2 * 4 * 2, "packing": 4 * 2}


@pytest.mark.parametrize(
    ("context", "num_groups", "shards"),
    [
        (1000, 1, [(0, 1000)]),
        (1000, 2, [(0, 512), (512, 1000)]),
        (1024, 2, [(0, 512), (512, 1024)]),
        (700, 3, [(0, 256), (256, 512), (512, 700)]),
    ],
)
def test_shards(context: int, num_groups: int, shards: list[tuple[int, int]]) -> None:
    held = Held(context, 1, is_decode=True)
    assert [held.shard(group, num_groups=num_groups, block_size=64) for group in range(num_groups)] == shards


def test_parts_are_medians_one_by_one() -> None:
    parts = [Parts(1.0, 2.0, 3.0, 4.0), Parts(3.0, 0.0, 3.0, 8.0), Parts(2.0, 1.0, 3.0, 6.0)]
    assert Parts.median(parts) == Parts(2.0, 1.0, 3.0, 6.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "train"], "mode='train'; accepted: prefill, decode, chunk"),
        (["--mode", "decode", "--context", "256"], "context=256 over 2 groups in blocks of 256"),
        (["--mode", "decode", "--context", "x"], "context='x'; accepted: positive integers"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(app, "bench", ["scaling", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
