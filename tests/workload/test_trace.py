"""The columns of a trace: what is refused, slices, windows, scales."""

import math
from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from medha.errors import ConfigError
from medha.workload.trace import Row, Trace, prefix_ids, trace_stats


def make_trace(times: list[float], **columns: Any) -> Trace:
    count = len(times)
    return Trace(np.array(times), np.arange(1, count + 1), np.arange(count, 0, -1), **columns)


def test_columns_are_typed_and_read_only() -> None:
    given = np.array([0.0, 1.0])
    trace = Trace(given, np.array([3, 4], np.int32), [5, 6])  # type: ignore[arg-type]
    given[0] = 7.0
    assert (trace.arrival_s.dtype, trace.prompt_tokens.dtype) == (np.float64, np.int64)
    assert trace.arrival_s.tolist() == [0.0, 1.0]
    assert trace.request_ids.tolist() == ["0", "1"]
    assert given.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        trace.output_tokens[0] = 1
    assert np.shares_memory(trace[:1].arrival_s, trace.arrival_s)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"arrival_s": [0.0, math.nan]}, r"arrival_s\[1\]=nan; accepted: finite seconds"),
        ({"arrival_s": [0.0, math.inf]}, r"arrival_s\[1\]=inf; accepted: finite seconds"),
        ({"arrival_s": [-1.0, 0.0]}, r"arrival_s\[0\]=-1.0; accepted: finite"),
        ({"arrival_s": [2.0, 1.0]}, r"arrival_s\[1\]=1.0; accepted: .* no less than the one before"),
        ({"arrival_s": [[0.0, 1.0]]}, "arrival_s has shape"),
        ({"arrival_s": ["a", "b"]}, "arrival_s: Cannot cast"),
        ({"output_tokens": [1.5, 2.0]}, "output_tokens: Cannot cast .*; accepted: an array of int64"),
        ({"output_tokens": [1]}, r"output_tokens has shape \(1,\); accepted: one dimension, as long as arrival_s"),
    ],
)
def test_wrong_columns_are_named(columns: dict[str, Any], message: str) -> None:
    whole = {"arrival_s": [0.0, 1.0], "prompt_tokens": [1, 2], "output_tokens": [3, 4], **columns}
    with pytest.raises(ConfigError, match=message):
        Trace(**whole)


def test_slices_windows_and_scales() -> None:
    trace = make_trace([1.0, 2.0, 2.0, 5.0], ttft_slo_s=[1.0, math.nan, 2.0, 3.0])
    assert (len(trace), trace.duration_s, trace.qps) == (4, 4.0, 0.75)
    assert trace[1:3].request_ids.tolist() == ["1", "2"]
    assert trace[:2].arrival_s.tolist() == [1.0, 2.0]
    assert len(trace.first(None)) == 4 and len(trace.first(1, 5.0)) == 1
    assert trace.first(None, 5.0).arrival_s.tolist() == [1.0, 2.0, 2.0]
    assert trace.first(9, 1.0, 1.5).arrival_s.tolist() == [0.5]
    assert trace.first(3, None, 2.0).qps == 2.0  # of those that come, whatever the rest of the file does
    assert trace.scaled(1.5).arrival_s.tolist() == [0.5, 1.0, 1.0, 2.5]
    assert trace.scaled(np.float32(1.5)).qps == 1.5
    assert trace.from_zero().arrival_s.tolist() == [0.0, 1.0, 1.0, 4.0]
    assert (trace[:0].duration_s, trace[:0].qps, len(trace[:0].from_zero())) == (0.0, None, 0)
    for wrong, qps in ((trace, 0.0), (trace, math.nan), (trace[1:3], 1.0)):
        with pytest.raises(ConfigError, match="accepted"):
            wrong.scaled(qps)
    for duration_s in (math.nan, math.inf, -1.0, 0.0):
        with pytest.raises(ConfigError, match=r"duration_s=.*; accepted: a finite number above 0"):
            trace.first(None, duration_s)


def test_rows() -> None:
    hashes = np.fromiter([array("q", [1, 2]), None], dtype=object)
    trace = make_trace([0.0, 1.0], tpot_slo_s=[math.nan, 0.5], prefix_hashes=hashes, priority=[0, 3])
    assert list(trace.rows()) == [
        Row(0.0, 1, 2, "0", array("q", [1, 2]), None, None, 0),
        Row(1.0, 2, 1, "1", None, None, 0.5, 3),
    ]
    many = make_trace([float(i) for i in range(70_000)])
    assert [row.request_id for row in many.rows()] == many.request_ids.tolist()


def test_stats() -> None:
    stats = trace_stats(make_trace([0.0, 1.0, 4.0]))
    assert (stats["qps"], stats["gap_cv"], stats["burstiness"]) == (0.5, 0.5, 4.0)
    assert stats["prefix_reuse"] is None
    hashes = np.fromiter([array("q", [7, 8, 9]), None, array("q", [7, 8, 5])], dtype=object)
    same = Trace(np.arange(3.0), np.array([1200, 100, 1030]), np.ones(3, np.int64), prefix_hashes=hashes)
    named = replace(same, tenant=np.array(["a", "b", "a"], dtype=np.dtypes.StringDType()))
    rows = list(named.rows())
    first, others, third = (prefix_ids(row, 16) for row in (rows[0], rows[0]._replace(tenant="b"), rows[2]))
    assert first[:512] == third[:512] != others[:512]
    assert trace_stats(same)["prefix_reuse"] == 1024 / 2330  # of whole blocks of 512, two came before
    apart = replace(same, tenant=np.array(["a", "b", "c"], dtype=np.dtypes.StringDType()))
    assert (trace_stats(named)["prefix_reuse"], trace_stats(apart)["prefix_reuse"]) == (1024 / 2330, 0.0)
    single = trace_stats(make_trace([3.0]))
    assert [single[name] for name in ("first_arrival_s", "qps", "gap_cv", "burstiness")] == [3.0, None, None, None]
