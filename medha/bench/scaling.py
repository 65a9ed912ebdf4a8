"""``medha bench scaling``: how much sooner several ranks read a prompt than one, and what the rest of the time went to.

Each layout is a job of its own, one thread a rank, with the whole engine and control plane; the jobs take turns, so a
slow spell of the machine hits all alike. Stream pipeline parallelism is the paper's section 3.3 (arXiv 2409.17264 v5):
its bound is the number of stages, less the time in which the pipeline fills and drains. Weights are random and differ
between layouts (each rank draws its own), so times are compared here, and tokens in the tests.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from medha.bench.job import Job, Prefill, parse_layout
from medha.bench.model import describe, random_llama, write_config
from medha.bench.timing import Timing
from medha.cli.report import check_writable, machine_line, progress, stamp, write_report
from medha.cli.table import figures_table, report_console
from medha.config import ParallelConfig
from medha.errors import ConfigError
from medha.timeline import RankRecords

ONE_RANK = "1 rank"


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    """What is measured: prefill of one prompt to its first token, on one rank and on each layout."""

    layouts: tuple[str, ...] = ("spp2",)
    prompt_len: int = 16384
    chunk_size: int = 512
    hf_overrides: Mapping[str, Any] | None = None
    dtype: str = "float32"
    warmup: int = 1
    runs: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Where the time of a prefill went, from its first batch's start to its last one's end on any rank.

    Attributes:
        span_s: that time.
        busy_s: of each rank, computing.
        bubble: share of all ranks' time that was not computing: filling, draining and waits.
        transfer_wait_s: the most that a rank waited for hidden states once its first batch was there.
        control_wait_s: the most that a rank waited for messages once its first batch was there.
        merge_wait_s: the most that a rank waited for other groups' parts of shared attention and merged them.
        report_wait_s: the most that a rank waited for reports of batches that are done, rank 0 because of the depth.
        num_late_messages: batches whose message was not there when their rank had ended the one before.
    """

    span_s: float
    busy_s: tuple[float, ...]
    bubble: float
    transfer_wait_s: float
    control_wait_s: float
    merge_wait_s: float
    report_wait_s: float
    num_late_messages: int

    @classmethod
    def of(cls, ranks: Sequence[RankRecords]) -> Usage:
        """Summarise what the ranks recorded of one prefill."""
        active = [r.batches for r in ranks if r.batches]  # a group may have had nothing to do
        span = max(batches[-1].end_s for batches in active) - min(batches[0].start_s for batches in active)
        busy = tuple(sum(batch.busy_s for batch in r.batches) for r in ranks)
        filled = [batches[1:] for batches in active]  # the wait for a rank's first batch is the pipeline's filling
        return cls(
            span_s=span,
            busy_s=busy,
            bubble=1 - sum(busy) / (span * len(ranks)),
            transfer_wait_s=max(sum(batch.hidden_wait_s for batch in batches) for batches in filled),
            control_wait_s=max(sum(batch.control_wait_s for batch in batches) for batches in filled),
            merge_wait_s=max(sum(batch.merge_wait_s for batch in batches) for batches in active),
            report_wait_s=max(sum(batch.report_wait_s for batch in batches) for batches in filled),
            num_late_messages=sum(not batch.control_ready for batches in filled for batch in batches),
        )


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """One line of the result; ``ratio`` above 1 means faster than one rank. ``usage`` is of the median run."""

    layout: str
    num_ranks: int
    timing: Timing
    ratio: float
    usage: Usage
    seconds: tuple[float, ...]


@dataclass(slots=True)
class _Runs:
    """What one job has done."""

    job: Job
    num_ranks: int
    prefills: list[Prefill] = field(default_factory=list)

    @property
    def median(self) -> Prefill:
        """The run in the middle; the faster of two."""
        middle = statistics.median_low(run.ttft_s for run in self.prefills)
        return next(run for run in self.prefills if run.ttft_s == middle)


