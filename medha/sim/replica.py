"""One model instance on hardware of a spec: models known by name, memory, scheduler and what its stages cost."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from medha.config import CDSP, ModelConfig, ParallelConfig, SchedulerConfig
from medha.config.fields import check_number
from medha.cost.chunk_times import fitted_times
from medha.cost.hardware import HardwareSpec
from medha.cost.predictor import Predictor, slowest_of
from medha.cost.roofline import MAX_SAMPLES, Shard, ring_cost, shape_name, stage_coefficients
from medha.errors import ConfigError, hint
from medha.models.hf_config import load_model_config
from medha.sched.cdsp import Planner
from medha.sched.scheduler import Scheduler, complete_config
from medha.sim.pipeline import Pipeline, Segment

DTYPE_BYTES = 2  # of a weight, and of a key or value element


@dataclass(frozen=True, slots=True)
class Replica:
    """A model instance that can be simulated."""

    spec: HardwareSpec
    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    max_model_len: int = 1 << 20  # tokens of the longest request
    block_size: int = 256
    utilization: float = 0.9  # share of an accelerator's memory that may be used
    num_blocks: int | None = None  # KV blocks of each group; None is what the memory holds

    def __post_init__(self) -> None:
        check_number("utilization", self.utilization, most=1.0)

    def kv_blocks(self) -> int:
        """KV blocks of each group; ConfigError if the model does not fit, or the layout does not split it."""
        if self.num_blocks is not None:
            return self.num_blocks
        if (tokens := self.pool_tokens()) < self.block_size:
            raise ConfigError(f"the KV pool holds {tokens} tokens, less than a block of {self.block_size}")
        return tokens // self.block_size

    def pool_tokens(self) -> int:
        """Tokens whose keys and values fit on each group beside weights and activations: those of its fullest stage."""
        spec, model, parallel, most = self.spec, self.model, self.parallel, self.scheduler.max_batch_tokens
        usable, tokens = int(spec.memory_bytes * self.utilization), []
        for stage in range(parallel.spp):
            weights, activations = weights_bytes(model, parallel, stage), activation_bytes(model, parallel, stage, most)
            token = kv_bytes_per_token(model, parallel, stage)
            if (left := usable - weights - activations) < token:
                raise ConfigError(
                    f"{shape_name(model)} at tp={parallel.tp} spp={parallel.spp} does not fit {spec.name}: stage "
                    f"{stage} needs {weights / 1e9:.1f} GB for weights and {activations / 1e9:.1f} GB for activations "
                    f"of {most} tokens, and {usable / 1e9:.1f} GB are there ({self.utilization:g} of "
                    f"{spec.memory_bytes / 1e9:.1f} GB); accepted: more tp or spp, or smaller batches"
                )
            tokens.append(left // token)
        return min(tokens)

    def stages(self) -> list[Predictor]:
        """What each stage of a group costs, first stage first; ConfigError if the layout does not split the model."""
        most = self.scheduler.max_batch_tokens
        if self.scheduler.scheduler in ("static", "orca", CDSP):  # these cut no prompt
            most = max(self.max_model_len, most)
        costs = (stage_coefficients(self.spec, self.model, self.parallel, stage) for stage in range(self.parallel.spp))
        return [Predictor(cost, max_tokens=most) for cost in costs]

    def build(self, *, on_segment: Callable[[Segment], None] | None = None) -> tuple[Scheduler, Pipeline]:
        """A fresh scheduler, and the stages that run what it decides; ConfigError if something does not fit."""
        stages, num_blocks = self.stages(), self.kv_blocks()
        predictor = slowest_of(stages).uncorrected()
        pool = {"num_blocks": num_blocks, "block_size": self.block_size}
        config = complete_config(self.scheduler, predictor, self.parallel, longest=self.max_model_len, **pool)
        if config.async_scheduling is None:
            config = replace(config, async_scheduling=self.parallel.spp > 1)
        sizes = {"num_groups": self.parallel.kvp, "max_prompt_tokens": self.max_model_len}
        planner = self.planner(predictor) if config.scheduler == CDSP else None
        scheduler = Scheduler(config, planner, **pool, **sizes, predictor=predictor)
        times = None if planner is None else planner.times
        pipeline = Pipeline(stages, self.parallel.kvp, on_segment, control_s=self.spec.control_s, chunk_times=times)
        return scheduler, pipeline

    def planner(self, predictor: Predictor) -> Planner:
        """What plans chunks; ``predictor`` is of a group. ConfigError for wrong SP sizes or rates of another."""
        in_a_node = max(self.spec.gpus_per_node // self.parallel.tp, 1)
        over = partial(self.predictor_over, predictor=predictor)
        times = partial(fitted_times, over, longest=self.max_model_len, groups_per_node=in_a_node)
        named = {"hardware": self.spec.name, "model": shape_name(self.model)}
        return Planner.of(self.scheduler, self.parallel, times, **named)

    def predictor_over(self, size: int, *, predictor: Predictor) -> Predictor:
        """Of chunks that are dealt to so many groups, in a node where they fit; ``predictor`` is of one stage, which
        holds the whole model."""
        link = self.spec.send if size * self.parallel.tp <= self.spec.gpus_per_node else self.spec.node_send
        ring = ring_cost(self.spec, Shard.of(self.model, self.parallel, 0), link)
        return Predictor(replace(predictor.coefficients, ring=ring), max_tokens=predictor.max_tokens)


def spec_fields(spec: HardwareSpec) -> dict[str, str]:
    """What a report says of a hardware spec."""
    return {name: getattr(spec, name) for name in ("name", "machine", "provenance")}


# ---------------------------------------------------------------------------------------------------------------------
# Memory of one rank; all raise ConfigError where there is no such stage, or the layout does not split the model


def weights_bytes(model: ModelConfig, parallel: ParallelConfig, stage: int) -> int:
    """Bytes of the parameters on one rank."""
    parallel.check_model(model)
    return DTYPE_BYTES * model.num_parameters(parallel.layers_of(stage, model.num_layers), parallel.tp)


def kv_bytes_per_token(model: ModelConfig, parallel: ParallelConfig, stage: int) -> int:
    """Bytes of keys and values that a token leaves on one rank of its group."""
    shard = Shard.of(model, parallel, stage)
    return 2 * shard.layers * shard.kv_heads * model.head_dim * DTYPE_BYTES


def activation_bytes(model: ModelConfig, parallel: ParallelConfig, stage: int, max_batch_tokens: int) -> int:
    """Bytes of the largest set of tensors alive at once on one rank.

    Four of the model dimension (residual, normed, output, pipeline buffer), and the larger of attention's (queries,
    keys, values, output) and the MLP's (gate, up, product); on the last stage float32 logits of 256 tokens.
    """
    shard = Shard.of(model, parallel, stage)
    attention = (2 * shard.heads + 2 * shard.kv_heads) * model.head_dim
    token = 4 * model.hidden_size + max(attention, 3 * shard.intermediate)
    return int(max_batch_tokens * token * DTYPE_BYTES + shard.is_last * MAX_SAMPLES * model.vocab_size * 4)


MODELS = Path(__file__).parent / "models"
KNOWN_MODELS = ("llama-3-8b", "llama-3-70b", "llama-3.1-8b", "qwen2.5-14b-1m")
"""Of each there is a folder with its ``config.json``."""

_AROUND = re.compile(r"^(meta-llama|qwen)/(meta-)?|-instruct")  # what ids on the hub have around or in these names


def find_model(name_or_path: str | Path) -> ModelConfig:
    """A known model by name or id on the hub, in any case, or that of a ``config.json`` or its folder.

    A simulation takes the shape alone, so contexts may be longer than ``max_position_embeddings``.
    """
    name = _AROUND.sub("", str(name_or_path).lower()).replace("llama3", "llama-3")
    path = MODELS / name if name in KNOWN_MODELS else Path(name_or_path)
    folder = path.parent if path.name == "config.json" else path
    if (folder / "config.json").is_file():
        return load_model_config(folder)
    accepted = f"{', '.join(KNOWN_MODELS)}, or the path of a config.json{hint(name, KNOWN_MODELS, cutoff=0.4)}"
    raise ConfigError(f"model {str(name_or_path)!r} is not known; accepted: {accepted}")
