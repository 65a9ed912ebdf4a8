"""``medha bench needle``: is a fact found in a document of a given length, how long does it take, how much memory?

The model runs in processes of its own, one a rank, so that the memory of each is its own. The cores are shared out.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from medha.bench.job import Job
from medha.cli.report import check_writable, stamp, write_report
from medha.cli.table import report_console
from medha.config import ParallelConfig
from medha.models.needle import make_haystack, needle_config, write_needle

_BLOCK_SIZE = 256
_ANSWER = 48


@dataclass(frozen=True, slots=True)
class NeedleResult:
    """One document.

    Attributes:
        num_tokens: of the document.
        depth: where the fact lies, as a share of the document.
        found: whether the answer is right.
        ttft_s: seconds to the first token.
        whole_kv_bytes: keys and values of document and answer over all layers.
        kv_bytes: of each rank, the blocks that it held at the end.
        peak_memory_bytes: of each rank.
    """

    num_tokens: int
    depth: float
    found: bool
    answer: str
    ttft_s: float
    whole_kv_bytes: int
    kv_bytes: tuple[int, ...]
    peak_memory_bytes: tuple[int, ...]

    @property
    def largest_share(self) -> float:
        """The most that a rank held, as a share of the whole."""
        return max(self.kv_bytes) / self.whole_kv_bytes


def find_needle(
    num_tokens: int,
    depth: float,
    *,
    layout: ParallelConfig | None = None,
    chunk_size: int = 2048,
    show_progress: bool = True,
) -> NeedleResult:
    """Read one document with the needle model and ask for the fact hidden in it.

    Raises:
        RankFailedError: a rank ended.
    """
    layout = layout or ParallelConfig()
    haystack = make_haystack(num_tokens, depth=depth)
    longest = num_tokens + 64
    options = {
        "max_model_len": longest,
        "num_kv_blocks": -(-longest // (layout.kvp * _BLOCK_SIZE)),
        "block_size": _BLOCK_SIZE,
        "scheduler": "sarathi",  # chunks of one size, whatever they take
        "chunk_size": chunk_size,
        "max_batch_tokens": chunk_size,
        "num_threads": max(1, (os.cpu_count() or 1) // layout.world_size),
    }
    with tempfile.TemporaryDirectory(prefix="medha-needle-") as folder:
        model = write_needle(Path(folder) / "needle")
        with Job(str(model), layout, options) as job:
            answer = job.ask("ask", prompt=haystack.prompt, max_tokens=_ANSWER, show_progress=show_progress)
            words = job.end()
    text = answer["text"]
    return NeedleResult(
        num_tokens,
        depth,
        text == haystack.answer.rstrip("\n"),
        text,
        answer["ttft_s"],
        (num_tokens + len(text)) * _token_bytes(),
        tuple(one.kv_bytes for one in words),
        tuple(one.peak_memory_bytes for one in words),
    )


def _token_bytes() -> int:
    """Bytes of a token's keys and values over all layers of the needle model, in float32."""
    config = needle_config()
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 4)


def run_and_print(
    lengths: tuple[int, ...], depths: tuple[float, ...], layout: ParallelConfig, output_json: Path | None
) -> int:
    """Try every length and depth and print a table; returns 0 when every fact was found, else 3."""
    check_writable(output_json)
    start = time.perf_counter()
    results = [find_needle(length, depth, layout=layout) for length in lengths for depth in depths]
    report = {
        "benchmark": "needle",
        "environment": stamp(),
        "layout": asdict(layout),
        "results": [asdict(result) | {"largest_share": result.largest_share} for result in results],
        "peak_memory_bytes": max(max(result.peak_memory_bytes) for result in results),
        "wall_s": time.perf_counter() - start,
    }
    write_report(output_json, report)
    table = Table(title="the needle model: 2 layers, 8 query heads, 2 KV heads, head dimension 128, float32")
    for name in ("tokens", "depth", "TTFT s"):
        table.add_column(name, justify="right")
    table.add_column("answer")
    table.add_column("")
    for r in results:
        table.add_row(f"{r.num_tokens:,}", f"{r.depth:g}", f"{r.ttft_s:.1f}", r.answer, "right" if r.found else "WRONG")
    console = report_console()
    console.print(table)
    for r in results:
        console.print(f"{r.num_tokens:,} tokens: {_memory(r)}")
    return 0 if all(r.found for r in results) else 3


def _memory(result: NeedleResult) -> str:
    """Peak memory and KV cache of the ranks, in words."""
    peaks = ", ".join(f"{peak / 2**30:.2f}" for peak in result.peak_memory_bytes)
    kv = ", ".join(f"{one / 2**20:.0f}" for one in result.kv_bytes)
    return (
        f"peak memory {peaks} GiB by rank; KV cache {kv} MiB by rank, "
        f"at most {result.largest_share:.1%} of the whole's {result.whole_kv_bytes / 2**20:.0f} MiB"
    )
