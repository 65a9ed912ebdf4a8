"""How long a prompt systems can take that split prefill and decode and read prompts whole: v5 sections 2.2 and 6.1.

Source: DistServe (Zhong et al., arXiv:2401.09670) and SplitWise (Patel et al., arXiv:2311.18677), which v5 section 6.1
leaves out of its comparison as they run out of memory. Prompts are read whole. A prefill instance holds weights, the
activations of a batch, and its keys and values; a decode instance weights and all keys and values of what it generates
for.

What activations take is :func:`~medha.sim.replica.activation_bytes` of the whole prompt. It counts what engines of the
time held at the widest point of a layer, the MLP: residual, normed input and output in the model dimension, which
tensor parallelism does not split, and gate, up and product, which it does; queries, keys and values take less. Logits
are those of last tokens only, and no attention matrix is written. Neither fragmentation nor workspace of kernels and
collectives is counted, in favour of these systems.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from examples.reproduce.plotting import Panel, token_label
from examples.reproduce.result import Answer, FigureResult, Options, figure
from examples.reproduce.timing import A100, LLAMA_8B, M
from medha.config import ParallelConfig
from medha.sim.replica import activation_bytes, kv_bytes_per_token, weights_bytes

MAX_DECODES = 256
"""Requests that a decode instance has at most, vLLM's default."""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of each accelerator of a stage, in bytes.

    Attributes:
        free: what may be used beside weights, and beside logits on the last stage.
        activation_token: activations of each token of a batch.
        kv_token: keys and values of each token.
    """

    free: int
    activation_token: int
    kv_token: int


def stage_memories(parallel: ParallelConfig) -> list[StageMemory]:
    """Memory of each stage of an instance of the 8B model, on A100s of which 90 % may be used, first stage first.

    Raises:
        ConfigError: the layout does not split the model.
    """
    found = []
    for stage in range(parallel.spp):
        logits, with_a_token = (activation_bytes(LLAMA_8B, parallel, stage, tokens) for tokens in (0, 1))
        free = int(A100.memory_bytes * 0.9) - weights_bytes(LLAMA_8B, parallel, stage) - logits
        found.append(StageMemory(free, with_a_token - logits, kv_bytes_per_token(LLAMA_8B, parallel, stage)))
    return found


def largest_prefill(memories: Sequence[StageMemory]) -> int:
    """Tokens of the longest prompt that an instance with nothing else on it can read whole; 0 if none."""
    return max(0, min(m.free // (m.activation_token + m.kv_token) for m in memories))


def largest_decode(memories: Sequence[StageMemory]) -> int:
    """Tokens whose keys and values fit on a decode instance, prompt and output; 0 if none."""
    return max(0, min((m.free - m.activation_token * MAX_DECODES) // m.kv_token for m in memories))


PROMPTS = (M // 8, M // 4, M // 2, M)
OUTPUT_TOKENS = 518
"""The median of MEDHA-SWE (v5 section 6.1)."""
NUM_GPUS = 16
LAYOUTS = tuple(
    ParallelConfig(tp=tp, spp=spp) for tp, spp in itertools.product((1, 2, 4, 8), repeat=2) if tp * spp <= NUM_GPUS // 2
)
"""Of an instance, within a node of eight."""


def spare_factor(memories: list[StageMemory], tokens: int) -> float:
    """How many times larger activations may be for a prompt of so many tokens to fit still; below 1 it does not fit."""
    return min((m.free - m.kv_token * tokens) / (m.activation_token * tokens) for m in memories)


@figure("disaggregation", "The longest prompts that systems with split prefill and decode can take")
def run(options: Options) -> FigureResult:
    """Closed forms; ``quick`` changes nothing."""
    memories = {layout: stage_memories(layout) for layout in LAYOUTS}
    prefill = {name: largest_prefill(found) for name, found in memories.items()}
    decode = {name: largest_decode(found) for name, found in memories.items()}
    pairs = list(itertools.product(memories, repeat=2))  # half of the GPUs to either phase, of any number of instances
    refused = {n: [n > prefill[one] or n + OUTPUT_TOKENS - 1 > decode[two] for one, two in pairs] for n in PROMPTS}
    num_cases, num_refused = len(PROMPTS) * len(pairs), sum(map(sum, refused.values()))
    num_by_prefill = sum(n > prefill[one] for n in PROMPTS for one, _ in pairs)
    num_failing = sum(any(column) for column in zip(*refused.values(), strict=True))
    spare = spare_factor(memories[ParallelConfig(tp=8)], M)
    panel = Panel(
        f"Of {len(pairs)} pairs of layouts on 16 A100s",
        "prompt, tokens",
        "out of memory, %",
        bars={"": {token_label(n): 100 * sum(row) / len(row) for n, row in refused.items()}},
        levels={"v5 section 6.1": 100},
    )
    one, eight = (prefill[ParallelConfig(tp=tp)] / 1000 for tp in (1, 8))
    counted = {"pairs": len(pairs), "failing": num_failing, "cases": num_cases, "refused": num_refused}
    answer = Answer(num_failing / len(pairs), **counted, by_prefill=num_by_prefill, one=one, eight=eight, spare=spare)
    return FigureResult([panel], {"disaggregated-oom": answer})
