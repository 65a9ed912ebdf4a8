"""Trace files: round trips, the traps of each format, and damaged files, which are always a named error."""

import gzip
import json
import logging
import math
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.errors import ConfigError, MedhaError
from medha.workload import io as files
from medha.workload.formats import FORMATS
from medha.workload.io import read_trace, write_trace
from medha.workload.trace import MAX_TOKENS, Row, Trace, TraceFormatError

MOON = '{"timestamp": %s, "input_length": %s, "output_length": %s}\n'
OWN = '{"id": "a", "num_prompt_tokens": 1, "num_output_tokens": 1}\n'

tokens = st.integers(1, MAX_TOKENS)
seconds = st.floats(0, 1e6) | st.integers(0, 10**9).map(lambda ms: ms / 1000)
slos = st.none() | st.floats(1e-6, 1e6)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
rows = st.builds(
    Row,
    seconds,
    tokens,
    tokens,
    st.none(),
    st.lists(st.integers(0, 2**63 - 1), max_size=5).map(lambda ids: array("q", ids)),
    slos,
    slos,
    st.integers(0, 3),
)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    drawn = draw(st.lists(rows, min_size=1, max_size=8))
    names = draw(st.lists(texts, min_size=len(drawn), max_size=len(drawn), unique=True))
    columns = list(zip(*drawn, strict=True))
    nan = [[math.nan if value is None else value for value in columns[i]] for i in (5, 6)]
    some = draw(st.booleans())
    return Trace(
        np.sort(columns[0]),
        np.array(columns[1]),
        np.array(columns[2]),
        np.array(names, np.dtypes.StringDType()),
        np.fromiter(columns[4], dtype=object) if some else None,
        *((np.array(nan[0]), np.array(nan[1]), np.array(columns[7], np.int8)) if some else ()),
    )


def error_of(call: Callable[[], object]) -> str | None:
    """The message of the error of ours that a call raises; any other error ends the test."""
    try:
        call()
    except MedhaError as error:
        return str(error)
    return None


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@settings(max_examples=60, deadline=None)
@given(trace=traces(), packed=st.booleans())
def test_round_trip(trace: Trace, packed: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / ("trace.gz" if packed else "trace")
        write_trace(path, trace)
        reading = read_trace(path)
        written = path.read_bytes()
        write_trace(path, reading.trace)
        assert path.read_bytes() == written
    assert (reading.format, reading.has_arrivals) == ("medha", True)
    assert list(reading.trace.rows()) == list(trace.rows())


# ---------------------------------------------------------------------------------------------------------------------
# What each format means


def test_arrivals_out_of_order_are_sorted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="medha")  # a command line run before may have raised it
    reading = read_trace(write(tmp_path / "a", MOON % (1500, 1, 1) + MOON % (500, 2, 2)))
    assert (reading.trace.arrival_s.tolist(), reading.trace.prompt_tokens.tolist()) == ([0.5, 1.5], [2, 1])
    assert "arrivals are not in order, first at request 2; the trace is sorted" in caplog.text


def test_lengths_without_arrivals(tmp_path: Path) -> None:
    reading = read_trace(write(tmp_path / "a", OWN + OWN.replace('"a"', '"b"')))
    assert (reading.has_arrivals, reading.trace.arrival_s.tolist()) == (False, [0.0, 0.0])


def test_own_lines_as_request_files_have_them(tmp_path: Path) -> None:
    own = {
        "arrival_s": 1,
        "num_prompt_tokens": 2,
        "num_output_tokens": 3,
        "slo": {"ttft_s": 2},
        "priority": "low",
        "tenant": "a",
    }
    lines = [{"prompt_token_ids": [5, 6, 7], "max_tokens": 9, "temperature": 0.5}, {"id": 7, **own}]
    reading = read_trace(write(tmp_path / "a", "\n\n".join(map(json.dumps, lines))))
    assert (reading.format, reading.has_arrivals) == ("medha", True)
    first, second = reading.trace.rows()
    assert first == Row(0.0, 3, 9, "line-1", None, None, None, 2, "")
    assert second == Row(1.0, 2, 3, "7", None, 2.0, None, 3, "a")


# ---------------------------------------------------------------------------------------------------------------------
# What is wrong with a file


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff", "\n"])
def test_bom_crlf_and_blank_lines(tmp_path: Path, start: str, end: str) -> None:
    text = MOON % (0, 3, 4) + "\n" + MOON % (9, 5, 6)
    reading = read_trace(write(tmp_path / "a", start + text.replace("\n", end)))
    assert reading.trace.prompt_tokens.tolist() == [3, 5]
    assert reading.trace.output_tokens.tolist() == [4, 6]


