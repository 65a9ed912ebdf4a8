"""Engines on random checkpoints, sharing one loaded model, and what they generate with the logits behind it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import medha.worker.runner
from medha.attention.interface import AttentionBackend, LayerShape
from medha.attention.torch_backend import TorchBackend
from medha.batch import Batch
from medha.config import EngineConfig, ParallelConfig, SchedulerConfig
from medha.cost.predictor import Predictor
from medha.engine.build import build_role
from medha.engine.engine import Engine
from medha.engine.request import ModelLimits
from medha.models.decoder import Decoder
from medha.models.hf_config import load_model_config
from medha.outputs import RequestOutput
from medha.params import SamplingParams
from medha.sched.scheduler import Scheduler
from medha.text import Tokenizer
from medha.timeline import Timeline
from medha.worker.kv_cache import KVCache
from medha.worker.runner import Runner
from medha.worker.shard import ModelShard, load_model
from medha.worker.swap import HostCache, Wait
from tests.sched.virtual import by_tokens

CPU = torch.device("cpu")


def build_engine(config: EngineConfig, *, timeline: Timeline | None = None) -> Engine:
    """The engine of a single process."""
    return build_role(config, timeline=timeline).engine


def load_decoder(folder: Path, *, dtype: torch.dtype = torch.float32) -> Decoder:
    """The packed decoder of a folder."""
    shard = ModelShard.at(load_model_config(folder), ParallelConfig(), 0, dtype)
    return load_model(EngineConfig(str(folder)), shard, None, folder, TorchBackend())


def make_engine(
    model: Decoder,
    *,
    num_blocks: int = 64,
    block_size: int = 64,
    max_model_len: int = 8192,
    eos: tuple[int, ...] = (),
    tokenizer: Tokenizer | None = None,
    clock: Callable[[], float] = time.perf_counter,
    dtype: torch.dtype = torch.float32,
    backend: AttentionBackend | None = None,
    has_scratch: bool = False,
    host_cache: type[HostCache] = HostCache,
    predictor: Predictor | None = None,
    **config: Any,
) -> Engine:
    """A fresh engine around a loaded decoder; ``has_scratch`` is of the KV pool, ``config`` of the scheduler.

    With ``num_swap_blocks`` it has host memory, to which blocks go over ``stream``.
    """
    shape = LayerShape(model.config.num_heads, model.config.num_kv_heads, model.config.head_dim, dtype)
    sizes = {"num_blocks": num_blocks, "block_size": block_size}
    cache = KVCache(shape, num_layers=model.config.num_layers, **sizes, device=CPU, has_scratch=has_scratch)
    num_swap_blocks = config.get("num_swap_blocks", 0)
    host = host_cache(cache, num_swap_blocks) if num_swap_blocks else None
    return Engine(
        Runner(model, cache, backend or TorchBackend(), CPU, host=host),
        Scheduler(SchedulerConfig(**{"scheduler": "sarathi"} | config), **sizes, predictor=predictor or by_tokens()),
        ModelLimits(model.config.vocab_size, max_model_len, eos),
        tokenizer=tokenizer,
        clock=clock,
    )


def on_threads(*counts: int) -> Iterator[None]:
    """Once for each number of threads that torch may use, and then as before; it is one again after every test."""
    before = torch.get_num_threads()
    for count in counts:
        torch.set_num_threads(count)
        yield
    torch.set_num_threads(before)


def submitted(engine: Engine) -> list[Batch]:
    """The batches that an engine hands to its runner from now on."""
    batches: list[Batch] = []
    submit = engine.runner.submit
    engine.runner.submit = lambda batch: (batches.append(batch), submit(batch))[1]
    return batches


class Late(HostCache):
    """A substitute for the host's pools: copies are made as late as they may be, when the compute that must come after
    them is launched."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.queued: deque[Callable[[], Wait]] = deque()

    def move(self, *runs: Any) -> list[Wait]:
        assert not self.queued, "the compute of every batch comes after all of its copies, and so do later batches"
        return super().move(*runs)

    def _move(self, *what: Any) -> Wait:
        copy = partial(super()._move, *what)
        self.queued.append(copy)

        def wait() -> None:
            while copy in self.queued:
                self.queued.popleft()()

        return wait

    def finish(self) -> None:
        while self.queued:
            self.queued.popleft()()


