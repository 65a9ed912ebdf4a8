"""Puts a load on a live engine: the requests of a workload, their arrivals in time, and a stream of probes.

A workload is a trace from a file, or drawn; its prompts are random. :func:`~medha.engine.arrivals.drive` serves a list
of arrivals; here probes keep coming until the load is done, a number of requests at once may be the limit, and the time
of every token is kept: when it is on the host, so that what a device had to do for it is over.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np

from medha.bench.cli import COUNT, of_load
from medha.bench.harness import random_prompt
from medha.config.fields import number
from medha.engine.arrivals import Arrival
from medha.engine.engine import Engine
from medha.errors import ConfigError, EngineDeadError, MedhaError
from medha.outputs import RequestOutput
from medha.params import PRIORITIES, SLO, SamplingParams
from medha.workload.io import Reading, read_trace
from medha.workload.metrics import Outcome, Served
from medha.workload.synth import arrival_times, generators, synthesize
from medha.workload.trace import Trace

NO_SLO = SLO()
_MAX_SLEEP_S = 0.1
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

    @cached_property
    def trace(self) -> Trace:
        """The requests, the first at 0.

        Raises:
            ConfigError: a value is not accepted, or the file cannot be read.
        """
        if self.dataset_path is not None:
            return self._timed(read_trace(self.dataset_path)).from_zero()
        spread = self.lengths or f"fixed:{self.input_len},{self.output_len}"
        rate = math.inf if self.request_rate is None else self.request_rate
        process, qps = ("gamma", rate) if math.isfinite(rate) else ("at-once", None)
        number = self.num_prompts or 100
        return synthesize(
            spread, process, qps=qps, burstiness=self.burstiness, num_requests=number, seed=self.seed
        ).from_zero()

    def _timed(self, reading: Reading) -> Trace:
        """A trace that was read, at the rate that is asked for."""
        trace, rate = reading.trace.first(self.num_prompts), self.request_rate
        if rate is None and reading.has_arrivals:
            return trace
        if rate is None or math.isinf(rate):
            return trace.with_arrivals(np.zeros(len(trace)))
        if reading.has_arrivals:
            return trace.scaled(rate)
        chance, _ = generators(self.seed)
        drawn = arrival_times("gamma", chance, qps=rate, burstiness=self.burstiness, num_requests=len(trace))
        return trace.with_arrivals(drawn)


@dataclass(frozen=True)
class ArrivingWorkload(Workload):
    """The same, whose arrivals users choose: a rate in place of a trace's own gaps scales them."""

    request_rate: float | None = of_load(None, "Requests a second, or inf.", _RATE, shown="a trace's own, or inf")
    burstiness: float = of_load(1.0, "Of the gaps: 1 is Poisson, less is burstier.")


def longest_of(trace: Trace) -> int:
    """Tokens of the longest request, prompt and output."""
    return int((trace.prompt_tokens + trace.output_tokens).max())


def arrivals_of(trace: Trace, vocab_size: int, *, seed: int, slo: SLO = NO_SLO) -> list[Arrival]:
    """The requests of a trace with random prompts, for :func:`serve_load`; ``slo`` is for those without their own."""
    chance = np.random.default_rng(seed)
    return [
        Arrival(
            f"request-{row.request_id}",
            random_prompt(row.prompt_tokens, vocab_size, chance),
            fixed_output(row.output_tokens),
            SLO(row.ttft_slo_s or slo.ttft_s, row.tpot_slo_s or slo.tpot_s),
            float(row.arrival_s or 0.0),
            "normal" if row.priority is None else PRIORITIES[row.priority],
        )
        for row in trace.rows()
    ]


def described(workload: Workload) -> Mapping[str, object]:
    """The workload for a report."""
    trace = workload.trace
    return {
        "dataset_path": None if workload.dataset_path is None else str(workload.dataset_path),
        "lengths": workload.lengths,
        "num_prompts": len(trace),
        "input_len": {"min": int(trace.prompt_tokens.min()), "max": int(trace.prompt_tokens.max())},
        "output_len": {"min": int(trace.output_tokens.min()), "max": int(trace.output_tokens.max())},
        "burstiness": workload.burstiness,
        "seed": workload.seed,
    }


