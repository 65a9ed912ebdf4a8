"""``medha bench scaling``: Several ranks against one, and what the rest of the time went to.

Each layout is a job of its own, one thread a rank, with the whole engine and control plane; the jobs take turns, so a
slow spell of the machine hits all alike. Weights are random and differ between layouts (each rank draws its own), so
times are compared here, and tokens in the tests. A job is a :class:`~medha.bench.timing.Worker` that runs this module.

``prefill`` reads one prompt to its first token: stream pipeline parallelism is the paper's section 3.3 (arXiv
2409.17264 v5), and its bound is the number of stages, less the time in which the pipeline fills and drains. ``decode``
and ``chunk`` run one step over a long context of random keys and values: with KV parallelism each group attends over
its share of the keys, and what does not shrink is everything outside attention, which every group repeats, and the
merges. With ``ring`` as attention chunks are dealt to the groups, and nothing is repeated; all of a prompt's are.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from medha.batch import PIECES, Row
from medha.bench.cli import ANY_COUNT, COUNT, Report, asked, counted, verb, warmups
from medha.bench.harness import Local, Subject, as_told, random_prompt
from medha.bench.load import fixed_output, serve_load
from medha.bench.timing import Worker, in_turn, timing_of
from medha.cli.command import end_process, run_guarded
from medha.cli.options import parse_lengths, pick
from medha.config import ParallelConfig
from medha.config.fields import choice, text_read, words
from medha.engine.arrivals import Arrival
from medha.errors import ConfigError
from medha.profile.steps import FIRST_SLOT, StepRunner, chunk
from medha.records import RankRecords

ONE_RANK = "1 rank"
MODES = ("prefill", "decode", "chunk")
GATHER, RING = "gather", "ring"
_BLOCK_SIZE = 256
_STEPS = 10  # of a turn


@dataclass(frozen=True, slots=True)
class ScalingOptions:
    """What is measured, on one rank and on each layout; each length by itself."""

    subject: Subject = field(default_factory=Subject)
    mode: str = asked("prefill", "prefill of a prompt, or one step over a long context: decode, chunk.", choice(*MODES))
    layouts: tuple[str, ...] = asked(
        (), "Compared with one rank, as kvp2spp2, comma separated.", kind=str, shown="spp2, kvp2 for a step",
        read=text_read(lambda text: words(text) or (text,)),
    )  # fmt: skip
    lengths: tuple[int, ...] = asked(
        (), "Tokens of the prompt, or in the KV cache before a step, comma separated.", name="input_len",
        kind=str, shown="16384, 65536 for a step",
        read=parse_lengths,
    )  # fmt: skip
    attention: tuple[str, ...] = asked(
        (GATHER,), "How the groups of a layout attend to a chunk: gather, ring, or both, comma separated.", kind=str,
        shown=GATHER, read=text_read(words),
    )  # fmt: skip
    chunk_size: int | None = asked(None, "Prompt tokens a batch.", COUNT, shown="512, 64 for a step")
    warmup: int = warmups(1, "Prompts, or turns of 10 steps,")
    runs: int = counted(3, "Prompts, or turns of 10 steps,")
    seed: int = asked(0, "Of prompts and weights.", ANY_COUNT)

    def __post_init__(self) -> None:
        is_step = self.mode != "prefill"
        has_ring = RING in self.attention
        layouts, lengths = ("kvp2",) if is_step or has_ring else ("spp2",), (65536,) if is_step else (16384,)
        usual = {"layouts": layouts, "lengths": lengths, "chunk_size": 64 if is_step else 512}
        for name, value in usual.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        if not self.attention or set(self.attention) - {GATHER, RING}:
            raise ConfigError(f"attention={','.join(self.attention)!r}; accepted: gather, ring, or both")
        if has_ring and self.mode == "decode":
            raise ConfigError("attention='ring' with mode='decode'; accepted: prefill and chunk, as decodes gather")
        for name, layout in self.all_layouts.items():
            layout.check_model(self.subject.model_config(longest=1))
            least = (layout.kvp - 1) * _BLOCK_SIZE
            is_short = layout.kvp < 2 or (self.chunk_size or 0) < PIECES * layout.kvp
            if has_ring and is_short and name != ONE_RANK:
                what = f"attention='ring' on {name} with chunks of {self.chunk_size}"
                raise ConfigError(f"{what}; accepted: kvp of 2 at least, and {PIECES} tokens a group")
            if is_step and min(self.lengths) <= least:
                raise ConfigError(
                    f"{min(self.lengths)} tokens over {layout.kvp} groups in blocks of {_BLOCK_SIZE} leave one without "
                    f"any; accepted: more than {least}"
                )

    @property
    def all_layouts(self) -> dict[str, ParallelConfig]:
        """One rank, and the others."""
        return {ONE_RANK: ParallelConfig(), **{name: parse_layout(name) for name in self.layouts}}


def parse_layout(text: str) -> ParallelConfig:
    """``kvp2``, ``tp2`` or ``kvp2spp2`` as degrees, the axes in any order; raises ConfigError for any other."""
    found = re.findall(r"(kvp|spp|tp)(\d+)", text)
    degrees = {axis: int(degree) for axis, degree in found}
    if not found or len(degrees) < len(found) or "".join(axis + degree for axis, degree in found) != text:
        raise ConfigError(f"layout {text!r}; accepted: for example spp2, tp2, kvp2 or kvp2spp2")
    return ParallelConfig(tp=degrees.get("tp", 1), spp=degrees.get("spp", 1), kvp=degrees.get("kvp", 1))


def scaling(options: ScalingOptions) -> Report:
    """Several ranks against one, one thread a rank; starts its processes itself, without torchrun."""
    results = [line for length in options.lengths for line in _one_length(options, length)]
    given = asdict(options) | {"threads_a_rank": 1}
    return options.subject.head(f"scaling, {options.mode}", given) | {"results": results}


def _one_length(options: ScalingOptions, length: int) -> list[Report]:
    """Every layout over one prompt, or one context."""
    is_decode = options.mode == "decode"
    q_len = 1 if is_decode else options.chunk_size or 0
    work: dict[str, Any] = {"q_len": q_len, "context": length, "is_decode": is_decode}
    if options.mode == "prefill":
        work = {"prompt_len": length, "seed": options.seed}
    with ExitStack() as stack:
        jobs = {
            name: stack.enter_context(start_job(options, layout, length + q_len))
            for name, layout in options.all_layouts.items()
        }
        turns = {
            f"{name} {RING}" if attention == RING else name: partial(job.ask, **work, attention=attention)
            for name, job in jobs.items()
            for attention in ((GATHER,) if name == ONE_RANK else options.attention)
        }
        answers = in_turn(turns, warmup=options.warmup, runs=options.runs)
    lines: list[Report] = []
    for name, found in answers.items():
        seconds, turns_s = [s for answer in found for s in answer["seconds"]], [sum(one["seconds"]) for one in found]
        middle = found[turns_s.index(statistics.median_low(turns_s))]  # the faster of two
        used = middle["usage"]
        line = {"length": length, "layout": name, "num_ranks": len(used["busy_s"]), "timing": timing_of(seconds)}
        lines.append(line | {"seconds": seconds, "usage": used})
    first_s = lines[0]["timing"]["median_s"]
    return [line | {"ratio": first_s / line["timing"]["median_s"]} for line in lines]


def usage(ranks: Sequence[RankRecords]) -> Report:
    """Where the time of a prefill, or of a turn of steps, went: from its first batch's start to its last one's end.

    ``busy_s`` is of each rank, as is ``cpu_s``, what of it was on the processor, and ``bubble`` the share of all
    ranks' time in which they did not compute. The waits are the most that a rank waited once its first batch was there:
    for hidden states and for messages; merges are of all batches.
    """
    active = [r.batches for r in ranks if r.batches]  # a group may have had nothing to do
    span_s = max(batches[-1].end_s for batches in active) - min(batches[0].start_s for batches in active)
    busy_s = [sum(batch.busy_s for batch in r.batches) for r in ranks]
    filled = [batches[1:] for batches in active]  # the wait for a rank's first batch is the pipeline's filling
    return {
        "busy_s": busy_s,
        "cpu_s": [sum(batch.cpu_s for batch in r.batches) for r in ranks],
        "bubble": 1 - sum(busy_s) / (span_s * len(ranks)),
        "transfer_wait_s": max(sum(batch.hidden_wait_s for batch in batches) for batches in filled),
        "control_wait_s": max(sum(batch.control_wait_s for batch in batches) for batches in filled),
        "merge_wait_s": max(sum(batch.merge_wait_s for batch in batches) for batches in active),
    }


def start_job(options: ScalingOptions, layout: ParallelConfig, longest: int) -> Worker:
    """The job of a layout, for contexts of up to so many tokens; its chunks have one size, whatever they take."""
    degrees = {"tp": layout.tp, "spp": layout.spp, "kvp": layout.kvp}
    engine = {**options.subject.engine, "num_threads": 1, "seed": options.seed, **degrees}
    settings = {
        "subject": asdict(replace(options.subject, engine=engine)),
        "longest": longest,
        "fills": options.mode != "prefill",
        "scheduler": "sarathi",
        "chunk_size": options.chunk_size,
        "max_batch_tokens": options.chunk_size,
        "max_num_seqs": 1,
        "block_size": _BLOCK_SIZE,
        "num_kv_blocks": -(-longest // _BLOCK_SIZE) + 1,
    }
    return Worker(f"a job of {degrees}", [sys.executable, "-P", "-m", "medha.bench.scaling"], settings, stops=False)


def _prefill(local: Local, hand: StepRunner, *, prompt_len: int, seed: int, attention: str) -> Report:
    """Read a random prompt to its first token."""
    if attention == RING:
        most, kvp = local.config.scheduler.chunk_size or prompt_len, local.config.parallel.kvp
        sizes = [(at, min(most, prompt_len - at)) for at in range(0, prompt_len, most)]
        hand.run_all([chunk(size, at, num_groups=kvp, is_dealt=size >= PIECES * kvp) for at, size in sizes])
        return {"seconds": [hand.last_s]}
    prompt = random_prompt(prompt_len, local.model.vocab_size, np.random.default_rng(seed))
    (outcome,) = serve_load(local.engine, [Arrival("prompt", prompt, fixed_output(1))]).outcomes
    if outcome.ttft_s is None:
        raise ConfigError(f"a prompt of {prompt_len} tokens has failed: {outcome.error}")
    return {"seconds": [outcome.ttft_s]}


def _steps(local: Local, hand: StepRunner, *, q_len: int, context: int, is_decode: bool, attention: str) -> Report:
    """Equal steps of one row over a context that lies on all groups."""
    step = (Row(FIRST_SLOT, context, q_len, is_decode, is_decode, 0, local.config.parallel.kvp, attention == RING),)
    ran = [(hand.run(step)[0], hand.last_s) for _ in range(_STEPS)]
    return {"batch_ids": [batch_id for batch_id, _ in ran], "seconds": [seconds for _, seconds in ran]}


def _usage(local: Local, ids: Sequence[int] | None) -> Report:
    """What the time since the last call went to, of batches that count."""
    if local.role.part is None:
        records = [RankRecords(0, 0, 0, local.role.runner.recorder.take())]
    else:
        records = local.engine.runner.gather_records()  # type: ignore[attr-defined]
    return usage(
        [r._replace(batches=tuple(one for one in r.batches if ids is None or one.batch_id in ids)) for r in records]
    )


def _serve_lines(local: Local) -> Report:
    """Answer line after line until the input ends, on rank 0 of a job."""
    cache = local.role.runner.cache
    sizes = {"block_size": cache.block_size, "num_blocks": cache.num_blocks}
    hand = StepRunner(local.engine.runner, vocab_size=local.model.vocab_size, **sizes)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        found = _prefill(local, hand, **work) if "prompt_len" in work else _steps(local, hand, **work)
        print(json.dumps(found | {"usage": _usage(local, found.pop("batch_ids", None))}), flush=True)
    return {}


_NOTES = (
    "interleaved; 1 thread a rank; ratio: one rank's time over a layout's",
    "of a step: turns of 10 over random keys and values; waits: of a turn",
)
_SHOWS = {"results": ("length", "layout", "timing", "ratio", "usage")}
_TAKES = pick("dtype", "device", "attention_backend", "hf_overrides")
verb("scaling", ScalingOptions, scaling, _SHOWS, _NOTES, _TAKES)

if __name__ == "__main__":
    end_process(run_guarded(lambda: as_told(sys.stdin.readline(), _serve_lines)))
