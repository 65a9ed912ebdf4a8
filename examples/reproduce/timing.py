"""Seconds of one request alone, from the specs of :mod:`medha.sim`; and its arithmetic and bytes, from the shape of a
model alone (arXiv:2409.17264, v4 eqs. 1 to 3, which are per layer, here over all layers; v5 eq. 1).

Two ways, held to each other by a test: :func:`simulate` plays the request through the scheduler and the simulated
pipeline; :func:`chunk_seconds` and :func:`pipeline_ends` do the same for chunks of one size with arrays, as a chunk is
affine in the tokens cached before it. The second is what makes sweeps over 32-token chunks of 4M prompts cheap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from medha.config import ModelConfig, ParallelConfig, SchedulerConfig
from medha.cost.coefficients import Floats
from medha.cost.hardware import HardwareSpec, load_spec
from medha.cost.predictor import Predictor, Work
from medha.errors import ConfigError
from medha.sim.outcome import Outcome
from medha.sim.pipeline import Segment
from medha.sim.replica import DTYPE_BYTES, Replica, find_model
from medha.sim.simulator import Simulation
from medha.workload.trace import Trace

M = 1 << 20
"""What the figures call 1M tokens."""
CHUNK = 4096
"""Tokens of a chunk where a claim names none: v4 section 3.3 gives 4K for its prefills."""
H100, A100 = load_spec("h100-80g"), load_spec("a100-80g")
"""Specs fitted to public kernel tables; of the H100 chunks behind a cache are derived from them."""
LLAMA_8B, LLAMA_70B = find_model("llama-3-8b"), find_model("llama-3-70b")
MODELS = {"Llama-3 8B": LLAMA_8B, "Llama-3 70B": LLAMA_70B}
BLOCK = 256
_NEAR, _FAR = 1 << 10, 1 << 22


def stage_predictors(spec: HardwareSpec, model: ModelConfig, parallel: ParallelConfig) -> list[Predictor]:
    """What each stage of a group costs, first stage first; batches have up to 16,384 tokens."""
    return Replica(spec, model, parallel, SchedulerConfig(max_batch_tokens=16384)).stages()


def fits(model: ModelConfig, parallel: ParallelConfig, tokens: int) -> bool:
    """Whether the keys and values of one request fit on all groups of H100s together, in 90 % of the memory."""
    try:
        replica = Replica(H100, model, parallel, SchedulerConfig(max_batch_tokens=CHUNK))
        return replica.pool_tokens() * parallel.kvp >= tokens
    except ConfigError:
        return False


def simulate(
    model: ModelConfig,
    parallel: ParallelConfig,
    prompt_tokens: int,
    *,
    output_tokens: int = 1,
    chunk: int = CHUNK,
    on_segment: Callable[[Segment], None] | None = None,
) -> Outcome:
    """Play one request, which has H100s to itself, in chunks of one size through scheduler and pipeline.

    The KV pool is as large as the request needs, so that the time of what does not fit can be asked as well.
    """
    share = -(-(prompt_tokens + output_tokens - 1) // (BLOCK * parallel.kvp)) * BLOCK
    config = SchedulerConfig(
        scheduler="medha" if parallel.kvp > 1 else "sarathi",
        chunk_size=chunk,
        max_batch_tokens=chunk,
        t_target_s=3600.0,
        max_kv_per_group=share if parallel.kvp > 1 else None,
    )
    longest = prompt_tokens + output_tokens + 1
    replica = Replica(H100, model, parallel, config, max_model_len=longest, num_blocks=share // BLOCK + 2)
    scheduler, pipeline = replica.build(on_segment=on_segment)
    trace = Trace(np.zeros(1), np.array([prompt_tokens]), np.array([output_tokens]))
    return Simulation(scheduler, pipeline, trace).run()


@cache
def ttft_s(model: ModelConfig, parallel: ParallelConfig, prompt_tokens: int) -> float:
    """Seconds to the first token of one request, simulated; several figures ask for the same."""
    return float(simulate(model, parallel, prompt_tokens).times.ttft_s[0])


def chunk_seconds(
    predictors: Sequence[Predictor], prompt_tokens: int, chunk: int, *, kvp: int = 1, decodes: Sequence[Work] = ()
) -> Floats:
    """Seconds of each chunk of a prompt on each stage, [stages, chunks]; the prompt is a multiple of the chunk.

    A request on several groups fills one after the other, each with an even share, as the engine does; the fullest
    group sets the time, and the merges are in it. ``decodes`` go along with every chunk.
    """
    assert not prompt_tokens % chunk, "chunks of one size"
    starts = np.arange(0, prompt_tokens, chunk, dtype=np.float64)
    share = -(-prompt_tokens // kvp)
    widths = ((starts + chunk - 1) // share).astype(int) + 1
    on_group = np.where(widths > 1, share, starts)
    seconds = np.stack([_on_stage(one, chunk, widths, on_group, decodes) for one in predictors])
    last = Work(chunk, int(on_group[-1]), False, _run(int(widths[-1])), True)
    seconds[-1, -1] = predictors[-1].predict([*decodes, last])
    return seconds


def _run(width: int) -> tuple[int, int] | None:
    return (0, width - 1) if width > 1 else None


def _on_stage(predictor: Predictor, chunk: int, widths: Floats, kv: Floats, decodes: Sequence[Work]) -> Floats:
    seconds = np.empty(len(kv))
    for width in np.unique(widths):
        run = _run(int(width))
        first, near, far = (predictor.predict([*decodes, Work(chunk, at, False, run)]) for at in (0, _NEAR, _FAR))
        slope = (far - near) / (_FAR - _NEAR)
        line = near + (kv - _NEAR) * slope
        mine = widths == width
        seconds[mine] = np.where(kv == 0, first, line)[mine]
    return seconds


def pipeline_ends(seconds: Floats) -> Floats:
    """When each batch leaves the last stage, where batches follow each other without a gap.

    Args:
        seconds: shape [stages, batches].
    """
    ready = np.zeros(seconds.shape[1])
    for stage in seconds:
        done = np.cumsum(stage)
        before = done - stage
        ready = done + np.maximum.accumulate(ready - before)
    return np.asarray(ready, dtype=np.float64)


def decode_s(predictors: Sequence[Predictor], kv_tokens: int, *, kvp: int = 1, batch: int = 1) -> float:
    """Seconds of one decode of one request, or of several alike, in all stages, keys evenly on the groups."""
    works = [Work(1, -(-kv_tokens // kvp), True, _run(kvp), True)] * batch
    return sum(predictor.predict(works) for predictor in predictors)


def attention_flops(model: ModelConfig, tokens: float, *, causal: bool = True) -> float:
    """FLOPs of attention over a prompt, all layers: v4 eq. 1, or twice that where the mask is not made use of."""
    full = 4 * tokens**2 * model.head_dim * model.num_heads * model.num_layers
    return full / 2 if causal else full


def linear_parameters(model: ModelConfig) -> int:
    """Parameters that every token is multiplied by: all layers, without embedding and head."""
    return model.num_layers * (model.layer_parameters() - 2 * model.hidden_size)  # without its norms


def prefill_flops(model: ModelConfig, tokens: float, *, causal: bool = True) -> float:
    """FLOPs of a prefill: attention and linear layers."""
    return attention_flops(model, tokens, causal=causal) + 2 * linear_parameters(model) * tokens


def kv_bytes(model: ModelConfig, tokens: float) -> float:
    """Bytes of keys and values, all layers: v4 eq. 2."""
    return tokens * model.kv_bytes_per_token(DTYPE_BYTES)


def weight_bytes(model: ModelConfig) -> float:
    """Bytes that a decode reads of the weights: layers and head."""
    return DTYPE_BYTES * (linear_parameters(model) + model.vocab_size * model.hidden_size)


def chunk_intensity(model: ModelConfig, chunk: float) -> float:
    """FLOPs per byte of the attention of a chunk: v5 eq. 1, v4 eq. 3; the context length cancels."""
    return chunk * model.num_heads / model.num_kv_heads
