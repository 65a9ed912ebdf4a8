"""The model and the engine that a benchmark runs in its own process: a random Llama by default, or a folder."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from medha.bench.model import describe, random_llama, write_config
from medha.cli.report import DEFINITIONS, machine_line, stamp
from medha.cli.table import counted
from medha.config import EngineConfig, ModelConfig, SchedulerConfig
from medha.cost.predictor import Predictor
from medha.engine.admission import Prompt
from medha.engine.build import RankHandle, build_role
from medha.engine.engine import Engine
from medha.errors import ConfigError
from medha.models.hf_config import load_model_config
from medha.models.hub import resolve_model
from medha.models.weights import expected_tensors
from medha.sched.scheduler import Scheduler

RANDOM_LLAMA = "random Llama"


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured.

    Attributes:
        model: folder or hub id; None is a random Llama.
        hf_overrides: merged over its ``config.json``.
        engine: flat names of :class:`EngineConfig`; what is None or missing has its default, and ``load_format`` is
            ``dummy`` for a random Llama.
    """

    model: str | None = None
    hf_overrides: Mapping[str, Any] | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = self.engine.get("load_format")
        if self.model is None and given not in (None, "dummy"):
            raise ConfigError(f"load_format={given!r} without a model; accepted: dummy, or --model with a folder")

    @property
    def model_id(self) -> str:
        """Its name in a report."""
        return RANDOM_LLAMA if self.model is None else self.model

    @property
    def options(self) -> dict[str, Any]:
        """The engine's options that were given."""
        load = {} if self.model is not None else {"load_format": "dummy"}
        return {name: value for name, value in self.engine.items() if value is not None} | load


@dataclass(frozen=True, slots=True)
class Local:
    """A subject that is loaded.

    Attributes:
        config: of its engine, complete.
        role: model, limits and engine.
    """

    subject: Subject
    config: EngineConfig
    role: RankHandle

    @property
    def engine(self) -> Engine:
        """The engine that the options ask for."""
        assert self.role.engine is not None, "one process has the engine"
        return self.role.engine

    @property
    def model(self) -> ModelConfig:
        """Shape of the model."""
        return self.role.runner.model.config

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.role.runner.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and KV cache."""
        return self.role.runner.cache.k[0].dtype

    def engine_with(self, **scheduler: Any) -> Engine:
        """Another engine over the same weights and KV pool, with other fields of :class:`SchedulerConfig`.

        Only one of the engines may have requests at a time, and :meth:`take_over` is called before it gets them.
        """
        known = self.engine.scheduler
        config: SchedulerConfig = replace(known.config, **scheduler)
        assert known.predictor is not None, "an engine that was built predicts"
        memory = known.memory
        other = Scheduler(
            config,
            num_blocks=memory.num_blocks,
            block_size=memory.block_size,
            predictor=Predictor(known.predictor.coefficients, max_tokens=config.max_batch_tokens),
            max_prompt_tokens=known.max_prompt_tokens,
        )
        return Engine(self.role.runner, other, self.role.limits, tokenizer=self.role.tokenizer)

    def take_over(self, engine: Engine) -> None:
        """Forget in the runner what other engines left there: their last frees never came."""
        assert not engine.has_unfinished, "it is about to begin"
        engine.abandon()

    def report(self, benchmark: str, options: Mapping[str, Any], load_before: float) -> dict[str, Any]:
        """What every report begins with."""
        return report_head(self.subject, self.model, benchmark, options, load_before) | {
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "engine": _plain({name: value for name, value in asdict(self.config).items() if name != "model"}),
        }

    def footer(self, runs: str) -> str:
        """Machine, threads, dtype, runs and load on one line, for below a table."""
        return footer(str(self.dtype).removeprefix("torch."), self.device, runs)


@contextmanager
def loaded(subject: Subject, *, longest: int, **engine: Any) -> Iterator[Local]:
    """Load a model and make its engine.

    Args:
        subject: what to load.
        longest: tokens of the longest request, prompt and output.
        engine: flat names of :class:`EngineConfig` that the benchmark itself decides.

    Raises:
        ConfigError: something about the model or an option is wrong.
    """
    with _folder(subject, longest) as folder:
        options = {**subject.options, "max_model_len": longest, **engine}
        if subject.model is not None and subject.hf_overrides:
            options["hf_overrides"] = dict(subject.hf_overrides)
        config = EngineConfig.from_flat(folder, **options)
        if config.parallel.world_size > 1:
            raise ConfigError(f"{config.parallel.world_size} ranks; accepted: 1, as this benchmark is one process")
        role = build_role(config)
    yield Local(subject, config, role)
    role.close()


def shape_of(subject: Subject, *, longest: int) -> ModelConfig:
    """The model's shape alone, no weights; raises as :func:`loaded`."""
    with _folder(subject, longest) as folder:
        overrides = None if subject.model is None else dict(subject.hf_overrides or {}) or None
        return load_model_config(resolve_model(folder), hf_overrides=overrides, max_model_len=longest)


