"""Static prefill-decode disaggregation: some instances read prompts, others generate. What fits into their memory.

Source: DistServe (Zhong et al., arXiv:2401.09670) and SplitWise (Patel et al., arXiv:2311.18677), which v5 section 6.1
leaves out of its comparison as they run out of memory (section 2.2). Prompts are read whole. A prefill instance holds
weights, the activations of a batch, and its keys and values; a decode instance weights and all keys and values of what
it generates for.

What activations take is :func:`~medha.sim.replica.activation_bytes` of the whole prompt. It counts what engines of the
time held at the widest point of a layer, the MLP: residual, normed input and output in the model dimension, which
tensor parallelism does not split, and gate, up and product, which it does; queries, keys and values take less. Logits
are those of last tokens only, and no attention matrix is written. Neither fragmentation nor workspace of kernels and
collectives is counted, in favour of these systems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medha.config import ModelConfig, ParallelConfig
from medha.cost.hardware import HardwareSpec
from medha.errors import ConfigError
from medha.sim.replica import activation_bytes, kv_bytes_per_token, kv_pool_tokens, weights_bytes

MAX_DECODES = 256
"""Requests that a decode instance has at most, vLLM's default."""
_PIECE = 16384
_DTYPE_BYTES = 2


@dataclass(frozen=True, slots=True)
class Disaggregated:
    """Instances that read prompts and instances that generate.

    Attributes:
        spec: the accelerators.
        model: what runs on them.
        num_prefill, num_decode: instances.
        prefill, decode: layout of an instance: ``tp`` and ``spp``, pipeline stages here; ``kvp`` is 1.
        max_prefill_tokens: of a batch of several prompts.
        utilization: share of an accelerator's memory that may be used.
    """

    spec: HardwareSpec
    model: ModelConfig
    num_prefill: int
    num_decode: int
    prefill: ParallelConfig
    decode: ParallelConfig
    max_prefill_tokens: int = 8192
    utilization: float = 0.9

    def __post_init__(self) -> None:
        for name in ("num_prefill", "num_decode", "max_prefill_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}; accepted: a whole number of at least 1")
        for layout in (self.prefill, self.decode):
            if layout.kvp != 1:
                raise ConfigError(f"kvp={layout.kvp}; accepted: 1, as these systems keep a request on one instance")
            kv_pool_tokens(self.spec, self.model, layout, utilization=self.utilization, max_batch_tokens=1)

    @property
    def num_gpus(self) -> int:
        """Accelerators in all."""
        return self.num_prefill * self.prefill.world_size + self.num_decode * self.decode.world_size


# ---------------------------------------------------------------------------------------------------------------------
# Memory


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of each accelerator of a stage, in bytes.

    Attributes:
        usable: all that may be used.
        fixed: weights, and logits on the last stage.
        activation_token: activations of each token of a batch.
        kv_token: keys and values of each token.
    """

    usable: int
    fixed: int
    activation_token: int
    kv_token: int

    def fits(self, batch_tokens: int, kv_tokens: int) -> bool:
        """Whether a batch of so many tokens can run while keys and values of so many are there, its own included."""
        return self.fixed + self.activation_token * batch_tokens + self.kv_token * kv_tokens <= self.usable


def stage_memories(
    spec: HardwareSpec, model: ModelConfig, parallel: ParallelConfig, *, utilization: float = 0.9
) -> list[StageMemory]:
    """Memory of each stage of an instance, first stage first.

    Raises:
        ConfigError: the layout does not split the model.
    """
    found = []
    for stage in range(parallel.spp):
        logits = activation_bytes(model, parallel, stage, 0)
        found.append(
            StageMemory(
                usable=int(spec.memory_bytes * utilization),
                fixed=weights_bytes(model, parallel, stage) + logits,
                activation_token=activation_bytes(model, parallel, stage, 1) - logits,
                kv_token=kv_bytes_per_token(model, parallel, stage),
            )
        )
    return found


def largest_prefill(memories: Sequence[StageMemory]) -> int:
    """Tokens of the longest prompt that an instance with nothing else on it can read whole; 0 if none."""
    return max(0, min((m.usable - m.fixed) // (m.activation_token + m.kv_token) for m in memories))


def largest_decode(memories: Sequence[StageMemory]) -> int:
    """Tokens whose keys and values fit on a decode instance, prompt and output; 0 if none."""
    return max(0, min((m.usable - m.fixed - m.activation_token * MAX_DECODES) // m.kv_token for m in memories))


def is_refused(system: Disaggregated, prompt_tokens: int, output_tokens: int) -> str | None:
    """Why a request can never be served, with the numbers; None if it can.

    Args:
        system: whose instances it would have to itself.
        prompt_tokens, output_tokens: at least 1 each.
    """
    kv_tokens = prompt_tokens + output_tokens - 1
    for name, layout, batch_tokens, held in (
        ("prefill", system.prefill, prompt_tokens, prompt_tokens),
        ("decode", system.decode, MAX_DECODES, kv_tokens),
    ):
        if name == "decode" and output_tokens == 1:
            continue  # its only token comes with the prompt
        memories = stage_memories(system.spec, system.model, layout, utilization=system.utilization)
        for stage, memory in enumerate(memories):
            if not memory.fits(batch_tokens, held):
                return (
                    f"out of memory: {name} at tp={layout.tp} spp={layout.spp} of {prompt_tokens:,} prompt and "
                    f"{output_tokens:,} output tokens needs on each accelerator of stage {stage} "
                    f"{memory.fixed / 1e9:.1f} GB for weights and logits, "
                    f"{memory.activation_token * batch_tokens / 1e9:.1f} GB for activations of {batch_tokens:,} tokens "
                    f"and {memory.kv_token * held / 1e9:.1f} GB for keys and values; {memory.usable / 1e9:.1f} GB are "
                    f"there ({system.utilization:g} of {system.spec.memory_bytes / 1e9:.1f} GB)"
                )
    return None
