"""One harness for all benchmarks: a model on every rank of a layout, and the engine for the work that rank 0 does.

The layout is torchrun's, or the ranks are started here: ``medha bench latency --spp 2`` runs two on this machine. Rank
0 drives the engine and has the report; the others follow it. The model is a folder, or a random Llama of 4 layers with
GQA 4.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from safetensors.torch import save_file

from medha.bench.cli import Report
from medha.cli.command import end_process, ignore_signals, run_guarded, state_on_signal
from medha.cli.report import stamp
from medha.config import EngineConfig, ModelConfig
from medha.cost.predictor import Predictor
from medha.engine.admission import Prompt
from medha.engine.build import RankHandle, build_role
from medha.engine.engine import Engine
from medha.errors import ConfigError
from medha.models.folder import resolve_model
from medha.models.hf_config import load_model_config, merge_overrides
from medha.models.weights import expected_tensors
from medha.parallel.launch import read_launch
from medha.parallel.own_ranks import own_ranks
from medha.profile.steps import fill_pools
from medha.sched.scheduler import Scheduler
from medha.worker.shard import TORCH_DTYPES

RANDOM_LLAMA = Path(__file__).with_name("random_llama")
"""Its folder; there is no more in it than a ``config.json``."""

DEFINITIONS = {
    "TTFT": "arrival to first token, queueing included",
    "TPOT": "(last - first token) / (tokens - 1) of a request; does not exist for one token",
    "ITL": "gap between successive tokens of a request",
    "E2EL": "arrival to last token",
    "goodput": "completed requests a second that met every objective they had",
    "SLO attainment": "share, of the requests with an objective, that completed and met all of theirs",
}
"""What the terms of serving mean here; other tools differ."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured.

    Attributes:
        hf_overrides: merged over its ``config.json``.
        engine: flat names of :class:`EngineConfig`; what is None or missing has its default, and ``load_format`` is
            ``dummy`` for a random Llama and prefixes are not cached.
    """

    model: str | None = None  # folder or hub id; None is a random Llama
    hf_overrides: Mapping[str, Any] | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = self.engine.get("load_format")
        if self.model is None and given not in (None, "auto", "dummy"):
            raise ConfigError(f"load_format={given!r} without a model; accepted: dummy, or --model with a folder")

    @property
    def folder(self) -> str:
        """The model's, or its hub id."""
        return self.model or str(RANDOM_LLAMA)

    def overrides(self, longest: int) -> dict[str, Any]:
        """What is merged over the model's ``config.json``; a random Llama takes prompts of any length."""
        positions = {} if self.model is not None else {"max_position_embeddings": max(longest, 131072)}
        return dict(self.hf_overrides or {}) | positions

    def config(self, *, longest: int, **engine: Any) -> EngineConfig:
        """The engine's, for requests of so many tokens; raises ConfigError."""
        options = {name: value for name, value in self.engine.items() if value is not None}
        options.setdefault("prefix_caching", False)  # the same prompts come again
        load = {} if self.model is not None else {"load_format": "dummy"}
        shape = {"max_model_len": longest, "hf_overrides": self.overrides(longest) or None}
        return EngineConfig.from_flat(self.folder, **{**options, **load, **shape, **engine})

    def model_config(self, *, longest: int) -> ModelConfig:
        """The model's shape alone, no weights; raises ConfigError."""
        folder = resolve_model(self.folder)
        return load_model_config(folder, hf_overrides=self.overrides(longest), max_model_len=longest)

    @contextmanager
    def checkpoint(self, longest: int, *, dtype: str, seed: int) -> Iterator[str]:
        """A folder that any engine reads: the model's, or for the time being one in which it has what overrides it, or
        in which a random Llama's weights are. Those have a spread of 0.2, which makes greedy tokens distinct.
        """
        if self.model is not None and not self.hf_overrides:
            yield self.model
            return
        source = resolve_model(self.folder)
        with tempfile.TemporaryDirectory(prefix="medha-bench-") as name:
            folder, shape = Path(name), json.loads((source / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(merge_overrides(shape, self.overrides(longest))))
            if self.model is not None:
                for file in source.iterdir():
                    if file.name != "config.json":
                        (folder / file.name).symlink_to(file.resolve())
            else:
                generator, tensors = torch.Generator().manual_seed(seed), {}
                for tensor, size in expected_tensors(load_model_config(folder)).items():
                    drawn = torch.ones(size) if len(size) == 1 else 0.2 * torch.randn(size, generator=generator)
                    tensors[tensor] = drawn.to(TORCH_DTYPES[dtype])
                save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            yield name

    def head(self, benchmark: str, options: Mapping[str, Any], model: ModelConfig | None = None) -> Report:
        """What a report begins with: the verb, its options, the model's shape."""
        model, name = model or self.model_config(longest=1), self.model or "random Llama"
        sharing = model.num_heads // model.num_kv_heads
        return {
            "benchmark": benchmark,
            "environment": stamp(),
            "options": options,
            "definitions": DEFINITIONS,
            "title": f"{benchmark}: {name}, {model.num_layers} layers, {model.hidden_size:,} wide, GQA {sharing}",
            "model_id": name,
            "model": asdict(model),
        }


class Local(NamedTuple):
    """A subject that is loaded, on rank 0: its configuration, model and limits, its engine, the model's shape."""

    subject: Subject
    config: EngineConfig
    role: RankHandle
    engine: Engine  # that the options ask for
    model: ModelConfig

    def engine_with(self, **scheduler: Any) -> Engine:
        """Another engine over the same weights and KV pool, with other fields of :class:`SchedulerConfig`.

        It begins with what the first one's predictor has learned. Only one of the engines may have requests at a time.
        """
        known = self.engine.scheduler
        config = replace(known.config, **scheduler)
        predictor = Predictor(known.predictor.coefficients, max_tokens=config.max_batch_tokens)
        predictor.learned = dict(known.predictor.learned)
        other = Scheduler(config, predictor=predictor, **known.sizes)
        other.memory.frees = known.memory.frees  # what one has left in the block tables goes with the next batch of any
        return Engine(self.engine.runner, other, self.role.limits, tokenizer=self.role.tokenizer)

    def report(self, benchmark: str, options: Mapping[str, Any]) -> Report:
        """What every report begins with."""
        return self.subject.head(benchmark, options, self.model) | {
            "dtype": str(self.role.runner.cache.k[0].dtype).removeprefix("torch."),
            "device": str(self.role.runner.device),
            "num_ranks": self.config.parallel.world_size,
            "engine": {name: value for name, value in asdict(self.config).items() if name != "model"},
        }


def on_ranks(
    subject: Subject, work: Callable[[Local], Report], *, longest: int, fills: bool = False, **engine: Any
) -> Report | None:
    """Load a model on every rank of its layout and do some work on rank 0; returns its report, None on the others.

    Every rank calls it; where no launcher has started this process, the other ranks are started on this machine.

    Args:
        subject: what to load.
        work: what rank 0 does; returns the report.
        longest: tokens of the longest request, prompt and output.
        fills: put random numbers into the whole KV pool of every rank.
        engine: flat names of :class:`EngineConfig` that the benchmark itself decides.
    """
    with ExitStack() as stack:
        config = subject.config(longest=longest, **engine)
        size = config.parallel.world_size
        if read_launch() is None and size > 1:
            told = {"subject": asdict(subject), "longest": longest, "fills": fills, **engine}
            stack.enter_context(own_ranks(size, ["medha.bench.harness", json.dumps(told)]))
        role = build_role(config)
        if role.engine is None:
            ignore_signals()  # from here on rank 0 tells this rank when to stop
            stack.enter_context(state_on_signal(role.describe))
        stack.enter_context(role)
        if fills:
            cache = role.runner.cache
            fill_pools(cache, cache.num_blocks * cache.block_size, seed=role.runner.group)
        if role.engine is None:
            return None
        return work(Local(subject, config, role, role.engine, subject.model_config(longest=longest)))


def terms(*names: str) -> str:
    """What some of the terms mean, for below a table."""
    return "; ".join(f"{name}: {DEFINITIONS[name]}" for name in names)


def random_prompt(length: int, vocab_size: int, chance: np.random.Generator) -> Prompt:
    """Token ids drawn evenly, as an array."""
    return cast(Prompt, chance.integers(0, vocab_size, length, dtype=np.int32))


def as_told(text: str, work: Callable[[Local], Report]) -> int:
    """What a process does that is told, as JSON, the arguments of :func:`on_ranks` beside the work."""
    told = json.loads(text)
    on_ranks(Subject(**told.pop("subject")), work, **told)
    return 0


if __name__ == "__main__":  # a rank that on_ranks has started
    end_process(run_guarded(lambda: as_told(sys.argv[1], lambda _: {})))
