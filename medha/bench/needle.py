"""``medha bench needle``: is a fact found in a document of a given length, how long does it take, how much memory?"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from medha.bench.report import check_writable, stamp, write_report
from medha.display import Display
from medha.llm import LLM
from medha.models.needle import make_haystack, write_needle
from medha.request import SamplingParams


@dataclass(frozen=True, slots=True)
class NeedleResult:
    """One document.

    Attributes:
        depth: where the fact lies, as a share of the document.
        found: whether the answer is right.
        ttft_s: seconds to the first token.
    """

    num_tokens: int
    depth: float
    found: bool
    answer: str
    ttft_s: float


def find_needle(num_tokens: int, depth: float, *, chunk_size: int = 2048, show_progress: bool = True) -> NeedleResult:
    """Read one document with the needle model and ask for the fact hidden in it."""
    haystack = make_haystack(num_tokens, depth=depth)
    with tempfile.TemporaryDirectory(prefix="medha-needle-") as folder:
        model = write_needle(Path(folder) / "needle")
        llm = LLM(
            str(model),
            max_model_len=num_tokens + 64,
            num_kv_blocks=-(-(num_tokens + 64) // 256),
            chunk_size=chunk_size,
            max_batch_tokens=chunk_size,
        )
    with llm:
        engine = llm.engine
        engine.add_request("document", haystack.prompt, SamplingParams(temperature=0.0, max_tokens=48))
        output = None
        live = Console(stderr=True) if show_progress else None
        with Display(engine, lines=None, live=live, num_requests=1) as display:
            while engine.has_unfinished:
                output = next((o for o in engine.step() if o.finished), output)
                display.refresh()
    assert output is not None
    text = output.outputs[0].text or ""
    return NeedleResult(num_tokens, depth, text == haystack.answer.rstrip("\n"), text, output.metrics.ttft or 0.0)


def peak_memory_bytes() -> int:
    """Most memory that this process has held resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def run_and_print(lengths: tuple[int, ...], depths: tuple[float, ...], output_json: Path | None) -> int:
    """Try every length and depth and print a table; returns 0 when every fact was found, else 3."""
    check_writable(output_json)
    start = time.perf_counter()
    results = [find_needle(length, depth) for length in lengths for depth in depths]
    peak = peak_memory_bytes()
    report = {
        "benchmark": "needle",
        "environment": stamp(),
        "results": [{name: getattr(r, name) for name in NeedleResult.__slots__} for r in results],
        "peak_memory_bytes": peak,
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
    console = Console()
    console.print(table)
    console.print(f"peak memory {peak / 2**30:.2f} GiB")
    return 0 if all(r.found for r in results) else 3
