"""What was served, by hand: vLLM's fields, objectives, buckets, the one percentile."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from medha.params import SLO
from medha.workload import metrics
from medha.workload.metrics import METRICS, Goodput, Outcome, Served


def outcome(name: str, start_s: float, ttft_s: float | None, itl_s: tuple[float, ...], **other: Any) -> Outcome:
    e2el_s = (ttft_s or 0.0) + sum(itl_s)
    return replace(Outcome(name, 10, 1 + len(itl_s), start_s, 0.0, ttft_s, itl_s, e2el_s), **other)


OUTCOMES = (
    outcome("a", 0.0, 1.0, (0.5, 0.5)),  # to 2.0
    outcome("b", 1.0, 2.0, ()),  # to 3.0
    outcome("c", 3.5, 0.25, (0.25,), input_len=5000),  # to 4.0
    outcome("d", 0.5, None, (), output_len=0, error="DeadlineError: late"),
)


def test_fields() -> None:
    served = Served(OUTCOMES, 4.0)
    goodput = Goodput(ttft_s=1.0, tpot_s=0.4)
    found = metrics.serving_figures(served, goodput=Goodput(), metrics=METRICS, percentiles=(99.0,))
    assert (found["completed"], found["failed"]) == (3, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (5020, 6)
    assert (found["request_throughput"], found["output_throughput"]) == (0.75, 1.5)
    assert found["request_goodput"] is None and found["slo_attainment"] is None
    assert found["median_ttft_ms"] == 1000.0
    assert found["mean_tpot_ms"] == pytest.approx(375.0)  # "b" has none
    assert found["median_itl_ms"] == 500.0
    assert (found["max_concurrent_requests"], found["max_output_tokens_per_s"]) == (2, 2.0)
    aimed = Served(tuple(replace(one, slo=goodput.slo) for one in OUTCOMES), 4.0)
    found = metrics.serving_figures(aimed, goodput=goodput, metrics=("ttft",), percentiles=(99.0,))
    assert (found["slo_attainment"], found["request_goodput"]) == (0.25, 0.25)  # "c" alone; the failed one counts


def test_objectives() -> None:
    def meets(one: Outcome, goodput: Goodput) -> bool:
        return bool(Served((one,), 2.0).times(goodput).is_in_time[0])

    one = outcome("a", 0.0, 1.0, (0.5,))
    assert meets(one, Goodput())
    assert meets(outcome("a", 844.4218515250482, 0.1, (0.1,), slo=SLO(0.1, 0.1)), Goodput(e2el_s=0.2))
    assert meets(replace(one, slo=SLO(1.0, 0.5)), Goodput(e2el_s=1.5))
    assert not meets(replace(one, slo=SLO(ttft_s=0.9)), Goodput())
    assert not meets(replace(one, slo=SLO(tpot_s=0.4)), Goodput())
    assert not meets(one, Goodput(e2el_s=1.4))
    assert not meets(replace(one, error="x"), Goodput())
    assert meets(outcome("b", 0.0, 1.0, (), slo=SLO(tpot_s=0.1)), Goodput())  # one token has no TPOT


def test_nothing_has_no_figures_and_what_is_for_ever_is_none() -> None:
    assert set(metrics.latency_fields("ttft", [], (99.0,)).values()) == {None}
    empty = metrics.serving_figures(Served((), 0.0), goodput=Goodput(), metrics=(), percentiles=())
    names = ("request_throughput", "max_concurrent_requests", "max_output_tokens_per_s", "ttft_by_length")
    assert [empty[name] for name in names] == [0.0, 0, 0.0, []]
    found = metrics.latency_fields("ttft", [1.0, 2.0, math.inf], (99.0,))
    assert found == {"mean_ttft_ms": None, "median_ttft_ms": 2000.0, "std_ttft_ms": None, "p99_ttft_ms": None}


def test_buckets_hold_all_requests() -> None:
    lens = (1, 255, 256, 1023, 1024, 5000, 2_000_000)
    served = Served(tuple(replace(OUTCOMES[0], input_len=length) for length in lens), 4.0)
    found = metrics.by_length(served.times(Goodput()), (99.0,))
    counts = {line["bucket"]: line["num_requests"] for line in found}
    assert counts == {"1-256": 2, "256-1K": 2, "1K-4K": 1, "4K-16K": 1, "1M-": 1}


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 50, None),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([4.0, 1.0, 2.0, 3.0], 25, 1.75),
        ([1.0, 3.0, math.nan], 50, 3.0),
        ([1.0, math.nan], 50, None),
        ([1.0, 2.0, math.inf], 99, None),
        ([5.0], 99, 5.0),
    ],
)
def test_percentiles_count_what_never_came(values: list[float], percent: float, expected: float | None) -> None:
    assert metrics.percentile(np.array(values), percent) == expected


def test_parsing() -> None:
    assert Goodput.parse(["ttft:100", "tpot:50,e2el:900.5"]) == Goodput(0.1, 0.05, 0.9005)
    assert Goodput.parse([]) == Goodput()
    assert metrics.parse_metrics("metrics", "e2el, ttft") == ("ttft", "e2el")
    assert metrics.parse_percentiles("percentiles", "99.9,50,50") == (50.0, 99.9)
