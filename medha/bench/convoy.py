"""``medha bench convoy``: do short requests queue behind long ones? The same arrivals under six schedulers.

Short requests arrive as an open Poisson stream while a few long prompts, queued at its start, are read: the convoy of
arXiv:2409.17264 (v5, figure 1b and section 4). Each system is a job of its own on two pipeline stages, one thread each,
with the whole engine on the wall clock; arrivals, deadlines, prompts and warm-up are the same for all.

First what steps cost is profiled, and a calibration job runs under LARS with space sharing. It measures the time of
each length alone; the capacity, which is the seconds from start to end when the whole mix is there at once; and the
deadline that the scheduler derives for a long prompt. The stream lasts capacity / load seconds. The deadlines of the
short ones are given.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from medha.bench.convoy_figures import LONG, SHORT, Bucket, Ratios, SystemFigures, ratios, system_figures
from medha.bench.job import Ask, Job, Stream, measure_profile
from medha.bench.model import write_config
from medha.cli.report import check_writable, stamp, write_report
from medha.config import ParallelConfig

WHOLE = "whole prefill"
CHUNKED = ("Sarathi-512", "EDF", "LRS")
"""The baselines that cut prompts into chunks."""
OURS = ("LARS", "LARS+sharing")

SMALL_LLAMA: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""A model so small that two CPU threads read 32K tokens in some ten seconds; fields of its ``config.json``."""

_LAYOUT = ParallelConfig(spp=2)
_BLOCK_SIZE = 256
_ALONE_RUNS = 3
_ALONE_LENGTHS = 5
_LIMIT_SPANS = 4.0


@dataclass(frozen=True, slots=True)
class ConvoyOptions:
    """The load and its objectives.

    Attributes:
        num_short, num_long: requests.
        short_lens: fewest and most prompt tokens of a short one; drawn evenly.
        long_len: prompt tokens of a long one.
        num_output_tokens: of each request.
        load: the part of the capacity that the stream takes.
        t_target_s: seconds of a batch; see :class:`medha.config.SchedulerConfig`.
        depth: batches in flight at most, of every system. As many as there are stages by default: one more, the
            engine's default, hides the host, which takes little of such long batches, and each one makes a new request
            wait for one more batch.
        short_ttft_s: TTFT objective of short requests.
        is_profiled: measure first what steps cost, as ``medha profile --quick`` does, and predict with that; otherwise
            the predictor starts from the stated default and corrects itself.
        shape: fields of the model's ``config.json``.
    """

    num_short: int = 200
    num_long: int = 4
    short_lens: tuple[int, int] = (50, 500)
    long_len: int = 32_768
    num_output_tokens: int = 8
    load: float = 0.75
    t_target_s: float = 0.25
    depth: int = _LAYOUT.spp
    short_ttft_s: float = 1.0
    seed: int = 0
    is_profiled: bool = True
    shape: Mapping[str, Any] | None = None

    @classmethod
    def quick(cls) -> ConvoyOptions:
        """A small load that ends within three minutes on two slow cores; it shows less of a convoy."""
        return cls(num_short=100, long_len=8192, is_profiled=False)

    @property
    def config(self) -> dict[str, Any]:
        """Fields of the model's ``config.json``."""
        return SMALL_LLAMA | dict(self.shape or {})

    @property
    def tpot_target_s(self) -> float:
        """Seconds between tokens that follow from the time of a batch: a decode returns with every batch in flight."""
        return self.depth * self.t_target_s

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Three of short lengths, then all short and all long ones."""
        low, high = self.short_lens
        cuts = [low + (high + 1 - low) * i // 3 for i in range(4)]
        parts = [Bucket(f"{a}-{b - 1}", a, b - 1) for a, b in pairwise(cuts)]
        return (*parts, Bucket(SHORT, low, high), Bucket(LONG, self.long_len, self.long_len))


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured before.

    Attributes:
        alone_s: (prompt tokens, seconds to the first token) of requests alone, medians; shortest first.
        capacity_s: seconds of work of the whole mix.
        long_deadline_s: as the scheduler derived it.
        prediction: errors of predicted batch seconds; see :class:`medha.bench.job.Stream`.
    """

    alone_s: tuple[tuple[int, float], ...]
    capacity_s: float
    long_deadline_s: float
    prediction: Mapping[str, float]

    def alone(self, num_prompt_tokens: int) -> float:
        """Seconds of a request alone, from the measured lengths in a straight line."""
        lengths, seconds = zip(*self.alone_s, strict=True)
        return float(np.interp(num_prompt_tokens, lengths, seconds))


