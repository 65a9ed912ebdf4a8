"""``medha bench prefill``: how fast a prompt is read, whole and in adaptive chunks, against this machine's products.

The whole engine runs, one prompt at a time, and what is timed is its TTFT. Whole: one chunk, as classical schedulers
have it. Adaptive: each chunk as large as the time of a batch allows (``t_target_s``), which is what makes the prefill
preemptible; the ratio is its price. Both run over the same weights, and the matrix product takes turns with them.

Useful operations of ``n`` tokens are ``2 * P * n + 2 * n**2 * N * H * L``: ``P`` parameters of the layers, ``N`` query
heads of ``H`` dimensions, ``L`` layers; the second part is attention under the causal mask. The embedding is a look-up
and the head runs for the last token alone; neither counts. MFU is their rate as a share of the product's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from medha.bench.harness import Local, Subject, layer_parameters, loaded, random_prompt, terms, title_of
from medha.bench.load import fixed_output, serve_load
from medha.bench.timing import Rate, Timing, in_turn, matrix_product
from medha.cli.report import check_writable, progress, write_report
from medha.cli.table import figures_table, report_console
from medha.config import ModelConfig, SchedulerConfig
from medha.engine.admission import Prompt
from medha.engine.arrivals import Arrival
from medha.engine.engine import Engine
from medha.errors import ConfigError

WHOLE = "whole"
ADAPTIVE = "adaptive"
_PRODUCT = "matrix product"


@dataclass(frozen=True, slots=True)
class PrefillOptions:
    """What is measured.

    Attributes:
        prompt_lens: tokens.
        t_target_s: seconds that a batch may take with adaptive chunks.
        max_batch_tokens: their largest chunk.
        warmup, runs: prompts of each length and way; the first ones also teach the predictor of step times.
        seed: of prompts.
    """

    subject: Subject = field(default_factory=Subject)
    prompt_lens: tuple[int, ...] = (512, 2048, 8192)
    t_target_s: float = 0.25
    max_batch_tokens: int = 2048
    warmup: int = 1
    runs: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        SchedulerConfig(**self.adaptive)

    @property
    def adaptive(self) -> dict[str, Any]:
        """Fields of the scheduler that cuts prompts into adaptive chunks; it raises ConfigError if one is wrong."""
        return {
            "scheduler": "medha",
            "policy": "lars",
            "chunk_size": None,
            "max_batch_tokens": self.max_batch_tokens,
            "t_target_s": self.t_target_s,
        }


@dataclass(frozen=True, slots=True)
class PrefillLine:
    """One prompt length in one way.

    Attributes:
        way: ``whole`` or ``adaptive``.
        timing: TTFT in seconds.
        num_chunks: of the last run.
        flops: useful floating-point operations.
        flops_per_s: at the median.
        mfu: of the matrix product's rate.
        ratio: of the median to that of the whole prompt.
    """

    prompt_len: int
    way: str
    timing: Timing
    num_chunks: int
    flops: float
    flops_per_s: float
    mfu: float
    ratio: float


def useful_flops(model: ModelConfig, prompt_len: int) -> float:
    """Operations of reading a prompt, see above."""
    linear = 2.0 * layer_parameters(model) * prompt_len
    return linear + 2.0 * prompt_len**2 * model.num_heads * model.head_dim * model.num_layers


def prefill(
    options: PrefillOptions, *, output_json: Path | None = None, on_run: Callable[[], None] = lambda: None
) -> tuple[Local, list[PrefillLine], Rate]:
    """Run the measurement.

    Args:
        options: what to run.
        output_json: where to write the report.
        on_run: called after each prompt and product, warm-up included.

    Returns:
        What ran; the lines; the rate of the matrix product.

    Raises:
        ConfigError: the options are wrong.
    """
    load = os.getloadavg()[0]
    longest = max(options.prompt_lens)
    one_chunk = {"scheduler": "orca", "policy": "fcfs", "chunk_size": longest, "max_batch_tokens": longest}
    with loaded(options.subject, longest=longest + 1, **one_chunk) as local:
        chunked = local.engine_with(**options.adaptive)
        product = matrix_product(local.dtype, local.device)
        chance = np.random.default_rng(options.seed)
        runs: dict[tuple[int, str], _Run] = {}
        for length in sorted(set(options.prompt_lens)):
            prompt = random_prompt(length, local.model.vocab_size, chance)
            for way, engine in ((WHOLE, local.engine), (ADAPTIVE, chunked)):
                runs[length, way] = _Run(local, engine, prompt)
        contestants: dict[str, Callable[[], float]] = {_PRODUCT: product.seconds}
        contestants |= {f"{length} {way}": run for (length, way), run in runs.items()}
        seconds = in_turn(contestants, warmup=options.warmup, runs=options.runs, on_run=on_run)
        rate = Rate.of(product, seconds[_PRODUCT])
        lines = _lines(local.model, runs, seconds, rate)
        report = local.report("prefill", asdict(options), load)
    report |= {"matrix_product": asdict(rate), "results": [asdict(line) for line in lines]}
    write_report(output_json, report)
    return local, lines, rate


class _Run:
    """Reads a prompt through an engine when called; returns its TTFT.

    Attributes:
        num_chunks: of the last call.
    """

    def __init__(self, local: Local, engine: Engine, prompt: Prompt) -> None:
        self._local, self._engine = local, engine
        self._arrival = Arrival("prompt", prompt, fixed_output(1))
        self.num_chunks = 0

    def __call__(self) -> float:
        self._local.take_over(self._engine)
        (outcome,) = serve_load(self._engine, [self._arrival]).outcomes
        if outcome.ttft_s is None:
            raise ConfigError(f"a prompt of {outcome.input_len} tokens has failed: {outcome.error}")
        self.num_chunks = outcome.num_chunks
        return outcome.ttft_s


def _lines(
    model: ModelConfig, runs: dict[tuple[int, str], _Run], seconds: dict[str, list[float]], rate: Rate
) -> list[PrefillLine]:
    lines = []
    for (length, way), run in runs.items():
        timing, whole = (Timing.of(seconds[f"{length} {one}"]) for one in (way, WHOLE))
        flops = useful_flops(model, length)
        per_s = flops / timing.median_s
        ratio = timing.median_s / whole.median_s
        lines.append(PrefillLine(length, way, timing, run.num_chunks, flops, per_s, per_s / rate.per_s, ratio))
    return lines


def run_and_print(options: PrefillOptions, output_json: Path | None) -> int:
    """Run with a progress bar on stderr, print the table on stdout; returns 0."""
    check_writable(output_json)
    total = (options.warmup + options.runs) * (1 + 2 * len(set(options.prompt_lens)))
    with progress("reading", total) as advance:
        local, lines, rate = prefill(options, output_json=output_json, on_run=advance)
    console = report_console()
    console.print(_table(local, lines))
    console.print(
        f"time: {terms('TTFT')}; MFU: useful operations over time, of {rate.per_s / 1e9:,.0f} GFLOP/s measured in turn "
        f"({rate.name}); ratio: to the whole prompt; adaptive: batches of {options.t_target_s:g} s",
        highlight=False,
    )
    runs = f"whole engine, one prompt at a time; median of {options.runs} after {options.warmup} warm-up, in turn"
    console.print(local.footer(runs), highlight=False)
    return 0


def _table(local: Local, lines: Sequence[PrefillLine]) -> Table:
    table = figures_table(
        f"prefill of one prompt: {title_of(local.subject, local.model)}",
        ("prompt", "chunks", "ms", "min-max", "GFLOP/s", "MFU", "ratio"),
        words=("way",),
    )
    for line in lines:
        row: list[Any] = [
            line.way,
            f"{line.prompt_len:,}",
            f"{line.num_chunks:,}",
            *line.timing.cells_ms(),
            f"{line.flops_per_s / 1e9:,.1f}",
            f"{line.mfu:.0%}",
            f"{line.ratio:.2f}x",
        ]
        table.add_row(*row, end_section=line.way == ADAPTIVE)
    return table
