"""``medha bench scaling``: several ranks against one, and what the rest of the time went to.

Each layout is a job of its own, one thread a rank, with the whole engine and control plane; the jobs take turns, so a
slow spell of the machine hits all alike. Weights are random and differ between layouts (each rank draws its own), so
times are compared here, and tokens in the tests.

``prefill`` reads one prompt to its first token: stream pipeline parallelism is the paper's section 3.3 (arXiv
2409.17264 v5), and its bound is the number of stages, less the time in which the pipeline fills and drains. ``decode``
and ``chunk`` run one step over a long context of random keys and values: with KV parallelism each group attends over
its share of the keys, and what does not shrink is everything outside attention, which every group repeats, and the
merges.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from medha.bench.harness import Report, Shown, Subject, median_text, rows_of
from medha.bench.job import Worker, records_of, start_job
from medha.bench.timing import Timing
from medha.config import ParallelConfig
from medha.errors import ConfigError
from medha.timeline import RankRecords

ONE_RANK = "1 rank"
MODES = ("prefill", "decode", "chunk")
_BLOCK_SIZE = 256
_STEPS = 10  # of a turn


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    """What is measured, on one rank and on each layout.

    Attributes:
        mode: ``prefill`` of a prompt; ``decode`` or ``chunk``, which are one step over a context.
        lengths: tokens of the prompt, or in the KV cache before the step; each by itself.
        layouts: as ``spp2`` or ``kvp2spp2``.
        chunk_size: tokens of a chunk.
        warmup, runs: prompts, or turns of 10 steps, of each layout.
        seed: of weights and prompts.
    """

    subject: Subject = field(default_factory=Subject)
    mode: str = "prefill"
    lengths: tuple[int, ...] = (16384,)
    layouts: tuple[str, ...] = ("spp2",)
    chunk_size: int = 512
    warmup: int = 1
    runs: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(f"mode={self.mode!r}; accepted: {', '.join(MODES)}")
        for layout in self.all_layouts.values():
            if self.mode != "prefill" and min(self.lengths) <= (layout.kvp - 1) * _BLOCK_SIZE:
                raise ConfigError(
                    f"{min(self.lengths)} tokens over {layout.kvp} groups in blocks of {_BLOCK_SIZE} leave one without "
                    f"any; accepted: more than {(layout.kvp - 1) * _BLOCK_SIZE}"
                )

    @property
    def all_layouts(self) -> dict[str, ParallelConfig]:
        """One rank, and the others."""
        return {ONE_RANK: ParallelConfig(), **{name: parse_layout(name) for name in self.layouts}}

    @property
    def num_runs(self) -> int:
        """Turns of all layouts over all lengths, warm-up included."""
        return len(self.lengths) * len(self.all_layouts) * (self.warmup + self.runs)


def parse_layout(text: str) -> ParallelConfig:
    """``kvp2``, ``tp2`` or ``kvp2spp2`` as degrees; the axes in any order, each at most once.

    Raises:
        ConfigError: none of these.
    """
    found = re.findall(r"([a-z]+)(\d+)[x*·]?", text.strip())
    degrees = {axis: int(degree) for axis, degree in found}
    whole = re.fullmatch(r"(?:(?:kvp|spp|tp)\d+(?:[x*·](?!$))?)+", text.strip())
    if whole is None or len(degrees) < len(found):
        raise ConfigError(f"layout {text!r}; accepted: for example spp2, tp2, kvp2 or kvp2spp2")
    return ParallelConfig(tp=degrees.get("tp", 1), spp=degrees.get("spp", 1), kvp=degrees.get("kvp", 1))


def scaling(options: ScalingOptions, *, on_run: Callable[[], None] = lambda: None) -> Report:
    """Run the measurement.

    Args:
        options: what to run.
        on_run: called after each turn, warm-up included.

    Raises:
        ConfigError: the options are wrong.
        RankFailedError: a job ended.
    """
    load = os.getloadavg()[0]
    results = [line for length in options.lengths for line in _one_length(options, length, on_run)]
    given = asdict(options) | {"threads_a_rank": 1}
    return options.subject.head(f"scaling, {options.mode}", given, load) | {"results": results}


def _one_length(options: ScalingOptions, length: int, on_run: Callable[[], None]) -> list[Report]:
    """Every layout over one prompt, or one context."""
    is_prefill, is_decode = options.mode == "prefill", options.mode == "decode"
    q_len = 1 if is_decode else options.chunk_size
    work: dict[str, Any] = {"q_len": q_len, "context": length, "is_decode": is_decode, "count": _STEPS}
    if is_prefill:
        work = {"prompt_len": length, "seed": options.seed}
    answers: dict[str, list[Report]] = {}
    with ExitStack() as stack:
        jobs = {
            name: stack.enter_context(_start(options, layout, length + q_len))
            for name, layout in options.all_layouts.items()
        }
        for i in range(options.warmup + options.runs):
            for name, job in jobs.items():
                answer = job.ask("prefill" if is_prefill else "steps", **work)
                on_run()
                if i >= options.warmup:
                    answers.setdefault(name, []).append(answer)
    of_layout = _prefill_line if is_prefill else _step_line
    lines: list[Report] = [{"length": length, "layout": name} | of_layout(found) for name, found in answers.items()]
    for line in lines:
        line["ratio"] = lines[0]["timing"]["median_s"] / line["timing"]["median_s"]
    return lines


def _start(options: ScalingOptions, layout: ParallelConfig, longest: int) -> Worker:
    engine = dict(options.subject.engine) | {
        "num_threads": 1, "seed": options.seed, "tp": layout.tp, "spp": layout.spp, "kvp": layout.kvp
    }  # fmt: skip
    sizes = {"scheduler": "sarathi", "chunk_size": options.chunk_size}  # chunks of one size, whatever they take
    return start_job(
        replace(options.subject, engine=engine),
        longest=longest,
        fills=options.mode != "prefill",
        block_size=_BLOCK_SIZE,
        num_kv_blocks=-(-longest // _BLOCK_SIZE) + 1,
        max_num_seqs=1,
        max_batch_tokens=options.chunk_size,
        **sizes,
    )


def _prefill_line(answers: Sequence[Mapping[str, Any]]) -> Report:
    """A layout's prefills; where the time went in the run in the middle, the faster of two."""
    seconds = [answer["seconds"] for answer in answers]
    middle = statistics.median_low(seconds)
    ranks = records_of(answers[seconds.index(middle)])
    return {
        "num_ranks": len(ranks),
        "timing": asdict(Timing.of(seconds)),
        "seconds": seconds,
        "usage": asdict(Usage.of(ranks)),
    }