def fitting(subject: Subject, name: str, lengths: tuple[int, ...], *, more: int) -> tuple[int, ...]:
    """The lengths that the model takes, with ``more`` tokens behind them; the others are left out, and it is said.

    Where none fits all are returned, for whoever loads the model to refuse.
    """
    if subject.model is None:  # a random Llama takes any
        return lengths
    most = shape_of(subject, longest=1).max_position_embeddings
    fit = tuple(length for length in lengths if length + more <= most)
    if fit and len(fit) < len(lengths):
        rest = ", ".join(f"{length:,}" for length in lengths if length not in fit)
        print(f"medha: {name} {rest} left out: the model takes {most:,} positions", file=sys.stderr)
    return fit or lengths


def layer_parameters(model: ModelConfig) -> int:
    """Parameters of the layers: every token goes through each of them. Embedding and head are apart."""
    return _count(model, lambda name: name.startswith("model.layers."))


def step_parameters(model: ModelConfig) -> int:
    """Parameters that a decode step reads: layers, last norm and head; of an embedding some rows, which are left out.

    Where the embedding is tied, it is the head.
    """
    return _count(model, lambda name: name != "model.embed_tokens.weight" or model.tie_word_embeddings)


def random_prompt(length: int, vocab_size: int, chance: np.random.Generator) -> Prompt:
    """Token ids drawn evenly, as an array."""
    return cast(Prompt, chance.integers(0, vocab_size, length, dtype=np.int32))


def report_head(
    subject: Subject, model: ModelConfig, benchmark: str, options: Mapping[str, Any], load_before: float
) -> dict[str, Any]:
    """What every report begins with, without an engine.

    Args:
        subject: what was measured.
        model: its shape.
        benchmark: the verb.
        options: of the verb.
        load_before: load average before the run.
    """
    return {
        "benchmark": benchmark,
        "environment": stamp(),
        "load_before_after": [load_before, os.getloadavg()[0]],
        "model_id": subject.model_id,
        "model": random_llama(subject.hf_overrides) if subject.model is None else asdict(model),
        "options": dict(options),
        "definitions": DEFINITIONS,
    }


def title_of(subject: Subject, model: ModelConfig) -> str:
    """The model in words, for a table's title."""
    if subject.model is None:
        return describe(random_llama(subject.hf_overrides))
    sharing = model.num_heads // model.num_kv_heads
    return f"{subject.model}, {model.num_layers} layers, {model.hidden_size:,} wide, GQA {sharing}"


def footer(dtype: str, device: torch.device, runs: str) -> str:
    """Machine, threads, dtype, runs and load on one line, for below a table."""
    where = counted(torch.get_num_threads(), "thread") if device.type == "cpu" else str(device)
    return f"{machine_line()}; {where}, {dtype}; {runs}; load average {os.getloadavg()[0]:.1f}"


def terms(*names: str) -> str:
    """What some of the terms mean, for below a table."""
    return "; ".join(f"{name}: {DEFINITIONS[name]}" for name in names)


def _plain(value: Any) -> Any:
    """A value of a configuration as JSON has it: no infinity."""
    if isinstance(value, dict):
        return {name: _plain(inside) for name, inside in value.items()}
    return str(value) if isinstance(value, float) and math.isinf(value) else value


def _count(model: ModelConfig, is_counted: Callable[[str], bool]) -> int:
    return sum(torch.Size(shape).numel() for name, shape in expected_tensors(model).items() if is_counted(name))


@contextmanager
def _folder(subject: Subject, longest: int) -> Iterator[str]:
    """The model's folder; that of a random Llama is there for as long as it takes to load."""
    if subject.model is not None:
        yield subject.model
        return
    with tempfile.TemporaryDirectory(prefix="medha-bench-") as folder:
        shape = random_llama(subject.hf_overrides)
        write_config(Path(folder), shape | {"max_position_embeddings": max(longest, shape["max_position_embeddings"])})
        yield folder
