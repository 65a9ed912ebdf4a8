"""Tetris against fixed groups, LoongServe's allocation and single chunks, and what its section 2 measures.

Of its evaluation (sections 7.2 and 7.3, Llama-3 8B) the prefill side: no memory, no decode, no transfer
(:mod:`examples.reproduce.baselines.tetris`); near the limit also with them. Its traces are unpublished: lengths have
their published ranges and means.

- A system's capacity is the load at which its median TTFT is 25 times that of fixed SP8 at a light load (0.1 requests
  a second); the paper normalises its figure 8 so.
- Ratios of TTFT are over Tetris, at shares of fixed SP8's capacity. They rise steeply near it. The paper compares at
  the highest load that its best baseline bears, which it does not number.
- Improvement rates are found on another seed, in steps of 0.5 requests a second, and Tetris reads the load as it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np

from examples.reproduce.baselines import tetris
from examples.reproduce.baselines.tetris import CDSP, LOONGSERVE, SINGLE, SP8, SP16, SYSTEMS, Stream, Tetris
from examples.reproduce.plotting import PAPER, Line, Panel, lines
from examples.reproduce.result import Answer, FigureResult, Options, figure
from examples.reproduce.timing import A100, LLAMA_8B, decode_s, stage_predictors
from medha.config import ParallelConfig

TRACES = ("tetris-short", "tetris-medium", "tetris-long")
LIGHT_QPS, LIMIT = 0.1, 25.0
SHARES = (0.8, 0.9, 0.95, 1.0)
"""Of fixed SP8's capacity, at which systems are compared."""
NEAR_LIMIT = 0.95
"""The share at which they are compared with memory, decodes and transfers too."""
CURVE = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.1, 1.2, 1.4)
FIXED_RATES = (0.1, 0.3, 0.5, 0.7)
"""Improvement rates of the paper's figures 11 and 12."""
NEAR = 1.1
"""A mean TTFT at most so many times the best is near it."""
STEP_QPS, MOST_QPS = 0.5, 12.0
INSTANT_GBIT = 1e9  # a link that takes no time
OTHER_SEED = 1000  # more, of the requests on which improvement rates are found
_HALVINGS, _PROFILED, _SERVED = 9, 500, 500
_CONTEXTS, _BATCHES = (4096, 32768, 262144), (1, 8, 32)
_BY_TP = {1: 5.73, 2: 3.87, 4: 1.93}
_BY_SP = {(8, 1): 1.83, (4, 2): 1.41, (2, 4): 1.15}