def scaling(
    options: ScalingOptions, *, output_json: Path | None = None, on_run: Callable[[], None] = lambda: None
) -> list[LayoutResult]:
    """Run the measurement.

    Args:
        options: what to run.
        output_json: where to write the report.
        on_run: called after each run, warm-up included.

    Raises:
        ConfigError: a layout is not understood.
        RankFailedError: a job ended.
    """
    layouts = {ONE_RANK: ParallelConfig(), **{name: parse_layout(name) for name in options.layouts}}
    shape = random_llama(options.hf_overrides)
    if options.prompt_len >= shape["max_position_embeddings"]:
        raise ConfigError(f"prompt_len={options.prompt_len}; accepted: below {shape['max_position_embeddings']}")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="medha-bench-"))
        write_config(Path(folder), shape)
        jobs = {
            name: _Runs(stack.enter_context(Job(folder, layout, _engine_options(options))), layout.world_size)
            for name, layout in layouts.items()
        }
        for i in range(options.warmup + options.runs):
            for runs in jobs.values():
                prefill = runs.job.prefill(options.prompt_len, seed=options.seed)
                on_run()
                if i >= options.warmup:
                    runs.prefills.append(prefill)
    results = [_result(name, runs, jobs[ONE_RANK]) for name, runs in jobs.items()]
    report = {
        "benchmark": "scaling",
        "environment": stamp(),
        "model": shape,
        "options": asdict(options) | {"threads_a_rank": 1},
        "results": [asdict(result) for result in results],
    }
    write_report(output_json, report)
    return results


def run_and_print(options: ScalingOptions, output_json: Path | None) -> int:
    """Run with a progress bar on stderr, print the table on stdout; returns 0."""
    check_writable(output_json)
    with progress("reading", (options.warmup + options.runs) * (len(options.layouts) + 1)) as advance:
        results = scaling(options, output_json=output_json, on_run=advance)
    table = figures_table(
        f"prefill of {options.prompt_len:,} tokens: {describe(random_llama(options.hf_overrides))}",
        ("seconds", "min-max", "ratio", "bubble", "transfer\nwait s", "control\nwait s"),
        words=("layout",),
    )
    for result in results:
        timing, usage = result.timing, result.usage
        table.add_row(
            result.layout,
            f"{timing.median_s:.2f}",
            f"{timing.min_s:.2f}-{timing.max_s:.2f}",
            f"{result.ratio:.2f}x",
            f"{usage.bubble:.1%}",
            f"{usage.transfer_wait_s:.3f}",
            f"{usage.control_wait_s:.3f}",
        )
    console = report_console()
    console.print(table)
    for result in results[1:]:
        console.print(
            f"{result.layout}: busy {', '.join(f'{busy:.2f}' for busy in result.usage.busy_s)} s of "
            f"{result.usage.span_s:.2f} s by rank; {result.usage.num_late_messages} late control messages"
        )
    console.print(
        f"{machine_line()}; 1 thread a rank, chunks of {options.chunk_size}, {options.dtype}; "
        f"median of {options.runs} after {options.warmup} warm-up, interleaved"
    )
    return 0


def _engine_options(options: ScalingOptions) -> dict[str, Any]:
    num_tokens = options.prompt_len + 1
    return {
        "load_format": "dummy",
        "dtype": options.dtype,
        "device": "cpu",
        "seed": options.seed,
        "max_model_len": num_tokens,
        "num_kv_blocks": -(-num_tokens // 256),
        "max_num_seqs": 1,
        "scheduler": "sarathi",  # chunks of one size, whatever they take
        "chunk_size": options.chunk_size,
        "max_batch_tokens": options.chunk_size,
    }


def _result(name: str, runs: _Runs, reference: _Runs) -> LayoutResult:
    seconds = tuple(run.ttft_s for run in runs.prefills)
    timing = Timing.of(seconds)
    ratio = Timing.of([run.ttft_s for run in reference.prefills]).median_s / timing.median_s
    return LayoutResult(name, runs.num_ranks, timing, ratio, Usage.of(runs.median.ranks), seconds)
