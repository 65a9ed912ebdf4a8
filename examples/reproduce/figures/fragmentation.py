"""What prefills and decodes ask for over time, memory against compute (v4 section 2.3 and figure 4), and how many
requests are active (v4 section 5.4 and figure 21).

Demand is that of Medha's play at 0.75 QPS with 5 % long requests (:mod:`examples.reproduce.load`): a prompt's FLOPs are
spread over its wait for the first token, those of its answer over the decoding; keys and values count from the
chunk as far as they are read, half of them on average, and whole from then on.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from examples.reproduce.load import MIX, Served, run_of
from examples.reproduce.plotting import Panel, lines
from examples.reproduce.result import Answer, FigureResult, Options, figure
from examples.reproduce.systems import LOONGSERVE, MEDHA
from examples.reproduce.timing import LLAMA_8B, kv_bytes, linear_parameters, prefill_flops
from medha.workload.metrics import Floats

_QPS, _BIN_S = 0.75, 10.0
SAWTOOTH = 2.0
"""So many times the swing of another is a sawtooth beside something stable."""
APART = 10.0
"""Ratios that differ so many times diverge significantly; the paper's axis is logarithmic and it gives no number."""


def demands(served: Served, end_s: float) -> dict[str, Floats]:
    """FLOPs a second and bytes of KV, of prefills and of decodes, at the middle of each bin."""
    begun, times = ~np.isnan(served.first_token_s), np.arange(_BIN_S / 2, end_s, _BIN_S)
    prompts, outputs = served.trace.prompt_tokens[begun], served.trace.output_tokens[begun]
    first_s, finish_s = served.first_token_s[begun], served.finish_s[begun]
    spans = (served.trace.arrival_s[begun], first_s, np.where(np.isnan(finish_s), end_s, finish_s))
    prompt_flops, prompt_bytes = (
        np.array([of(LLAMA_8B, tokens) for tokens in prompts.tolist()]) for of in (prefill_flops, kv_bytes)
    )
    attention = 4 * LLAMA_8B.head_dim * LLAMA_8B.num_heads * LLAMA_8B.num_layers  # FLOPs of a token and a key
    seconds = [np.maximum(b - a, 1e-3) for a, b in pairwise(spans)]
    token_flops = 2 * linear_parameters(LLAMA_8B) + attention * prompts
    rates = (prompt_flops / seconds[0], token_flops * outputs / seconds[1])
    held = (prompt_bytes / 2, prompt_bytes)
    found: dict[str, Floats] = {}
    for kind, (start_s, stop_s), flops, num_bytes in zip(
        ("prefill", "decode"), pairwise(spans), rates, held, strict=True
    ):
        at = (start_s[None] <= times[:, None]) & (times[:, None] < stop_s[None])
        found |= {f"{kind} FLOPs/s": at @ flops, f"{kind} bytes": at @ num_bytes}
    return found


def active(served: Served, end_s: float) -> Floats:
    """Requests that have arrived and not finished, at the middle of each bin."""
    times = np.arange(_BIN_S / 2, end_s, _BIN_S)
    finish_s = np.sort(np.where(np.isnan(served.finish_s), np.inf, served.finish_s))
    begun, ended = (np.searchsorted(of, times, side="right") for of in (served.trace.arrival_s, finish_s))
    return (begun - ended).astype(np.float64)


def swing(counts: Floats) -> float:
    """P95 less P5 of what lies above or below the linear trend."""
    at = np.arange(len(counts))
    low, high = np.percentile(counts - np.polyval(np.polyfit(at, counts, 1), at), (5, 95))
    return float(high - low)


@figure("fragmentation", "Memory and compute that prefills and decodes ask for over time (v4 fig. 4)")
def run(options: Options) -> FigureResult:
    """Demand over an hour; ``quick`` plays five minutes."""
    found = demands(run_of(MEDHA, MIX, _QPS, options), options.window_s)
    minutes = ((np.arange(len(found["decode bytes"])) + 0.5) * _BIN_S / 60).tolist()
    both = (found["decode bytes"] > 0) & (found["prefill bytes"] > 0)
    compute, memory = (
        found[f"prefill {unit}"][both] / np.maximum(found[f"decode {unit}"][both], 1) for unit in ("FLOPs/s", "bytes")
    )
    asked = {name: [value or None for value in values.tolist()] for name, values in found.items()}
    units = (("compute", "TFLOP/s asked for", "FLOPs/s", 1e-12), ("memory", "KV, GB", "bytes", 1e-9))
    panels = [
        Panel(
            f"{what}, 5 % long, {_QPS:g} QPS",
            "time, min",
            label,
            lines(minutes, {kind: asked[f"{kind} {unit}"] for kind in ("prefill", "decode")}, scale=scale, marker=""),
            log="y",
        )
        for what, label, unit, scale in units
    ]
    counts = {one.label: active(run_of(one, MIX, _QPS, options), options.window_s) for one in (MEDHA, LOONGSERVE)}
    rows = lines(minutes, {name: row.tolist() for name, row in counts.items()}, marker="")
    panels.append(Panel(f"active requests, 5 % long, {_QPS:g} QPS", "time, min", "requests", rows))
    ours, theirs = (swing(row) for row in counts.values())
    apart, ends = compute / memory, [row[-1] for row in counts.values()]
    p5, p95 = np.percentile(found["prefill FLOPs/s"][both], (5, 95)).tolist()
    swings = {"ours": ours, "theirs": theirs, "ends": ends}
    medians = {"compute": np.median(compute), "memory": np.median(memory)}
    answers = {
        "fragmentation-diverges": Answer(apart >= APART, count=len(apart), bin_s=_BIN_S, apart=APART, **medians),
        "fragmentation-shoots-up": Answer(p95 / p5, p95=1e-12 * p95, p5=1e-12 * p5, apart=APART),
        "active-sawtooth": Answer(theirs / max(ours, 1.0), qps=_QPS, sawtooth=SAWTOOTH, **swings),
    }
    return FigureResult(panels, answers)
