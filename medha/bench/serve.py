"""``medha bench serve``: Requests arrive at a live engine: TTFT, TPOT, ITL, E2EL, goodput.

The engine runs in this process: no server, no network. The fields of the report are those of ``vllm bench serve
--save-detailed``, but for texts. Objectives (``--goodput``, or a trace's own) are told to the scheduler, but for the
end-to-end latency.

``--preset convoy`` serves the same arrivals under six schedulers, over the same weights and KV pool: short requests
arrive as a Poisson stream while a few long prompts, queued at its start, are read (arXiv:2409.17264, v5, figure 1b and
section 4). Short ones have a TTFT objective; the long ones' is derived by the scheduler. Policies are as published,
without a guard; the last scheduler is the default. All have the same time a batch. The stream lasts as long as the
whole mix takes when it is there at once, over the load. What that run taught the predictor of step times, all
schedulers begin with.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any

import numpy as np
import typer

from medha.bench.cli import ANY_COUNT, COUNT, SUBJECT, Report, Shows, asked, of_load, verb
from medha.bench.harness import Local, Subject, on_ranks, random_prompt, terms
from medha.bench.load import ArrivingWorkload, NotedStep, arrivals_of, fixed_output, serve_load, steps_noted
from medha.cli.options import MEMORY, PARALLEL, SCHEDULING, SERVING, Group
from medha.config import CDSP, SchedulerConfig
from medha.config.fields import choice, finite
from medha.engine.arrivals import Arrival
from medha.engine.engine import Engine
from medha.errors import ConfigError
from medha.params import SLO
from medha.workload.metrics import METRICS, Goodput, Served, detailed, parse_metrics, parse_percentiles, serving_figures

CONVOY_MODEL: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""A model so small that two CPU threads read 32K tokens in some ten seconds; fields of its ``config.json``."""

_NUM_LONG, _NUM_SHORT = 4, 200
_SHORT_LENS = (50, 500)  # prompt tokens, drawn evenly
_OUTPUT_LEN = 8
_SHORT_TTFT_S = 1.0
_BATCH_S = 0.25
_WARM_SHORT = 8
_NOT_ITS = (
    "goodput", "max_concurrency", "num_warmups", "metrics", "percentiles", "input_len", "output_len", "lengths",
    "dataset_path", "request_rate", "burstiness",
)  # fmt: skip  # options that the preset has no use for
_NEAR = 0.15  # an error of predicted step times up to which a prediction was right

_OBJECTIVES = "Objectives in ms, as ttft:100 tpot:50 e2el:900; the first two are the scheduler's."
_FURTHER = typer.Argument(metavar="KEY:MS", help="Further values of --goodput.")
_MORE: Group = {"more_goodput": (Annotated[list[str] | None, _FURTHER], None)}


