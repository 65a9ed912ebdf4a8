"""How long a prompt systems can take that split prefill and decode and read prompts whole: v5 sections 2.2 and 6.1."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from examples.reproduce.baselines.disaggregation import StageMemory, largest_decode, largest_prefill, stage_memories
from examples.reproduce.plotting import COLORS, PAPER, finish, plain_ticks, token_label
from examples.reproduce.result import Answer, FigureResult, FigureSpec, Options
from examples.reproduce.timing import MODELS, M, a100
from medha.config import ParallelConfig

PROMPTS = (M // 8, M // 4, M // 2, M)
OUTPUT_TOKENS = 518
"""The median of MEDHA-SWE (v5 section 6.1)."""
NUM_GPUS = 16
_8B = MODELS["Llama-3 8B"]
LAYOUTS = tuple(
    ParallelConfig(tp=tp, spp=spp) for tp, spp in itertools.product((1, 2, 4, 8), repeat=2) if tp * spp <= NUM_GPUS // 2
)
"""Of an instance, within a node of eight."""


def label(layout: ParallelConfig) -> str:
    """``TP 4, PP 2``."""
    return f"TP {layout.tp}" + (f", PP {layout.spp}" if layout.spp > 1 else "")


def spare_factor(memories: list[StageMemory], tokens: int) -> float:
    """How many times larger activations may be for a prompt of so many tokens to fit still; below 1 it does not fit."""
    return min((m.usable - m.fixed - m.kv_token * tokens) / (m.activation_token * tokens) for m in memories)


def run(options: Options) -> FigureResult:
    """Closed forms; ``quick`` changes nothing."""
    memories = {label(layout): stage_memories(a100(), _8B, layout) for layout in LAYOUTS}
    prefill = {name: largest_prefill(found) for name, found in memories.items()}
    decode = {name: largest_decode(found) for name, found in memories.items()}
    pairs = list(itertools.product(memories, repeat=2))  # half of the GPUs to either phase, of any number of instances
    refused = {n: [n > prefill[one] or n + OUTPUT_TOKENS - 1 > decode[two] for one, two in pairs] for n in PROMPTS}
    num_cases, num_refused = len(PROMPTS) * len(pairs), sum(map(sum, refused.values()))
    num_by_prefill = sum(n > prefill[one] for n in PROMPTS for one, _ in pairs)
    num_failing = sum(any(column) for column in zip(*refused.values(), strict=True))
    spare = spare_factor(memories["TP 8"], M)
    numbers = {
        "prompts": list(PROMPTS),
        "largest_prefill_tokens": prefill,
        "largest_decode_tokens": decode,
        "share_out_of_memory": {str(n): sum(row) / len(row) for n, row in refused.items()},
        "cases": num_cases,
        "cases_out_of_memory": num_refused,
        "cases_out_of_memory_in_prefill": num_by_prefill,
        "splits": len(pairs),
        "splits_out_of_memory_on_some_prompt": num_failing,
        "activations_that_fit_1m_tp8": spare,
        "bytes_a_token": {name: [found[0].activation_token, found[0].kv_token] for name, found in memories.items()},
    }
    sentence = (
        f"Cases are {len(pairs)} pairs of layouts (TP and stages of either phase, instances within a node): "
        f"{num_failing} run out on some of the workload's prompts of 128K to 1M tokens; of the {num_cases} pairs of "
        f"layouts and one of four prompts it is {num_refused}, {num_by_prefill} of them in prefill. Yet an instance of "
        f"TP 1 reads {prefill['TP 1'] / 1000:.0f}K tokens whole, one of TP 8 {prefill['TP 8'] / 1000:,.0f}K: with TP 8 "
        "in both phases, as on SplitWise's machines, any prompt of these fits. That counts what a layer's widest point "
        f"needs and nothing beside it; at {spare:.2f} times the activations 1M would not fit either."
    )
    return FigureResult(numbers, {"disaggregated-oom": Answer(num_failing / len(pairs), sentence)})


def draw(numbers: Mapping[str, Any], figure: Any) -> None:
    """Left: the largest request by layout; right: how many splits run out by prompt."""
    left, right = figure.subplots(1, 2)
    names = list(numbers["largest_prefill_tokens"])
    for shift, (phase, key) in enumerate((("prefill", "largest_prefill_tokens"), ("decode", "largest_decode_tokens"))):
        at = [i + 0.4 * (shift - 0.5) for i in range(len(names))]
        left.bar(at, [numbers[key][name] / M for name in names], 0.4, color=COLORS[shift], label=f"{phase} instance")
    for tokens in numbers["prompts"]:
        left.axhline(tokens / M, color=PAPER, linestyle=":", linewidth=1)
    left.set_yscale("log")
    plain_ticks(left.yaxis, [tokens / M for tokens in numbers["prompts"]] + [2, 4])
    left.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
    finish(left, title="Llama-3 8B on A100s: what fits on an instance", ylabel="largest request, M tokens (2^20)")
    shares = numbers["share_out_of_memory"]
    bars = right.bar(
        [token_label(int(n)) for n in shares], [100 * s for s in shares.values()], color=COLORS[0], width=0.6
    )
    right.bar_label(bars, fmt="%.0f", fontsize=8)
    right.axhline(100, color=PAPER, linestyle=":", label="v5 section 6.1")
    right.set(xlabel="prompt, tokens", ylim=(0, 110))
    finish(right, title=f"Of {numbers['splits']} pairs of layouts on 16 A100s", ylabel="out of memory, %")


FIGURES = (
    FigureSpec("disaggregation", "The longest prompts that systems with split prefill and decode can take", run, draw),
)