def drained(engine: Engine) -> list[RequestOutput]:
    """Step to the end, at which the pool must be empty; every output on the way."""
    outputs: list[RequestOutput] = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert engine.scheduler.memory.num_used == 0
    return outputs


def left_behind(engine: Any) -> dict[str, list[int]]:
    """What an engine without requests still holds by kind: blocks, slots, rows, grants, sampling states; empty if
    nothing."""
    scheduler = getattr(engine.scheduler, "_scheduler", engine.scheduler)
    runner = engine.runner
    while hasattr(runner, "runner"):  # of a rank that drives others, or of a test
        runner = runner.runner
    memory, queue = scheduler.memory, scheduler._queue
    hand_overs, instances = engine.hand_overs, [one.scheduler for one in engine.hand_overs.instances]
    left = {
        "blocks": [memory.num_used, *(host.pool.num_blocks - host.num_free for host in memory.hosts)],
        "swapped requests": [len(host.swapped) for host in memory.hosts],
        "reservations": [len(memory._accounts), *memory._open, *memory._set_aside],
        "requests": [scheduler.num_running, scheduler.num_waiting, len(queue.ending), len(queue.decoding)],
        "rows": [queue.num_prefills, int(queue.column("relegated").sum())],
        "batches": [len(scheduler.in_flight), len(engine._in_flight)],
        "plans": [len(getattr(scheduler.packer, "_plans", ()))],
        "of instances": [n for one in instances for n in (one.memory.num_used, len(one.in_flight), one.num_running)],
        "hand-overs": [len(hand_overs.waiting), len(hand_overs.transfers)],
        "hand-overs to instances": [len(one.coming) for one in hand_overs.instances],
        "slots": [len(engine.live), len(engine.by_slot)],
        "slots twice": [len(engine._free_slots) - len(set(engine._free_slots))],
        "of the runner": [len(runner._tokens), len(runner.sampling)],
    }
    return {name: counts for name, counts in left.items() if any(counts)}


def run_to_end(engine: Engine, prompts: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens of each prompt, all added at once."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, output_kind="final_only")
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    tokens = {output.request_id: output.outputs[0].token_ids for output in drained(engine)}
    return [tokens[str(i)] for i in range(len(prompts))]


def run_with_logits(
    engine: Engine, prompts: Sequence[list[int]], num_tokens: int
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """As :func:`run_to_end`, with the logits that chose each token, [num_tokens, V] a prompt."""
    with pytest.MonkeyPatch.context() as patch:
        logits = poison(patch)  # nobody: it records them
        tokens = run_to_end(engine, prompts, num_tokens)
    return tokens, [torch.stack(logits[i]) for i in range(len(prompts))]  # request i draws with seed i


def poison(
    patch: pytest.MonkeyPatch, *, seed: int = -1, index: int = 0, value: float = 0.0
) -> dict[int, list[torch.Tensor]]:
    """Make one logit of one request's token bad, if any draws with that seed; returns where all logits are recorded
    from now on, by the seed of the request."""
    logits: dict[int, list[torch.Tensor]] = {}
    original = medha.worker.runner.draw

    def poisoned(logits_SV: torch.Tensor, slots: Any, indices: Any, *rest: Any) -> Any:
        for row, slot, i in zip(logits_SV, slots, indices, strict=True):
            logits.setdefault(slot.seed, []).append(row.clone())
            if (slot.seed, i) == (seed, index):
                row[11] = value
        return original(logits_SV, slots, indices, *rest)

    patch.setattr(medha.worker.runner, "draw", poisoned)
    return logits
