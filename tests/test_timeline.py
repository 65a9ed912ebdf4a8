"""The trace is what chrome://tracing and Perfetto read: names, places and durations."""

import gzip
import json
import math
import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from medha.batch import Batch, Row
from medha.records import BatchRecord, RankRecords, Recorder, decode_records, encode_records
from medha.timeline import Timeline

FIRST = Batch(0, (Row(0, 0, 8, False, False),))
SECOND = Batch(1, (Row(1, 30, 1, True, True), Row(0, 8, 4, False, True)))


def written(timeline: Timeline, path: Path) -> list[dict[str, Any]]:
    """The events of the file that a timeline writes."""
    timeline.write(path)
    data = path.read_bytes()
    if path.suffix == ".gz":
        assert data[:2] == b"\x1f\x8b"
        data = gzip.decompress(data)

    trace = json.loads(data.decode("ascii"), parse_constant=pytest.fail)
    assert set(trace) == {"traceEvents", "displayTimeUnit"} and trace["displayTimeUnit"] == "ms"
    return trace["traceEvents"]


def test_names_places_and_durations(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.record(FIRST, 1.0, 1.5, ["request-0"])
    timeline.record(SECOND, 1.5, 1.5125, ["request-1", "request-0"])
    events = written(timeline, tmp_path / "a.json")
    names = [(e["name"], e["pid"], e["tid"], e["args"]["name"]) for e in events if e["ph"] == "M"]
    assert names == [
        ("process_name", 0, 0, "stages"),
        ("thread_name", 0, 0, "stage 0"),
        ("process_name", 1, 0, "requests"),
        ("thread_name", 1, 0, "request-0"),
        ("thread_name", 1, 1, "request-1"),
    ]
    slices = [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"]
    assert slices == [
        ("batch 0", 0, 0, 1e6, 5e5, {"batch": 0, "decodes": 0, "tokens": 8}),
        ("chunk [0:8]", 1, 0, 1e6, 5e5, {"batch": 0, "position": 0, "tokens": 8}),
        ("batch 1", 0, 0, 1.5e6, 12500.0, {"batch": 1, "decodes": 1, "tokens": 5}),
        ("decode", 1, 1, 1.5e6, 12500.0, {"batch": 1, "position": 30, "tokens": 1}),
        ("chunk [8:12]", 1, 0, 1.5e6, 12500.0, {"batch": 1, "position": 8, "tokens": 4}),
    ]


def test_the_newest_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline(kept=3)
    for batch_id in range(100):
        names = [f"{batch_id}-1", f"{batch_id}-0"]
        timeline.record(Batch(batch_id, SECOND.rows), float(batch_id), batch_id + 0.5, names, [1.0])
    events = written(timeline, tmp_path / "a.json")
    assert [e["name"] for e in events if e["ph"] == "X"] == ["batch 99", "decode", "chunk [8:12]"]
    assert [e["ts"] for e in events if e["ph"] == "C"] == [98e6, 99e6]  # the batch of the first has gone
    assert [e["args"]["name"] for e in events if e["ph"] == "M"][3:] == ["99-1", "99-0"]
    assert "holds the newest 3 batches and points of counters; 197 are left out" in caplog.text


def test_no_piece_of_a_trace_is_encoded_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """json.dumps holds the interpreter lock, and the job that was traced still lives."""
    timeline, sizes = Timeline(), []
    for batch_id in range(2000):
        timeline.record(Batch(batch_id, SECOND.rows), 0.0, 1.0, "10")

    def dumps(value: Any, dumps: Any = json.dumps) -> str:
        sizes.append(len(text := dumps(value)))
        return text

    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", dumps)
        events = written(timeline, tmp_path / "a.json")
    assert sum(event["ph"] == "X" for event in events) == 6000
    assert max(sizes) < 200_000


def test_recorder_counts_compute_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)  # time that passes when told
    clocks = SimpleNamespace(perf_counter=lambda: clock.now, thread_time=lambda: clock.now / 2)
    monkeypatch.setattr("medha.records.time", clocks)
    recorder = Recorder()

    def wait(kind: str, until_s: float) -> None:
        with recorder.waiting(kind):
            clock.now = until_s

    wait("control", 1.0)
    recorder.begin()
    clock.now = 1.5  # gets ready for the hidden states, then waits
    wait("hidden", 2.0)
    assert recorder.begin() == 2.0
    clock.now = 5.0
    record = recorder.end(FIRST)
    assert record == BatchRecord(0, 8, 2.0, 5.0, 1.0, 0.5, 0.0, 0.0, cpu_s=1.5)
    assert record.busy_s == 3.0
    wait("send", 5.25)
    wait("report", 5.5)
    wait("report", 6.0)
    recorder.begin()
    wait("merge", 6.5)  # within the compute
    second = recorder.end(SECOND)
    assert second == BatchRecord(1, 5, 6.0, 6.5, 0.0, 0.0, 0.75, 0.25, 0.5, cpu_s=0.25)
    assert second.busy_s == 0.5
    assert [kept.batch_id for kept in recorder.take()] == [0, 1]
    assert recorder.take() == ()


def ran(batch_id: int, start_s: float, end_s: float) -> BatchRecord:
    return BatchRecord(batch_id, 8, start_s, end_s, 0.0, 0.125, 0.0, 0.0)


def test_records_survive_their_json_and_another_nodes_clock_is_shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    merged = ran(1, 2.3, 1e6 / 3)._replace(merge_wait_s=0.1)
    records = RankRecords(5, 2, 1, (ran(0, 1.1, 2.3), merged), 3)
    assert decode_records(encode_records(records)) == records
    assert decode_records(encode_records(RankRecords(0, 0, 0, ()))).batches == ()
    monkeypatch.setattr("medha.records._epoch_s", lambda: 1e9)
    sent = json.loads(encode_records(RankRecords(1, 1, 0, (ran(0, 1.0, 2.0),))))
    sent["node"] = platform.node() + "-other"
    sent["epoch_s"] += 100.0  # its monotonic clock began 100 s after ours
    (record,) = decode_records(json.dumps(sent).encode()).batches
    assert record.start_s == pytest.approx(101.0)
    assert record.busy_s == pytest.approx(1.0)


def test_ranks_have_lanes_and_batches_arrows(tmp_path: Path) -> None:
    """Records come in two parts; rank 0's take the place of what the engine recorded of the stages."""
    parts = [
        [RankRecords(0, 0, 0, (ran(0, 10.0, 11.0),)), RankRecords(1, 1, 0, (ran(0, 11.0, 12.0),))],
        [RankRecords(0, 0, 0, (ran(1, 11.0, 12.0),)), RankRecords(1, 1, 0, ())],
    ]
    timeline = Timeline()
    timeline.record(FIRST, 0.0, 1.0, ["a"])
    timeline.gather_from(lambda: parts.pop(0), zero_s=10.0)
    timeline.collect()
    timeline.close()
    events = written(timeline, tmp_path / "a.json")  # asks nobody any more
    lanes = [(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name" and e["pid"] == 0]
    assert lanes == [(0, "stage 0"), (1, "stage 1")]
    slices = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    found = [(e["name"], e["tid"], e["ts"], e["dur"]) for e in slices]
    assert found == [("batch 0", 0, 0.0, 1e6), ("batch 1", 0, 1e6, 1e6), ("batch 0", 1, 1e6, 1e6)]
    assert [e["args"]["hidden_wait_s"] for e in slices] == [0.125] * 3
    arrows = [(e["ph"], e["id"], e["tid"], e["ts"], e.get("bp")) for e in events if e["ph"] in "sf"]
    assert arrows == [("s", "0-1-0", 0, 1e6 - 1, None), ("f", "0-1-0", 1, 1e6, "e")]
    assert [e["name"] for e in events if e["ph"] == "X" and e["pid"] == 1] == ["chunk [0:8]"]


@pytest.mark.parametrize("first_s", [0.0, 1e7 / 3])
def test_neighbours_touch_and_arrows_begin_and_end_in_their_slices(tmp_path: Path, first_s: float) -> None:
    """Perfetto drops a slice that begins before its neighbour ends, by however little."""
    ends_s = (first_s + np.random.default_rng(0).uniform(2e-6, 1e-3, 1001).cumsum()).tolist()
    lanes = [tuple(ran(i, *ends_s[i + lane : i + lane + 2]) for i in range(999)) for lane in (0, 1)]
    timeline = Timeline()
    timeline.gather_from(lambda: [RankRecords(lane, lane, 0, lanes[lane]) for lane in (0, 1)], zero_s=0.1)
    events = written(timeline, tmp_path / "a.json")
    first, second = ([(e["ts"], e["ts"] + e["dur"]) for e in events if (e["ph"], e["tid"]) == ("X", i)] for i in (0, 1))
    assert [end for _, end in first[:-1]] == [start for start, _ in first[1:]] and first[1:] == second[:-1]
    leaves, comes = ([e["ts"] for e in events if e["ph"] == kind] for kind in "sf")
    assert all(start <= at < end for at, (start, end) in zip(leaves, first, strict=True))
    assert comes == [start for start, _ in second]


@pytest.mark.parametrize(
    ("places", "lanes", "arrows"),
    [
        ([(0, 0, 0, 0), (1, 0, 1, 0), (2, 1, 0, 0), (3, 1, 1, 0)], "stage {1}, tp {2}", ["0-2-0", "1-3-0"]),
        ([(0, 0, 0, 0), (1, 1, 0, 0), (2, 0, 0, 1), (3, 1, 0, 1)], "group {3}, stage {1}", ["0-1-0", "2-3-0"]),
    ],
    ids=["tp", "kvp"],
)
def test_ranks_side_by_side_have_lanes_of_their_own(
    tmp_path: Path, places: list[tuple[int, int, int, int]], lanes: str, arrows: list[str]
) -> None:
    """Hidden states go from stage to stage within a group and tensor-parallel index; merges show in the slice."""
    records = [
        RankRecords(rank, stage, tp, (ran(0, 1.0 + stage, 2.0)._replace(merge_wait_s=0.25),), group)
        for rank, stage, tp, group in places
    ]
    timeline = Timeline()
    timeline.gather_from(lambda: records, zero_s=0.0)
    events = written(timeline, tmp_path / "a.json")
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == [lanes.format(*p) for p in places]
    assert [e["id"] for e in events if e["ph"] == "s"] == [e["id"] for e in events if e["ph"] == "f"] == arrows
    assert {e["args"]["merge_wait_s"] for e in events if e["ph"] == "X"} == {0.25}


def test_counters_of_time_budget_and_slack(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.record(FIRST, 1.0, 1.5, ["a"], step_s={"predicted": 0.4, "busy": 0.5, "budget": 0.45})
    chunks = Batch(0, (Row(9, 3, 1, True, True), *(Row(slot, 0, 8, False, False) for slot in range(3))))
    timeline.record(chunks, 1.0, 2.0, ["decode", "a", "no deadline", "late"], [2.5, math.inf, -0.5])
    timeline.record(FIRST, 1.0, 2.0, ["no deadline \ud800"], [math.inf])  # a lone surrogate must not stop the file
    events = written(timeline, tmp_path / "a.json.gz")
    assert [(event["name"], event["ts"], event["args"]) for event in events if event["ph"] == "C"] == [
        ("step time (ms)", 1.5e6, {"predicted": 400.0, "busy": 500.0, "budget": 450.0}),
        ("slack (s)", 1e6, {"a": 2.5, "late": -0.5}),
    ]
