"""How long a prompt systems can take that split prefill and decode and read prompts whole: v5 sections 2.2 and 6.1."""

from __future__ import annotations

import itertools

from examples.reproduce.baselines.disaggregation import StageMemory, largest_decode, largest_prefill, stage_memories
from examples.reproduce.plotting import Panel, token_label
from examples.reproduce.result import Answer, FigureResult, Options, figure
from examples.reproduce.timing import MODELS, M, a100
from medha.config import ParallelConfig

PROMPTS = (M // 8, M // 4, M // 2, M)
OUTPUT_TOKENS = 518
"""The median of MEDHA-SWE (v5 section 6.1)."""
NUM_GPUS = 16
_8B, _TP8 = MODELS["Llama-3 8B"], ParallelConfig(tp=8)
LAYOUTS = tuple(
    ParallelConfig(tp=tp, spp=spp) for tp, spp in itertools.product((1, 2, 4, 8), repeat=2) if tp * spp <= NUM_GPUS // 2
)
"""Of an instance, within a node of eight."""


def spare_factor(memories: list[StageMemory], tokens: int) -> float:
    """How many times larger activations may be for a prompt of so many tokens to fit still; below 1 it does not fit."""
    return min((m.usable - m.fixed - m.kv_token * tokens) / (m.activation_token * tokens) for m in memories)


@figure("disaggregation", "The longest prompts that systems with split prefill and decode can take")
def run(options: Options) -> FigureResult:
    """Closed forms; ``quick`` changes nothing."""
    memories = {layout: stage_memories(a100(), _8B, layout) for layout in LAYOUTS}
    prefill = {name: largest_prefill(found) for name, found in memories.items()}
    decode = {name: largest_decode(found) for name, found in memories.items()}
    pairs = list(itertools.product(memories, repeat=2))  # half of the GPUs to either phase, of any number of instances
    refused = {n: [n > prefill[one] or n + OUTPUT_TOKENS - 1 > decode[two] for one, two in pairs] for n in PROMPTS}
    num_cases, num_refused = len(PROMPTS) * len(pairs), sum(map(sum, refused.values()))
    num_by_prefill = sum(n > prefill[one] for n in PROMPTS for one, _ in pairs)
    num_failing = sum(any(column) for column in zip(*refused.values(), strict=True))
    spare = spare_factor(memories[_TP8], M)
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