def fixed_output(num_tokens: int) -> SamplingParams:
    """Greedy, exactly so many tokens, each reported as it comes."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, output_kind="delta")


def serve_load(
    engine: Engine,
    arrivals: Sequence[Arrival],
    *,
    probes: Iterable[Arrival] = (),
    max_concurrency: int | None = None,
    on_end: Callable[[], None] = lambda: None,
) -> Served:
    """Serve arrivals to the end of the last one.

    Args:
        engine: idle. The parameters of all requests are of :func:`fixed_output`, and their prompts are token ids.
        arrivals: the load, in order of ``arrival_s``.
        probes: may go on for ever; those after the end of the load are not sent. Ids differ from the load's.
        max_concurrency: requests of the load at once; who comes while there are so many arrives when one of them ends.
        on_end: called as each request of the load ends.

    Raises:
        EngineDeadError: a step failed.
    """
    assert not engine.has_unfinished, "the load has the engine to itself"
    return _Load(engine, arrivals, iter(probes), max_concurrency or len(arrivals), on_end).serve()


class _Load:
    """The state of :func:`serve_load`."""

    def __init__(
        self,
        engine: Engine,
        arrivals: Sequence[Arrival],
        probes: Iterator[Arrival],
        max_concurrency: int,
        on_end: Callable[[], None],
    ) -> None:
        self._upcoming = deque(arrivals)
        self._num_running = 0
        self._done: dict[str, Outcome] = {}
        self._engine = engine
        self._ids = dict.fromkeys(arrival.request_id for arrival in arrivals)
        self._probes, self._next_probe = probes, next(probes, None)
        self._max_concurrency, self._is_held_back = max_concurrency, False
        self._on_end = on_end
        self._sent: dict[str, tuple[int, list[float]]] = {}  # prompt tokens, and the times of the tokens
        self._start_s = engine.now()

    def serve(self) -> Served:
        engine = self._engine
        while self._upcoming or self._num_running or engine.has_unfinished:
            self._send_due()
            if engine.has_unfinished:
                outputs, now_s = engine.step(), engine.now()
                for output in outputs:
                    self._take(output, now_s)
            elif self._upcoming:
                self._sleep()
        outcomes = tuple(self._done.pop(name) for name in self._ids)
        return Served(outcomes, tuple(self._done.values()), max((one.end_s for one in outcomes), default=0.0))

    def _send_due(self) -> None:
        """Queue what has arrived."""
        now_s = self._engine.now() - self._start_s
        while self._upcoming and self._upcoming[0].arrival_s <= now_s:
            if self._num_running >= self._max_concurrency:
                self._is_held_back = True
                break
            self._num_running += 1
            arrival = self._upcoming.popleft()
            self._send(replace(arrival, arrival_s=now_s) if self._is_held_back else arrival)
            self._is_held_back = False
        while self._next_probe is not None and (self._upcoming or self._num_running):
            if self._next_probe.arrival_s > now_s:
                break
            self._send(self._next_probe)
            self._next_probe = next(self._probes, None)

    def _send(self, arrival: Arrival) -> None:
        name, at_s = arrival.request_id, self._start_s + arrival.arrival_s
        self._sent[name] = len(arrival.prompt), []
        try:
            self._engine.add_request(
                name, arrival.prompt, arrival.params, slo=arrival.slo, priority=arrival.priority, arrival_s=at_s
            )
        except EngineDeadError:
            raise
        except MedhaError as error:
            now_s = self._engine.now()
            self._take(arrival.unserved(self._start_s, error=error, now_s=now_s), now_s)

    def _take(self, output: RequestOutput, now_s: float) -> None:
        """Note the tokens of an output, and the end of its request."""
        name = output.request_id
        self._sent[name][1].extend([now_s] * len(output.outputs[0].token_ids))
        if output.finished:
            self._done[name] = self._outcome(output)
            if name in self._ids:
                self._num_running -= 1
                self._on_end()

    def _outcome(self, output: RequestOutput) -> Outcome:
        metrics, name = output.metrics, output.request_id
        assert metrics.finished is not None, "it has ended"
        input_len, times = self._sent.pop(name)
        if times and metrics.first_token is not None:  # both ends by the engine's own clock reading
            times[0], times[-1] = metrics.first_token, metrics.finished if len(times) > 1 else metrics.first_token
        error = "" if output.error is None else f"{type(output.error).__name__}: {output.error}"
        reason = output.outputs[0].finish_reason
        if not error and reason not in ("length", "stop"):
            error = f"ended by {reason}"
        return Outcome(
            request_id=name,
            input_len=input_len,
            output_len=len(times),
            start_s=metrics.arrival - self._start_s,
            queue_s=metrics.queue_time,
            ttft_s=metrics.ttft,
            itl_s=tuple(later - sooner for sooner, later in pairwise(times)),
            e2el_s=metrics.finished - metrics.arrival,
            num_chunks=metrics.num_chunks,
            error=error,
            slo=SLO(metrics.ttft_slo_s, metrics.tpot_slo_s),
        )

    def _sleep(self) -> None:
        """Until the next arrival, or a while."""
        due = [arrival.arrival_s for arrival in (self._upcoming[0], self._next_probe) if arrival is not None]
        time.sleep(min(_MAX_SLEEP_S, max(0.0, min(due) - (self._engine.now() - self._start_s))))