def _step_line(answers: Sequence[Mapping[str, Any]]) -> Report:
    """A layout's steps; of each rank the medians of its compute and of the merges within."""
    seconds = [taken for answer in answers for _, taken in answer["steps"]]
    parts: dict[int, list[tuple[float, float]]] = {}
    for answer in answers:
        counted = {batch_id for batch_id, _ in answer["steps"]}
        for rank in records_of(answer):
            found = [(one.busy_s, one.merge_wait_s) for one in rank.batches if one.batch_id in counted]
            parts.setdefault(rank.rank, []).extend(found)
    busy, merge = ([statistics.median(one[i] for one in parts[rank]) for rank in sorted(parts)] for i in (0, 1))
    return {
        "num_ranks": len(parts),
        "timing": asdict(Timing.of(seconds)),
        "seconds": seconds,
        "busy_s": busy,
        "merge_s": merge,
    }


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


def shown(report: Report) -> Shown:
    """What is printed of the report."""
    columns = ("length", "layout", "timing", "ratio", "bubble", "transfer_wait_s", "control_wait_s", "merge_wait_s")
    rows = rows_of([line | line.get("usage", {}) for line in report["results"]], (*columns, "num_late_messages"))
    notes = [f"{median_text(report)}, interleaved; 1 thread a rank; ratio: one rank's time over a layout's"]
    if report["options"]["mode"] != "prefill":
        notes.append("turns of 10 steps over random keys and values; compute and merges by rank are in the report")
    return {"results": rows}, notes