@dataclass(frozen=True)
class ServeOptions:
    """What is measured; ``long_len`` and ``load`` are of the preset."""

    subject: Subject = field(default_factory=Subject)
    preset: str | None = of_load(
        None, "convoy: short requests beside long prompts, under six schedulers.", choice("convoy")
    )
    long_len: int = of_load(32_768, "Of the preset: tokens of each of four long prompts.", COUNT)
    load: float = of_load(
        0.75, "Of the preset: part of the measured capacity that the stream takes.", finite(0, is_open=True)
    )
    workload: ArrivingWorkload = field(default_factory=ArrivingWorkload)
    max_concurrency: int | None = of_load(None, "Requests at once; others arrive as one ends.", COUNT)
    num_warmups: int = of_load(1, "Requests served before, which do not count.", ANY_COUNT)
    goodput: tuple[str, ...] = asked((), _OBJECTIVES, kind=list[str])
    more_goodput: tuple[str, ...] = ()
    metrics: tuple[str, ...] = asked(
        METRICS, "Which of these to report.", name="percentile_metrics", kind=str, shown=",".join(METRICS),
        read=parse_metrics,
    )  # fmt: skip
    percentiles: tuple[float, ...] = asked(
        (99.0,), "Percentiles of them, comma separated.", name="metric_percentiles", kind=str, shown="99",
        read=parse_percentiles,
    )  # fmt: skip

    def __post_init__(self) -> None:
        assert self.goals is not None  # it is read, and may be wrong
        own = self.long_len, self.load
        if self.preset is None:
            if own != (ServeOptions.long_len, ServeOptions.load):
                raise ConfigError(f"long_len, load={own} without a preset; accepted: with preset=convoy")
            return
        if self.long_len <= _SHORT_LENS[1]:
            raise ConfigError(f"long_len={self.long_len}; accepted: above {_SHORT_LENS[1]}, the longest short one")
        given, bare = asdict(self), asdict(ServeOptions())
        given, bare = given | given["workload"] | given["subject"]["engine"], bare | bare["workload"]
        wrong = [name for name in _NOT_ITS if given[name] not in (bare[name], [])]
        if wrong := wrong + ["scheduler"] * (given.get("scheduler") == CDSP):
            what = ", ".join(f"{name}={given[name]!r}" for name in wrong)
            raise ConfigError(
                f"{what} with preset={self.preset}; accepted: without, its workload and figures are given"
            )

    @cached_property
    def goals(self) -> Goodput:
        """Objectives of requests that bring none; raises ConfigError."""
        return Goodput.parse([*self.goodput, *self.more_goodput])

    @property
    def num_short(self) -> int:
        """Of the preset: short requests."""
        return self.workload.num_prompts or _NUM_SHORT


def serve(options: ServeOptions) -> Report | None:
    """Requests arrive at a live engine: TTFT, TPOT, ITL, E2EL, goodput; on one rank or several.

    TTFT: arrival to first token, queueing included. TPOT: (last - first token) / (tokens - 1). ITL: gap between
    successive tokens. E2EL: arrival to last token. Goodput: completed requests a second that met every objective;
    SLO attainment: their share of the requests with one. Exit code 3: some requests failed.
    """
    if options.preset is not None:
        return convoy(options)
    return on_ranks(options.subject, lambda local: _serve(local, options), longest=options.workload.trace.longest)


def _serve(local: Local, options: ServeOptions) -> Report:
    vocab_size, workload, goals = local.model.vocab_size, options.workload, options.goals
    arrivals = arrivals_of(workload.trace, vocab_size, seed=workload.seed, slo=goals.slo)
    warm_up(local.engine, arrivals[: options.num_warmups])
    with steps_noted(local.engine) as steps:
        served = serve_load(local.engine, arrivals, max_concurrency=options.max_concurrency)
    rate = workload.trace.qps if workload.request_rate is None else workload.request_rate
    found = local.report("serve", asdict(options) | {"goodput": asdict(goals)}) | {
        "backend": "medha",
        "tokenizer_id": options.subject.model if local.role.tokenizer is not None else None,
        "num_prompts": len(arrivals),
        "request_rate": "inf" if rate is None or math.isinf(rate) else rate,
        "burstiness": workload.burstiness,
        "max_concurrency": options.max_concurrency,
        "runs": 1,
        "warmup": min(options.num_warmups, len(arrivals)),
        "prediction_error": prediction_error(steps),
    }
    figures = serving_figures(served, goodput=goals, metrics=options.metrics, percentiles=options.percentiles)
    why = Counter(one.error for one in served.outcomes if not one.is_completed).most_common(1)
    found["notes"] = [f"{number} of {figures['failed']} that failed: {error}" for error, number in why]
    names = ("mean", "median", "std", *(f"p{percent:g}" for percent in options.percentiles))
    found["by_metric"] = [
        {"": metric.upper(), **{f"{name}_ms": figures[f"{name}_{metric}_ms"] for name in names}}
        for metric in options.metrics
    ]
    return found | figures | detailed(served.outcomes)


def warm_up(engine: Engine, arrivals: Sequence[Arrival]) -> Served:
    """Serve requests all at once, under other names."""
    return serve_load(engine, [replace(one, request_id=f"warm-{one.request_id}", arrival_s=0.0) for one in arrivals])


