"""Pipelined micro-batches (``stream=False``) on real stages generate the tokens of transformers, as a stream does."""

from __future__ import annotations

from pathlib import Path

from tests.parallel.test_layouts import check_layout
from tests.parallel.workers import WorkerPool


def test_two_stages_say_the_same_without_a_stream(workers: WorkerPool, tmp_path: Path) -> None:
    options = {"scheduler": "sarathi", "chunk_size": 32, "max_batch_tokens": 64, "stream": False}
    check_layout(workers, tmp_path, "llama", False, (1, 2, "local"), (1, 33, 200), **options)
