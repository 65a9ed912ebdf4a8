"""Tetris and what it is compared with, as prefill instances alone: plans of one planner, by its options.

Source: Tetris ("Optimizing Long-context LLM Serving via Fine-grained Sequence Parallelism"), sections 5.1 and 7.1. Each
system plans a prompt when it arrives and keeps the plan, so a load is played with arithmetic alone
(:func:`tools.best_rates.played_ttft_s`; a test holds the simulator to it). There is no memory, no decode and no
transfer; :func:`served` has them. Times are Eq. 1 fitted to the paper's Table 1, which is within 7 % of its 34 cells.

==================  ============================================================================================
Tetris              chunks, and the improvement rate of the load, found on other requests
single chunk        likewise, with one chunk a prompt
LoongServe, disagg  one chunk, the SP size with the least TTFT
fixed SP8, SP16     groups of so many instances
==================  ============================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from examples.reproduce.baselines.context_parallel import ContextParallel, prefill_s
from examples.reproduce.timing import A100, LLAMA_8B
from medha.config import CDSP as CDSP_SCHEDULER, ParallelConfig, SchedulerConfig
from medha.cost.chunk_times import ChunkTimes, fit_chunk_times
from medha.cost.coefficients import Floats
from medha.cost.hardware import LinkRates
from medha.cost.improvement import LoadWindow, RateTable
from medha.cost.predictor import Predictor
from medha.sched.cdsp import Planner
from medha.sim.replica import Replica
from medha.workload.synth import generators, parse_lengths
from medha.workload.trace import Trace
from tools.best_rates import best_rate, played_ttft_s
from tools.transfer_buffers import Play, played

NUM_INSTANCES = 16
"""Two nodes of eight: half of the paper's four, as the ratio of prefill to decode is 1:1."""
TABLE_1 = {
    1: (0.28, 0.57, 1.29, 3.22, 9.05, 29.20),
    2: (0.16, 0.31, 0.69, 1.67, 4.61, 14.30, 50.07),
    4: (0.13, 0.20, 0.39, 0.92, 2.43, 7.32, 24.77),
    8: (0.21, 0.24, 0.31, 0.58, 1.37, 3.96, 12.81),
    16: (0.39, 0.43, 0.46, 0.53, 0.96, 2.31, 7.02),
}
"""Prefill seconds of Llama-3 8B on A100s, TP 1, by SP size, of 4K, 8K … 256K (2^10); one instance has no memory for the
last. Nodes of eight, 200 Gbit/s of InfiniBand a GPU."""
CELLS = {(size, 4096 << at): seconds for size, row in TABLE_1.items() for at, seconds in enumerate(row)}
BETWEEN_NODES = LinkRates(alpha_s=29e-6, bytes_per_s=0.72 * 25e9)
"""The testbed's network at the share of the published rate that the H100 spec has (36 of 50 GB/s), not fitted."""

GBIT, BUFFERS = 200, 16
"""Of the link of each GPU, and transfer buffers of a decode instance, one for each prefill instance."""


def table_times(sizes: Sequence[int] = tuple(TABLE_1)) -> ChunkTimes:
    """Eq. 1, fitted to the rows of Table 1 of some SP sizes."""
    return fit_chunk_times({size: [(0, 4096 << at, s) for at, s in enumerate(TABLE_1[size])] for size in sizes})


def ring_s(size: int, tokens: int) -> float:
    """Seconds of a prefill on so many instances by our computed ring, which the table is held to."""
    link = BETWEEN_NODES if size > 8 else None
    return prefill_s(ContextParallel(A100, LLAMA_8B, cp=size, link=link), tokens)


@dataclass(frozen=True, slots=True)
class Tetris:
    """A system of prefill instances.

    Attributes:
        label: its name in figures.
        sizes: SP sizes.
        max_chunks: of a prompt; None sets no bound.
        rate: the improvement rate; None is the best one of the load.
    """

    label: str
    sizes: tuple[int, ...] = tuple(TABLE_1)
    max_chunks: int | None = None
    rate: float | None = None

    def planner(self, rates: float | RateTable = 0.0) -> Planner:
        """What plans its prompts."""
        return Planner(table_times(self.sizes), NUM_INSTANCES, max_chunks=self.max_chunks, rates=rates)


CDSP = Tetris("Tetris")
SINGLE = Tetris("single chunk", max_chunks=1)
LOONGSERVE = Tetris("LoongServe, disaggregated", max_chunks=1, rate=0.0)
SP8, SP16 = Tetris("fixed SP8", (8,), 1, 0.0), Tetris("fixed SP16", (16,), 1, 0.0)
SYSTEMS = (CDSP, SINGLE, LOONGSERVE, SP8, SP16)


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests that arrive at one a second on average (Poisson); other loads scale their times, as the paper does.

    Attributes:
        lengths: of :func:`medha.workload.synth.parse_lengths`.
        count: requests.
        seed: of arrivals and lengths.
    """

    lengths: str
    count: int
    seed: int = 0

    def trace(self, qps: float) -> Trace:
        """The requests at a load."""
        for_arrivals, for_lengths = generators(self.seed)
        lengths = parse_lengths(self.lengths).sample(for_lengths, self.count)
        return Trace(np.cumsum(for_arrivals.exponential(1.0, self.count)) / qps, *lengths)


def rates_of(system: Tetris, stream: Stream, loads: list[float]) -> float | RateTable:
    """The improvement rates of a system, found on a stream at some loads."""
    if system.rate is not None:
        return system.rate
    best = [best_rate(system.planner(), stream.trace(qps)) for qps in loads]
    rates, means = zip(*best, strict=True)
    return RateTable("a100", "llama-3-8b", system.label, stream.lengths, tuple(loads), rates, means)


def ttft_s(system: Tetris, stream: Stream, qps: float, rates: float | RateTable) -> Floats:
    """TTFT of each request of a stream at a load."""
    return played_ttft_s(system.planner(), stream.trace(qps), LoadWindow(rates))


@dataclass(frozen=True, slots=True)
class Prefills(Replica):
    """Prefill instances with the memory of A100s; chunks take what :func:`table_times` says."""

    system: Tetris = CDSP
    rates: float | RateTable = 0.0

    def planner(self, predictor: Predictor) -> Planner:
        """Of the system; ``predictor`` is not asked."""
        return self.system.planner(self.rates)


def served(
    system: Tetris, stream: Stream, qps: float, rates: float | RateTable, *, gbit: float = GBIT, buffers: int = BUFFERS
) -> Play:
    """A stream at a load with memory, on two decode instances of TP 8, and transfers to them."""
    trace = stream.trace(qps)
    layout, config = ParallelConfig(kvp=NUM_INSTANCES), SchedulerConfig(CDSP_SCHEDULER)
    prefills = Prefills(A100, LLAMA_8B, layout, config, trace.longest, system=system, rates=rates)
    return played(prefills, trace, gbit=gbit, buffers=buffers)
