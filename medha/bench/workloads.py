"""What ``medha bench throughput`` and ``serve`` ask for: a trace from a file, or drawn, and its requests."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medha.bench.harness import Local, random_prompt
from medha.bench.load import fixed_output
from medha.engine.arrivals import Arrival
from medha.errors import ConfigError
from medha.params import PRIORITIES, SLO
from medha.workload.io import Reading, read_trace
from medha.workload.synth import arrival_times, generators, synthesize
from medha.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests by number, lengths and arrivals; their prompts are random.

    Attributes:
        dataset_path: trace file; None draws the lengths.
        lengths: what they are drawn from, as of :func:`medha.workload.synth.parse_lengths`; None is ``input_len`` and
            ``output_len`` for all.
        num_prompts: how many; of a trace the first ones, None for all of it.
        request_rate: requests a second on average, ``inf`` for all at once; None is as a trace has it, else ``inf``.
        burstiness: of gamma-distributed gaps, 1 being Poisson; a trace's own arrivals keep theirs.
        seed: of arrivals, lengths and prompts.
    """

    dataset_path: Path | None = None
    lengths: str | None = None
    input_len: int = 1024
    output_len: int = 128
    num_prompts: int | None = None
    request_rate: float | None = None
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(f"request_rate={self.request_rate:g}; accepted: requests a second above 0, or inf")
        if self.dataset_path is not None and self.lengths is not None:
            raise ConfigError(f"a trace and lengths={self.lengths!r} are both given; accepted: one of the two")

    def trace(self) -> Trace:
        """The requests, the first at 0.

        Raises:
            ConfigError: a value is not accepted, or the file cannot be read.
        """
        if self.dataset_path is not None:
            return self._timed(read_trace(self.dataset_path)).from_zero()
        lengths = self.lengths or f"fixed:{self.input_len},{self.output_len}"
        rate = math.inf if self.request_rate is None else self.request_rate
        number = 100 if self.num_prompts is None else self.num_prompts
        process, qps = ("gamma", rate) if math.isfinite(rate) else ("at-once", None)
        return synthesize(
            lengths, process, qps=qps, burstiness=self.burstiness, num_requests=number, seed=self.seed
        ).from_zero()

    def _timed(self, reading: Reading) -> Trace:
        """A trace that was read, at the rate that is asked for."""
        trace, rate = reading.trace, self.request_rate
        trace = trace if self.num_prompts is None else trace.head(self.num_prompts)
        if rate is None and reading.has_arrivals:
            return trace
        if rate is None or math.isinf(rate):
            return trace.with_arrivals(np.zeros(len(trace)))
        if reading.has_arrivals:
            return trace.scaled(rate)
        chance, _ = generators(self.seed)
        drawn = arrival_times("gamma", chance, qps=rate, burstiness=self.burstiness, num_requests=len(trace))
        return trace.with_arrivals(drawn)


def longest_of(trace: Trace) -> int:
    """Tokens of the longest request, prompt and output."""
    return int((trace.prompt_tokens + trace.output_tokens).max())


def arrivals_of(trace: Trace, local: Local, *, seed: int, slo: SLO | None = None) -> list[Arrival]:
    """The requests of a trace with random prompts, for :func:`medha.bench.load.serve_load`.

    Args:
        trace: what to ask for.
        local: of which vocabulary.
        seed: of the prompts.
        slo: objectives of the requests for which the trace has none.
    """
    chance = np.random.default_rng(seed)
    default = slo or SLO()
    arrivals = []
    for row in trace.rows():
        arrivals.append(
            Arrival(
                f"request-{row.request_id}",
                random_prompt(row.prompt_tokens, local.model.vocab_size, chance),
                fixed_output(row.output_tokens),
                SLO(row.ttft_slo_s or default.ttft_s, row.tpot_slo_s or default.tpot_s),
                float(row.arrival_s or 0.0),
                "normal" if row.priority is None else PRIORITIES[row.priority],
            )
        )
    return arrivals


def rate_text(rate: float) -> float | str:
    """A request rate as vLLM writes it: ``inf`` as a string."""
    return rate if math.isfinite(rate) else "inf"


def described(workload: Workload, trace: Trace) -> Mapping[str, object]:
    """The workload for a report."""
    return {
        "dataset_path": None if workload.dataset_path is None else str(workload.dataset_path),
        "lengths": workload.lengths,
        "num_prompts": len(trace),
        "input_len": {"min": int(trace.prompt_tokens.min()), "max": int(trace.prompt_tokens.max())},
        "output_len": {"min": int(trace.output_tokens.min()), "max": int(trace.output_tokens.max())},
        "burstiness": workload.burstiness,
        "seed": workload.seed,
    }
