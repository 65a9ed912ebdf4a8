"""Generated traces have the published figures, and are the same for the same seed."""

import math
from typing import Any

import numpy as np
import pytest

from medha.errors import ConfigError
from medha.workload import synth
from medha.workload.synth import ARRIVALS, arrival_times, generators, named_lengths, parse_lengths, synthesize
from medha.workload.trace import Trace, trace_stats

MANY = 200_000
NEAR = 0.03
DEFAULT: dict[str, Any] = {"qps": 2.0, "num_requests": 50}

# (column, what, published figure); P50, P90, P99 and mean of sharegpt4-8k are those of the file that it is fitted to.
FIGURES = [
    ("sharegpt4-8k", "prompt", {"p50": 1730, "p90": 5696, "p99": 7434, "mean": 2340}, (1, 8141)),
    ("sharegpt4-8k", "output", {"p50": 415, "p90": 834, "p99": 998, "mean": 438.7}, (2, 1024)),
    ("medha-swe", "prompt", {"p50": 393e3, "p90": 839e3}, (131_072, 1_000_000)),
    ("medha-swe", "output", {"p50": 518, "p90": 808}, (64, 2048)),
    ("medha-mix-2m", "output", {"p50": 420}, (2, 2048)),
    ("tetris-short", "prompt", {"mean": 23.6e3}, (4_000, 95_000)),
    ("tetris-medium", "prompt", {"mean": 32.8e3}, (8_000, 142_000)),
    ("tetris-long", "prompt", {"mean": 50.1e3}, (16_000, 190_000)),
    ("tetris-long", "output", {"p50": 415}, (2, 1024)),
    ("uniform:10-20,1-3", "prompt", {"mean": 15, "p50": 15}, (10, 20)),
    ("fixed:7,9", "output", {"mean": 9, "p50": 9}, (9, 9)),
]


@pytest.mark.parametrize(("name", "column", "figures", "bounds"), FIGURES)
def test_lengths_have_the_published_figures(
    name: str, column: str, figures: dict[str, float], bounds: tuple[int, int]
) -> None:
    prompts, outputs = parse_lengths(name).sample(generators(1)[1], MANY)
    tokens = prompts if column == "prompt" else outputs
    assert bounds[0] <= tokens.min() and tokens.max() <= bounds[1]
    measured = {"mean": tokens.mean(), **dict(zip(("p50", "p90", "p99"), np.percentile(tokens, [50, 90, 99])))}  # noqa: B905
    for what, figure in figures.items():
        assert measured[what] == pytest.approx(figure, rel=NEAR), what


def test_the_ends_of_a_distribution_occur() -> None:
    ends = {"sharegpt4-8k": (1, 8141), "uniform:10-20,1-3": (10, 20), "fixed:7,9": (7, 7)}
    ends["uniform:1k-128K,1-2k"] = (1000, 131072)
    draws = np.array([0.0, np.nextafter(1.0, 0.0)])  # where a draw of 200,000 may miss the last token
    assert {name: tuple(np.rint(parse_lengths(name).prompt(draws))) for name in ends} == ends


@pytest.mark.parametrize(("name", "scale"), [("medha-mix", 1), ("medha-mix-2m", 2)])
def test_the_mix_has_five_percent_of_long_requests(name: str, scale: int) -> None:
    prompts, outputs = named_lengths()[name].sample(generators(2)[1], MANY)
    is_long = prompts > 8192
    assert is_long.mean() == pytest.approx(0.05, rel=NEAR)
    assert prompts[is_long].min() >= 131_072 * scale and prompts[is_long].max() <= 1_000_000 * scale
    assert np.percentile(prompts[is_long], [50, 90]) == pytest.approx([393e3 * scale, 839e3 * scale], rel=NEAR)
    assert np.percentile(outputs[is_long], [50, 90]) == pytest.approx([518, 808], rel=NEAR)
    assert np.percentile(prompts[~is_long], [50, 90]) == pytest.approx([1730, 5696], rel=NEAR)
    assert (prompts + outputs)[~is_long].max() == 8192


def same(a: Any, b: Any) -> bool:
    names = ("arrival_s", "prompt_tokens", "output_tokens")
    return all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in names)


@pytest.mark.parametrize("process", ARRIVALS)
@pytest.mark.parametrize("name", ["medha-mix", "tetris-long", "uniform:1-9,2-3"])
def test_the_same_seed_gives_the_same_bytes(name: str, process: str) -> None:
    given: dict[str, Any] = {"num_requests": 50, "qps": None if process == "at-once" else 2.0}
    first = synthesize(name, process, seed=3, **given)
    assert same(first, synthesize(name, process, seed=3, **given))
    assert not same(first, synthesize(name, process, seed=4, **given))
    assert same(first, synthesize(name, process, seed=3, **{**given, "num_requests": 1000})[:50])


def test_another_rate_leaves_the_lengths() -> None:
    slow, fast = (synthesize("medha-mix", **{**DEFAULT, "qps": qps}) for qps in (0.25, 1.75))
    assert slow.prompt_tokens.tolist() == fast.prompt_tokens.tolist()
    assert slow.scaled(1.0).arrival_s == pytest.approx(fast.scaled(1.0).arrival_s)


PROCESSES = [("poisson", 1.0, 1.0), ("poisson", 4.0, 0.5), ("uniform", 9.0, 0.0)]
PROCESSES += [("gamma", 1.0, 1.0), ("gamma", 0.25, 2.0), ("gamma", 4.0, 0.5)]


