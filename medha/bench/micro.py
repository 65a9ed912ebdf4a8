"""``medha bench micro attention``, ``decode`` and ``sampling``: one part alone, in turn with what the machine can do.

``attention`` is one layer's, called as the engine calls it: the engine's backend, planned once, over the paged pool of
one layer, the chunk's own keys at its end. Chunking is free where a small chunk costs no more for each product than a
large one (arXiv:2409.17264 v4 section 3.2), so ``overhead`` compares seconds for each useful operation with those of
the largest chunk over the same KV cache. A chunk of ``c`` tokens that ends a context of ``S`` has
``c * (S - c) + c * (c + 1) / 2`` useful scores a head, of ``4 * H`` operations.

A step of a ``decode`` reads all weights once and the keys and values of every request, so what bounds it is memory. The
bytes that it has to read, over its time, as a share of the rate at which memory can be read is its MBU. What a cache
holds between steps makes small models look faster than that. What is timed is a step of the runner: from the batch to
its tokens, with block tables, embedding, sampling, and without the scheduler. The steps are made by hand over a KV
cache of random numbers (:mod:`medha.profile.steps`), in which no two requests share a block. It runs on any layout;
with several ranks the seconds are those of the ranks that sample, and there is no MBU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product as pairs

import torch

from medha.attention.interface import AttentionRows, LayerShape
from medha.bench.harness import Local, Report, Shown, Subject, count_parameters, median_text, on_ranks, rows_of
from medha.bench.timing import Timing, in_turn, matrix_product, memory_read, timed, waited
from medha.bench.verb import ALONE, SUBJECT, counted, lengths, verb, warmups, words
from medha.cli.options import PARALLEL
from medha.config import ModelConfig
from medha.errors import ConfigError
from medha.params import SamplingParams
from medha.profile.steps import Step, StepRunner, decodes, fill_pools
from medha.worker.kv_cache import KVCache
from medha.worker.sampling import SlotSampling, draw
from medha.worker.shard import TORCH_DTYPES, choose_backend, pick_device

TIMED = "a step of the runner, from the batch to its tokens; without scheduler and engine"
_BLOCK_SIZE = 256
_YARDSTICK = "yardstick"


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What is measured: chunks over KV lengths in each dtype. Of the engine's options only those of :data:`ALONE`."""

    subject: Subject = field(default_factory=Subject)
    chunks: tuple[int, ...] = lengths(
        "chunk_size", "32,64,128,256,512,1024", "Query tokens of a chunk, comma separated."
    )
    kv_lens: tuple[int, ...] = lengths(
        "kv_lens", "4096,16384,65536", "Keys that the last query sees, the chunk's own included."
    )
    dtypes: tuple[str, ...] = words("float32,bfloat16", "Comma separated.", name="dtype")
    warmup: int = warmups(1)
    runs: int = counted(3)

    def __post_init__(self) -> None:
        wrong = [name for name in self.dtypes if name not in TORCH_DTYPES]
        if wrong:
            raise ConfigError(f"dtype={wrong[0]!r}; accepted: {', '.join(TORCH_DTYPES)}, comma separated")
        if min(self.kv_lens) < min(self.chunks):
            raise ConfigError(f"kv_lens={self.kv_lens} with chunks={self.chunks}; accepted: none below every chunk")

    @property
    def cells(self) -> list[tuple[int, list[int]]]:
        """Each KV length with the chunks that it has room for, from small to large."""
        return [(kv, [c for c in sorted(set(self.chunks)) if c <= kv]) for kv in sorted(set(self.kv_lens))]

    @property
    def num_runs(self) -> int:
        """Calls and products, warm-up included."""
        return sum(1 + len(chunks) for _, chunks in self.cells) * (self.warmup + self.runs) * len(self.dtypes)


