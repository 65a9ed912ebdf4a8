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
from medha.sim.replica import activation_bytes, kv_bytes_per_token, weights_bytes

MAX_DECODES = 256
"""Requests that a decode instance has at most, vLLM's default."""


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
