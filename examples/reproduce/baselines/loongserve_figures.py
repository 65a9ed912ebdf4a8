"""Whether our model of LoongServe stands above the systems that its own paper compares it with.

Source: LoongServe (Wu et al., arXiv:2404.09526), its evaluation on one node and its ablation: Llama-2 7B, 8 A800 of
80 GB, four instances of TP 2 against chunked prefill on TP 8 (SplitFuse, 2,048 tokens in the mixed load) and against
static sequence parallelism on the same instances. Two measures are its own: the mean latency per token, served while at
most 25 times that at light load; and, from the scripts of the ablation, the share of requests whose first token comes
within 25 times its prefill, or 15 s, and whose others come every 50 ms, served while at least 90 %. The paper has
LoongServe first, at up to 3.85 times the rate of chunked prefill.

Departures: the spec is that of the A100, whose links within a node are 1.5 times as fast as the A800's. The datasets
are not at hand: prompts are drawn log-uniformly from the ranges of the three that the mixed load takes equally
(ShareGPT 16 to 2.3K tokens, as the scripts leave out shorter ones; L-Eval 2.7K to 210.5K; LV-Eval 15.1K to 497.3K),
outputs from 4 to 1,000, 300 and 100. Chunked prefill is our own scheduler on our own cost model, without what the
measured systems lose beside it. Disaggregation is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from examples.reproduce.baselines.loongserve import LoongServe, play
from examples.reproduce.baselines.loongserve_cost import EspCosts
from examples.reproduce.served import Floats, Served
from examples.reproduce.timing import a100
from medha.config import ModelConfig, ParallelConfig, SchedulerConfig
from medha.sim.known_models import KNOWN_MODELS
from medha.sim.replica import Replica
from medha.sim.simulator import Simulation
from medha.workload.trace import Trace

SYSTEMS = ("LoongServe", "static sequence parallelism", "chunked prefill")
LIMIT = 25.0
"""Times the latency at light load, or the prefill."""
ATTAINED = 0.9
"""Share of requests."""
LIGHT_QPS = 0.02
RATES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)
LLAMA_2_7B: ModelConfig = replace(
    KNOWN_MODELS["llama-3-8b"],
    num_kv_heads=32,
    intermediate_size=11008,
    vocab_size=32000,
    max_position_embeddings=1 << 20,
)
_PROMPTS = ((16, 2300), (2700, 210_500), (15_100, 497_300))
_OUTPUTS = ((4, 1000), (4, 300), (4, 100))
_INSTANCES = 4
_SOON_S, _STEADY_S = 15.0, 0.05
_CHUNK = 2048
_LONGEST = 500_000


@dataclass(frozen=True, slots=True)
class Point:
    """One system at one rate.

    Attributes:
        token_s: mean seconds from arrival to end over tokens of prompt and output.
        attained: share of requests within the limits of the ablation.
    """

    token_s: float
    attained: float


@dataclass(frozen=True, slots=True)
class OwnFigures:
    """Measures by system and rate.

    Attributes:
        rates: requests a second, ascending.
        points: by system, at each rate.
        light: LoongServe at light load.
    """

    rates: tuple[float, ...]
    points: dict[str, list[Point]]
    light: Point

    def token_qps(self, name: str) -> float:
        """The first rate at which a system's latency per token exceeds the limit, on a line between rates; or inf."""
        return _passes(self.rates, [point.token_s for point in self.points[name]], LIMIT * self.light.token_s)

    def attained_qps(self, name: str) -> float:
        """The first rate at which more than 10 % of a system's requests miss a limit, likewise."""
        return _passes(self.rates, [1 - point.attained for point in self.points[name]], 1 - ATTAINED)


def own_figures(*, rates: Sequence[float] = RATES, num_requests: int = 400, seed: int = 0) -> OwnFigures:
    """Play the mixed load at rising rates on LoongServe, static sequence parallelism and chunked prefill.

    Args:
        rates: requests a second, ascending.
        num_requests: at each rate; arrivals at one rate are those at another, scaled.
        seed: of lengths and arrivals.
    """
    costs = EspCosts(a100(), LLAMA_2_7B, num_instances=_INSTANCES, tp=2, utilization=0.9)
    light = mixed_load(LIGHT_QPS, num_requests, seed)
    alone_s = np.array([costs.prefill_s([prompt], _INSTANCES) for prompt in light.prompt_tokens.tolist()])
    traces = [mixed_load(qps, num_requests, seed) for qps in rates]
    points = {name: [_point(_play(name, trace), alone_s) for trace in traces] for name in SYSTEMS}
    return OwnFigures(tuple(rates), points, _point(_play(SYSTEMS[0], light), alone_s))


def mixed_load(qps: float, num_requests: int, seed: int = 0) -> Trace:
    """Requests of three datasets in equal shares, arriving as a Poisson process."""
    rng = np.random.default_rng(seed)
    dataset = rng.integers(0, len(_PROMPTS), num_requests)
    prompts, outputs = (
        np.exp(rng.uniform(*np.log(np.array(ranges)[dataset].T))).astype(np.int64) for ranges in (_PROMPTS, _OUTPUTS)
    )
    return Trace(np.cumsum(rng.exponential(1.0, num_requests)) / qps, prompts, outputs)


def _play(name: str, trace: Trace) -> Served:
    if name == "chunked prefill":
        config = SchedulerConfig(scheduler="sarathi", chunk_size=_CHUNK, max_batch_tokens=_CHUNK)
        replica = Replica(a100(), LLAMA_2_7B, ParallelConfig(tp=8), config, max_model_len=_LONGEST)
        return Served.of(Simulation(*replica.build(), trace).run())
    return play(LoongServe(a100(), LLAMA_2_7B, num_instances=_INSTANCES, tp=2, is_elastic=name == "LoongServe"), trace)


def _point(served: Served, alone_s: Floats) -> Point:
    trace, tpot_s = served.trace, served.tpot_s
    per_token_s = (served.finish_s - trace.arrival_s) / (trace.prompt_tokens + trace.output_tokens)
    is_soon = served.ttft_s <= np.maximum(LIMIT * alone_s, _SOON_S)
    is_steady = np.isnan(tpot_s) | (tpot_s <= _STEADY_S)
    return Point(
        token_s=float(per_token_s.mean()),
        attained=float((is_soon & is_steady).mean()),
    )


def _passes(rates: Sequence[float], values: Sequence[float], limit: float) -> float:
    for (slow, low), (fast, high) in pairwise(zip((0.0, *rates), (0.0, *values), strict=True)):
        if high > limit:
            return slow + (fast - slow) * (limit - low) / (high - low)
    return float("inf")