def attention(options: AttentionOptions, *, on_run: Callable[[], None] = lambda: None) -> Report:
    """Attention of one layer, chunks over KV lengths: its rate, against the matrix products of this machine."""
    load, device = os.getloadavg()[0], _device(options.subject)
    model = options.subject.model_config(longest=max(options.kv_lens))
    backends: dict[str, str] = {}
    results: list[Report] = []
    rates: list[Report] = []
    for name in options.dtypes:
        dtype = TORCH_DTYPES[name]
        backends[name], attend = _attention(options, model, dtype, device)
        product = matrix_product(dtype, device)
        for kv_len, chunks in options.cells:
            runs = {_YARDSTICK: product.seconds}
            runs |= {str(chunk): partial(timed, attend(chunk, kv_len)) for chunk in chunks}
            seconds = in_turn(runs, warmup=options.warmup, runs=options.runs, on_run=on_run)
            rate = product.rate(seconds.pop(_YARDSTICK))
            rates.append({"dtype": name, "kv_len": kv_len, **asdict(rate)})
            lines: list[Report] = []
            for chunk, found in zip(chunks, seconds.values(), strict=True):
                timing, flops = Timing.of(found), attention_flops(model, chunk, kv_len)
                per_s = flops / timing.median_s
                cell: Report = {
                    "dtype": name,
                    "kv_len": kv_len,
                    "chunk": chunk,
                    "timing": asdict(timing),
                    "flops": flops,
                }
                lines.append(cell | {"flops_per_s": per_s, "share": per_s / rate.per_s})
            results += [one | {"overhead": lines[-1]["flops_per_s"] / one["flops_per_s"] - 1} for one in lines]
    return options.subject.head("micro attention", asdict(options), load, model) | {
        "dtype": " and ".join(options.dtypes),
        "device": str(device),
        "backend": backends,
        **{name: getattr(model, name) for name in ("num_heads", "num_kv_heads", "head_dim")},
        "results": results,
        "matrix_rates": rates,
    }


def attention_flops(model: ModelConfig, chunk: int, kv_len: int) -> float:
    """Operations of one layer's attention: scores under the causal mask, and their products with the values."""
    scores = chunk * (kv_len - chunk) + chunk * (chunk + 1) / 2
    return 4.0 * model.num_heads * model.head_dim * scores


