"""One model instance on hardware of a sheet: its layout, its pools, its scheduler and what its stages cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from medha.config import ModelConfig, ParallelConfig, SchedulerConfig
from medha.cost.hardware import Sheet, kv_pool_tokens, stage_coefficients
from medha.cost.predictor import Predictor, Work
from medha.cost.prefill_time import complete_config
from medha.errors import ConfigError
from medha.sched.scheduler import Scheduler
from medha.sim.pipeline import Pipeline, Segment

_TYPICAL_CHUNK, _TYPICAL_KV = 512, 8192


def slowest_of(stages: Sequence[Predictor]) -> Predictor:
    """The stage that computes longest on a chunk behind a context."""
    chunk = min(_TYPICAL_CHUNK, *(stage.max_tokens for stage in stages))
    return max(stages, key=lambda stage: stage.predict([Work(chunk, _TYPICAL_KV, False, None, True)]))


@dataclass(frozen=True, slots=True)
class Replica:
    """A model instance that can be simulated.

    Attributes:
        sheet: its accelerators.
        model, parallel: what runs on them, and how.
        scheduler: who decides.
        max_model_len: tokens of the longest request.
        block_size: tokens of a KV block.
        utilization: share of an accelerator's memory that may be used.
        dtype_bytes: bytes of a weight and of a key or value element.
        backend: of attention, ``split-kv`` or ``no-split-kv``; None is what the sheet says.
        num_blocks: KV blocks of each group; None is what the memory holds beside weights and activations.
    """

    sheet: Sheet
    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    max_model_len: int = 1 << 20
    block_size: int = 256
    utilization: float = 0.9
    dtype_bytes: int = 2
    backend: str | None = None
    num_blocks: int | None = None

    @property
    def num_gpus(self) -> int:
        """Accelerators in all."""
        return self.parallel.world_size

    def kv_blocks(self) -> int:
        """KV blocks of each group.

        Raises:
            ConfigError: the model does not fit, with the numbers, or the layout does not split it.
        """
        if self.num_blocks is not None:
            return self.num_blocks
        tokens = kv_pool_tokens(
            self.sheet,
            self.model,
            self.parallel,
            utilization=self.utilization,
            max_batch_tokens=self.scheduler.max_batch_tokens,
            dtype_bytes=self.dtype_bytes,
        )
        if tokens < self.block_size:
            raise ConfigError(f"the KV pool holds {tokens} tokens, less than a block of {self.block_size}")
        return tokens // self.block_size

    def stages(self) -> list[Predictor]:
        """What each stage of a group costs, first stage first.

        Raises:
            ConfigError: the layout does not split the model.
        """
        return [
            Predictor(
                stage_coefficients(
                    self.sheet,
                    self.model,
                    self.parallel,
                    stage,
                    dtype_bytes=self.dtype_bytes,
                    backend=self.backend,
                ),
                max_tokens=self.max_predicted_tokens,
            )
            for stage in range(self.parallel.spp)
        ]

    @property
    def max_predicted_tokens(self) -> int:
        """Query tokens of the largest chunk: schedulers that cut no prompt take whole ones."""
        config = self.scheduler
        if config.scheduler in ("static", "orca"):
            return max(self.max_model_len, config.max_batch_tokens)
        return config.max_batch_tokens

    def build(
        self,
        *,
        noise: Callable[[], float] | None = None,
        on_segment: Callable[[Segment], None] | None = None,
    ) -> tuple[Scheduler, Pipeline]:
        """A fresh scheduler, and the stages that run what it decides.

        Args:
            noise: see :class:`medha.sim.pipeline.Pipeline`.
            on_segment: likewise.

        Raises:
            ConfigError: something does not fit.
        """
        stages, num_blocks = self.stages(), self.kv_blocks()
        slowest = slowest_of(stages)
        predictor = Predictor(slowest.coefficients, max_tokens=slowest.max_tokens)
        config = complete_config(
            self.scheduler,
            predictor,
            self.parallel,
            longest=self.max_model_len,
            num_blocks=num_blocks,
            block_size=self.block_size,
        )
        scheduler = Scheduler(
            config,
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_groups=self.parallel.kvp,
            predictor=predictor,
            max_prompt_tokens=self.max_model_len,
        )
        return scheduler, Pipeline(stages, self.parallel.kvp, noise, on_segment)