def prediction_error(steps: Sequence[NotedStep]) -> Report:
    """How far predicted step times are off: count, mean absolute and mean signed error as shares of the time taken, and
    the share of steps that took what was predicted within 15 %; None where there are none."""
    known = [(step.prediction.seconds, step.busy_s) for step in steps if step.prediction is not None]
    errors = [seconds / busy_s - 1.0 for seconds, busy_s in known if seconds > 0 and busy_s > 0]
    near = sum(abs(error) <= _NEAR for error in errors)
    sums = {"mean_abs_error": sum(map(abs, errors)), "mean_signed_error": sum(errors), "within_share": near}
    return {"count": len(errors), **{name: value / len(errors) if errors else None for name, value in sums.items()}}


def systems_of(longest: int) -> dict[str, dict[str, Any]]:
    """Fields of the scheduler of each system of the preset; of the last none: it is what is asked for."""
    return {
        "whole prefill": {"scheduler": "orca", "policy": "fcfs", "chunk_size": longest, "max_batch_tokens": longest},
        "Sarathi-512": {"scheduler": "sarathi", "policy": "fcfs", "chunk_size": 512, "max_batch_tokens": 512},
        "EDF": {"scheduler": "medha", "policy": "edf"},
        "SRPT": {"scheduler": "medha", "policy": "srpt", "rho_max": 0.0, "late_share": 0.0, "interactive_share": 0.0},
        "LARS": {"scheduler": "medha", "policy": "lars"},
        "default": {},
    }


def mix_of(options: ServeOptions, vocab_size: int) -> list[Arrival]:
    """The requests of the preset, all at once: long ones first."""
    chance = np.random.default_rng(options.workload.seed % 2**64)
    params, goal = fixed_output(_OUTPUT_LEN), SLO(ttft_s=_SHORT_TTFT_S)
    lens = chance.integers(*_SHORT_LENS, options.num_short, endpoint=True).tolist()
    prompts = [random_prompt(length, vocab_size, chance) for length in [options.long_len] * _NUM_LONG + lens]
    longs = [Arrival(f"long-{i}", prompt, params) for i, prompt in enumerate(prompts[:_NUM_LONG])]
    return longs + [Arrival(f"short-{i}", prompt, params, goal) for i, prompt in enumerate(prompts[_NUM_LONG:])]


def stream_of(mix: Sequence[Arrival], span_s: float, seed: int) -> list[Arrival]:
    """The same, the short ones as a Poisson process within so many seconds, given their number."""
    times = np.sort(np.random.default_rng((seed % 2**64, 1)).uniform(0.0, span_s, len(mix) - _NUM_LONG)).tolist()
    return [replace(one, arrival_s=at) for one, at in zip(mix, [0.0] * _NUM_LONG + times, strict=True)]