@dataclass(frozen=True, slots=True)
class SystemResult:
    """What one system made of the stream.

    Attributes:
        options: of the engine, where they differ between systems.
        load_average: of the machine before and after.
    """

    options: Mapping[str, Any]
    stream: Stream
    figures: SystemFigures
    load_average: tuple[float, float]


@dataclass(frozen=True, slots=True)
class ConvoyResult:
    """The whole run."""

    options: ConvoyOptions
    calibration: Calibration
    requests: tuple[Ask, ...]
    systems: Mapping[str, SystemResult]
    ratios: Mapping[str, Ratios]

    @property
    def span_s(self) -> float:
        """Seconds in which the requests arrive."""
        return self.calibration.capacity_s / self.options.load


def systems(options: ConvoyOptions) -> dict[str, dict[str, Any]]:
    """Engine options of each system, by its name. The baselines stand alone: no sharing and no guard."""
    longest = options.long_len
    plain = {"t_target_s": options.t_target_s, "rho_max": 0.0, "late_share": 0.0}
    timed = {"t_target_s": options.t_target_s}
    return {
        WHOLE: {"scheduler": "orca", "policy": "fcfs", "chunk_size": longest, "max_batch_tokens": longest},
        "Sarathi-512": {"scheduler": "sarathi", "policy": "fcfs", "chunk_size": 512, "max_batch_tokens": 512},
        "EDF": {"policy": "edf", **plain},
        "LRS": {"policy": "lrs", **plain},
        "LARS": {"policy": "lars", **timed, "rho_max": 0.0},
        "LARS+sharing": {"policy": "lars", **timed, "rho_max": 0.4},
    }


def make_mix(options: ConvoyOptions) -> tuple[Ask, ...]:
    """The requests, all at once: long ones first, short ones of random lengths."""
    chance = random.Random(options.seed)
    num_out = options.num_output_tokens
    longs = [Ask(f"long-{i}", options.long_len, num_out) for i in range(options.num_long)]
    shorts = [
        Ask(f"short-{i}", chance.randint(*options.short_lens), num_out, ttft_s=options.short_ttft_s)
        for i in range(options.num_short)
    ]
    return (*longs, *shorts)


def make_stream(options: ConvoyOptions, calibration: Calibration) -> tuple[Ask, ...]:
    """The requests with arrivals and deadlines: a Poisson process of short ones, given their number."""
    chance = random.Random(options.seed + 1)
    span_s = calibration.capacity_s / options.load
    arrivals = iter(sorted(chance.uniform(0.0, span_s) for _ in range(options.num_short)))
    return tuple(
        replace(request, ttft_s=calibration.long_deadline_s)
        if request.ttft_s is None
        else replace(request, arrival_s=next(arrivals))
        for request in make_mix(options)
    )


def convoy(
    options: ConvoyOptions,
    *,
    output_json: Path | None = None,
    on_calibrated: Callable[[Calibration], None] = lambda _: None,
    on_job: Callable[[], None] = lambda: None,
) -> ConvoyResult:
    """Calibrate, then run every system.

    Args:
        options: the load.
        output_json: where to write the report.
        on_calibrated: called with what was measured, before the systems run.
        on_job: called after the calibration and after each system.

    Raises:
        ConfigError: the report cannot be written.
        RankFailedError: a job ended.
    """
    check_writable(output_json)
    results = {}
    with tempfile.TemporaryDirectory(prefix="medha-bench-") as folder:
        write_config(Path(folder), options.config)
        profile = _profile(folder, options)
        calibration = _calibrate(folder, options, profile)
        requests = make_stream(options, calibration)
        on_calibrated(calibration)
        on_job()
        alone = {request.request_id: calibration.alone(request.num_prompt_tokens) for request in requests}
        for name, engine in systems(options).items():
            before = os.getloadavg()[0]
            stream = _run(folder, options, profile | engine, requests)
            figures = system_figures(name, requests, stream.served, buckets=options.buckets, alone=alone)
            results[name] = SystemResult(engine, stream, figures, (before, os.getloadavg()[0]))
            on_job()
    result = ConvoyResult(options, calibration, requests, results, _ratios(options, requests, results))
    write_report(output_json, report(result))
    return result