def _attention(
    options: AttentionOptions, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[str, Callable[[int, int], Callable[[], None]]]:
    """An engine's backend over one layer's pool of random numbers: its name, and what attends with a chunk.

    A context is one run of adjacent blocks, which is what the allocator aims at.
    """
    num_blocks, shape = -(-max(options.kv_lens) // _BLOCK_SIZE), (model.num_kv_heads, model.head_dim)
    cache = KVCache(
        num_layers=1, num_blocks=num_blocks, block_size=_BLOCK_SIZE, num_kv_heads=shape[0], head_dim=shape[1],
        dtype=dtype, device=device,
    )  # fmt: skip
    fill_pools(cache, max(options.kv_lens), seed=0)
    wanted = options.subject.options.get("attention_backend", "auto")
    layer = LayerShape(model.num_heads, *shape, dtype)
    backend = choose_backend(wanted, layer, device, block_size=_BLOCK_SIZE)[0]

    def attend(chunk: int, kv_len: int) -> Callable[[], None]:
        generator = torch.Generator(device).manual_seed(chunk)
        q_TNH = torch.randn(chunk, model.num_heads, model.head_dim, generator=generator, device=device).to(dtype)
        plan = backend.plan(AttentionRows.over([(chunk, ((0, kv_len),), True)], _BLOCK_SIZE))
        run = torch.inference_mode()(partial(backend.run, q_TNH, cache.k[0], cache.v[0], plan))
        return waited(run, device)

    return backend.name, attend


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """What is measured: every batch size at every context; contexts that the model does not take are left out."""

    subject: Subject = field(default_factory=Subject)
    batch_sizes: tuple[int, ...] = lengths("batch_size", "1,4,16", "Requests that decode together, comma separated.")
    contexts: tuple[int, ...] = lengths(
        "input_len", "1024,8192", "Tokens of each in the KV cache.", "--input-len", "--context"
    )
    warmup: int = warmups(2, "Steps")
    runs: int = counted(10, "Steps")

    def __post_init__(self) -> None:
        object.__setattr__(self, "contexts", self.subject.fitting("input_len", self.contexts, more=1))

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Context and batch size of each."""
        return list(pairs(sorted(set(self.contexts)), sorted(set(self.batch_sizes))))

    @property
    def num_blocks(self) -> int:
        """Blocks of the largest cell; a step adds one token to each request."""
        return max(batch * -(-(context + 1) // _BLOCK_SIZE) for context, batch in self.cells)

    @property
    def num_runs(self) -> int:
        """Steps and reads, warm-up included."""
        return (1 + len(self.cells)) * (self.warmup + self.runs)


def decode(options: DecodeOptions, *, on_run: Callable[[], None] = lambda: None) -> Report | None:
    """A step of decodes, batch sizes over contexts: its time, and the share of the memory's rate (MBU)."""
    longest, sizes = max(options.contexts) + 1, {"block_size": _BLOCK_SIZE, "num_kv_blocks": options.num_blocks}
    return on_ranks(
        options.subject, lambda local: _decode(local, options, on_run), longest=longest, fills=True, **sizes
    )


def _decode(local: Local, options: DecodeOptions, on_run: Callable[[], None]) -> Report:
    memory, hand, size = memory_read(local.device), local.hand, local.dtype.itemsize
    runs: dict[str, Callable[[], float]] = {_YARDSTICK: memory.seconds}
    for context, batch in options.cells:
        runs[f"{batch} at {context}"] = partial(_busy_s, hand, decodes(batch, context))
    seconds = in_turn(runs, warmup=options.warmup, runs=options.runs, on_run=on_run)
    rate = memory.rate(seconds.pop(_YARDSTICK))
    weight_bytes, is_whole = step_parameters(local.model) * size, local.config.parallel.world_size == 1
    cells = []
    for (context, batch), timing in zip(options.cells, map(Timing.of, seconds.values()), strict=True):
        kv_bytes = batch * (context + 1) * local.model.kv_bytes_per_token(size)
        per_s = (weight_bytes + kv_bytes) / timing.median_s
        cell = {"batch_size": batch, "context": context, "timing": asdict(timing), "weight_bytes": weight_bytes}
        cell |= {"kv_bytes": kv_bytes, "bytes_per_s": per_s, "mbu": per_s / rate.per_s if is_whole else None}
        cells.append(cell | {"tokens_per_s": batch / timing.median_s})
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
    """What is measured: every way of drawing at every batch size. Of the engine's options only those of
    :data:`ALONE`."""

    subject: Subject = field(default_factory=Subject)
    batch_sizes: tuple[int, ...] = lengths("batch_size", "1,16,64", "Rows of logits, comma separated.")
    warmup: int = warmups(2)
    runs: int = counted(10)

    @property
    def num_runs(self) -> int:
        """Of all, warm-up included."""
        return len(WAYS) * len(self.batch_sizes) * (self.warmup + self.runs)


def sampling(options: SamplingOptions, *, on_run: Callable[[], None] = lambda: None) -> Report:
    """From random logits to tokens on the host, over batch sizes and ways of drawing."""
    load, device = os.getloadavg()[0], _device(options.subject)
    model = options.subject.model_config(longest=1)
    prompt, cells = torch.arange(min(1024, model.vocab_size)), list(pairs(options.batch_sizes, WAYS))
    runs: dict[str, Callable[[], float]] = {}
    for batch, way in cells:
        logits_SV = torch.randn(batch, model.vocab_size, generator=torch.Generator().manual_seed(0)).to(device)
        slots = [SlotSampling.of(WAYS[way].resolve({}), i, (), len(prompt), prompt) for i in range(batch)]
        runs[f"{batch} {way}"] = partial(timed, waited(partial(draw, logits_SV, slots, [0] * batch), device))
    found = in_turn(runs, warmup=options.warmup, runs=options.runs, on_run=on_run)
    results = [
        {"batch_size": batch, "way": way, "timing": asdict(timing), "per_token_s": timing.median_s / batch}
        for (batch, way), timing in zip(cells, map(Timing.of, found.values()), strict=True)
    ]
    head = options.subject.head("micro sampling", asdict(options), load, model)
    return head | {"dtype": "float32", "device": str(device), "vocab_size": model.vocab_size, "results": results}


def _device(subject: Subject) -> torch.device:
    """Where the part runs, on as many threads as are asked for."""
    if subject.options.get("num_threads") is not None:
        torch.set_num_threads(subject.options["num_threads"])
    return pick_device(subject.options.get("device", "auto"))


def _attention_shown(report: Report) -> Shown:
    columns = ("dtype", "kv_len", "chunk", "timing", "flops_per_s", "share", "overhead")
    return {"results": rows_of(report["results"], columns)}, [
        f"one layer; {median_text(report)}, in turn; share: of the matrix product's rate; operations: those under the "
        "causal mask; overhead: seconds for each of them against the largest chunk over the same KV cache, less 1"
    ]


def _decode_shown(report: Report) -> Shown:
    columns = ("context", "batch_size", "timing", "weight_bytes", "kv_bytes", "mbu", "tokens_per_s")
    entries = {"memory_read": report["memory_read"], "results": rows_of(report["results"], columns)}
    mbu = "bytes that a step has to read (weights and KV) over its time, of the memory's rate"
    notes = [f"timed: {report['timed']}; MBU: {mbu}", f"{median_text(report)}, in turn; KV cache of random numbers"]
    return entries, notes


def _sampling_shown(report: Report) -> Shown:
    return {name: report[name] for name in ("vocab_size", "results")}, [f"{median_text(report)}, in turn"]


verb("attention", AttentionOptions, attention, _attention_shown, ALONE)
verb("decode", DecodeOptions, decode, _decode_shown, SUBJECT, PARALLEL)
verb("sampling", SamplingOptions, sampling, _sampling_shown, ALONE)
