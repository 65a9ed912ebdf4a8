"""``medha bench decode``: one step in which a batch decodes, over batch sizes and contexts, against the memory's rate.

A step of a decode reads all weights once and the keys and values of every request, so what bounds it is memory. The
bytes that it has to read, over its time, as a share of the rate at which memory can be read is its MBU; the read is
measured in turn with the steps. What a cache holds between steps makes small models look faster than that.

What is timed is a step of the runner: from the batch to its tokens, with block tables, embedding, sampling; the
scheduler and what the engine keeps of a request are not in it. The steps are made by hand over a KV cache of random
numbers (:mod:`medha.profile.steps`), in which no two requests share a block.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

from medha.bench.harness import Local, Subject, loaded, step_parameters, title_of
from medha.bench.timing import Rate, Timing, in_turn, memory_read
from medha.cli.report import check_writable, progress, write_report
from medha.cli.table import figures_table, report_console
from medha.profile.steps import Step, StepRunner, decodes, fill

TIMED = "a step of the runner, from the batch to its tokens; without scheduler and engine"
_BLOCK_SIZE = 256
_READ = "read"


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """What is measured: every batch size at every context.

    Attributes:
        batch_sizes: requests that decode together.
        contexts: tokens of each in the KV cache.
        warmup, runs: steps of each cell.
    """

    subject: Subject = field(default_factory=Subject)
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    contexts: tuple[int, ...] = (1024, 8192)
    warmup: int = 2
    runs: int = 10

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Batch size and context of each."""
        return [(batch, context) for context in sorted(set(self.contexts)) for batch in sorted(set(self.batch_sizes))]

    @property
    def num_blocks(self) -> int:
        """Blocks of the largest cell; a step adds one token to each request."""
        return max(batch * -(-(context + 1) // _BLOCK_SIZE) for batch, context in self.cells)


@dataclass(frozen=True, slots=True)
class DecodeCell:
    """One batch size at one context.

    Attributes:
        timing: seconds of a step.
        weight_bytes, kv_bytes: read in a step: the layers, the last norm and the head once; the KV cache of every
            request, its new token included.
        bytes_per_s: both, over the median.
        mbu: of the rate at which memory was read.
        tokens_per_s: of all requests.
    """

    batch_size: int
    context: int
    timing: Timing
    weight_bytes: int
    kv_bytes: int
    bytes_per_s: float
    mbu: float
    tokens_per_s: float


def decode(
    options: DecodeOptions, *, output_json: Path | None = None, on_run: Callable[[], None] = lambda: None
) -> tuple[Local, list[DecodeCell], Rate]:
    """Run the measurement.

    Args:
        options: what to run.
        output_json: where to write the report.
        on_run: called after each step and read, warm-up included.

    Returns:
        What ran; the cells; the rate at which memory is read.

    Raises:
        ConfigError: the options are wrong, or there is no memory for the KV cache.
    """
    load = os.getloadavg()[0]
    sizes = {"block_size": _BLOCK_SIZE, "num_kv_blocks": options.num_blocks}
    with loaded(options.subject, longest=max(options.contexts) + 1, **sizes) as local:
        memory = memory_read(local.device)
        steps = {f"{batch} at {context}": decodes(batch, context) for batch, context in options.cells}
        hand = _hand(local, options)
        contestants: dict[str, Callable[[], float]] = {_READ: memory.seconds}
        contestants |= {name: _step(hand, step) for name, step in steps.items()}
        seconds = in_turn(contestants, warmup=options.warmup, runs=options.runs, on_run=on_run)
        rate = Rate.of(memory, seconds.pop(_READ))
        cells = [
            _cell(local, batch, context, Timing.of(found), rate)
            for (batch, context), found in zip(options.cells, seconds.values(), strict=True)
        ]
        report = local.report("decode", asdict(options), load)
    report |= {"timed": TIMED, "memory_read": asdict(rate), "results": [asdict(cell) for cell in cells]}
    write_report(output_json, report)
    return local, cells, rate


def _hand(local: Local, options: DecodeOptions) -> StepRunner:
    """What runs the steps, over a pool that holds random numbers."""
    fill(local.role.runner, options.num_blocks * _BLOCK_SIZE)
    return StepRunner(
        local.engine.runner,
        block_size=_BLOCK_SIZE,
        num_blocks=options.num_blocks,
        vocab_size=local.model.vocab_size,
    )


def _step(hand: StepRunner, step: Step) -> Callable[[], float]:
    """Runs the step; returns its busy seconds, which end when its tokens are on the host."""
    return lambda: hand.run(step)[1]


def _cell(local: Local, batch: int, context: int, timing: Timing, rate: Rate) -> DecodeCell:
    weight_bytes = step_parameters(local.model) * local.dtype.itemsize
    kv_bytes = batch * (context + 1) * local.model.kv_bytes_per_token(local.dtype.itemsize)
    per_s = (weight_bytes + kv_bytes) / timing.median_s
    return DecodeCell(
        batch, context, timing, weight_bytes, kv_bytes, per_s, per_s / rate.per_s, batch / timing.median_s
    )


def run_and_print(options: DecodeOptions, output_json: Path | None) -> int:
    """Run with a progress bar on stderr, print the table on stdout; returns 0."""
    check_writable(output_json)
    with progress("decoding", (options.warmup + options.runs) * (1 + len(options.cells))) as advance:
        local, cells, rate = decode(options, output_json=output_json, on_run=advance)
    console = report_console()
    console.print(_table(local, cells))
    console.print(
        f"timed: {TIMED}; MBU: bytes that a step has to read (weights and KV) over its time, of "
        f"{rate.per_s / 1e9:,.1f} GB/s measured in turn ({rate.name})",
        highlight=False,
    )
    runs = f"median of {options.runs} after {options.warmup} warm-up, in turn; KV cache of random numbers"
    console.print(local.footer(runs), highlight=False)
    return 0


def _table(local: Local, cells: Sequence[DecodeCell]) -> Table:
    headings = ("context", "batch", "ms", "min-max", "MiB read", "GB/s", "MBU", "tokens/s")
    table = figures_table(f"decode step: {title_of(local.subject, local.model)}", headings)
    for cell in cells:
        table.add_row(
            f"{cell.context:,}",
            f"{cell.batch_size:,}",
            *cell.timing.cells_ms(),
            f"{(cell.weight_bytes + cell.kv_bytes) / 2**20:,.1f}",
            f"{cell.bytes_per_s / 1e9:,.1f}",
            f"{cell.mbu:.0%}",
            f"{cell.tokens_per_s:,.1f}",
        )
    return table
