"""Stream pipeline against context parallelism at 1M tokens: v5 figure 5b, v4 section 3.3 and figure 8."""

from __future__ import annotations

from examples.reproduce.baselines.context_parallel import KINDS, ContextParallel, hidden_tokens, prefill_s
from examples.reproduce.figures.stages import STAGES, layout
from examples.reproduce.flops import prefill_flops
from examples.reproduce.plotting import Panel, lines
from examples.reproduce.result import Answer, FigureResult, Options, figure
from examples.reproduce.timing import MODELS, M, h100, simulate

_8B = MODELS["Llama-3 8B"]
_TP = 8
_A100_FLOPS_PER_S = 312e12
_INFINIBAND_BYTES_PER_S = 12.5e9
"""100 Gbit/s a GPU: what Ring Attention's table takes for InfiniBand."""


@figure("spp-vs-cp", "Stream pipeline against context parallelism at 1M (v5 fig. 5b)")
def run(options: Options) -> FigureResult:
    """TTFT of 1M tokens on 8 to 128 H100s, three ways; ``quick`` changes nothing."""
    spec = h100()
    gpus = [_TP * s for s in STAGES]
    ttft_s = {"SPP": [simulate(spec, _8B, layout(s), M).ttft_s for s in STAGES]}
    for kind in KINDS:
        rings = [ContextParallel(spec, _8B, cp=s, tp=_TP, kind=kind) for s in STAGES]
        ttft_s[f"{kind} attention"] = [prefill_s(ring, M) for ring in rings]
    spp, ring, striped = (row[-1] for row in ttft_s.values())
    hidden = hidden_tokens(_A100_FLOPS_PER_S, _INFINIBAND_BYTES_PER_S)
    hidden_8b = hidden_tokens(
        _A100_FLOPS_PER_S, _INFINIBAND_BYTES_PER_S, query_heads_per_kv_head=_8B.num_heads / _8B.num_kv_heads
    )
    panel = Panel(
        "1M tokens, Llama-3 8B",
        "H100s (TP 8)",
        "TTFT, s",
        lines(gpus, ttft_s),
        levels={"15 s (v4 section 3.3)": 15},
        log="xy",
    )
    answers = {
        "spp-over-cp": Answer(striped / spp, striped=striped, spp=spp, ring=ring),
        "spp-64-percent": Answer(100 * (1 - spp / striped)),
        "spp-over-ring": Answer(ring / spp, striped=striped / spp),
        "spp-15s": Answer(spp, mfu=_mfu(spp), said=_mfu(15)),
        "ring-24k": Answer(hidden / 1024, grouped=hidden_8b / 1024),
    }
    return FigureResult([panel], answers)


def _mfu(seconds: float) -> float:
    """Percent of the peak of 128 H100s that a 1M prefill in so many seconds means, causal FLOPs."""
    return 100 * prefill_flops(_8B, M) / (seconds * _TP * STAGES[-1] * h100().peak_flops_per_s)
