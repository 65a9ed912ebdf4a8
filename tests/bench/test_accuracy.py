"""``medha bench accuracy`` at a toy size, and its figures on steps made up."""

import json

import pytest

from medha.bench.accuracy import AccuracyOptions, Ran, accuracy, lines_of, repeats_of
from medha.bench.harness import Subject
from medha.cost.predictor import Kind
from medha.profile.calibrate import Effort
from medha.profile.steps import Step, chunk, decodes
from tests.bench.shapes import TINY

SMALL = AccuracyOptions(
    subject=Subject(hf_overrides=TINY, engine={"num_threads": 1}),
    num_rounds=1,
    num_short=4,
    num_middle=1,
    short_lens=(8, 24),
    middle_lens=(40, 64),
    long_len=300,
    output_lens=(2, 4),
    steps_between=1.0,
    t_target_s=0.002,
)


@pytest.fixture
def _few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Effort(chunks=(16, 64), batches=(1, 4), limit_s=0.5, total_s=0.2, min_repeats=2, max_repeats=2)
    monkeypatch.setattr("medha.bench.accuracy.QUICK", few)


@pytest.mark.usefixtures("_few_points")
def test_report() -> None:
    report = json.loads(json.dumps(accuracy(SMALL)))
    lines = {(line["kind"], line["kv"]): line for line in report["lines"]}
    assert {kind for kind, _ in lines} <= {"all", "decode", "mixed", "prefill"}
    of_kinds = sum(lines[kind, "all"]["steps"] for kind in ("decode", "mixed", "prefill") if (kind, "all") in lines)
    assert of_kinds == lines["all", "all"]["steps"] > 0
    assert lines["all", "all"]["repeats"] >= 0  # which steps come twice depends on the clock
    assert set(report["factors"]) == {"decode", "mixed", "prefill"}
    assert report["engine"]["scheduler"]["t_target_s"] == 0.002
    assert {"factors", "lines"} <= report.keys()


def ran(step: Step, expected_s: float, busy_s: float) -> Ran:
    return Ran(step, "decode" if step[0].is_decode else "prefill", expected_s, busy_s)


def test_shares_and_errors() -> None:
    short, long = decodes(2, 100), chunk(64, 20000)
    steps = [ran(short, 1.0, 1.1), ran(short, 1.0, 1.2), ran(short, 1.0, 0.9), ran(long, 2.0, 1.0)]
    times = [1.0, 1.0, 1.0, 2.0]
    repeated: list[tuple[Step, Kind, float]] = [(short, "decode", seconds) for seconds in times]
    repeated += [(long, "prefill", 3.0)] * 2
    assert [one.is_within for one in repeats_of(repeated)] == [True, True, True, False]  # two runs are too few to tell
    lines = {(line["kind"], line["kv"]): line for line in lines_of(steps, repeated)}

    def figures(kind: str, kv: str) -> list[float | None]:
        return [lines[kind, kv][name] for name in ("steps", "within", "repeatability", "ratio")]

    assert figures("decode", "0K-1K") == [3, pytest.approx(2 / 3), 0.75, pytest.approx(2 / 3 / 0.75)]
    assert lines["decode", "0K-1K"]["mean_signed"] == pytest.approx((1 / 1.1 + 1 / 1.2 + 1 / 0.9) / 3 - 1)
    assert figures("prefill", "16K-64K") == [1, 0.0, None, None]
    assert lines["prefill", "16K-64K"]["mean_abs"] == lines["prefill", "16K-64K"]["mean_signed"] == 1.0
    assert figures("all", "all")[:3] == [4, 0.5, 0.75]
    assert ("mixed", "all") not in lines


def test_repeatability_weighs_as_the_steps_do() -> None:
    """A kind that is steady and rare among the steps does not hide one that is neither."""
    noisy, steady = decodes(1, 100), chunk(16, 100)
    repeated: list[tuple[Step, Kind, float]] = [(noisy, "decode", seconds) for seconds in (1.0, 2.0, 4.0)]
    repeated += [(steady, "prefill", 1.0)] * 99
    steps = [ran(noisy, 1.0, 2.0)] * 9 + [ran(steady, 1.0, 1.0)]
    assert lines_of(steps, repeated)[0]["repeatability"] == pytest.approx(0.1)


def test_a_machine_that_drifts_is_steady_against_what_is_near() -> None:
    step = decodes(1, 100)
    repeated: list[tuple[Step, Kind, float]] = [(step, "decode", 1.05**i) for i in range(40)]
    share = sum(one.is_within for one in repeats_of(repeated)) / 40
    line = lines_of([ran(step, 1.0, 1.0)], repeated)[0]
    assert share > 0.9 and (line["repeatability"], line["ratio"]) == (share, 1 / share)