class Trial:
    """One trace, of one seed: every system, with its improvement rates."""

    def __init__(self, lengths: str, count: int, seed: int) -> None:
        self.stream = Stream(lengths, count, seed)
        self.rates: dict[str, Any] = {SP8.label: 0.0}
        self.quantiles = cache(self._quantiles)
        self.limit_s = LIMIT * self.quantiles(SP8, LIGHT_QPS)[0]
        self.sp8_qps = self.capacity_qps(SP8)
        most, profiled = 1.5 * self.sp8_qps, Stream(lengths, min(count, _PROFILED), seed + OTHER_SEED)
        loads = [STEP_QPS * step for step in range(1, int(most / STEP_QPS) + 2)]
        self.rates = {system.label: tetris.rates_of(system, profiled, loads) for system in SYSTEMS}

    def _quantiles(self, system: Tetris, qps: float) -> tuple[float, float]:
        """P50 and P99 of the TTFT, seconds."""
        p50, p99 = np.percentile(self._ttft_s(system, qps), (50, 99)).tolist()
        return p50, p99

    def _ttft_s(self, system: Tetris, qps: float, rates: Any = None) -> Any:
        return tetris.ttft_s(system, self.stream, qps, self.rates[system.label] if rates is None else rates)

    def capacity_qps(self, system: Tetris) -> float:
        """The load at which the median TTFT comes to the limit."""
        low, high = LIGHT_QPS, MOST_QPS
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.quantiles(system, middle)[0] <= self.limit_s else (low, middle)
        return low

    def figures(self) -> dict[str, float]:
        """Capacities over fixed SP8's, and ratios of TTFT over Tetris's."""
        found = {f"capacity, {one.label}": self.capacity_qps(one) / self.sp8_qps for one in SYSTEMS if one is not SP8}
        for share in SHARES:
            times = {system.label: self.quantiles(system, share * self.sp8_qps) for system in SYSTEMS}
            for other in (SP8, SINGLE):
                for name, of, over in zip(("P50", "P99"), times[other.label], times[CDSP.label], strict=True):
                    found[f"{name} at {share:g}, {other.label}"] = of / over
            mean_s, *fixed_s = (self._ttft_s(CDSP, share * self.sp8_qps, rate).mean() for rate in (None, *FIXED_RATES))
            found[f"mean at {share:g}, over the best fixed rate"] = float(mean_s / min(fixed_s))
        return found

    def served(self) -> dict[str, float]:
        """With memory, decodes and transfers: ratios near the limit; at Tetris's capacity its median over the limit;
        and what transfers, and half of their buffers, add to Tetris's mean time to the second token, percent."""
        found, qps = dict[str, float](), NEAR_LIMIT * self.sp8_qps
        alone = [self.quantiles(system, qps) for system in (SP8, CDSP)]
        rates, trace = self.rates[CDSP.label], self.stream.trace(qps)
        play = tetris.served(CDSP, self.stream, qps, rates)
        times = [np.array(one.waited_s(trace, 0)) for one in (tetris.served(SP8, self.stream, qps, 0.0), play)]
        for at, share in enumerate((50, 99)):
            found[f"P{share}"] = np.percentile(times[0], share) / np.percentile(times[1], share)
            found[f"P{share} alone"] = alone[0][at] / alone[1][at]
        most_qps = self.capacity_qps(CDSP)
        at_most = tetris.served(CDSP, self.stream, most_qps, rates).waited_s(self.stream.trace(most_qps), 0)
        found["median over the limit"] = float(np.median(at_most)) / self.limit_s
        half, instant = ({"buffers": tetris.BUFFERS // 2}, {"gbit": INSTANT_GBIT})
        mean_s, half_s, instant_s = (
            float(np.mean(one.waited_s(trace, 1)))
            for one in (play, *(tetris.served(CDSP, self.stream, qps, rates, **other) for other in (half, instant)))
        )
        return found | {"half": 100 * (half_s / mean_s - 1), "transfers": 100 * (mean_s / instant_s - 1)}


@figure("tetris", "Tetris: prefills on 16 A100s by load (its figures 8 to 13)")
def run(options: Options) -> FigureResult:
    """Three traces of 2,000 requests, and 500 with memory, decodes and transfers, three seeds each; ``quick`` takes one
    seed of 100."""
    count, seeds = (100, 1) if options.quick else (2000, 3)
    made = cache(Trial)
    trials = {lengths: [made(lengths, count, options.seed + n) for n in range(seeds)] for lengths in TRACES}
    panels = [_curves(lengths, row, at) for at in range(2) for lengths, row in trials.items()]
    found = {lengths: [trial.figures() for trial in row] for lengths, row in trials.items()}
    few = min(count, _SERVED)
    whole = {lengths: [made(lengths, few, options.seed + n).served() for n in range(seeds)] for lengths in TRACES}
    return FigureResult(panels, {**_loads(found, whole), **_fixed_rates(found)})


def _curves(lengths: str, trials: Sequence[Trial], at: int) -> Panel:
    """The P50 or, with ``at`` 1, the P99 of each system by load, geometric means over seeds."""
    limit_s, qps = (float(np.mean([getattr(one, name) for one in trials])) for name in ("limit_s", "sp8_qps"))

    def mean_s(system: Tetris, share: float) -> float:
        return float(np.exp(np.mean([np.log(one.quantiles(system, share * one.sp8_qps)[at]) for one in trials])))

    rows = {system.label: [mean_s(system, share) for share in CURVE] for system in SYSTEMS}
    return Panel(
        f"{lengths.removeprefix('tetris-')} trace",
        f"load, share of fixed SP8's capacity ({qps:.2f} QPS)",
        ("median TTFT, s", "P99 TTFT, s")[at],
        lines(CURVE, {name: [value if value < limit_s * 4 else None for value in row] for name, row in rows.items()}),
        levels={} if at else {"25 times the light load": limit_s},
        log="y",
    )


def medians(found: dict[str, list[dict[str, float]]], name: str) -> list[float]:
    """By trace the median over seeds."""
    return [float(np.median([one[name] for one in seeds])) for seeds in found.values()]


def _says(found: dict[str, list[dict[str, float]]], name: str) -> str:
    """By trace the median over seeds, and the least and the most."""
    every = [sorted(one[name] for one in seeds) for seeds in found.values()]
    return ", ".join(f"{np.median(row):.2f} ({row[0]:.2f} to {row[-1]:.2f})" for row in every)


def _span(values: Sequence[float]) -> tuple[float, float]:
    return min(values), max(values)


def _loads(found: dict[str, list[dict[str, float]]], whole: dict[str, list[dict[str, float]]]) -> dict[str, Answer]:
    gains = medians(found, "capacity, Tetris")
    over = [
        mine / other
        for label in (SP16.label, LOONGSERVE.label)
        for mine, other in zip(gains, medians(found, f"capacity, {label}"), strict=True)
    ]
    one_chunk, sixteen = (medians(found, f"capacity, {system.label}") for system in (LOONGSERVE, SP16))
    order = [1.0 > b > c for b, c in zip(one_chunk, sixteen, strict=True)]
    low, high = _span([100 * (gain - 1) for gain in gains])
    capacities = {one.label: _says(found, f"capacity, {one.label}") for one in (CDSP, LOONGSERVE, SP16)}
    answers = {
        "tetris-capacity": Answer(
            (low, high), capacity=capacities[CDSP.label], median=_says(whole, "median over the limit")
        ),
        "tetris-handshake": Answer(float(np.mean(medians(whole, "transfers"))), listed=_says(whole, "transfers")),
        "tetris-buffers": Answer(max(medians(whole, "half")), listed=_says(whole, "half")),
        "tetris-throughput": Answer(_span([*gains, *over])),
        "tetris-order": Answer(order, loongserve=capacities[LOONGSERVE.label], sp16=capacities[SP16.label]),
    }
    for quantile, (name, label) in product(("P50", "P99"), (("sp8", SP8.label), ("single", SINGLE.label))):
        ratios = {share: f"{quantile} at {share:g}, {label}" for share in SHARES}
        listed = "; ".join(f"at {share:g} {_says(found, ratio)}" for share, ratio in ratios.items())
        if name == "sp8":
            listed += f"; at {NEAR_LIMIT:g}, 500 requests, with memory, decodes and transfers {_says(whole, quantile)}"
            listed += f", without {_says(whole, f'{quantile} alone')}"
        span = _span(medians(found, ratios[0.9]))
        answers[f"tetris-{quantile.lower()}-{name}"] = Answer(span, listed=listed)
    return answers


def _fixed_rates(found: dict[str, list[dict[str, float]]]) -> dict[str, Answer]:
    names = [f"mean at {share:g}, over the best fixed rate" for share in SHARES]
    values = [one for name in names for one in medians(found, name)]
    near, rates = [value <= NEAR for value in values], ", ".join(map(str, FIXED_RATES))
    return {"tetris-rates": Answer(near, rates=rates, least=min(values), most=max(values), near=NEAR)}


def _table_1() -> dict[str, Answer]:
    """Our computed ring against the paper's measured table."""
    values = [tetris.ring_s(*cell) / seconds for cell, seconds in tetris.CELLS.items()]
    long = {size: tetris.ring_s(size, 1 << 18) for size in (2, 16)}
    near = [abs(ratio - 1) <= 0.15 for ratio in values]
    spread = {"least": min(values), "most": max(values), "median": np.median(values)}
    return {
        "tetris-table-1": Answer(near, count=len(values), **spread),
        "tetris-gap": Answer(long[2] - long[16], on_2=long[2], on_16=long[16]),
    }


@figure("tetris-alone", "Tetris: one request alone on A100s (its Table 1 and figure 2)")
def run_alone(options: Options) -> FigureResult:
    """Prefills by a computed ring, decode latency by TP size, and by SP and TP; ``quick`` changes nothing."""

    def seconds(tp: int, sp: int = 1) -> list[float]:
        stages = stage_predictors(A100, LLAMA_8B, ParallelConfig(tp=tp, kvp=sp))
        return [decode_s(stages, kv, kvp=sp, batch=batch) for kv in _CONTEXTS for batch in _BATCHES]

    best = np.array(seconds(8))
    by_tp = {f"TP {tp}": np.array(seconds(tp)) / best for tp in _BY_TP}
    by_sp = {f"SP {sp}, TP {tp}": np.array(seconds(tp, sp)) / best for sp, tp in _BY_SP}
    most = {name: float(row.max()) for name, row in (by_tp | by_sp).items()}
    tps, sps = (
        "; ".join(f"{name} {row.min():.2f} to {row.max():.2f}" for name, row in rows.items()) for rows in (by_tp, by_sp)
    )
    cases = {"contexts": ", ".join(f"{kv >> 10}K" for kv in _CONTEXTS), "batches": ", ".join(map(str, _BATCHES))}
    answers = {f"tetris-decode-tp{tp}": Answer(most[f"TP {tp}"], listed=tps, **cases) for tp in _BY_TP}
    answers |= {f"tetris-decode-sp{sp}": Answer(most[f"SP {sp}, TP {tp}"], listed=sps, **cases) for sp, tp in _BY_SP}
    said = [*_BY_TP.values(), *_BY_SP.values()]
    paper = Line(
        "the paper's most", list(range(len(said))), said, {"color": PAPER, "marker": "x", "linestyle": "", "zorder": 3}
    )
    bars = {"most of nine cases": most}
    panel = Panel("Decodes of Llama-3 8B, A100s", "", "times those of TP 8", [paper], bars=bars)
    return FigureResult([panel], _table_1() | answers)
