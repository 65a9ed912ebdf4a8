"""What a long prompt takes by arithmetic alone: v4 section 2.1 and figure 2, v5 sections 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from examples.reproduce.flops import attention_flops, kv_bytes, linear_parameters, prefill_flops, weight_bytes
from examples.reproduce.plotting import COLORS, PAPER, finish, lines, log_axis
from examples.reproduce.result import Answer, FigureResult, FigureSpec, Options
from examples.reproduce.timing import MODELS, h100

MILLION = 1e6
TTFT_S, TPOT_S = 30.0, 0.020
_GPUS = 8
_8B, _70B = MODELS["Llama-3 8B"], MODELS["Llama-3 70B"]


def most_tokens_by_compute(flops: float) -> float:
    """Tokens of an 8B prompt whose prefill takes so many FLOPs: the root of ``a n^2 + b n = flops``."""
    a, b = attention_flops(_8B, 1.0), 2.0 * linear_parameters(_8B)
    return (math.sqrt(b * b + 4 * a * flops) - b) / (2 * a)


def gpus_needed(tokens: float) -> dict[str, float]:
    """H100s by what asks for them, at published peaks: the prefill in 30 s, the decode in 20 ms, the memory."""
    spec = h100()
    held = weight_bytes(_8B) + kv_bytes(_8B, tokens)
    return {
        "compute": prefill_flops(_8B, tokens) / (TTFT_S * spec.peak_flops_per_s),
        "bandwidth": held / (TPOT_S * spec.hbm_bytes_per_s),
        "memory": held / spec.memory_bytes,
    }


def run(options: Options) -> FigureResult:
    """Closed forms; ``quick`` changes nothing."""
    spec, n = h100(), MILLION
    spare_bytes = _GPUS * spec.memory_bytes - weight_bytes(_8B)
    token_bytes = kv_bytes(_8B, 1)
    limits = {
        "compute": most_tokens_by_compute(_GPUS * spec.peak_flops_per_s * TTFT_S),
        "bandwidth": (_GPUS * spec.hbm_bytes_per_s * TPOT_S - weight_bytes(_8B)) / token_bytes,
        "memory": spare_bytes / token_bytes,
    }
    lengths = [0.25, 0.5, 1, 2, 4, 8, 10]
    needed = [gpus_needed(length * MILLION) for length in lengths]
    causal, full = (prefill_flops(_70B, n, causal=causal) for causal in (True, False))
    numbers = {
        "max_tokens_dgx_h100": limits,
        "lengths_million": lengths,
        "gpus_needed": {name: [row[name] for row in needed] for name in limits},
        "exaflops_1m_70b": {"causal": causal / 1e18, "not causal": full / 1e18},
        "kv_gb_1m_70b": kv_bytes(_70B, n) / 1e9,
        "cost_100k_over_1k": {name: _cost(model, 1e5, 1e3) for name, model in MODELS.items()},
        "attention_cost_100k_over_1k": attention_flops(_8B, 1e5) / attention_flops(_8B, 1e3),
        "cost_1m_over_128k": {name: _cost(model, 1e6, 128e3) for name, model in MODELS.items()},
    }
    return FigureResult(numbers, _answers(numbers, causal, full))


def _cost(model: Any, long: float, short: float) -> float:
    return prefill_flops(model, long) / prefill_flops(model, short)


def _answers(numbers: Mapping[str, Any], causal: float, full: float) -> dict[str, Answer]:
    limits, peak = numbers["max_tokens_dgx_h100"], h100().peak_flops_per_s
    ratios, at_128k = numbers["cost_100k_over_1k"], numbers["cost_1m_over_128k"]
    exaflops = (
        f"With the causal mask, as v4 eq. 1 has it; without it the count is {full / 1e18:.2f} exaFLOPs, "
        "which must be what was counted."
    )
    one, two = (gpus_needed(tokens * MILLION)["compute"] for tokens in (1, 2))
    return {
        "cost-100k-1k": Answer(
            ratios["Llama-3 8B"],
            f"FLOPs of the whole 8B model ({ratios['Llama-3 70B']:.0f} for 70B), as linear layers grow linearly and "
            "dominate at 1K; attention alone is 10,000 times.",
        ),
        "cost-1m-128k": Answer(
            at_128k["Llama-3 8B"],
            f"FLOPs of the 8B model ({at_128k['Llama-3 70B']:.0f} for 70B); attention alone grows "
            f"{(1e6 / 128e3) ** 2:.0f} times, so 100 is more than quadratic.",
        ),
        "kv-320gb": Answer(numbers["kv_gb_1m_70b"], "Keys and values in 2 bytes, 80 layers of 8 heads of 128."),
        "exaflops-v4": Answer(causal / 1e18, exaflops),
        "exaflops-v5": Answer(causal / 1e18, exaflops),
        "h100-minutes": Answer(
            causal / peak / 60,
            f"At the published peak of 989 TFLOP/s; {full / peak / 60:.0f} minutes without the causal mask.",
        ),
        "dgx-compute": Answer(limits["compute"] / MILLION, "Eight H100s at their peak for 30 s, causal attention."),
        "dgx-memory": Answer(
            limits["memory"] / MILLION,
            f"All of eight memories less the weights; at 20 ms a token the bandwidth ends at "
            f"{limits['bandwidth'] / MILLION:.1f}M already, which may be the limit that was drawn.",
        ),
        "gpus-1m": Answer(math.ceil(one), f"{one:.1f} H100s at their peak, rounded up; compute asks for the most."),
        "gpus-2m": Answer(math.ceil(two), f"{two:.1f} H100s at their peak, rounded up."),
    }


def draw(numbers: Mapping[str, Any], figure: Any) -> None:
    """Left: tokens within the SLOs on one node; right: GPUs over tokens (v4 figure 2)."""
    left, right = figure.subplots(1, 2)
    limits = numbers["max_tokens_dgx_h100"]
    names = list(limits)
    bars = left.bar(names, [limits[name] / MILLION for name in names], color=COLORS[: len(names)], width=0.6)
    left.bar_label(bars, fmt="%.2fM", fontsize=9)
    left.margins(y=0.12)
    finish(
        left, title="Llama-3 8B on one DGX-H100, TTFT 30 s, TPOT 20 ms", ylabel="tokens that fit, million", legend=False
    )
    lines(right, numbers["lengths_million"], numbers["gpus_needed"], marker="o")
    right.scatter([1, 2], [10, 40], marker="x", s=60, color=PAPER, zorder=3, label="v4 section 2.1")
    right.set_yscale("log")
    log_axis(right, numbers["lengths_million"], label="tokens, million")
    finish(right, title="What asks for GPUs (H100 at published peaks)", ylabel="H100s needed")


FIGURES = (FigureSpec("requirements", "What 1M tokens ask of hardware, in closed form", run, draw),)
