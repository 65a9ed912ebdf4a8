"""Stream pipeline parallelism: prefill over stages, its cost to decodes, the papers' formulas; against context
parallelism at 1M tokens.

v5 section 3.3, figures 5, 17 and 18; v4 section 3.3, figures 8 to 10, eqs. 4 to 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from examples.reproduce import timing
from examples.reproduce.baselines.context_parallel import KINDS, ContextParallel, hidden_tokens, prefill_s
from examples.reproduce.plotting import PAPER, Line, Panel, lines, token_label
from examples.reproduce.result import Answer, FigureResult, Options, figure
from examples.reproduce.timing import CHUNK, H100, LLAMA_8B, MODELS, M
from medha.config import ParallelConfig
from medha.cost.predictor import Work

STAGES = (1, 2, 4, 8, 16)
_LINEAR = {"color": PAPER, "linestyle": ":"}
_MISFIT = {"color": "red", "marker": "x", "linestyle": "", "markersize": 10, "zorder": 3}
_LENGTHS = (M, 4 * M, 10 * M)
_TP = 8
_A100_FLOPS_PER_S = 312e12
_INFINIBAND_BYTES_PER_S = 12.5e9
"""100 Gbit/s a GPU: what Ring Attention's table takes for InfiniBand."""


def layout(spp: int, *, tp: int = 8, kvp: int = 1) -> ParallelConfig:
    """TP 8 unless told otherwise, as in the papers."""
    return ParallelConfig(tp=tp, spp=spp, kvp=kvp)


# ---------------------------------------------------------------------------------------------------------------------
# Prefill over stages


@figure("spp-scaling", "Prefill over pipeline stages to 10M tokens (v5 fig. 17)")
def run_scaling(options: Options) -> FigureResult:
    """TTFT by model, length and stages; ``quick`` takes 1M and 10M alone."""
    lengths = [M, 10 * M] if options.quick else [M, 2 * M, 4 * M, 10 * M]
    ttft_s = {
        name: {n: [timing.ttft_s(model, layout(s), n) for s in STAGES] for n in lengths}
        for name, model in MODELS.items()
    }
    efficiency = {
        name: {n: [row[0] / (t * s) for t, s in zip(row, STAGES, strict=True)] for n, row in rows.items()}
        for name, rows in ttft_s.items()
    }
    panels = [_scaling_panel(name, rows) for name, rows in ttft_s.items()]
    panels += [_efficiency_panel(name, rows) for name, rows in efficiency.items()]
    return FigureResult(panels, _scaling_answers(ttft_s, efficiency))


def _efficiency_panel(name: str, rows: Mapping[int, list[float]]) -> Panel:
    """What of the stages shows in TTFT."""
    return Panel(
        f"{name}, against one stage",
        "stages of 8 H100s (TP 8)",
        "efficiency, %",
        lines(STAGES, {f"{token_label(n)} tokens": row for n, row in rows.items()}, scale=100),
        levels={"80 % (v5 fig. 17)": 80},
        log="x",
    )


def _scaling_panel(name: str, rows: Mapping[int, list[float]]) -> Panel:
    """TTFT over stages (v5 figure 17)."""
    points = {f"{token_label(n)} tokens": row for n, row in rows.items()}
    too_long = [
        [None if timing.fits(MODELS[name], layout(s), n) else row[i] for i, s in enumerate(STAGES)]
        for n, row in rows.items()
    ]
    return Panel(
        f"{name} (dotted: linear; red: no memory for it)",
        "stages of 8 H100s (TP 8)",
        "TTFT, s",
        [
            *lines(STAGES, points),
            *(Line(None, STAGES, [row[0] / s for s in STAGES], _LINEAR) for row in rows.values()),
            *(Line(None, STAGES, row, _MISFIT) for row in too_long),
        ],
        log="xy",
    )


