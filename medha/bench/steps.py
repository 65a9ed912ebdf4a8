"""``medha bench scaling --mode decode|chunk``: one step over a long context on several ranks against one.

KV parallelism is the paper's section 3.3 (arXiv 2409.17264 v5): each group attends over its share of the keys, and what
does not shrink is everything outside attention, which every group repeats (its Amdahl bound), and the merges. So both
are shown apart. What the KV cache holds is random (:mod:`medha.profile.held`); a step is the same work as in a request
that had been read for real, through the same control plane. The jobs take turns of a few steps.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from medha.bench.job import Job, LastWords, parse_layout, records_in
from medha.bench.model import NARROW_LLAMA, describe, random_llama, write_config
from medha.bench.timing import Timing
from medha.cli.report import check_writable, machine_line, stamp, write_report
from medha.cli.table import figures_table, report_console
from medha.config import ParallelConfig
from medha.profile.held import Held
from medha.timeline import BatchRecord, RankRecords

ONE_RANK = "1 rank"
_BLOCK_SIZE = 256


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What is measured: a step over each context, on one rank and on each layout.

    Attributes:
        chunk_size: tokens of a prefill chunk; None for the decode of one token.
        contexts: tokens in the KV cache.
        warmup, runs: turns of ``steps`` steps that each layout takes.
    """

    chunk_size: int | None
    contexts: tuple[int, ...]
    layouts: tuple[str, ...] = ("kvp2",)
    hf_overrides: Mapping[str, Any] | None = None
    dtype: str = "float32"
    warmup: int = 1
    runs: int = 3
    steps: int = 10
    block_size: int = _BLOCK_SIZE
    seed: int = 0

    @property
    def shape(self) -> dict[str, Any]:
        """Fields of the model's ``config.json``."""
        shape = random_llama(NARROW_LLAMA | dict(self.hf_overrides or {}))
        longest = max(self.held(context).context + self.held(context).q_len for context in self.contexts)
        return shape | {"max_position_embeddings": max(longest, shape["max_position_embeddings"])}

    def held(self, context: int) -> Held:
        """The step over a context."""
        return Held(context, self.chunk_size or 1, is_decode=self.chunk_size is None)


@dataclass(frozen=True, slots=True)
class Parts:
    """Where the time of a step went, in seconds.

    Attributes:
        attention_s: attending over the keys that lie here.
        merge_s: packing the parts of shared rows, waiting for the other groups' and merging them.
        replicated_s: computing outside attention, which every group repeats; the head on the first alone.
        rest_s: not computing: messages, reports, hidden states on their way.
    """

    attention_s: float
    merge_s: float
    replicated_s: float
    rest_s: float

    @classmethod
    def median(cls, parts: Sequence[Parts]) -> Parts:
        """The median of each part."""
        return cls(*(statistics.median(getattr(part, name) for part in parts) for name in cls.__slots__))


@dataclass(frozen=True, slots=True)
class StepScaling:
    """One line of the result.

    Attributes:
        ratio: above 1 means faster than one rank.
        path: parts of the leading group, its stages one after the other.
        ranks: parts of each rank; ``rest_s`` is what it waited for.
    """

    context: int
    layout: str
    num_ranks: int
    timing: Timing
    ratio: float
    path: Parts
    ranks: tuple[Parts, ...]
    seconds: tuple[float, ...]


@dataclass(slots=True)
class _Turns:
    """What one job has done in the turns that count.

    Attributes:
        batches: of each rank, the records of the steps.
        words: what each rank said at the end.
    """

    job: Job
    layout: ParallelConfig
    seconds: list[float] = field(default_factory=list)
    batches: list[list[BatchRecord]] = field(default_factory=list)
    words: tuple[LastWords, ...] = ()

    def take(self, held: Held, steps: int) -> None:
        """Run some steps and note them."""
        answer = self.job.ask("steps", held=asdict(held), steps=steps)
        self.seconds += answer["seconds"]
        self.batches = self.batches or [[] for _ in range(self.layout.world_size)]
        for kept, records in zip(self.batches, records_in(answer), strict=True):
            kept += _steps_of(records, steps)

    def forget(self) -> None:
        """The turns so far were for warming up."""
        self.seconds.clear()
        self.batches.clear()


def _steps_of(records: RankRecords, steps: int) -> tuple[BatchRecord, ...]:
    """The records without that of the batch before the first step."""
    assert len(records.batches) == steps + 1, "every group takes part in every step"
    return records.batches[1:]


def step_scaling(
    options: StepOptions, *, output_json: Path | None = None, on_turn: Callable[[], None] = lambda: None
) -> list[StepScaling]:
    """Run the measurement.

    Args:
        options: what to run.
        output_json: where to write the report.
        on_turn: called after each turn, warm-up included.

    Raises:
        ConfigError: a layout is not understood, or has more groups than a context has blocks.
        RankFailedError: a job ended.
    """
    layouts = {ONE_RANK: ParallelConfig(), **{name: parse_layout(name) for name in options.layouts}}
    for context in options.contexts:
        for layout in layouts.values():
            options.held(context).shard(layout.kvp - 1, num_groups=layout.kvp, block_size=options.block_size)
    load = [os.getloadavg()[0]]
    results = [line for context in options.contexts for line in _one_context(options, layouts, context, on_turn)]
    load.append(os.getloadavg()[0])
    report = {
        "benchmark": "scaling",
        "environment": stamp(),
        "load_before_after": load,
        "model": options.shape,
        "options": asdict(options) | {"threads_a_rank": 1},
        "results": [asdict(result) for result in results],
    }
    write_report(output_json, report)
    return results


