"""``medha bench serve``: requests arrive at a live engine, and a stream of probes measures how they stall others.

The engine runs in this process; there is no server and no network, so TTFT is what scheduling and computing make of it.
The fields of the report are those of ``vllm bench serve``. A probe is a small request that has nothing to do with the
load: how long it takes says what the load does to somebody else. Probes arrive as a Poisson process of their own until
the load is done, and count in no other figure. Objectives (``--goodput``, or a trace's own) are told to the scheduler,
except for the end-to-end latency, of which no policy knows.

``--preset convoy`` serves the same arrivals under six schedulers, one after the other, over the same weights and KV
pool: short requests arrive as a Poisson stream while a few long prompts, queued at its start, are read. A convoy is
what short requests then form behind a long one (arXiv:2409.17264, v5, figure 1b and section 4). How long the stream
lasts follows from the capacity, which is measured first: the seconds of the whole mix when it is there at once under
LARS with space sharing, over the load. What that run taught the predictor of step times, all schedulers begin with.
The preset is this benchmark with other arrivals, so it stands here, and the file is longer than others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from medha.batch import Batch
from medha.bench.harness import Local, Report, Shown, Subject, on_ranks, plain, random_prompt, terms
from medha.bench.load import Workload, arrivals_of, described, fixed_output, longest_of, rate_text, serve_load
from medha.cost.correction import KINDS, RunningError
from medha.engine.arrivals import Arrival
from medha.engine.engine import Engine
from medha.errors import ConfigError
from medha.params import SLO
from medha.sched.decision import Prediction
from medha.workload.metrics import (
    METRICS,
    Goodput,
    Outcome,
    Served,
    detailed,
    latency_fields,
    meets,
    percentile_name,
    seconds_of,
    serving_figures,
)
from medha.workload.trace import Trace

_WARM_SHORT = 8


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What is measured.

    Attributes:
        max_concurrency: requests of the load at once; who comes while there are so many arrives when one ends.
        goodput: objectives of requests that bring none.
        metrics, percentiles: what is reported of which figures, see :mod:`medha.workload.metrics`.
        probe_request_rate: probes a second on average; 0 is none.
        probe_input_len, probe_output_len: tokens of a probe.
        num_warmups: requests of the load that are served before it, all at once, and do not count.
        save_detailed: also report the arrays of one value a request.
        label: copied into the report.
    """

    subject: Subject = field(default_factory=Subject)
    workload: Workload = field(default_factory=Workload)
    max_concurrency: int | None = None
    goodput: Goodput = field(default_factory=Goodput)
    metrics: tuple[str, ...] = METRICS
    percentiles: tuple[float, ...] = (99.0,)
    probe_request_rate: float = 0.0
    probe_input_len: int = 16
    probe_output_len: int = 1
    num_warmups: int = 1
    save_detailed: bool = False
    label: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.probe_request_rate < math.inf:
            raise ConfigError(
                f"probe_request_rate={self.probe_request_rate:g}; accepted: probes a second, a finite number, not "
                "negative"
            )


def serve(options: ServeOptions, trace: Trace, *, on_run: Callable[[], None] = lambda: None) -> Report | None:
    """Run the load; every rank calls it.

    Args:
        options: what to run.
        trace: of the workload.
        on_run: called as each request of the load ends.

    Returns:
        The report on rank 0.

    Raises:
        ConfigError: the options are wrong, or the model has no room for a request.
    """
    longest = max(longest_of(trace), options.probe_input_len + options.probe_output_len)
    return on_ranks(options.subject, lambda local: _serve(local, options, trace, on_run), longest=longest)


