"""Puts a load on a live engine: the requests of a workload, their arrivals in time.

A workload is a trace from a file, or drawn; its prompts are random. The time of every token is kept: when it is on the
host, so that what a device had to do for it is over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from medha.batch import Batch
from medha.bench.cli import COUNT, of_load
from medha.bench.harness import random_prompt
from medha.config.fields import number
from medha.engine.admission import Prompt
from medha.engine.arrivals import Arrival, drive
from medha.engine.engine import Engine
from medha.errors import ConfigError
from medha.outputs import RequestOutput
from medha.params import PRIORITIES, SLO, SamplingParams
from medha.sched.decision import Prediction
from medha.workload.io import read_trace
from medha.workload.metrics import Outcome, Served
from medha.workload.synth import retimed, synthesize
from medha.workload.trace import HASHED_TOKENS, Row, Trace, prefix_ids

NO_SLO = SLO()
_RATE = number("requests a second above 0, or inf", lambda value: value > 0)


@dataclass(frozen=True)
class Workload:
    """Requests by number, lengths and arrivals; their prompts are random. ``seed`` is of all three."""

    num_prompts: int | None = of_load(None, "Requests; of a trace the first.", COUNT, shown="100, or all of a trace")
    input_len: int = of_load(1024, "Prompt tokens of each.", COUNT)
    output_len: int = of_load(128, "Output tokens of each.", COUNT)
    lengths: str | None = of_load(None, "Draw both from a distribution, as medha trace synth.")
    dataset_path: Path | None = of_load(None, "Trace file of requests.", kind=Path, flags=("--dataset-path", "--trace"))
    request_rate: float | None = None
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dataset_path is not None and self.lengths is not None:
            raise ConfigError(f"a trace and lengths={self.lengths!r} are both given; accepted: one of the two")
        own = self.input_len, self.output_len
        if (self.dataset_path or self.lengths) and own != (Workload.input_len, Workload.output_len):
            raise ConfigError(f"input_len, output_len={own} beside a trace or lengths; accepted: one of the three")

    @cached_property
    def trace(self) -> Trace:
        """The requests, the first at 0; raises ConfigError."""
        rate = self.request_rate
        is_paced = rate is not None and math.isfinite(rate)
        arrive: dict[str, Any] = {"qps": rate if is_paced else None, "burstiness": self.burstiness, "seed": self.seed}
        process = "poisson" if is_paced else "at-once"
        if self.dataset_path is None:
            spread = self.lengths or f"fixed:{self.input_len},{self.output_len}"
            return synthesize(spread, process, num_requests=self.num_prompts or 100, **arrive).from_zero()
        found = read_trace(self.dataset_path)
        if rate is not None and not is_paced:
            found = found._replace(has_arrivals=False)
        process = "poisson" if found.has_arrivals else process
        return retimed(found, process, num_requests=self.num_prompts, **arrive).from_zero()


@dataclass(frozen=True)
class ArrivingWorkload(Workload):
    """The same, whose arrivals users choose: a rate in place of a trace's own gaps scales them."""

    request_rate: float | None = of_load(None, "Requests a second, or inf.", _RATE, shown="a trace's own, or inf")
    burstiness: float = of_load(1.0, "Of the gaps: 1 is Poisson, less is burstier.")


def arrivals_of(trace: Trace, vocab_size: int, *, seed: int, slo: SLO = NO_SLO) -> list[Arrival]:
    """The requests of a trace with random prompts, for :func:`serve_load`: the same where they have the same ids of
    blocks; ``slo`` is for those without their own."""
    chance = np.random.default_rng(seed)
    return [
        Arrival(
            f"request-{row.request_id}",
            _prompt(row, vocab_size, chance, seed),
            fixed_output(row.output_tokens),
            SLO(row.ttft_slo_s or slo.ttft_s, row.tpot_slo_s or slo.tpot_s),
            float(row.arrival_s or 0.0),
            "normal" if row.priority is None else PRIORITIES[row.priority],
            tenant=row.tenant or "",
        )
        for row in trace.rows()
    ]


