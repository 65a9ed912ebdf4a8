"""Two layouts of equal cost: SPP 8 against SPP 4 with KVP 2, TP 8, Llama-3 70B on 64 H100s under load.

v5 section 6.3, figures 11 and 12; v4 section 5.3, figures 17 and 18. The papers play an hour; here 15 minutes, as the
simulation of several groups is slow. Long requests are those of MEDHA-SWE with doubled prompts, up to 2M tokens.
"""

from __future__ import annotations

from examples.reproduce.load import MIX_2M, RATES_QPS, Bounded, Load, Served, quantile_s, serve
from examples.reproduce.plotting import Line, Panel, lines
from examples.reproduce.result import Answer, FigureResult, Options, figure
from examples.reproduce.systems import MEDHA, Engine
from examples.reproduce.timing import H100, LLAMA_70B
from medha.config import ParallelConfig
from medha.sim.replica import Replica


def _engine(label: str, parallel: ParallelConfig) -> Engine:
    return Engine(label, MEDHA.scheduler, Replica(H100, LLAMA_70B, parallel, max_model_len=1 << 21))


TWO_D = _engine("2D: SPP 8", ParallelConfig(tp=8, spp=8))
THREE_D = _engine("3D: SPP 4, KVP 2", ParallelConfig(tp=8, spp=4, kvp=2))
SYSTEMS = (TWO_D, THREE_D)
ALIKE = 1.5
"""TTFTs within such a factor are similar."""


@figure("2d-3d", "SPP 8 against SPP 4 with KVP 2 under load, 70B on 64 H100s")
def run(options: Options) -> FigureResult:
    """Both layouts at the papers' rates; ``quick`` plays 90 seconds and leaves out 1.25 QPS."""
    stop_s = 90.0 if options.quick else 900.0
    rates = [qps for qps in RATES_QPS if not (options.quick and qps == 1.25)]
    loads = [Load(MIX_2M, qps, stop_s, options.seed) for qps in rates]
    runs = {system.label: [serve(system, load) for load in loads] for system in SYSTEMS}
    two, three = runs.values()
    styles = ((0.5, "P50", "-"), (0.9, "P90", ":"))
    ttft_s, tpot_ms = list[Line](), list[Line]()
    for share, which, style in styles:
        labels = [f"{name}, {which}" for name in runs]
        known = [[_ttft_s(one, share) for one in row] for row in runs.values()]
        ttft_s += lines(rates, dict(zip(labels, known, strict=True)), linestyle=style)
        times = [[quantile_s(one.tpot_s, share) for one in row] for row in runs.values()]
        tpot_ms += lines(rates, dict(zip(labels, times, strict=True)), scale=1e3, linestyle=style)
    panels = [
        Panel("All requests, 5 % of them of up to 2M tokens", "load, QPS", "TTFT, s", ttft_s, log="y"),
        Panel("All finished requests", "load, QPS", "TPOT, ms", tpot_ms),
    ]
    pairs = list(zip(rates, two, three, strict=True))
    return FigureResult(panels, {"3d-tpot-2": _tpot(two[-1], three[-1]), "3d-ttft-alike": _ttft(pairs)})


def _ttft_s(served: Served, share: float) -> float | None:
    found = served.ttft_quantile(share)
    return None if found.is_least else found.seconds


def _tpot(two: Served, three: Served) -> Answer:
    p50, p90 = ([quantile_s(one.tpot_s, share) for one in (two, three)] for share in (0.5, 0.9))
    ms = [1e3 * one for one in (*p50, *p90)]
    return Answer(min(slow_s / fast_s for slow_s, fast_s in (p50, p90)), ms=ms)


def _ttft(pairs: list[tuple[float, Served, Served]]) -> Answer:
    cases, parts = [], []
    for qps, two, three in pairs:
        for share in (0.5, 0.9) if qps <= 0.75 else (0.5,):
            one, other = two.ttft_quantile(share), three.ttft_quantile(share)
            cases.append(_alike(one, other))
            parts.append(f"{qps:g} QPS P{100 * share:.0f} {one} and {other}")
    return Answer(cases, listed="; ".join(parts), alike=ALIKE)


def _alike(one: Bounded, other: Bounded) -> bool:
    if one.is_least or other.is_least:
        return one.is_least == other.is_least
    return 1 / ALIKE <= one.seconds / other.seconds <= ALIKE
