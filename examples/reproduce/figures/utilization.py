"""MFU of prefills and MBU of decodes: v5 appendix B.4, figures 15 and 16; v4 section 5.5, figures 19 and 20."""

from __future__ import annotations

from itertools import pairwise

from examples.reproduce import timing
from examples.reproduce.figures.stages import STAGES, layout
from examples.reproduce.plotting import Panel, lines, token_label
from examples.reproduce.result import Answer, FigureResult, Options, figure
from examples.reproduce.timing import H100, LLAMA_70B, MODELS, M
from medha.config import ModelConfig, ParallelConfig

_GROUPS = (1, 2, 4)


@figure("mfu", "Model FLOPs utilization of prefills (v5 fig. 15)")
def run_mfu(options: Options) -> FigureResult:
    """Causal FLOPs of a prefill over what the GPUs could do meanwhile; ``quick`` takes 1M and 10M alone."""
    lengths = [M, 10 * M] if options.quick else [M, 2 * M, 4 * M, 10 * M]
    layouts = [layout(spp) for spp in STAGES]
    mfu = {  # of each length, by layout; None where it does not fit
        name: [[_mfu(model, one, n) if timing.fits(model, one, n) else None for one in layouts] for n in lengths]
        for name, model in MODELS.items()
    }
    gpus = [one.world_size for one in layouts]
    panels = [
        Panel(
            f"{name}, 4K chunks",
            "H100s (TP 8)",
            "MFU, causal FLOPs, % (grey: 50 to 60 %, 70B, v5 B.4)",
            lines(gpus, {f"{token_label(n)} tokens": row for n, row in zip(lengths, rows, strict=True)}, scale=100),
            band=(50, 60) if model is LLAMA_70B else None,
            log="x",
        )
        for (name, rows), model in zip(mfu.items(), MODELS.values(), strict=True)
    ]
    by_layout = [[one for one in column if one is not None] for column in zip(*mfu["Llama-3 70B"], strict=True)]
    mfus, widest = [one for column in by_layout for one in column], by_layout[-1]
    rises = [b >= a for values in by_layout for a, b in pairwise(values)]
    share = 100 * H100.attention.flops_per_s / H100.peak_flops_per_s
    answers = {
        "mfu-70b": Answer((100 * min(mfus), 100 * max(mfus)), share=share),
        "mfu-128": Answer(100 * min(widest), most=100 * max(widest), share=share),
        "mfu-rises": Answer(rises),
    }
    return FigureResult(panels, answers)


def _mfu(model: ModelConfig, parallel: ParallelConfig, tokens: int) -> float:
    could = timing.ttft_s(model, parallel, tokens) * parallel.world_size * H100.peak_flops_per_s
    return timing.prefill_flops(model, tokens) / could


@figure("mbu", "Model bandwidth utilization of decodes (v5 fig. 16)")
def run_mbu(options: Options) -> FigureResult:
    """Bytes that a decode must read over what the memories could deliver meanwhile; ``quick`` changes nothing."""
    lengths = [M, 2 * M, 4 * M, 10 * M]
    found = {(name, kvp): [_mbu(model, kvp, n) for n in lengths] for name, model in MODELS.items() for kvp in _GROUPS}
    panels = [
        Panel(
            f"{name}, TP 8, one stage",
            "context, tokens",
            "MBU, %",
            lines(lengths, {f"KVP {kvp}": found[name, kvp] for kvp in _GROUPS}, scale=100),
            levels={"92 % (v5 B.4)": 92},
            log="x",
        )
        for name in MODELS
    ]
    (name, kvp), best = max(found.items(), key=lambda item: max(item[1]))
    reached = 100 * H100.attention.bytes_per_s / H100.hbm_bytes_per_s
    return FigureResult(panels, {"mbu-92": Answer(100 * max(best), kvp=kvp, model=name, reached=reached)})


def _mbu(model: ModelConfig, kvp: int, tokens: int) -> float:
    parallel = ParallelConfig(tp=8, kvp=kvp)
    read = timing.weight_bytes(model) / parallel.tp + timing.kv_bytes(model, tokens) / (parallel.tp * kvp)
    seconds = timing.decode_s(timing.stage_predictors(H100, model, parallel), tokens, kvp=kvp)
    return read / (seconds * H100.hbm_bytes_per_s)