def _prompt(row: Row, vocab_size: int, chance: np.random.Generator, seed: int) -> Prompt:
    ids = np.frombuffer(prefix_ids(row, HASHED_TOKENS), np.uint32).reshape(-1, 4).tolist()
    parts = [random_prompt(HASHED_TOKENS, vocab_size, np.random.default_rng((seed, *named))) for named in ids]
    rest = random_prompt(row.prompt_tokens - len(ids) * HASHED_TOKENS, vocab_size, chance)
    return cast(Prompt, np.concatenate([*parts, rest]))


def fixed_output(num_tokens: int) -> SamplingParams:
    """Greedy, exactly so many tokens, each reported as it comes."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, output_kind="delta")


def serve_load(engine: Engine, arrivals: Sequence[Arrival], *, max_concurrency: int | None = None) -> Served:
    """Serve arrivals to the end of the last one, from an empty prefix cache on.

    Args:
        engine: idle. The parameters of all requests are of :func:`fixed_output`, and their prompts are token ids.
        arrivals: in order of ``arrival_s``.
        max_concurrency: as ``most`` of :func:`~medha.engine.arrivals.drive`.

    Raises:
        EngineDeadError: a step failed.
    """
    engine.reset_prefix_cache()  # of a run before, with the same prompts
    start_s = engine.now()
    times: dict[str, list[float]] = {one.request_id: [] for one in arrivals}  # of the tokens
    last: dict[str, RequestOutput] = {}
    for output in drive(engine, arrivals, start_s=start_s, most=max_concurrency):
        times[output.request_id] += [engine.now()] * len(output.outputs[0].token_ids)
        last[output.request_id] = output
    outcomes = tuple(_outcome(one, last[one.request_id], times[one.request_id], start_s) for one in arrivals)
    return Served(outcomes, max((one.end_s for one in outcomes), default=0.0))


class NotedStep(NamedTuple):
    """A step that has ended."""

    num_rows: int  # of its batch
    prediction: Prediction | None  # made before it was sent; None where the scheduler makes none
    busy_s: float  # computed
    host_s: float  # since the step before had ended, beside what it computed


@contextmanager
def steps_noted(engine: Engine) -> Iterator[list[NotedStep]]:
    """The steps of an engine that end while this is open."""
    steps, last_s = list[NotedStep](), engine.now()

    def note(batch: Batch, prediction: Prediction | None, busy_s: float) -> None:
        nonlocal last_s
        before_s, last_s = last_s, engine.now()
        steps.append(NotedStep(len(batch.rows), prediction, busy_s, last_s - before_s - busy_s))

    engine.on_step = note
    try:
        yield steps
    finally:
        engine.on_step = None


def _outcome(arrival: Arrival, output: RequestOutput, times: list[float], start_s: float) -> Outcome:
    """Of a request that has ended, whose tokens came at these times."""
    metrics = output.metrics
    assert metrics.finished is not None, "it has ended"
    if times and metrics.first_token is not None:  # both ends by the engine's own clock reading
        times[0], times[-1] = metrics.first_token, metrics.finished if len(times) > 1 else metrics.first_token
    error = "" if output.error is None else f"{type(output.error).__name__}: {output.error}"
    reason = output.outputs[0].finish_reason
    if not error and reason not in ("length", "stop"):
        error = f"ended by {reason}"
    return Outcome(
        request_id=output.request_id,
        input_len=len(arrival.prompt),
        output_len=len(times),
        start_s=metrics.arrival - start_s,
        queue_s=metrics.queue_time,
        ttft_s=metrics.ttft,
        itl_s=tuple(later - sooner for sooner, later in pairwise(times)),
        e2el_s=metrics.finished - metrics.arrival,
        num_chunks=metrics.num_chunks,
        error=error,
        slo=SLO(metrics.ttft_slo_s, metrics.tpot_slo_s),
    )
