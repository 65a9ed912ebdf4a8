"""``medha bench micro decode``: one step in which a batch decodes; ``micro sampling``: the drawing of its tokens.

A step of a decode reads all weights once and the keys and values of every request, so what bounds it is memory. The
bytes that it has to read, over its time, as a share of the rate at which memory can be read is its MBU; the read is
measured in turn with the steps. What a cache holds between steps makes small models look faster than that.

What is timed is a step of the runner: from the batch to its tokens, with block tables, embedding, sampling; the
scheduler and what the engine keeps of a request are not in it. The steps are made by hand over a KV cache of random
numbers (:mod:`medha.profile.steps`), in which no two requests share a block. It runs on any layout; with several ranks
the seconds are those of the ranks that sample, and there is no MBU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial

import torch

from medha.bench.harness import Local, Report, Shown, Subject, count_parameters, median_text, on_ranks, rows_of
from medha.bench.timing import Rate, Timing, in_turn, memory_read, timed
from medha.config import ModelConfig
from medha.params import SamplingParams
from medha.profile.steps import Step, StepRunner, decodes
from medha.worker.sampling import SlotSampling, sample
from medha.worker.shard import pick_device

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

    @property
    def num_runs(self) -> int:
        """Steps and reads, warm-up included."""
        return (1 + len(self.cells)) * (self.warmup + self.runs)


def decode(options: DecodeOptions, *, on_run: Callable[[], None] = lambda: None) -> Report | None:
    """Run the measurement; every rank calls it.

    Args:
        options: what to run.
        on_run: called after each step and read, warm-up included.

    Returns:
        The report on rank 0.

    Raises:
        ConfigError: the options are wrong, or there is no memory for the KV cache.
    """
    return on_ranks(
        options.subject,
        lambda local: _decode(local, options, on_run),
        longest=max(options.contexts) + 1,
        fills=True,
        block_size=_BLOCK_SIZE,
        num_kv_blocks=options.num_blocks,
    )


def _decode(local: Local, options: DecodeOptions, on_run: Callable[[], None]) -> Report:
    memory = memory_read(local.device)
    sizes = {"block_size": _BLOCK_SIZE, "num_blocks": options.num_blocks}
    hand = StepRunner(local.engine.runner, vocab_size=local.model.vocab_size, **sizes)
    contestants: dict[str, Callable[[], float]] = {_READ: memory.seconds}
    for batch, context in options.cells:
        step = decodes(batch, context)
        contestants[f"{batch} at {context}"] = partial(_busy_s, hand, step)
    seconds = in_turn(contestants, warmup=options.warmup, runs=options.runs, on_run=on_run)
    rate = Rate.of(memory, seconds.pop(_READ))
    is_whole = local.config.parallel.world_size == 1
    cells = []
    for (batch, context), found in zip(options.cells, seconds.values(), strict=True):
        timing, size = Timing.of(found), local.dtype.itemsize
        weight_bytes = step_parameters(local.model) * size
        kv_bytes = batch * (context + 1) * local.model.kv_bytes_per_token(size)
        per_s = (weight_bytes + kv_bytes) / timing.median_s
        cells.append(
            {
                "batch_size": batch,
                "context": context,
                "timing": asdict(timing),
                "weight_bytes": weight_bytes,
                "kv_bytes": kv_bytes,
                "bytes_per_s": per_s,
                "mbu": per_s / rate.per_s if is_whole else None,
                "tokens_per_s": batch / timing.median_s,
            }
        )
    head = local.report("micro decode", asdict(options))
    return head | {"timed": TIMED, "memory_read": asdict(rate), "results": cells}


def _busy_s(hand: StepRunner, step: Step) -> float:
    """Runs the step; its busy seconds end when its tokens are on the host."""
    return hand.run(step)[1]


def step_parameters(model: ModelConfig) -> int:
    """Parameters that a decode step reads: layers, last norm and head; of an embedding some rows, which are left out.

    Where the embedding is tied, it is the head.
    """
    return count_parameters(model, lambda name: name != "model.embed_tokens.weight" or model.tie_word_embeddings)


WAYS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=1.0),
    "top-k 50": SamplingParams(temperature=1.0, top_k=50),
    "top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9),
    "repetition 1.1": SamplingParams(temperature=0.0, repetition_penalty=1.1),
    "20 logprobs": SamplingParams(temperature=0.0, logprobs=20),
}
"""Ways of drawing a token."""


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """What is measured: every way of drawing at every batch size.

    Attributes:
        subject: whose vocabulary; of its engine's options only ``device`` and ``num_threads`` count.
        batch_sizes: rows of logits.
        warmup, runs: of each.
    """

    subject: Subject = field(default_factory=Subject)
    batch_sizes: tuple[int, ...] = (1, 16, 64)
    warmup: int = 2
    runs: int = 10

    @property
    def num_runs(self) -> int:
        """Of all, warm-up included."""
        return len(WAYS) * len(self.batch_sizes) * (self.warmup + self.runs)


def sampling(options: SamplingOptions, *, on_run: Callable[[], None] = lambda: None) -> Report:
    """Draw tokens of random logits until they are on the host.

    Args:
        options: what to run.
        on_run: called after each run, warm-up included.

    Raises:
        ConfigError: the options are wrong.
    """
    load, given = os.getloadavg()[0], options.subject.options
    if given.get("num_threads") is not None:
        torch.set_num_threads(given["num_threads"])
    device = pick_device(given.get("device", "auto"))
    model = options.subject.model_config(longest=1)
    prompt = torch.arange(min(1024, model.vocab_size))
    runs: dict[str, Callable[[], float]] = {}
    for batch in options.batch_sizes:
        logits_SV = torch.randn(batch, model.vocab_size, generator=torch.Generator().manual_seed(0)).to(device)
        for way, params in WAYS.items():
            slots = [SlotSampling.of(params.resolve({}), i, (), len(prompt), prompt) for i in range(batch)]
            runs[f"{batch} {way}"] = partial(timed, partial(sample, logits_SV, slots, [0] * batch))
    found = iter(in_turn(runs, warmup=options.warmup, runs=options.runs, on_run=on_run).values())
    results = [
        {"batch_size": batch, "way": way, "timing": asdict(timing), "per_token_s": timing.median_s / batch}
        for batch in options.batch_sizes
        for way, timing in zip(WAYS, map(Timing.of, (next(found) for _ in WAYS)), strict=True)
    ]
    head = options.subject.head("micro sampling", asdict(options), load, model)
    return head | {"dtype": "float32", "device": str(device), "vocab_size": model.vocab_size, "results": results}


def shown(report: Report) -> Shown:
    """What is printed of the report."""
    columns = ("context", "batch_size", "timing", "weight_bytes", "kv_bytes", "mbu", "tokens_per_s")
    entries = {"memory_read": report["memory_read"], "results": rows_of(report["results"], columns)}
    mbu = "bytes that a step has to read (weights and KV) over its time, of the memory's rate"
    notes = [f"timed: {report['timed']}; MBU: {mbu}", f"{median_text(report)}, in turn; KV cache of random numbers"]
    return entries, notes


def sampling_shown(report: Report) -> Shown:
    """What is printed of the report."""
    return {name: report[name] for name in ("vocab_size", "results")}, [f"{median_text(report)}, in turn"]
