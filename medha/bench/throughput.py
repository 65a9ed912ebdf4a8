"""``medha bench throughput``: a number of requests, all there from the start, to the end of the last one.

The fields are those of ``vllm bench throughput``; those of the run with the median time are reported, and the times of
all runs beside them. ``host`` is what a step takes beside the runner's busy seconds, over the steps of all runs, from
one step's tokens to those of the next: completing the step, outputs, the next decision and whoever drives the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain

from medha.bench.cli import SUBJECT, Report, Shows, counted, verb, warmups
from medha.bench.harness import Local, Subject, on_ranks
from medha.bench.load import NotedStep, Workload, arrivals_of, serve_load, steps_noted
from medha.bench.timing import in_turn, timing_of
from medha.cli.options import MEMORY, PARALLEL, SCHEDULING, SERVING
from medha.errors import ConfigError
from medha.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class ThroughputOptions:
    """What is measured: passes over all requests of a workload, whose arrivals do not count."""

    subject: Subject = field(default_factory=Subject)
    workload: Workload = field(default_factory=Workload)
    warmup: int = warmups(1, "Passes over all requests")
    runs: int = counted(3, "Passes over all requests")


def throughput(options: ThroughputOptions) -> Report | None:
    """A number of requests, all there from the start: requests and tokens a second; on one rank or several."""
    longest = options.workload.trace.longest
    return on_ranks(options.subject, lambda local: _measure(local, options), longest=longest)


def _measure(local: Local, options: ThroughputOptions) -> Report:
    trace = options.workload.trace
    arrivals = arrivals_of(trace, local.model.vocab_size, seed=options.workload.seed)
    arrivals = [replace(one, arrival_s=0.0) for one in arrivals]
    passes: list[list[NotedStep]] = []

    def run() -> float:
        with steps_noted(local.engine) as steps:
            served = serve_load(local.engine, arrivals)
        passes.append(steps)
        failed = next((one for one in served.outcomes if not one.is_completed), None)
        if failed is not None:
            raise ConfigError(f"{failed.request_id} of {failed.input_len} tokens has failed: {failed.error}")
        return served.duration_s

    seconds = in_turn({"pass": run}, warmup=options.warmup, runs=options.runs)["pass"]
    found = throughput_fields(trace, seconds) | {"host": host_fields([*chain.from_iterable(passes[options.warmup :])])}
    return local.report("throughput", asdict(options)) | found


def throughput_fields(trace: Trace, seconds: Sequence[float]) -> Report:
    """The fields of ``vllm bench throughput``, and medha's, of passes over the requests of a trace."""
    timing, number = timing_of(seconds), len(trace)
    inputs, outputs = int(trace.prompt_tokens.sum()), int(trace.output_tokens.sum())
    rates = {"requests": number, "tokens": inputs + outputs, "output_tokens": outputs}
    return {
        "elapsed_time": timing["median_s"],
        "num_requests": number,
        "total_num_tokens": inputs + outputs,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        **{f"{name}_per_second": amount / timing["median_s"] for name, amount in rates.items()},
        "elapsed_times": list(seconds),
        "timing": timing,
    }


def host_fields(steps: Sequence[NotedStep]) -> Report:
    """Host seconds of steps: over all, and over those of the largest batch."""
    largest = max(step.num_rows for step in steps)
    return {
        "timing": timing_of([step.host_s for step in steps]),
        "largest_batch": largest,
        "at_largest": timing_of([step.host_s for step in steps if step.num_rows == largest]),
    }


_SHOWN = """
    num_requests total_input_tokens total_output_tokens timing requests_per_second tokens_per_second
    output_tokens_per_second host
"""
_SHOWS: Shows = dict.fromkeys(_SHOWN.split(), ())
_NOTES = (
    "all requests at once",
    "host: a step less the runner's compute: scheduler, engine, and noting the tokens here; of all passes that count",
)
verb("throughput", ThroughputOptions, throughput, _SHOWS, _NOTES, SUBJECT, SCHEDULING, SERVING, MEMORY, PARALLEL)
