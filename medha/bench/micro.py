"""One part alone.

``medha bench micro attention``: Attention of one layer, chunks over KV lengths.
``medha bench micro sampling``: From logits to tokens, over batch sizes and ways of drawing.
``medha bench micro scheduler``: One scheduling decision, as the queue grows.

``attention`` is one layer's: the engine's backend over one layer's paged pool, planned once, the chunk's own keys at
its end. Chunking is free where a small chunk costs no more for each product than a large one (arXiv:2409.17264 v4
section 3.2), so ``overhead`` compares seconds for each useful operation with those of the largest chunk over the same
KV cache. A chunk of ``c`` tokens that ends a context of ``S`` has ``c * (S - c) + c * (c + 1) / 2`` useful scores a
head, of ``4 * H`` operations.

``scheduler`` is what the engine pays for a batch beside computing it: ``schedule`` and ``complete`` of
:class:`~medha.sched.scheduler.Scheduler`, with the predictor of an 8B model on one A100. No model runs: a batch takes
the seconds predicted of it. The engine is overloaded: so many requests decode, prefills are under way, one in a hundred
of a long prompt, and so many wait; the decodes go on, and for each prompt that has been read another one arrives. With
``--full-pool`` one decode holds all KV memory and nobody else can start; two batches may be in flight, and the slower
of two decisions counts: the one that goes on with the decode, and the one that finds nothing while it is in flight.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count, product
from typing import Any

import numpy as np
import torch

from medha.attention.interface import AttentionRows, LayerShape
from medha.bench.cli import ALONE, ANY_COUNT, COUNT, Report, asked, counted, lengths, verb, warmups
from medha.bench.harness import Subject
from medha.bench.timing import in_turn, matrix_product, timed, timing_of
from medha.cli.report import stamp
from medha.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig
from medha.config.fields import choice, integer
from medha.cost.hardware import load_spec
from medha.errors import ConfigError
from medha.params import SLO, SamplingParams
from medha.profile.steps import fill_pools
from medha.sched.decision import SchedulerRequest
from medha.sched.prefix import ID_BYTES
from medha.sched.scheduler import Scheduler
from medha.sim.replica import Replica, find_model
from medha.worker.kv_cache import KVCache
from medha.worker.sampling import SlotSampling, draw
from medha.worker.shard import TORCH_DTYPES, choose_backend, pick_device

_BLOCK_SIZE = 256
_YARDSTICK = "yardstick"
_FIGURES = ("median_ms", "p99_ms", "max_ms")
_MAX_NEW_TOKENS = 1 << 16  # more than are decoded here
_LONG_TOKENS = 100_000
_LONG_SHARE = 0.01
_LONGEST_SHORT = SchedulerConfig().long_threshold - 1  # tokens of a prompt that is not long


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What is measured: chunks over KV lengths."""

    subject: Subject = field(default_factory=Subject)
    chunks: tuple[int, ...] = lengths(
        "chunk_size", "32,64,128,256,512,1024", "Query tokens of a chunk, comma separated."
    )
    kv_lens: tuple[int, ...] = lengths(
        "kv_lens", "4096,16384,65536", "Keys that the last query sees, the chunk's own included."
    )
    dtype: str = asked("float32", "float32, bfloat16 or float16.", choice(*TORCH_DTYPES))
    warmup: int = warmups(1)
    runs: int = counted(3)