def _job(folder: str, options: ConvoyOptions, engine: Mapping[str, Any]) -> Job:
    longest = options.long_len + options.num_output_tokens
    shorts = options.short_lens[1] + options.num_output_tokens
    blocks = [
        num * -(-length // _BLOCK_SIZE) for num, length in ((options.num_long, longest), (options.num_short, shorts))
    ]
    common = {
        "load_format": "dummy",
        "dtype": "float32",
        "device": "cpu",
        "seed": options.seed,
        "max_model_len": longest,
        "block_size": _BLOCK_SIZE,
        "num_kv_blocks": sum(blocks),
        "max_num_seqs": options.num_short + options.num_long,
        "long_threshold": min(8192, options.long_len),
        "depth": options.depth,
    }
    return Job(folder, _LAYOUT, common | dict(engine))


def _profile(folder: str, options: ConvoyOptions) -> dict[str, Any]:
    """The engine's option that says what it predicts with."""
    if not options.is_profiled:
        return {}
    path = Path(folder) / "profile.json"
    measure_profile(folder, _LAYOUT, path, max_kv=options.long_len)
    return {"profile": str(path)}


def _calibrate(folder: str, options: ConvoyOptions, profile: Mapping[str, Any]) -> Calibration:
    """Measure lengths alone and the whole mix at once."""
    with _job(folder, options, {**profile, **systems(options)[OURS[-1]]}) as job:
        low, high = options.short_lens
        lengths = sorted({low + (high - low) * i // (_ALONE_LENGTHS - 1) for i in range(_ALONE_LENGTHS)})
        _alone(job, options, high)  # warms up
        alone_s = [(options.long_len, _alone(job, options, options.long_len))]
        for length in lengths:
            alone_s.append((length, statistics.median(_alone(job, options, length) for _ in range(_ALONE_RUNS))))
        mix = job.serve(make_mix(options), seed=options.seed, limit_s=1e4)
    deadlines = [one.deadline_s for one in mix.served if one.deadline_is_derived and one.deadline_s is not None]
    capacity_s = max(one.finished_s or 0.0 for one in mix.served)
    return Calibration(tuple(sorted(alone_s)), capacity_s, statistics.median(deadlines), mix.prediction)


def _alone(job: Job, options: ConvoyOptions, length: int) -> float:
    (served,) = job.serve([Ask("alone", length, options.num_output_tokens)], seed=options.seed, limit_s=1e4).served
    assert served.ttft_s is not None, "it has all the time in the world"
    return served.ttft_s


def _run(folder: str, options: ConvoyOptions, engine: Mapping[str, Any], requests: tuple[Ask, ...]) -> Stream:
    """One system: a warm-up of a quarter of a long prompt and of some short ones, then the stream."""
    num_out = options.num_output_tokens
    warm = [Ask("warm", max(options.long_len // 4, 1), num_out)]
    warm += [Ask(f"warm-{i}", options.short_lens[1], num_out) for i in range(8)]
    limit_s = _LIMIT_SPANS * max(request.arrival_s for request in requests) + 10.0
    with _job(folder, options, engine) as job:
        job.serve(warm, seed=options.seed, limit_s=limit_s)
        return job.serve(requests, seed=options.seed, limit_s=limit_s)


def _ratios(
    options: ConvoyOptions, requests: tuple[Ask, ...], results: Mapping[str, SystemResult]
) -> dict[str, Ratios]:
    whole = results[WHOLE]
    long_ids = frozenset(r.request_id for r in requests if r.num_prompt_tokens == options.long_len)
    return {
        name: ratios(
            result.figures,
            whole=whole.figures,
            chunked=[results[one].figures for one in CHUNKED],
            served=result.stream.served,
            whole_served=whole.stream.served,
            long_ids=long_ids,
            tpot_target_s=options.tpot_target_s,
        )
        for name, result in results.items()
    }


def report(result: ConvoyResult) -> dict[str, Any]:
    """The run as what is written."""
    options = result.options
    return {
        "benchmark": "convoy",
        "environment": stamp(),
        "model": options.config,
        "options": {**asdict(options), "tpot_target_s": options.tpot_target_s, "layout": "spp2", "threads_a_rank": 1},
        "calibration": asdict(result.calibration) | {"span_s": result.span_s},
        "requests": [asdict(request) for request in result.requests],
        "systems": [
            {
                "system": name,
                "options": dict(one.options),
                "load_average": one.load_average,
                "prediction": dict(one.stream.prediction),
                **asdict(one.figures),
                "ratios": asdict(result.ratios[name]),
                "served": [asdict(served) | {"ttft_s": served.ttft_s} for served in one.stream.served],
            }
            for name, one in result.systems.items()
        ],
    }