@pytest.mark.parametrize(("process", "burstiness", "cv"), PROCESSES)
def test_arrivals_have_rate_and_burstiness(process: str, burstiness: float, cv: float) -> None:
    trace = synthesize("fixed:1,1", process, qps=5.0, burstiness=burstiness, duration_s=40_000.0, seed=7)
    stats = trace_stats(trace)
    assert len(trace) == pytest.approx(200_000, rel=NEAR)
    assert (stats["qps"], stats["gap_cv"]) == (pytest.approx(5.0, rel=NEAR), pytest.approx(cv, rel=NEAR, abs=1e-6))
    assert trace.arrival_s[-1] < 40_000.0
    if process == "gamma":
        assert stats["burstiness"] == pytest.approx(burstiness, rel=2 * NEAR)


def test_a_duration_is_the_beginning_of_a_longer_one() -> None:
    """Whichever of both ends it, and whether or not more gaps than expected were needed."""
    for seed in range(20):
        short, long = (synthesize("fixed:1,1", qps=1.0, duration_s=t, seed=seed) for t in (9.0, 900.0))
        assert same(short, long.first(None, 9.0))
        assert same(short, synthesize("fixed:1,1", qps=1.0, num_requests=len(short), seed=seed))


def test_sessions_resend_their_history() -> None:
    sizes = {"document": 1000, "new": 200, "output": 100}
    trace, longer, other = (
        synthesize("sessions:1000,200,100,5", qps=1.0, num_requests=count, seed=seed)
        for count, seed in ((300, 1), (400, 1), (300, 2))
    )
    assert same(trace, longer[:300]) and not same(trace, other)
    asked: dict[int, list[int]] = {}
    for row in trace.rows():
        assert row.prefix_hashes is not None and row.output_tokens == sizes["output"]
        session = row.prefix_hashes[0] >> 32
        assert list(row.prefix_hashes) == [(session << 32) + i for i in range(row.prompt_tokens // 512)]
        asked.setdefault(session, []).append(row.prompt_tokens)
    assert len(asked) > 60 and max(map(len, asked.values())) == 5
    for tokens in asked.values():
        assert tokens == [sizes["document"] + sizes["new"] + 300 * turn for turn in range(len(tokens))]
    hashed = [one for row in trace.rows() for one in row.prefix_hashes or ()]
    reuse = trace_stats(trace)["prefix_reuse"]
    assert reuse == pytest.approx(512 * (len(hashed) - len(set(hashed))) / trace.prompt_tokens.sum())
    assert reuse > 0.5


def test_uniform_arrivals_those_at_once_and_those_of_a_trace_are_exact() -> None:
    rng, _ = generators(0)
    assert arrival_times("uniform", rng, qps=4.0, num_requests=3).tolist() == [0.0, 0.25, 0.5]
    assert arrival_times("uniform", rng, qps=4.0, duration_s=1.0).tolist() == [0.0, 0.25, 0.5, 0.75]
    assert arrival_times("at-once", rng, num_requests=2).tolist() == [0.0, 0.0]
    times = np.array([0.0, 1.0, 3.0, 4.0])
    trace = Trace(times, np.ones(4, int), np.ones(4, int))
    assert synthesize("fixed:1,1", trace).arrival_s.tolist() == times.tolist()
    assert synthesize("fixed:1,1", trace, qps=1.5).arrival_s.tolist() == [0.0, 0.5, 1.5, 2.0]
    assert len(synthesize("fixed:1,1", trace, duration_s=3.0)) == 2
    assert len(synthesize("fixed:1,1", trace, num_requests=3)) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qps": None}, "arrivals='poisson' without a rate; accepted: --request-rate, or --arrivals at-once"),
        ({"qps": 0.0}, "qps=0.0; accepted"),
        ({"qps": math.inf}, "qps=inf; accepted"),
        ({"num_requests": None}, "num_requests=None and duration_s=None; accepted: one of the two"),
        ({"duration_s": 1.0}, "num_requests=50 and duration_s=1.0; accepted: one of the two"),
        ({"num_requests": 0}, "num_requests=0; accepted: 1 to 20000000"),
        ({"num_requests": None, "duration_s": 1e-9}, "duration_s=1e-09: no request arrives; accepted: longer"),
        ({"num_requests": None, "duration_s": 1e9}, "num_requests=2000000001; accepted: 1 to 20000000"),
        ({"arrivals": "bursts"}, "arrivals='bursts'; accepted: poisson, gamma, uniform, at-once"),
        ({"arrivals": "at-once"}, "arrivals at-once with qps=2.0.*; accepted: num_requests alone"),
        ({"arrivals": "gamma", "burstiness": 0.0}, "burstiness=0.0; accepted"),
        ({"seed": -1}, "seed=-1; accepted: 0 or more"),
        ({"lengths": "sharegpt"}, "lengths='sharegpt'; accepted: sharegpt4-8k, medha-swe, .*, fixed:P,D, uniform"),
        ({"lengths": "sessions:0,1,1"}, "lengths='sessions:0,1,1'; accepted: .*sessions:DOCUMENT,P,D,REQUESTS"),
        ({"lengths": "sessions:1M,1M,1M,60"}, "accepted: .* with 1 to 100000000 tokens"),
        ({"lengths": "fixed:0,1"}, "lengths='fixed:0,1'; accepted"),
        ({"lengths": "fixed:999999999,1"}, "accepted: .* with 1 to 100000000 tokens"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        synthesize(**{"lengths": "medha-mix", **DEFAULT, **changes})


def test_gaps_that_never_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synth, "MAX_REQUESTS", 50_000)
    with pytest.raises(ConfigError, match=r"^duration_s=60.0: over 50000 requests; accepted: a higher burstiness$"):
        synthesize("medha-mix", qps=2.0, duration_s=60.0, burstiness=1e-12)
