"""``medha bench convoy`` at a toy size, and its figures by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medha.bench.cli import app
from medha.bench.convoy import CHUNKED, OURS, WHOLE, Calibration, ConvoyOptions, make_stream, systems
from medha.bench.convoy_figures import LONG, SHORT, Bucket, SystemFigures, percentile, ratios, system_figures
from medha.bench.convoy_plot import plot_convoy
from medha.bench.job import Ask, Served
from medha.cli.command import run_app
from tests.bench.shapes import TINY

OPTIONS = ConvoyOptions(num_short=30, num_long=2, long_len=1000)
MEASURED = Calibration(((50, 0.1), (500, 1.0), (1000, 2.0)), 6.0, 9.0, {})


def served(request: Ask, ttft_s: float | None, *, tpot_s: float | None = 0.1, has_finished: bool = True) -> Served:
    first_s = None if ttft_s is None else request.arrival_s + ttft_s
    finished_s = None if first_s is None else first_s + 1.0
    return Served(
        request.request_id, request.arrival_s, first_s, finished_s, has_finished, tpot_s, request.ttft_s, False, 1
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:  # type: ignore[type-arg]
    path = tmp_path_factory.mktemp("convoy") / "convoy.json"
    shape = {**TINY, "max_position_embeddings": 2048}
    sizes = ["--quick", "--num-short", "6", "--long-len", "600", "--hf-overrides", json.dumps(shape)]
    assert (
        run_app(app, "bench", ["convoy", *sizes, "--output-json", str(path), "--plot", str(path.with_suffix(".svg"))])
        == 0
    )
    return json.loads(path.read_text()), path


def test_every_request_is_accounted_for_in_every_system(run: tuple[dict, Path]) -> None:  # type: ignore[type-arg]
    report, _ = run
    ids = [request["request_id"] for request in report["requests"]]
    assert ids == [f"long-{i}" for i in range(4)] + [f"short-{i}" for i in range(6)]
    assert [system["system"] for system in report["systems"]] == [WHOLE, *CHUNKED, *OURS]
    for system in report["systems"]:
        assert [one["request_id"] for one in system["served"]] == ids
        assert all(one["has_finished"] and one["ttft_s"] > 0 for one in system["served"])
        by_name = {bucket["bucket"]: bucket for bucket in system["buckets"]}
        assert list(by_name) == ["50-199", "200-349", "350-500", SHORT, LONG]
        assert (by_name[SHORT]["num_requests"], by_name[LONG]["num_requests"]) == (6, 4)
        assert sum(by_name[name]["num_requests"] for name in list(by_name)[:3]) == 6


def test_every_system_gets_the_same_arrivals_and_deadlines(run: tuple[dict, Path]) -> None:  # type: ignore[type-arg]
    report, _ = run
    deadline_s = report["calibration"]["long_deadline_s"]
    for system in report["systems"]:
        for one, request in zip(system["served"], report["requests"], strict=True):
            assert one["arrival_s"] == pytest.approx(request["arrival_s"], abs=1e-3)
            assert one["deadline_s"] == request["ttft_s"] == (deadline_s if "long" in one["request_id"] else 1.0)
            assert not one["deadline_is_derived"]


def test_the_report_says_what_was_run(run: tuple[dict, Path]) -> None:  # type: ignore[type-arg]
    report, path = run
    assert report["benchmark"] == "convoy" and {"cpu", "packages", "date"} <= set(report["environment"])
    options, measured = report["options"], report["calibration"]
    assert (options["load"], options["t_target_s"], options["short_ttft_s"]) == (0.75, 0.25, 1.0)
    assert measured["span_s"] == pytest.approx(measured["capacity_s"] / 0.75)
    assert [length for length, _ in measured["alone_s"]] == [50, 162, 275, 387, 500, 600]
    for system in report["systems"]:
        assert len(system["load_average"]) == 2
        assert system["requests_per_s"] == pytest.approx(10 / system["span_s"])
        assert set(system["ratios"]["is_attained"]) == {bucket["bucket"] for bucket in system["buckets"]}
    whole = report["systems"][0]
    assert whole["ratios"]["short_p50"] == whole["ratios"]["long_worst"] == 1.0
    assert all(one["num_chunks"] == 1 for one in whole["served"][:1])
    assert path.with_suffix(".svg").exists() == plot_convoy(report, path.with_suffix(".pdf"))


def test_the_stream_is_a_poisson_process_of_the_wanted_load() -> None:
    stream = make_stream(OPTIONS, MEASURED)
    assert stream == make_stream(OPTIONS, MEASURED)
    longs, shorts = stream[:2], stream[2:]
    assert all((one.num_prompt_tokens, one.arrival_s, one.ttft_s) == (1000, 0.0, 9.0) for one in longs)
    assert all(50 <= one.num_prompt_tokens <= 500 and one.ttft_s == 1.0 for one in shorts)
    times = [one.arrival_s for one in shorts]
    assert times == sorted(times) and 0 < times[0] < times[-1] < 6.0 / 0.75
    assert len(shorts) == 30 and sum(times) / 30 == pytest.approx(4.0, rel=0.3)


def test_the_systems_differ_as_they_are_named() -> None:
    engines = systems(OPTIONS)
    assert engines[WHOLE]["chunk_size"] >= OPTIONS.long_len
    assert engines["Sarathi-512"]["chunk_size"] == engines["Sarathi-512"]["max_batch_tokens"] == 512
    assert [engines[name]["rho_max"] for name in OURS] == [0.0, 0.4]
    assert {engines[name]["t_target_s"] for name in ("EDF", "LRS", *OURS)} == {0.25}


def test_time_alone_lies_between_the_measured_lengths() -> None:
    assert [MEASURED.alone(length) for length in (50, 275, 1000)] == pytest.approx([0.1, 0.55, 2.0])


def test_percentiles_are_of_the_nearest_rank_and_nothing_is_never() -> None:
    values: list[float | None] = [float(i) for i in range(1, 101)]
    assert [percentile(values, percent) for percent in (50, 90, 99)] == [50.0, 90.0, 99.0]
    assert percentile([1.0, None, None], 50) is None
    assert percentile([1.0, 2.0, None], 50) == 2.0
    assert percentile([], 50) is None


BUCKETS = (Bucket(SHORT, 1, 99), Bucket(LONG, 100, 100))


def figures(name: str, short_ttft_s: float | None, long_ttft_s: float) -> tuple[SystemFigures, list[Served]]:
    asked = [Ask("s", 10, 5, arrival_s=2.0, ttft_s=1.0), Ask("l", 100, 5, ttft_s=8.0)]
    became = [served(asked[0], short_ttft_s, has_finished=short_ttft_s is not None), served(asked[1], long_ttft_s)]
    return system_figures(name, asked, became, buckets=BUCKETS, alone={"s": 0.5, "l": 4.0}), became


def test_figures_of_a_system() -> None:
    found, _ = figures("x", 1.0, 6.0)
    assert found.span_s == 7.0 and found.requests_per_s == pytest.approx(2 / 7)
    assert found.tokens_per_s == pytest.approx(120 / 7)
    short, long = found.buckets
    assert (short.ttft_s, short.slowdown, short.attainment) == ((1.0,) * 3, (2.0,) * 3, 1.0)
    assert (long.mean_ttft_s, long.slowdown[0], long.attainment) == (6.0, 1.5, 1.0)


def test_an_unfinished_request_is_a_missed_one() -> None:
    found, _ = figures("x", None, 9.0)
    short, long = found.buckets
    assert (short.ttft_s, short.mean_ttft_s, short.num_finished, short.attainment) == ((None,) * 3, None, 0, 0.0)
    assert long.attainment == 0.0  # late


def test_ratios_against_the_baselines() -> None:
    whole, whole_served = figures("whole", 6.0, 4.0)
    best, _ = figures("chunked", 0.75, 9.0)
    other, _ = figures("other", None, 9.0)
    ours, ours_served = figures("ours", 0.5, 5.0)
    found = ratios(
        ours,
        whole=whole,
        chunked=[best, other],
        served=ours_served,
        whole_served=whole_served,
        long_ids=frozenset({"l"}),
        tpot_target_s=0.2,
    )
    assert (found.short_p50, found.chunked_p99, found.tpot) == (12.0, 1.5, 0.5)
    assert (found.long_mean, found.long_last, found.long_worst) == (1.25, 1.25, 1.25)
    assert found.is_attained == {SHORT: True, LONG: True}
