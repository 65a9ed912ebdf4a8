"""What a chunk costs: intensity, overhead of small chunks, decodes beside it, how long it cannot be stopped; and chunks
of one size against adaptive ones.

v5 sections 2.6, 3.1 and 3.2, figures 3 and 4; v4 sections 3.1 and 3.2, figures 5 and 6.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from examples.reproduce import timing
from examples.reproduce.baselines.context_parallel import ContextParallel, prefill_s
from examples.reproduce.plotting import PAPER, Line, Panel, lines, paths, token_label
from examples.reproduce.result import Answer, FigureResult, Options, figure
from examples.reproduce.timing import A100, H100, LLAMA_8B, LLAMA_70B, MODELS, M
from medha.config import ModelConfig, ParallelConfig
from medha.cost.coefficients import Floats
from medha.cost.predictor import Predictor, Work

SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_TP8 = ParallelConfig(tp=8)
_SHORT_DECODE = Work(1, 1024, True)
_EIGHT_DECODES = (_SHORT_DECODE,) * 8
_MOST = 8192  # tokens of an adaptive chunk

# ---------------------------------------------------------------------------------------------------------------------
# Intensity


@figure("intensity", "Arithmetic intensity of a chunk (v5 eq. 1)")
def run_intensity(options: Options) -> FigureResult:
    """Eq. 1 against the FLOPs a byte that an H100 can feed; ``quick`` changes nothing."""
    ridge = H100.peak_flops_per_s / H100.hbm_bytes_per_s
    saturated = {name: ridge / timing.chunk_intensity(model, 1) for name, model in MODELS.items()}
    reached = H100.attention.flops_per_s / H100.attention.bytes_per_s / timing.chunk_intensity(LLAMA_70B, 1)
    rows = {f"attention, {name}": [timing.chunk_intensity(model, c) for c in SIZES] for name, model in MODELS.items()}
    panel = Panel(
        "Arithmetic intensity of a chunk (v5 eq. 1)",
        "chunk, tokens",
        "FLOPs per byte",
        [
            *lines(SIZES, rows | {"linear layers": SIZES}),
            Line("40 tokens (v5 section 3.1)", [40, 40], [SIZES[0], 8 * SIZES[-1]], {"color": PAPER, "linestyle": ":"}),
        ],
        levels={"H100, peak over bandwidth": ridge},
        log="xy",
    )
    answers = {
        "saturating-chunk": Answer(saturated["Llama-3 70B"], ridge=ridge, reached=reached),
        "gqa-ratio": Answer(timing.chunk_intensity(LLAMA_70B, 1)),
        "linear-memory-bound": Answer([c < ridge for c in (32, 64)], ridge=ridge),
    }
    return FigureResult([panel], answers)


# ---------------------------------------------------------------------------------------------------------------------
# Overhead of small chunks


def attention_s(predictor: Predictor, tokens: int, chunk: int) -> float:
    """Seconds of attention alone of a whole prompt in chunks of one size, one stage."""
    table = predictor.coefficients.chunks
    size = max(chunk, int(table.tokens[0]))
    a, b, first = (float(np.interp(size, table.tokens, column)) for column in (table.a_s, table.b_s, table.first_s))
    starts: Floats = np.arange(chunk, tokens, chunk, dtype=np.float64)
    return first + float((a + b * starts).sum())


def overhead(predictor: Predictor, tokens: int, chunk: int) -> float:
    """Share by which attention takes longer than with 2,048-token chunks."""
    return attention_s(predictor, tokens, chunk) / attention_s(predictor, tokens, 2048) - 1


def roofline_overhead(model: ModelConfig, chunk: int) -> float:
    """The same far into a prompt, where reading hides behind arithmetic in full, at published peaks."""
    ridge = H100.peak_flops_per_s / H100.hbm_bytes_per_s
    return max(1.0, ridge / timing.chunk_intensity(model, chunk)) - 1


@figure("chunk-overhead", "What small chunks cost (v5 fig. 3b, v4 fig. 5b)")
def run_overhead(options: Options) -> FigureResult:
    """Attention and whole prefills over the chunk; ``quick`` takes fewer lengths."""
    lengths = [1 << 14, 1 << 17, M] if options.quick else [1 << 14, 1 << 16, 1 << 18, M]
    large = timing.stage_predictors(H100, LLAMA_70B, _TP8)[0]
    small = timing.stage_predictors(H100, LLAMA_8B, _TP8)
    attention = {n: [overhead(large, n, c) for c in SIZES] for n in lengths}
    ttft_s = [float(timing.pipeline_ends(timing.chunk_seconds(small, M, c))[-1]) for c in SIZES]
    whole = [seconds / ttft_s[-1] - 1 for seconds in ttft_s]
    shown = {f"spec, {token_label(n)} context": [max(v, 0.0) or None for v in attention[n]] for n in lengths}
    attention_lines = lines(SIZES, shown, scale=100)
    hidden = {"reading hidden in full": [roofline_overhead(LLAMA_70B, c) or None for c in SIZES]}
    panels = [
        Panel(
            "Attention, Llama-3 70B, TP 8, H100",
            "chunk, tokens",
            "longer than with 2K chunks, %",
            [*attention_lines, *lines(SIZES, hidden, scale=100, color="black", marker="_", linestyle="--")],
            paper={"v5 section 3.1: 11 %": (32, 11)},
            log="xy",
        ),
        Panel(
            "Whole prefill of 1M, Llama-3 8B, TP 8, H100",
            "chunk, tokens",
            "TTFT, s",
            lines(SIZES, {"": ttft_s}),
            log="x",
        ),
    ]
    at_32, at_64 = attention[M][:2]
    falls = [attention[a][i] >= attention[b][i] for a, b in pairwise(lengths) for i in (0, 1)]
    answers = {
        "chunk-32-overhead": Answer(100 * at_32, hidden=100 * roofline_overhead(LLAMA_70B, 32)),
        "chunk-64-minimal": Answer(100 * at_64),
        "overhead-falls": Answer(falls),
        "chunk-32-prefill": Answer(100 * whole[0], times=1 + whole[0]),
    }
    return FigureResult(panels, answers)


# ---------------------------------------------------------------------------------------------------------------------
# A decode beside a chunk


@figure("mixed-batch", "A decode beside a chunk of a long prompt (v5 section 2.6)")
def run_mixed(options: Options) -> FigureResult:
    """A batch of one decode and one chunk over the context; ``quick`` changes nothing."""
    lengths, chunks = [1 << 17, 1 << 18, 1 << 19, M, 2 * M, 4 * M], (32, 128, 512, 2048)
    batch_s: dict[str, dict[int, list[float]]] = {}
    for name, model in MODELS.items():
        predict = timing.stage_predictors(H100, model, _TP8)[0].predict
        batch_s[name] = {c: [predict([_SHORT_DECODE, Work(c, kv, False)]) for kv in lengths] for c in chunks}
    panels = [
        Panel(
            f"{name}, TP 8, H100",
            "context of the chunk, tokens",
            "decode latency in a mixed batch, ms",
            lines(lengths, {f"chunk of {chunk}": row for chunk, row in rows.items()}, scale=1e3),
            paper={"v5 section 2.6: chunk of 512": (M, 250)} if name == "Llama-3 8B" else {},
            levels={"30 ms, a usual objective": 30},
            log="xy",
        )
        for name, rows in batch_s.items()
    ]
    ours, large = (rows[512][lengths.index(M)] for rows in batch_s.values())
    floor_s = 4 * 512 * M * LLAMA_8B.num_heads * LLAMA_8B.head_dim * LLAMA_8B.num_layers / (8 * H100.peak_flops_per_s)
    facts = {"floor_ms": 1e3 * floor_s, "share": 100 * floor_s / 0.25, "large_ms": 1e3 * large}
    return FigureResult(panels, {"mixed-512-1m": Answer(1e3 * ours, **facts)})


# ---------------------------------------------------------------------------------------------------------------------
# How long a prefill cannot be stopped


@figure("preemption", "How long a prefill cannot be stopped (v4 fig. 5a)")
def run_preemption(options: Options) -> FigureResult:
    """The longest piece of a prompt that runs in one go, by chunk, against a whole prompt in a ring."""
    lengths = [1 << 14, 1 << 16, 1 << 18, M, 4 * M]
    on_a100, on_h100 = (timing.stage_predictors(spec, LLAMA_8B, _TP8)[0] for spec in (A100, H100))
    held = {
        f"chunk of {c}, 8 {name}": [predictor.predict([Work(c, n - c, False)]) for n in lengths]
        for name, predictor, c in (*(("A100s", on_a100, c) for c in (64, 512, 4096)), ("H100s", on_h100, 512))
    }
    ring = ContextParallel(A100, LLAMA_8B, cp=8, tp=2)
    whole = [prefill_s(ring, n) for n in lengths]
    panel = Panel(
        "Longest time without preemption, Llama-3 8B",
        "prompt, tokens",
        "time, s",
        lines(lengths, held | {"whole prompt, context parallel, 16 A100s": whole}),
        log="xy",
    )
    longest_s = held["chunk of 512, 8 H100s"][-1]
    answers = {"chunk-tens-of-ms": Answer(1e3 * longest_s), "whole-minutes": Answer(whole[lengths.index(M)])}
    return FigureResult([panel], answers)


# ---------------------------------------------------------------------------------------------------------------------
# Static against adaptive chunks


def adaptive(predictor: Predictor, tokens: int, budget_s: float) -> tuple[Floats, Floats]:
    """Chunks as the packer cuts them, beside 8 decodes: the largest within the budget, at least 32 tokens.

    Returns:
        Seconds of each batch, and its chunk.
    """
    tick = predictor.tick(_EIGHT_DECODES)
    seconds, sizes, done = [], [], 0
    while done < tokens:
        chunk = max(tick.largest_chunk(done, budget_s, min(_MOST, tokens - done), 16), min(SIZES[0], tokens - done))
        seconds.append(tick.with_chunk(chunk, done))
        sizes.append(chunk)
        done += chunk
    return np.array(seconds), np.array(sizes, dtype=np.float64)


@figure("adaptive-chunking", "Static against adaptive chunks (v5 fig. 4)")
def run_adaptive(options: Options) -> FigureResult:
    """1M tokens, 8B on 8 H100s, 8 short decodes in every batch; ``quick`` changes nothing."""
    predictor = timing.stage_predictors(H100, LLAMA_8B, _TP8)[0]
    static = [timing.chunk_seconds([predictor], M, size, decodes=_EIGHT_DECODES)[0] for size in SIZES]
    fitted = [adaptive(predictor, M, float(seconds.max()))[0] for seconds in static]
    prefill_s, worst_s, p50_s = (
        np.array([[float(of(seconds)) for seconds in rows] for rows in (static, fitted)])
        for of in (np.sum, np.max, np.median)
    )
    (static_ms, fitted_ms), (static_s, fitted_s) = (1e3 * worst_s).tolist(), prefill_s.tolist()
    panel = Panel(
        f"{token_label(M)} prompt beside 8 decodes, Llama-3 8B, 8 H100s",
        "longest decode latency, ms",
        "prefill, s",
        paths({"static": (static_ms, static_s), "adaptive": (fitted_ms, fitted_s)}),
        notes=list(zip(static_ms, static_s, map(str, SIZES), strict=True)),
        log="xy",
    )
    gains, order, at = prefill_s[0] / prefill_s[1], np.argsort(p50_s[1]), np.log(p50_s)
    inside = (at[0] >= at[1].min()) & (at[0] <= at[1].max())
    # adaptive chunks, interpolated to the median latency of each static size
    same_median_s = np.exp(np.interp(at[0, inside], at[1, order], np.log(prefill_s[1, order])))
    by_median = prefill_s[0, inside] / same_median_s
    spans = {"least": gains.min(), "most": gains.max(), "low": by_median.min(), "high": by_median.max()}
    no_worse = np.append(gains, by_median) >= 1 - 1e-9
    return FigureResult([panel], {"adaptive-pareto": Answer(no_worse, tokens=token_label(M), **spans)})