def convoy(options: ServeOptions) -> Report | None:
    """Measure the capacity, serve the stream under every system; every rank calls it."""
    subject, given = options.subject, options.subject.engine
    if subject.model is None:
        subject = replace(subject, hf_overrides=CONVOY_MODEL | dict(subject.hf_overrides or {}))
    longest, size = options.long_len + _OUTPUT_LEN, given.get("block_size") or 256
    blocks = _NUM_LONG * -(-longest // size) + options.num_short * -(-(_SHORT_LENS[1] + _OUTPUT_LEN) // size)
    usual: dict[str, Any] = {
        "num_kv_blocks": None if given.get("kv_memory") else blocks,
        "max_num_seqs": _NUM_LONG + options.num_short,
        "long_threshold": min(8192, options.long_len),
        "t_target_s": _BATCH_S,
        # one batch more than stages would hide the host, and have new requests wait for it
        "depth": given.get("spp") or 1,
    }
    bare = SchedulerConfig()
    engine = {n: value if given.get(n) in (None, getattr(bare, n, None)) else given[n] for n, value in usual.items()}
    return on_ranks(subject, lambda local: _convoy(local, options), longest=longest, **engine)


def _convoy(local: Local, options: ServeOptions) -> Report:
    mix = mix_of(options, local.model.vocab_size)
    first = replace(mix[0], prompt=mix[0].prompt[: options.long_len // 4])  # type: ignore[index]
    warm = [first, *mix[_NUM_LONG:][:_WARM_SHORT]]
    warm_up(local.engine, warm)
    capacity_s = serve_load(local.engine, mix).duration_s
    stream = stream_of(mix, capacity_s / options.load, options.workload.seed)
    options_of = systems_of(options.long_len)
    asked_for = map(local.subject.engine.get, ("scheduler", "policy"))
    name = " ".join(str(one) for one in asked_for if one not in (None, "medha", "priority"))
    options_of[name or "default"] = options_of.pop("default")
    engines = {name: local.engine_with(**scheduler) for name, scheduler in options_of.items()}
    systems: list[Report] = []
    for name, engine in engines.items():
        warm_up(engine, warm)
        with steps_noted(engine) as steps:
            served = serve_load(engine, stream)
        figures = convoy_figures(served) | {"prediction_error": prediction_error(steps)}
        systems.append({"system": name, "options": options_of[name]} | figures)
    found: Report = {"capacity_s": capacity_s, "span_s": capacity_s / options.load, "systems": systems}
    found["failed"] = sum(one["failed"] for one in systems)
    found["ttft_by_scheduler"] = [
        {
            "scheduler": one["system"],
            **{f"short {name}_ms": one["short"][f"{name}_ttft_ms"] for name in ("median", "p90", "p99")},
            "short in SLO_share": one["short"]["slo_attainment"],
            **{f"long {name}_ms": one["long"][f"{name}_ttft_ms"] for name in ("mean", "p99")},
            "short p99 TPOT_ms": one["short"]["p99_tpot_ms"],
            "span_s": one["duration"],
        }
        for one in systems
    ]
    lengths = {"num_long": _NUM_LONG, "short_lens": _SHORT_LENS, "output_len": _OUTPUT_LEN}
    found["notes"] = [
        f"{_NUM_LONG} prompts of {options.long_len:,} tokens queued at 0 s, {options.num_short} of {_SHORT_LENS[0]} "
        f"to {_SHORT_LENS[1]} (Poisson) within {found['span_s']:.1f} s; {_OUTPUT_LEN} output tokens each",
        f"capacity: the whole mix at once takes {capacity_s:.1f} s; load {options.load:g}; SLO: a TTFT of "
        f"{_SHORT_TTFT_S:g} s",
    ]
    workload = {"num_short": options.num_short, **lengths, "short_ttft_s": _SHORT_TTFT_S, "seed": options.workload.seed}
    return local.report("serve", asdict(options) | {"workload": workload}) | found


def convoy_figures(served: Served) -> Report:
    """What one system made of the stream: figures of the short requests and of the long ones; times in seconds."""
    figures: Report = {"duration": served.duration_s, "failed": sum(not one.is_completed for one in served.outcomes)}
    for kind in ("short", "long"):
        part = served._replace(outcomes=tuple(one for one in served.outcomes if one.request_id.startswith(kind)))
        figures[kind] = serving_figures(part, goodput=Goodput(), metrics=("ttft", "tpot"), percentiles=(90.0, 99.0))
    figures["requests"] = [
        {"request_id": one.request_id, "arrival_s": one.start_s, "input_len": one.input_len, "ttft_s": one.ttft_s}
        for one in served.outcomes
    ]
    return figures


_SHOWN = """
    ttft_by_scheduler duration completed failed request_rate burstiness max_concurrent_requests request_throughput
    output_throughput total_token_throughput max_output_tokens_per_s request_goodput slo_attainment prediction_error
    by_metric ttft_by_length
"""
_SHOWS: Shows = dict.fromkeys(_SHOWN.split(), ())
_NOTES = (
    "one run after the warm-up; error: of predicted step times, as a share",
    terms("TTFT", "TPOT", "ITL", "E2EL", "goodput", "SLO attainment"),
)
verb("serve", ServeOptions, serve, _SHOWS, _NOTES, _MORE, SUBJECT, SCHEDULING, SERVING, MEMORY, PARALLEL)
