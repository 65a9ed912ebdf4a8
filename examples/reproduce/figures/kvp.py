"""KV-cache parallelism: decodes, growth with the context, and the trade-off of TTFT against TPOT.

v5 section 3.3 and appendix B.2, B.3, figures 6, 7, 19 and 20; v4 sections 3.4 and 3.5, figures 11 and 13.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np

from examples.reproduce import timing
from examples.reproduce.plotting import Panel, lines, paths, token_label
from examples.reproduce.result import Answer, FigureResult, Options, figure
from examples.reproduce.timing import H100, LLAMA_8B, MODELS, M
from medha.config import ParallelConfig
from medha.cost.predictor import Predictor, Work
from medha.sim.pipeline import Segment

GROUPS = (1, 2, 4)
_STAGES = {"Llama-3 8B": 4, "Llama-3 70B": 8}

# ---------------------------------------------------------------------------------------------------------------------
# Decodes


@figure("kvp-decode", "Decodes over KVP groups (v5 figs. 7a and 19)")
def run_decode(options: Options) -> FigureResult:
    """TPOT of one request by length and groups, TP 8; ``quick`` changes nothing."""
    lengths = [M, 2 * M, 4 * M, 10 * M]
    tpot_s: dict[str, dict[int, list[float]]] = {}
    for name, spp in _STAGES.items():
        stages = {p: timing.stage_predictors(H100, MODELS[name], ParallelConfig(tp=8, spp=spp, kvp=p)) for p in GROUPS}
        tpot_s[name] = {n: [timing.decode_s(stages[p], n, kvp=p) for p in GROUPS] for n in lengths}
    at_4m, at_10m = (tpot_s["Llama-3 8B"][n] for n in (4 * M, 10 * M))
    panels = [
        Panel(
            f"{name}, TP 8, SPP {_STAGES[name]}",
            "context, tokens",
            "TPOT, ms",
            bars={f"KVP {p}": {token_label(n): 1e3 * rows[n][i] for n in lengths} for i, p in enumerate(GROUPS)},
            levels={"30 tokens a second": 1e3 / 30},
        )
        for name, rows in tpot_s.items()
    ]
    longer = [
        rows[4 * M][0] / rows[4 * M][i] < rows[10 * M][0] / rows[10 * M][i] for rows in tpot_s.values() for i in (1, 2)
    ]
    ms = [1e3 * seconds for seconds in at_10m]
    answers = {
        "kvp-4m": Answer(at_4m[0] / at_4m[2], one=1e3 * at_4m[0], four=1e3 * at_4m[2]),
        "kvp-10m": Answer(at_10m[0] / at_10m[2], ms=ms),
        "kvp-10m-2": Answer(100 * (1 - at_10m[1] / at_10m[0]), ms=ms),
        "kvp-10m-4-v5": Answer(100 * (1 - at_10m[2] / at_10m[0]), ms=ms),
        "kvp-30-tokens": Answer(1 / at_10m[1], ms=ms),
        "kvp-longer-gains-more": Answer(longer),
    }
    return FigureResult(panels, answers)


# ---------------------------------------------------------------------------------------------------------------------
# Growth


@figure("kvp-growth", "Groups and iteration time as a 2M prompt grows (v5 fig. 6)")
def run_growth(options: Options) -> FigureResult:
    """A 2M prompt that gains groups as it grows, through scheduler and pipeline; ``quick`` takes larger chunks."""
    chunk = 2048 if options.quick else 512
    tokens, kvp, spp = 2 * M, 4, 4
    one, several = (ParallelConfig(tp=8, spp=spp, kvp=groups) for groups in (1, kvp))
    segments: list[Segment] = []
    timing.simulate(LLAMA_8B, several, tokens, chunk=chunk, on_segment=segments.append)
    first = sorted(segment for segment in segments if segment.stage == 0)  # of each batch one in each of its groups
    batches = [list(same) for _, same in groupby(first, key=lambda segment: segment.batch_id)]
    widths = [len(batch) for batch in batches]
    seconds = [max(segment.end_s - segment.start_s for segment in batch) for batch in batches]
    plain = timing.chunk_seconds(timing.stage_predictors(H100, LLAMA_8B, one), tokens, chunk)[0]
    assert len(widths) == len(plain), "shards are whole chunks"
    thin = max(1, len(widths) // 256)
    before_growth = max(s for s, w in zip(seconds, widths, strict=True) if w == 1)
    level = max(seconds) / before_growth
    done = [(i + 1) * chunk / M for i in range(len(plain))][::thin]
    panels = [
        Panel(
            "2M prompt, Llama-3 8B, TP 8, SPP 4, KVP up to 4",
            "tokens done, M (2^20)",
            "servers of 8 H100s",
            lines(done, {"": [w * spp for w in widths][::thin]}, marker=""),
        ),
        Panel(
            f"chunks of {chunk}",
            "tokens done, M (2^20)",
            "time of a stage for a chunk, ms",
            lines(done, {"growing groups": seconds[::thin], "one group": plain.tolist()[::thin]}, scale=1e3, marker=""),
        ),
    ]
    answers = {
        "kvp-growth": Answer((float(min(widths) * spp), float(max(widths) * spp))),
        "kvp-level": Answer(level, chunk=chunk, without=plain[-1] / before_growth),
    }
    return FigureResult(panels, answers)


# ---------------------------------------------------------------------------------------------------------------------
# TTFT against TBT


@figure("kvp-trade-off", "TTFT against TBT by chunk and groups (v5 fig. 20)")
def run_trade_off(options: Options) -> FigureResult:
    """TTFT and P95 TBT of decodes beside it, 8B, TP 4, SPP 4, by chunk, groups and length; ``quick`` leaves 2M out."""
    lengths = [M, 4 * M] if options.quick else [M, 2 * M, 4 * M]
    chunks = (32, 64, 128, 256)
    stages = {p: timing.stage_predictors(H100, LLAMA_8B, ParallelConfig(tp=4, spp=4, kvp=p)) for p in GROUPS}
    points = {(n, p): np.array([_point(stages[p], n, c, p) for c in chunks]).T for n in lengths for p in GROUPS}
    ttft_s, tbt_s = np.array([[points[n, p] for p in GROUPS] for n in lengths]).transpose(2, 0, 1, 3)  # [n, p, chunk]
    lower = (ttft_s[:, 1:] < ttft_s[:, :-1]) & (tbt_s[:, 1:] < tbt_s[:, :-1])  # both, by doubling the groups
    small = ~lower[0, :, :2]
    larger = (ttft_s[..., 1:] < ttft_s[..., :-1]) & (tbt_s[..., :-1] < tbt_s[..., 1:])
    known = {"count": small.size, "chunks": chunks, "length": token_label(lengths[0])}
    named = ", ".join(token_label(n) for n in lengths)
    answers = {
        "kvp-crossover": Answer(small, **known),
        "tbt-4m-128": Answer(1e3 * float(points[4 * M, 1][1, chunks.index(128)])),
        "kvp-improves-both": Answer(100 * float(lower.mean()), count=lower.size, lengths=named),
        "chunk-trade-off": Answer(larger, count=larger.size),
    }
    panels = [
        Panel(
            f"{token_label(n)}, Llama-3 8B, TP 4, SPP 4",
            "TTFT, s",
            "P95 TBT, ms",
            paths({f"KVP {p}": (ttft_s[i, j].tolist(), (1e3 * tbt_s[i, j]).tolist()) for j, p in enumerate(GROUPS)}),
            notes=[(x, 1e3 * y, str(c)) for x, y, c in zip(*points[n, 1].tolist(), chunks, strict=True)],
        )
        for i, n in enumerate(lengths)
    ]
    return FigureResult(panels, answers)


def _point(stages: list[Predictor], tokens: int, chunk: int, kvp: int) -> tuple[float, float]:
    """Seconds to the first token, and P95 of the time between tokens of a decode beside it."""
    seconds = timing.chunk_seconds(stages, tokens, chunk, kvp=kvp, decodes=(Work(1, 1024, True),))
    return float(timing.pipeline_ends(seconds)[-1]), float(np.percentile(seconds.sum(axis=0), 95))
