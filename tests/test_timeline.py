"""The trace is what chrome://tracing and Perfetto read: names, places and durations."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from medha.batch import Batch, Row
from medha.timeline import Timeline

FIRST = Batch(0, (Row(0, 0, 8, False, False),))
SECOND = Batch(1, (Row(1, 30, 1, True, True), Row(0, 8, 4, False, True)))


def record() -> Timeline:
    timeline = Timeline()
    timeline.record(FIRST, 1.0, 1.5, lambda slot: f"request-{slot}")
    timeline.record(SECOND, 1.5, 1.5125, lambda slot: f"request-{slot}")
    return timeline


def read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(data.decode("ascii"), parse_constant=refuse)


@pytest.mark.parametrize("name", ["run.timeline.json", "run.timeline.json.gz"])
def test_file_is_a_chrome_trace(tmp_path: Path, name: str) -> None:
    record().write(tmp_path / name)
    trace = read(tmp_path / name)
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] == "ms"
    for event in trace["traceEvents"]:
        assert event["ph"] in ("M", "X")
        assert {"name", "ph", "pid", "tid", "args"} <= set(event)
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
        else:
            assert event["cat"] == "step"
            assert event["ts"] >= 0
            assert event["dur"] >= 0


def test_plain_and_gzip_hold_the_same(tmp_path: Path) -> None:
    timeline = record()
    timeline.write(tmp_path / "a.json")
    timeline.write(tmp_path / "a.json.gz")
    assert read(tmp_path / "a.json") == read(tmp_path / "a.json.gz")
    assert (tmp_path / "a.json.gz").read_bytes()[:2] == b"\x1f\x8b"


def test_names_places_and_durations(tmp_path: Path) -> None:
    record().write(tmp_path / "a.json")
    events = read(tmp_path / "a.json")["traceEvents"]
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


def test_a_reused_slot_gets_a_thread_of_its_own(tmp_path: Path) -> None:
    timeline = Timeline()
    timeline.record(FIRST, 0.0, 1.0, lambda slot: "old")
    timeline.record(FIRST, 1.0, 2.0, lambda slot: "new \N{SNOWMAN} \ud800")  # a lone surrogate must not stop the file
    timeline.write(tmp_path / "a.json")
    events = read(tmp_path / "a.json")["traceEvents"]
    chunks = [(e["tid"], e["ts"]) for e in events if e["name"].startswith("chunk")]
    assert chunks == [(0, 0.0), (1, 1e6)]


def test_empty_timeline_is_a_trace(tmp_path: Path) -> None:
    Timeline().write(tmp_path / "a.json")
    assert [e["ph"] for e in read(tmp_path / "a.json")["traceEvents"]] == ["M", "M", "M"]