WRONG: list[tuple[str | bytes, str]] = [
    ("", "has no requests; accepted: at least 1"),
    ('{"a": 1}', "line 1: num_prompt_tokens is missing; accepted"),
    (MOON % (1700000000000000, 1, 1), r"line 1: timestamp=1700000000000000; accepted: .* at most 1e\+13"),
    (MOON % ('"1_0"', 1, 1), "line 1: timestamp='1_0'; accepted"),
    (MOON % (0, 0, 1), f"line 1: input_length=0; accepted: an integer from 1 to {MAX_TOKENS}"),
    (MOON % (0, 1, 3.5), "line 1: output_length=3.5; accepted"),
    (MOON % (0, 1, '"' + "9" * 9999 + '"'), "line 1: output_length='999"),
    ((MOON % (0, 1, 1)).encode() + b"\xff\n", "line 2: .* is not JSON .*invalid start byte"),
    (gzip.compress((MOON % (0, 1, 1)).encode() * 9999)[:-9], "the gzip data are damaged or end early"),
    (MOON % (0, 1, 1) + "{\n", r"line 2: '\{' is not JSON \(.*\); accepted: a JSON object"),
    (MOON % (0, 1, 1) + "[1]\n", r"line 2: \[1\]; accepted: a JSON object"),
    (MOON % (0, 1, 1) + '{"timestamp": 3}\n', "line 2: input_length is missing; accepted"),
    (MOON % ("NaN", 1, 1), "line 1: timestamp=nan; accepted: a time in ms, not negative"),
    (MOON % (0, "[]", 1), r"line 1: input_length=\[\]; accepted"),
    ((MOON % (0, 1, 1)).replace("}", ', "hash_ids": [1.5]}'), r"line 1: hash_ids=\[1.5\]; accepted"),
    ('{"a": ' + "[" * 99_999, r"line 1: .* is not JSON"),
    (OWN + OWN, "line 2: id='a' is that of line 1; accepted: different ids"),
    (OWN.replace('"a"', '""'), "line 1: id=''; accepted: a string"),
    (OWN.replace('"a"', r'"\ud800"'), r"line 1: id='\\ud800'; accepted: a string of Unicode characters"),
    (OWN.replace("}", ', "slo": {"ttft": 1}}'), "line 1: slo=.*; accepted: an object with ttft_s and tpot_s"),
    (OWN.replace("}", ', "slo": {"ttft_s": 0}}'), "line 1: slo.ttft_s=0; accepted: a finite number above 0"),
    (OWN.replace("}", ', "priority": [1]}'), r"line 1: priority=\[1\]; accepted: one of realtime"),
    (OWN.replace("}", ', "arrival_s": "soon"}'), "line 1: arrival_s='soon'; accepted: a time in s"),
    ('{"prompt": "Hi", "max_tokens": 3}', "line 1: num_prompt_tokens is missing"),
]


@pytest.mark.parametrize(("content", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_files(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = write(tmp_path / "in.txt", content)
    with pytest.raises(TraceFormatError, match=message) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < len(str(path)) + 400


def test_a_line_of_any_length_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 100)
    path = write(tmp_path / "a.jsonl", OWN + " " * 200)
    with pytest.raises(TraceFormatError, match="line 2: more than 100 bytes; accepted: shorter lines"):
        read_trace(path)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace file .*nowhere: No such file"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_trace(tmp_path)
    trace = Trace(np.zeros(1), np.ones(1, int), np.ones(1, int))
    for path in (tmp_path / "no" / "a.csv", write(tmp_path / "file", "x") / "a.csv"):
        with pytest.raises(ConfigError, match="cannot be written"):
            write_trace(path, trace)
    with pytest.raises(ConfigError, match="the trace has no requests; accepted: at least 1"):
        write_trace(tmp_path / "a.csv", trace[:0])


def test_a_failed_write_leaves_the_former_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(row: Row) -> str:
        raise OSError(28, "No space left on device")

    path = write(tmp_path / "a.jsonl", "former")
    monkeypatch.setattr("medha.workload.io.medha_line", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        write_trace(path, Trace(np.zeros(1), np.ones(1, int), np.ones(1, int)))
    assert path.read_text() == "former"
    assert list(tmp_path.iterdir()) == [path]


# ---------------------------------------------------------------------------------------------------------------------
# Garbage

SAMPLES = {"mooncake": MOON % (0, 3, 4) * 3, "medha": OWN + OWN.replace("a", "b")}


@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_garbage_is_a_named_error(format: str, data: st.DataObject) -> None:
    sample = SAMPLES[format].encode()
    if data.draw(st.booleans()):
        sample = gzip.compress(sample, mtime=0)
    at = data.draw(st.integers(0, len(sample)))
    junk = data.draw(st.binary(max_size=8) | st.sampled_from([b'"', b"{", b"[" * 3000, b"\0", b"1e999", b"-", b"\n"]))
    sample = sample[:at] + junk + sample[at + data.draw(st.integers(0, 9)) :]
    logging.disable()
    try:
        with tempfile.TemporaryDirectory() as name:
            path = write(Path(name) / "a", sample)
            message = error_of(lambda: read_trace(path))
            assert message is None or (str(path) in message and ("accepted" in message or "gzip" in message))
    finally:
        logging.disable(logging.NOTSET)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = {
    "mooncake": ["timestamp", "input_length", "output_length", "hash_ids"],
    "medha": [
        "id",
        "arrival_s",
        "num_prompt_tokens",
        "num_output_tokens",
        "slo",
        "priority",
        "tenant",
        "hash_ids",
        "max_tokens",
    ],
}


@pytest.mark.parametrize("format", KEYS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_values_are_a_request_or_a_named_error(format: str, data: st.DataObject) -> None:
    values = json_values | st.integers(1, 100)
    fields = data.draw(st.dictionaries(st.sampled_from(KEYS[format]), values, min_size=1))
    with tempfile.TemporaryDirectory() as name:
        path = write(Path(name) / "a", json.dumps(fields))
        message = error_of(lambda: read_trace(path))
        assert message is None or "accepted" in message