def attention(options: AttentionOptions) -> Report:
    """Attention of one layer, chunks over KV lengths: its rate, against the matrix products of this machine."""
    device, dtype, longest = _device(options.subject), TORCH_DTYPES[options.dtype], max(options.kv_lens)
    model = options.subject.model_config(longest=longest)
    shape = LayerShape(model.num_heads, model.num_kv_heads, model.head_dim, dtype)
    num_blocks = -(-longest // _BLOCK_SIZE)
    cache = KVCache(shape, num_layers=1, num_blocks=num_blocks, block_size=_BLOCK_SIZE, device=device)
    fill_pools(cache, longest, seed=0)
    backend = choose_backend("auto", shape, device, block_size=_BLOCK_SIZE)[0]

    def attend(chunk: int, kv_len: int) -> Callable[[], float]:
        """A context is one run of adjacent blocks, which is what the allocator aims at."""
        generator = torch.Generator(device).manual_seed(chunk)
        q_TNH = torch.randn(chunk, model.num_heads, model.head_dim, generator=generator, device=device).to(dtype)
        pages = np.arange(-(-kv_len // _BLOCK_SIZE), dtype=np.int32)
        row = AttentionRows.of(np.array([chunk]), np.array([kv_len]), np.array([True]), [pages], _BLOCK_SIZE)
        run = torch.inference_mode()(partial(backend.run, q_TNH, cache.k[0], cache.v[0], backend.plan(row)))
        return timed(run, device)

    yardstick = matrix_product(dtype, device)
    runs: dict[Any, Callable[[], float]] = {_YARDSTICK: yardstick.seconds}
    sizes = product(sorted(set(options.kv_lens)), sorted(set(options.chunks)))
    runs |= {(kv_len, chunk): attend(chunk, kv_len) for kv_len, chunk in sizes if chunk <= kv_len}
    if len(runs) == 1:
        raise ConfigError(f"chunk_size={min(options.chunks)}; accepted: one up to kv_lens, {longest}")
    seconds = in_turn(runs, warmup=options.warmup, runs=options.runs)
    rate = yardstick.rate(seconds.pop(_YARDSTICK))
    results: list[Report] = []
    for (kv_len, chunk), found in seconds.items():
        timing, flops = timing_of(found), attention_flops(model, chunk, kv_len)
        per_s = flops / timing["median_s"]
        cell = {"kv_len": kv_len, "chunk": chunk, "timing": timing, "flops": flops, "flops_per_s": per_s}
        results.append(cell | {"share": per_s / rate["flops_per_s"]})
    largest = {one["kv_len"]: one["flops_per_s"] for one in results}
    results = [one | {"overhead": largest[one["kv_len"]] / one["flops_per_s"] - 1} for one in results]
    head = options.subject.head("micro attention", asdict(options), model)
    head |= {"dtype": options.dtype, "device": str(device), "backend": backend.name}
    return head | {"results": results, "matrix_product": rate}


def attention_flops(model: ModelConfig, chunk: int, kv_len: int) -> float:
    """Operations of one layer's attention: scores under the causal mask, and their products with the values."""
    scores = chunk * (kv_len - chunk) + chunk * (chunk + 1) / 2
    return 4.0 * model.num_heads * model.head_dim * scores


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
    """What is measured: every way of drawing at every batch size."""

    subject: Subject = field(default_factory=Subject)
    batch_sizes: tuple[int, ...] = lengths("batch_size", "1,16,64", "Rows of logits, comma separated.")
    warmup: int = warmups(2)
    runs: int = counted(10)


def sampling(options: SamplingOptions) -> Report:
    """From random logits to tokens on the host, over batch sizes and ways of drawing."""
    device = _device(options.subject)
    model = options.subject.model_config(longest=1)
    prompt = np.arange(min(1024, model.vocab_size), dtype=np.int32)
    runs: dict[Any, Callable[[], float]] = {}
    for batch, way in product(options.batch_sizes, WAYS):
        logits_SV = torch.randn(batch, model.vocab_size, generator=torch.Generator().manual_seed(0)).to(device)
        slots = [SlotSampling.of(WAYS[way].resolve({}), i, (), prompt) for i in range(batch)]
        runs[batch, way] = timed(partial(draw, logits_SV, slots, [0] * batch), device)
    found = in_turn(runs, warmup=options.warmup, runs=options.runs)
    results = [{"batch_size": key[0], "way": key[1], "timing": timing_of(one)} for key, one in found.items()]
    head = options.subject.head("micro sampling", asdict(options), model)
    return head | {"dtype": "float32", "device": str(device), "vocab_size": model.vocab_size, "results": results}


def _device(subject: Subject) -> torch.device:
    """Where the part runs, on as many threads as are asked for."""
    if subject.engine.get("num_threads") is not None:
        torch.set_num_threads(subject.engine["num_threads"])
    return pick_device(subject.engine.get("device") or "auto")


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What is measured: each policy over each queue, whose requests have arrived within ``backlog_s`` seconds."""

    waiting: tuple[int, ...] = lengths(
        "num_waiting", "1000,10000,100000", "Requests that wait, comma separated; each is measured."
    )
    policies: Sequence[str] = asked(
        ("priority",), "May be repeated; priority by default.", name="policy", kind=list[str]
    )
    num_decoding: int = asked(256, "Requests that decode.", COUNT, name="num_running")
    num_prefilling: int = asked(
        16, "Places for prefills under way beside them.", integer(2, 65536), name="num_prefills"
    )
    kvp: int = asked(1, "KV-parallel groups.", COUNT)
    is_full: bool = asked(
        False, "One decode holds the KV pool, so that no other request starts.", flags=("--full-pool",)
    )
    warmup: int = warmups(50, "Decisions")
    runs: int = counted(500, "Decisions")
    seed: int = asked(0, "Of lengths, arrivals, objectives and classes.", ANY_COUNT)
    prefix_len: int = asked(0, "Tokens with which all prompts begin.", ANY_COUNT, name="shared_prefix_len")
    backlog_s: float = 60.0


def scheduler(options: SchedulerOptions) -> Report:
    """CPU time of one scheduling decision as the queue grows; no model runs."""
    results: list[Report] = []
    for policy, waiting in product(options.policies, options.waiting):
        queue = Queue(policy, waiting, options)
        steps = [queue.step()[:2] for _ in range(options.warmup + options.runs)][options.warmup :]
        schedule_s, complete_s = np.array(steps).T
        line: Report = {"policy": policy, "waiting": queue.scheduler.num_waiting}
        for call, seconds in {"schedule": schedule_s, "complete": complete_s, "both": schedule_s + complete_s}.items():
            line[call] = dict(zip(_FIGURES, (np.percentile(seconds, [50, 99, 100]) * 1e3).tolist(), strict=True))
        results.append(line)
    return {"benchmark": "micro scheduler", "environment": stamp(), "options": asdict(options), "results": results}


class Queue:
    """Requests on a scheduler, whose numbers stay as they are: the first go on decoding, and of the others one arrives
    for each that ends with its first token."""

    def __init__(self, policy: str, waiting: int, options: SchedulerOptions) -> None:
        max_num_seqs = options.num_decoding + options.num_prefilling
        config = SchedulerConfig(policy=policy, max_num_seqs=max_num_seqs, depth=2 if options.is_full else None)
        size, num_tokens = CacheConfig().block_size, config.max_num_seqs * (_LONG_TOKENS + _MAX_NEW_TOKENS)
        if options.is_full:  # the decode is in the last block throughout
            num_tokens = _LONG_TOKENS + (size := options.warmup + options.runs + 2)
        replica = Replica(load_spec("a100-80g"), find_model("llama-3-8b"), ParallelConfig(kvp=options.kvp), config)
        sizes = {"num_blocks": -(-num_tokens // size), "block_size": size, "num_groups": options.kvp}
        self.scheduler = Scheduler(config, predictor=replica.stages()[0], **sizes)
        self._num_decoding, self._num_waiting = 1 if options.is_full else options.num_decoding, 0
        self._random, self._now_s = np.random.default_rng(options.seed), options.backlog_s
        self._unit = self.scheduler.memory.prefix.unit
        self._shared = self._random.bytes(options.prefix_len // self._unit * ID_BYTES)
        self._slots, self._free = count(), list[int]()
        if options.is_full:
            prompt = self.scheduler.memory.max_request_tokens - size
            self.scheduler.add(SchedulerRequest(next(self._slots), prompt, size, self._now_s, priority=0))
        for _ in range(0 if options.is_full else options.num_decoding):
            self._add(self._now_s)
        while self.step()[2] < self._num_decoding:
            pass
        for arrival_s in np.sort(self._now_s - self._random.uniform(0.0, options.backlog_s, waiting)).tolist():
            self._add(arrival_s)
        self._num_waiting = waiting

    def step(self) -> tuple[float, float, int, int]:
        """One decision, and the arrivals that keep the queue as long as it was: CPU seconds of the two calls, and
        decodes and chunks of the batch."""
        start_s = time.thread_time()
        decision = self.scheduler.schedule(self._now_s)
        scheduled_s = time.thread_time() - start_s
        batch, prediction = decision.batch, decision.prediction
        assert batch is not None and prediction is not None, "an overloaded scheduler always has a batch"
        if self._num_waiting and self.scheduler.depth > 1:
            start_s = time.thread_time()
            assert self.scheduler.schedule(self._now_s).batch is None, "the pool is full, and the decode is in flight"
            scheduled_s = max(scheduled_s, time.thread_time() - start_s)
        self._now_s += prediction.seconds
        sampling = dict.fromkeys(row.slot for row in batch.rows if row.samples)
        results = [(slot, 1, slot >= self._num_decoding) for slot in sampling]
        start_s = time.thread_time()
        self._free += self.scheduler.complete(batch, self._now_s, results, prediction.seconds)
        completed_s = time.thread_time() - start_s
        while self.scheduler.num_waiting < self._num_waiting:
            self._add(self._now_s)
        return scheduled_s, completed_s, batch.num_decodes, len(batch.rows) - batch.num_decodes

    def _add(self, arrival_s: float) -> None:
        """One request arrives: those that go on decoding and most others are chats, one in a hundred is a document."""
        slot, random = self._free.pop() if self._free else next(self._slots), self._random
        goes_on = slot < self._num_decoding
        length = int(np.clip(random.lognormal(6.9, 0.8), 16, _LONGEST_SHORT))  # 1,000 tokens in the median
        if not goes_on and random.random() < _LONG_SHARE:
            length = int(random.uniform(0.2, 1.0) * _LONG_TOKENS)
        slo = SLO(ttft_s=float(random.uniform(0.5, 300.0)), tpot_s=0.5) if random.random() < 0.3 else None
        tokens, priority = _MAX_NEW_TOKENS if goes_on else 1, int(random.integers(0, 4))
        size = length // self._unit * ID_BYTES
        prefix = (self._shared + random.bytes(max(size - len(self._shared), 0)))[:size] if self._shared else b""
        self.scheduler.add(SchedulerRequest(slot, length, tokens, arrival_s, slo, priority, prefix=prefix))


_ATTENTION = {"results": ("kv_len", "chunk", "timing", "flops_per_s", "share", "overhead")}
_ATTENTION_NOTES = (
    "one layer, in turn; share: of the matrix product's rate; operations: those under the causal mask; overhead: "
    "seconds for each of them against the largest chunk over the same KV cache, less 1",
)
verb("attention", AttentionOptions, attention, _ATTENTION, _ATTENTION_NOTES, ALONE)
verb("sampling", SamplingOptions, sampling, {"vocab_size": (), "results": ()}, ("in turn",), ALONE)
verb("scheduler", SchedulerOptions, scheduler, {"results": ()}, ("CPU time of the thread that decides, not wall time",))