def _serve(local: Local, options: ServeOptions, trace: Trace, on_run: Callable[[], None]) -> Report:
    vocab_size = local.model.vocab_size
    arrivals = arrivals_of(trace, vocab_size, seed=options.workload.seed, slo=options.goodput.slo)
    warm_up(local.engine, arrivals[: options.num_warmups])
    with errors_counted(local.engine) as errors:
        served = serve_load(
            local.engine,
            arrivals,
            probes=probe_stream(options, vocab_size),
            max_concurrency=options.max_concurrency,
            on_end=on_run,
        )
    given = asdict(options) | {"workload": described(options.workload, trace)}
    rate = trace.qps if options.workload.request_rate is None else options.workload.request_rate
    return (
        local.report("serve", given)
        | {
            "backend": "medha",
            "label": options.label,
            "tokenizer_id": options.subject.model if local.role.tokenizer is not None else None,
            "num_prompts": len(trace),
            "request_rate": rate_text(math.inf if rate is None else rate),
            "burstiness": options.workload.burstiness,
            "max_concurrency": options.max_concurrency,
            "runs": 1,
            "warmup": min(options.num_warmups, len(trace)),
        }
        | serving_figures(served, goodput=options.goodput, metrics=options.metrics, percentiles=options.percentiles)
        | {"prediction_error": errors_by_kind(errors)}
        | (detailed(served.outcomes) if options.save_detailed else {})
    )


def warm_up(engine: Engine, arrivals: Sequence[Arrival]) -> Served:
    """Serve requests all at once, under other names."""
    return serve_load(engine, [replace(one, request_id=f"warm-{one.request_id}", arrival_s=0.0) for one in arrivals])


def probe_stream(options: ServeOptions, vocab_size: int) -> Iterator[Arrival]:
    """Probes without end, or none."""
    if not options.probe_request_rate:
        return
    chance = np.random.default_rng((options.workload.seed, 1))
    at_s, number = 0.0, 0
    while True:
        at_s += float(chance.exponential(1 / options.probe_request_rate))
        prompt = random_prompt(options.probe_input_len, vocab_size, chance)
        yield Arrival(f"probe-{number}", prompt, fixed_output(options.probe_output_len), arrival_s=at_s)
        number += 1


@contextmanager
def errors_counted(engine: Engine) -> Iterator[RunningError]:
    """Count how far predicted step times are off while this is open."""
    errors = RunningError()

    def note(batch: Batch, prediction: Prediction | None, busy_s: float) -> None:
        if prediction is not None and prediction.seconds > 0 and busy_s > 0:
            errors.add(prediction.kind, prediction.seconds, busy_s)

    engine.on_step = note
    try:
        yield errors
    finally:
        engine.on_step = None


def errors_by_kind(errors: RunningError) -> dict[str, dict[str, float]]:
    """Count, mean absolute and mean signed error of predicted step times, as shares: of all steps, and by kind."""
    return {"all": asdict(errors.figures()), **{kind: asdict(errors.figures(kind)) for kind in KINDS}}