def _scaling_answers(
    ttft_s: Mapping[str, Mapping[int, list[float]]], efficiency: Mapping[str, Mapping[int, list[float]]]
) -> dict[str, Answer]:
    small, large = efficiency["Llama-3 8B"], efficiency["Llama-3 70B"]
    at_16 = [row[-1] for rows in efficiency.values() for row in rows.values()]
    small_10m, large_10m = (rows[10 * M][-1] for rows in ttft_s.values())
    small_s, crossing = ttft_s["Llama-3 8B"][M], timing.ttft_s(LLAMA_8B, layout(1, tp=16), M)
    tp16_gain, spp2_gain = small_s[0] / crossing, small_s[0] / small_s[1]
    small_fits, large_fits = ({s: timing.fits(model, layout(s), 10 * M) for s in STAGES} for model in MODELS.values())
    on_8 = "fit" if large_fits[8] else "do not fit without a second KVP group"
    return {
        "spp-efficiency": Answer(100 * min(at_16), most=100 * max(at_16)),
        "spp-8b-efficiency": Answer(100 * min(row[-1] for row in small.values())),
        "spp-70b-efficiency": Answer(100 * large[M][STAGES.index(8)]),
        "spp-10m": Answer([small_fits[16], large_fits[16]], small=small_10m / 60, large=large_10m / 60),
        "spp-70b-memory": Answer([not large_fits[4], large_fits[16]], on_8=on_8),
        "tp-one-node": Answer(float(tp16_gain < spp2_gain), tp=tp16_gain, spp=spp2_gain),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Decodes


@figure("spp-decode", "What pipeline stages cost a decode (v5 fig. 18)")
def run_decode(options: Options) -> FigureResult:
    """TPOT of one 2M request over stages, through scheduler and pipeline; ``quick`` decodes fewer tokens."""
    tokens = 9 if options.quick else 65
    tpot_s = {
        name: [timing.simulate(model, layout(s), 2 * M, output_tokens=tokens).times.tpot_s[0] for s in STAGES]
        for name, model in MODELS.items()
    }
    rises = {name: [100 * (t / row[0] - 1) for t in row] for name, row in tpot_s.items()}
    panel = Panel(
        "Decode of one 2M request alone",
        "stages of 8 H100s (TP 8)",
        "TPOT, ms",
        lines(STAGES, tpot_s, scale=1e3),
        notes=[
            (s, 1e3 * row[i], f"{rises[name][i]:+.0f} %")
            for name, row in tpot_s.items()
            for i, s in enumerate(STAGES)
            if i
        ],
        log="x",
    )
    small, large = rises["Llama-3 8B"], rises["Llama-3 70B"]
    larger = [b < a for a, b in zip(small[1:], large[1:], strict=True)]
    at_8, host_ms = STAGES.index(8), 1e3 * H100.host_s
    answers = {
        "spp-decode-8": Answer(small[at_8], large=large[at_8], host_ms=host_ms),
        "spp-decode-larger-model": Answer(larger, large=large[-1], small=small[-1]),
    }
    return FigureResult([panel], answers)


# ---------------------------------------------------------------------------------------------------------------------
# The formulas of v4


@figure("equations", "v4 equations 4 to 6 against the simulation")
def run_equations(options: Options) -> FigureResult:
    """v4 eqs. 4 to 6 against the simulated times; ``quick`` takes the 8B model alone."""
    models = ["Llama-3 8B"] if options.quick else list(MODELS)
    equations: dict[str, tuple[str, str, tuple[int, ...], Callable[[str, int, int], float]]] = {
        "eq4": ("eq. 4: SPP prefill", "stages", STAGES[1:], _eq4),
        "eq5": ("eq. 5: KVP decode", "KVP groups", (2, 4), partial(_over_groups, 1)),
        "eq6": ("eq. 6: KVP chunk", "KVP groups", (2, 4), partial(_over_groups, 512)),
    }
    panels, answers = [], {}
    for name, (title, label, degrees, over) in equations.items():
        rows = {
            f"{model[8:]}, {token_label(n)}": [over(model, degree, n) for degree in degrees]
            for model in models
            for n in _LENGTHS
        }
        off = [abs(ratio - 1) for row in rows.values() for ratio in row]
        answers[name] = Answer([error <= 0.15 for error in off], count=len(off), worst=100 * max(off))
        drawn = lines(degrees, rows)
        panels.append(Panel(f"v4 {title}", label, "simulated / formula", drawn, band=(0.85, 1.15), log="x"))
    return FigureResult(panels, answers)


def _eq4(name: str, spp: int, tokens: int) -> float:
    """The simulated time over (T_p + T_comm n / c) / p_spp."""
    one, many = (timing.ttft_s(MODELS[name], layout(s), tokens) for s in (1, spp))
    link = timing.stage_predictors(H100, MODELS[name], layout(spp))[0].coefficients.spp
    assert link is not None, "the first of several stages sends"
    send_s = link.fixed_s + link.token_s * CHUNK
    return many / ((one + send_s * tokens / CHUNK) / spp)


def _over_groups(q_len: int, name: str, kvp: int, tokens: int) -> float:
    """That of a decode, or of a chunk of so many tokens, over T_attn / p_kvp + (T - T_attn) + T_comm, one stage."""
    one, many = (timing.stage_predictors(H100, MODELS[name], layout(1, kvp=p))[0] for p in (1, kvp))
    decodes, chunks, link = one.coefficients.decodes, one.coefficients.chunks, many.coefficients.kvp
    assert link is not None, "groups merge"
    is_decode = q_len == 1
    table, sizes = (decodes, decodes.batch) if is_decode else (chunks, chunks.tokens)
    a, b = (float(np.interp(q_len, sizes, column)) for column in (table.a_s, table.b_s))
    attention_s = a + b * tokens
    merge_s = link.fixed_s + (kvp - 1) * link.token_s * q_len
    formula = attention_s / kvp + one.predict([Work(q_len, tokens, is_decode)]) - attention_s + merge_s
    return many.predict([Work(q_len, tokens // kvp, is_decode, (0, kvp - 1))]) / formula


# ---------------------------------------------------------------------------------------------------------------------
# Against context parallelism


@figure("spp-vs-cp", "Stream pipeline against context parallelism at 1M (v5 fig. 5b)")
def run(options: Options) -> FigureResult:
    """TTFT of 1M tokens on 8 to 128 H100s, three ways; ``quick`` changes nothing."""
    gpus = [_TP * s for s in STAGES]
    ttft_s = {"SPP": [timing.ttft_s(LLAMA_8B, layout(s), M) for s in STAGES]}
    for kind in KINDS:
        rings = [ContextParallel(H100, LLAMA_8B, cp=s, tp=_TP, kind=kind) for s in STAGES]
        ttft_s[f"{kind} attention"] = [prefill_s(ring, M) for ring in rings]
    spp, ring, striped = (row[-1] for row in ttft_s.values())
    hidden, hidden_8b = (
        hidden_tokens(_A100_FLOPS_PER_S, _INFINIBAND_BYTES_PER_S, query_heads_per_kv_head=heads)
        for heads in (1.0, LLAMA_8B.num_heads / LLAMA_8B.num_kv_heads)
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
    return 100 * timing.prefill_flops(LLAMA_8B, M) / (seconds * _TP * STAGES[-1] * H100.peak_flops_per_s)