def _one_context(
    options: StepOptions, layouts: Mapping[str, ParallelConfig], context: int, on_turn: Callable[[], None]
) -> list[StepScaling]:
    held = options.held(context)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="medha-bench-"))
        write_config(Path(folder), options.shape)
        turns = {}
        for name, layout in layouts.items():
            job = Job(folder, layout, _engine_options(options, held, layout), held=asdict(held))
            turns[name] = _Turns(stack.enter_context(job), layout)
        for i in range(options.warmup + options.runs):
            for one in turns.values():
                if i == options.warmup:
                    one.forget()
                one.take(held, options.steps)
                on_turn()
        for one in turns.values():
            one.words = one.job.end()
    return [_result(context, name, one, turns[ONE_RANK]) for name, one in turns.items()]


def _engine_options(options: StepOptions, held: Held, layout: ParallelConfig) -> dict[str, Any]:
    sizes = {"num_groups": layout.kvp, "block_size": options.block_size}
    return {
        "load_format": "dummy",
        "dtype": options.dtype,
        "device": "cpu",
        "seed": options.seed,
        "max_model_len": held.context + held.q_len,
        "block_size": options.block_size,
        "num_kv_blocks": max(held.num_blocks(group, **sizes) for group in range(layout.kvp)),
        "max_num_seqs": 1,
    }


def _result(context: int, name: str, turns: _Turns, reference: _Turns) -> StepScaling:
    steps = [
        [_parts(ranks[i], said.spans) for ranks, said in zip(turns.batches, turns.words, strict=True)]
        for i in range(len(turns.seconds))
    ]
    lead = [turns.layout.rank_of(stage=stage, tp_rank=0) for stage in range(turns.layout.spp)]
    path = [
        _along([parts[rank] for rank in lead], seconds) for parts, seconds in zip(steps, turns.seconds, strict=True)
    ]
    timing = Timing.of(turns.seconds)
    return StepScaling(
        context,
        name,
        turns.layout.world_size,
        timing,
        statistics.median(reference.seconds) / timing.median_s,
        Parts.median(path),
        tuple(Parts.median([parts[rank] for parts in steps]) for rank in range(turns.layout.world_size)),
        tuple(turns.seconds),
    )


def _parts(batch: BatchRecord, spans: Sequence[tuple[str, float, float]]) -> Parts:
    """The parts of one rank's share of a step."""
    total = {"attention": 0.0, "packing": 0.0}
    for what, start_s, seconds in spans:
        if batch.start_s <= start_s <= batch.end_s:
            total[what] += seconds
    merge_s = total["packing"] + batch.merge_wait_s
    waits_s = batch.control_wait_s + batch.hidden_wait_s + batch.report_wait_s + batch.send_wait_s
    return Parts(total["attention"], merge_s, batch.busy_s - total["attention"] - merge_s, waits_s)


def _along(stages: Sequence[Parts], seconds: float) -> Parts:
    """The parts of a step that went through stages one after the other."""
    attention, merge, replicated = (
        sum(getattr(stage, name) for stage in stages) for name in ("attention_s", "merge_s", "replicated_s")
    )
    return Parts(attention, merge, replicated, seconds - attention - merge - replicated)


def run_and_print(options: StepOptions, output_json: Path | None) -> int:
    """Run with a progress bar on stderr, print the table on stdout; returns 0."""
    check_writable(output_json)
    turns = (options.warmup + options.runs) * (len(options.layouts) + 1) * len(options.contexts)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("stepping", total=turns)
        results = step_scaling(options, output_json=output_json, on_turn=lambda: bar.advance(task))
    console = report_console()
    console.print(_table(options, results))
    console.print(
        f"{machine_line()}; 1 thread a rank, {options.dtype}; median of {options.runs * options.steps} steps in turns "
        f"of {options.steps} after {options.warmup * options.steps} warm-up, interleaved; KV cache of random numbers, "
        f"vocabulary {options.shape['vocab_size']:,}; load average {os.getloadavg()[0]:.1f}"
    )
    return 0


def _table(options: StepOptions, results: Sequence[StepScaling]) -> Table:
    what = "decode of one request" if options.chunk_size is None else f"a prefill chunk of {options.chunk_size} tokens"
    table = figures_table(
        f"{what}: {describe(options.shape)}",
        ("context", "ms", "min-max", "ratio", "= attention + merge\n+ replicated + rest"),
        words=("layout",),
    )
    for result in results:
        table.add_row(
            result.layout,
            f"{result.context:,}",
            *result.timing.cells_ms(),
            f"{result.ratio:.2f}x",
            " + ".join(f"{getattr(result.path, name) * 1e3:,.1f}" for name in Parts.__slots__),
        )
    return table