CONVOY_MODEL: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""A model so small that two CPU threads read 32K tokens in some ten seconds; fields of its ``config.json``."""


@dataclass(frozen=True, slots=True)
class ConvoyOptions:
    """The load of the convoy.

    Attributes:
        num_short, num_long: requests.
        short_lens: fewest and most prompt tokens of a short one; drawn evenly.
        long_len: prompt tokens of a long one.
        output_len: tokens of each request.
        load: the part of the capacity that the stream takes.
        short_ttft_s: TTFT objective of short requests; the scheduler derives that of the long ones.
        t_target_s: seconds of a batch.
    """

    subject: Subject = field(default_factory=lambda: Subject(hf_overrides=CONVOY_MODEL))
    num_short: int = 200
    num_long: int = 4
    short_lens: tuple[int, int] = (50, 500)
    long_len: int = 32_768
    output_len: int = 8
    load: float = 0.75
    short_ttft_s: float = 1.0
    t_target_s: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.load < math.inf:
            raise ConfigError(f"load={self.load:g}; accepted: a part of the capacity, above 0")
        if self.long_len <= self.short_lens[1]:
            raise ConfigError(f"long_len={self.long_len}; accepted: above {self.short_lens[1]}, the longest short one")

    @property
    def systems(self) -> dict[str, dict[str, Any]]:
        """Fields of the scheduler of each system. The baselines stand alone: no sharing and no guard."""
        longest = self.long_len
        alone, ours = {"rho_max": 0.0, "late_share": 0.0}, {"policy": "lars"}
        return {
            "whole prefill": {
                "scheduler": "orca", "policy": "fcfs", "chunk_size": longest, "max_batch_tokens": longest
            },
            "Sarathi-512": {"scheduler": "sarathi", "policy": "fcfs", "chunk_size": 512, "max_batch_tokens": 512},
            "EDF": {"policy": "edf", **alone},
            "LRS": {"policy": "lrs", **alone},
            "LARS": {**ours, "rho_max": 0.0},
            "LARS+sharing": ours,
        }  # fmt: skip

    def mix(self, vocab_size: int) -> list[Arrival]:
        """The requests, all at once: long ones first."""
        dice, chance = random.Random(self.seed), np.random.default_rng(self.seed)
        params, goal = fixed_output(self.output_len), SLO(ttft_s=self.short_ttft_s)
        longs = [
            Arrival(f"long-{i}", random_prompt(self.long_len, vocab_size, chance), params) for i in range(self.num_long)
        ]
        shorts = [
            Arrival(f"short-{i}", random_prompt(dice.randint(*self.short_lens), vocab_size, chance), params, goal)
            for i in range(self.num_short)
        ]
        return longs + shorts

    def stream(self, mix: Sequence[Arrival], span_s: float) -> list[Arrival]:
        """The same, the short ones as a Poisson process within so many seconds, given their number."""
        dice = random.Random(self.seed + 1)
        times = sorted(dice.uniform(0.0, span_s) for _ in range(self.num_short))
        return [replace(one, arrival_s=at) for one, at in zip(mix, [0.0] * self.num_long + times, strict=True)]


def convoy(options: ConvoyOptions, *, on_run: Callable[[], None] = lambda: None) -> Report | None:
    """Calibrate, then serve the stream under every system; every rank calls it.

    Args:
        options: the load.
        on_run: called as each request ends, those of the calibration included.

    Returns:
        The report on rank 0.

    Raises:
        ConfigError: the options are wrong, or the model has no room for the requests.
    """
    longest, short = (length + options.output_len for length in (options.long_len, options.short_lens[1]))
    given = options.subject.engine
    block_size = given.get("block_size") or 256
    blocks = sum(
        n * -(-length // block_size) for n, length in ((options.num_long, longest), (options.num_short, short))
    )
    return on_ranks(
        options.subject,
        lambda local: _convoy(local, options, on_run),
        longest=longest,
        num_kv_blocks=given.get("num_kv_blocks") or blocks,
        max_num_seqs=options.num_long + options.num_short,
        long_threshold=min(8192, options.long_len),
        t_target_s=options.t_target_s,
        depth=given.get("spp") or 1,  # one batch more would hide the host, and have new requests wait for it
    )


def _convoy(local: Local, options: ConvoyOptions, on_run: Callable[[], None]) -> Report:
    mix = options.mix(local.model.vocab_size)
    warm = [
        replace(mix[0], prompt=mix[0].prompt[: options.long_len // 4]),  # type: ignore[index]
        *mix[options.num_long :][:_WARM_SHORT],
    ]
    warm_up(local.engine, warm)
    capacity_s = serve_load(local.engine, mix, on_end=on_run).duration_s
    stream = options.stream(mix, capacity_s / options.load)
    engines = {name: local.engine_with(**scheduler) for name, scheduler in options.systems.items()}
    systems = []
    for name, engine in engines.items():
        local.take_over(engine)
        warm_up(engine, warm)
        with errors_counted(engine) as errors:
            served = serve_load(engine, stream, on_end=on_run)
        systems.append(
            {"system": name, "options": options.systems[name]}
            | convoy_figures(served)
            | {"prediction_error": errors_by_kind(errors)}
        )
    found: Report = {"capacity_s": capacity_s, "span_s": capacity_s / options.load, "systems": systems}
    found["failed"] = sum(one["failed"] for one in systems)
    return local.report("serve", {"preset": "convoy"} | plain(asdict(options))) | found


def convoy_figures(served: Served) -> Report:
    """What one system made of the stream: figures of the short requests and of the long ones; times in seconds."""
    figures = {
        kind: _kind_figures([one for one in served.outcomes if one.request_id.startswith(kind)])
        for kind in ("short", "long")
    }
    requests = [
        {"request_id": one.request_id, "arrival_s": one.start_s, "input_len": one.input_len, "ttft_s": one.ttft_s}
        for one in served.outcomes
    ]
    failed = sum(not one.is_completed for one in served.outcomes)
    return {"duration": served.duration_s, "failed": failed, **figures, "requests": requests}


def _kind_figures(outcomes: Sequence[Outcome]) -> Report:
    completed = [one for one in outcomes if one.is_completed]
    aimed = [one for one in outcomes if one.slo.ttft_s is not None]
    return {
        "num_requests": len(outcomes),
        "completed": len(completed),
        **latency_fields("ttft", seconds_of("ttft", completed), (90.0, 99.0)),
        **latency_fields("tpot", seconds_of("tpot", completed), (99.0,)),
        "slo_attainment": sum(meets(one, Goodput()) for one in aimed) / len(aimed) if aimed else None,
    }


def plot_convoy(report: Mapping[str, Any], path: Path) -> None:
    """Draw a report of the preset into a file, whose ending says in which format: a convoy is a slope.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib; pip install 'medha[plot]'") from error
    figure = Figure(figsize=(12, 5), layout="constrained")
    short, long = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    for index, system in enumerate(report["systems"]):
        for axis, kind in ((short, "short"), (long, "long")):
            some = [one for one in system["requests"] if one["request_id"].startswith(kind) and one["ttft_s"]]
            across = [one["arrival_s"] if kind == "short" else index for one in some]
            axis.scatter(across, [one["ttft_s"] for one in some], s=12, color=f"C{index}", label=system["system"])
    short.axhline(report["options"]["short_ttft_s"], color="gray", linestyle=":")
    short.set(xlabel="arrival, s", ylabel="TTFT, s", yscale="log", title="short requests; dotted: their objective")
    names = [system["system"] for system in report["systems"]]
    long.set(title="long requests", xticks=range(len(names)))
    long.set_xticklabels(names, rotation=45, ha="right")
    short.legend(loc="lower left", fontsize="small")
    figure.savefig(path, dpi=150)


