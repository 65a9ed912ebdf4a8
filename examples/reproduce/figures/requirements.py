"""What a long prompt takes by arithmetic alone: v4 section 2.1 and figure 2, v5 sections 1 and 2."""

from __future__ import annotations

import math
from collections.abc import Mapping

from examples.reproduce import timing
from examples.reproduce.plotting import Panel, lines
from examples.reproduce.result import Answer, FigureResult, Options, figure
from examples.reproduce.timing import H100, LLAMA_8B, LLAMA_70B

MILLION = 1e6
TTFT_S, TPOT_S = 30.0, 0.020
_GPUS = 8


def most_tokens_by_compute(flops: float) -> float:
    """Tokens of an 8B prompt whose prefill takes so many FLOPs: the root of ``a n^2 + b n = flops``."""
    a, b = timing.attention_flops(LLAMA_8B, 1.0), 2.0 * timing.linear_parameters(LLAMA_8B)
    return (math.sqrt(b * b + 4 * a * flops) - b) / (2 * a)


def gpus_needed(tokens: float) -> dict[str, float]:
    """H100s by what asks for them, at published peaks: the prefill in 30 s, the decode in 20 ms, the memory."""
    held = timing.weight_bytes(LLAMA_8B) + timing.kv_bytes(LLAMA_8B, tokens)
    return {
        "compute": timing.prefill_flops(LLAMA_8B, tokens) / (TTFT_S * H100.peak_flops_per_s),
        "bandwidth": held / (TPOT_S * H100.hbm_bytes_per_s),
        "memory": held / H100.memory_bytes,
    }


@figure("requirements", "What 1M tokens ask of hardware, in closed form")
def run(options: Options) -> FigureResult:
    """Closed forms; ``quick`` changes nothing."""
    token_bytes = timing.kv_bytes(LLAMA_8B, 1)
    limits = {
        "compute": most_tokens_by_compute(_GPUS * H100.peak_flops_per_s * TTFT_S),
        "bandwidth": (_GPUS * H100.hbm_bytes_per_s * TPOT_S - timing.weight_bytes(LLAMA_8B)) / token_bytes,
        "memory": (_GPUS * H100.memory_bytes - timing.weight_bytes(LLAMA_8B)) / token_bytes,
    }
    lengths = [0.25, 0.5, 1, 2, 4, 8, 10]
    needed = [gpus_needed(length * MILLION) for length in lengths]
    panels = [
        Panel(
            "Llama-3 8B on one DGX-H100, TTFT 30 s, TPOT 20 ms",
            "what ends first",
            "tokens that fit, million",
            bars={"": {name: tokens / MILLION for name, tokens in limits.items()}},
        ),
        Panel(
            "What asks for GPUs (H100 at published peaks)",
            "tokens, million",
            "H100s needed",
            lines(lengths, {name: [row[name] for row in needed] for name in limits}, marker="o"),
            paper={"v4 section 2.1: 1M": (1, 10), "v4 section 2.1: 2M": (2, 40)},
            log="xy",
        ),
    ]
    return FigureResult(panels, _answers(limits))


def _answers(limits: Mapping[str, float]) -> dict[str, Answer]:
    peak = H100.peak_flops_per_s
    causal, full = (timing.prefill_flops(LLAMA_70B, MILLION, causal=causal) for causal in (True, False))
    at_1k, at_128k = (
        [timing.prefill_flops(model, long) / timing.prefill_flops(model, short) for model in (LLAMA_8B, LLAMA_70B)]
        for long, short in ((1e5, 1e3), (1e6, 128e3))
    )
    exaflops = Answer(causal / 1e18, unmasked=full / 1e18)
    one, two = (gpus_needed(tokens * MILLION)["compute"] for tokens in (1, 2))
    return {
        "cost-100k-1k": Answer(at_1k[0], large=at_1k[1]),
        "cost-1m-128k": Answer(at_128k[0], large=at_128k[1], attention=(1e6 / 128e3) ** 2),
        "kv-320gb": Answer(timing.kv_bytes(LLAMA_70B, MILLION) / 1e9),
        "exaflops-v4": exaflops,
        "exaflops-v5": exaflops,
        "h100-minutes": Answer(causal / peak / 60, unmasked=full / peak / 60),
        "dgx-compute": Answer(limits["compute"] / MILLION),
        "dgx-memory": Answer(limits["memory"] / MILLION, bandwidth=limits["bandwidth"] / MILLION),
        "gpus-1m": Answer(math.ceil(one), exactly=one),
        "gpus-2m": Answer(math.ceil(two), exactly=two),
    }