def shown(report: Report) -> Shown:
    """What is printed of the report."""
    options = report["options"]
    names = ("mean", "median", "std", *(percentile_name(percent) for percent in options["percentiles"]))
    figures = ["completed", "failed", "request_rate", "burstiness", "max_concurrent_requests"]
    figures += ["request_throughput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s"]
    figures += ["request_goodput", "slo_attainment"]
    figures += [name for name in report if name.startswith("probe_")] if options["probe_request_rate"] else []
    entries = {"duration_s": report["duration"]} | {name: report[name] for name in figures}
    entries["prediction_error"] = report["prediction_error"]
    entries["latencies"] = [
        {"": metric.upper(), **{f"{name}_ms": report[f"{name}_{metric}_ms"] for name in names}}
        for metric in options["metrics"]
    ]
    entries["ttft_by_length"] = report["ttft_by_length"]
    warm = f"one run after {report['warmup']} warm-up requests; error: of predicted step times, as a share"
    return entries, [warm, terms("TTFT", "TPOT", "ITL", "E2EL", "goodput", "SLO attainment")]


def convoy_shown(report: Report) -> Shown:
    """What is printed of the report."""
    rows = [
        {
            "scheduler": one["system"],
            **{f"short {name}": one["short"][name] for name in ("median_ttft_ms", "p90_ttft_ms", "p99_ttft_ms")},
            "short in SLO_share": one["short"]["slo_attainment"],
            **{f"long {name}": one["long"][name] for name in ("mean_ttft_ms", "p99_ttft_ms")},
            "short p99_tpot_ms": one["short"]["p99_tpot_ms"],
            "span_s": one["duration"],
        }
        for one in report["systems"]
    ]
    options = report["options"]
    low, high = options["short_lens"]
    return {"schedulers": rows}, [
        f"{options['num_long']} prompts of {options['long_len']:,} tokens queued at 0 s, {options['num_short']} of "
        f"{low} to {high} (Poisson) within {report['span_s']:.1f} s; {options['output_len']} output tokens each; "
        f"seed {options['seed']}",
        f"capacity: the whole mix at once takes {report['capacity_s']:.1f} s under LARS+sharing; load "
        f"{options['load']:g}; batches of {options['t_target_s']:g} s; SLO: a TTFT of {options['short_ttft_s']:g} s",
        terms("TTFT", "TPOT"),
    ]
