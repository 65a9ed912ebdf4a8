"""Trace files: round trips of every format, the traps of each, and damaged files, which are always a named error."""

import gzip
import json
import math
import os
import tempfile
from array import array
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from medha.errors import ConfigError, MedhaError
from medha.workload import io as files
from medha.workload.formats import FORMATS
from medha.workload.io import detect, open_bytes, read_trace, write_trace
from medha.workload.trace import MAX_TOKENS, Row, Trace, TraceFormatError

VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"

tokens = st.integers(1, MAX_TOKENS)
seconds = st.floats(0, 1e6) | st.integers(0, 10**9).map(lambda ms: ms / 1000)
slos = st.none() | st.floats(1e-6, 1e6)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
hashes = st.lists(st.integers(0, 2**63 - 1), max_size=5).map(lambda ids: array("q", ids))
rows = st.builds(Row, seconds, tokens, tokens, st.none(), hashes, slos, slos, st.integers(0, 3))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    drawn = draw(st.lists(rows, min_size=1, max_size=8))
    names = draw(st.lists(texts, min_size=len(drawn), max_size=len(drawn), unique=True))
    columns = list(zip(*drawn, strict=True))
    nan = [[math.nan if value is None else value for value in columns[i]] for i in (5, 6)]
    tenants = np.array(names[::-1], np.dtypes.StringDType())
    some = draw(st.booleans())
    return Trace(
        np.sort(columns[0]),
        np.array(columns[1]),
        np.array(columns[2]),
        np.array(names, np.dtypes.StringDType()),
        np.fromiter(columns[4], dtype=object) if some else None,
        *((np.array(nan[0]), np.array(nan[1]), np.array(columns[7], np.int8), tenants) if some else ()),
    )


def read_or_named(content: bytes, *formats: str | None) -> None:
    """It is a trace, or there is an error of ours, which names the file and what is accepted."""
    with tempfile.TemporaryDirectory() as name:
        path = write(Path(name) / "a", content)
        for format in formats:
            said = ""
            try:
                read_trace(path, format)
            except MedhaError as error:
                said = str(error)
            assert not said or (str(path) in said and ("accepted" in said or "gzip" in said))


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@settings(max_examples=60, deadline=None)
@given(trace=traces(), packed=st.booleans())
def test_round_trip(trace: Trace, packed: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / ("trace.gz" if packed else "trace")
        write_trace(path, trace)
        with open_bytes(path) as file:
            assert detect(path, file).name == "medha"
        reading = read_trace(path)
        written = path.read_bytes()
        write_trace(path, reading.trace)
        assert path.read_bytes() == written
    assert (reading.format, reading.has_arrivals, reading.num_dropped) == ("medha", True, 0)
    assert list(reading.trace.rows()) == list(trace.rows())


# -- what each format means ------------------------------------------------------------------------------------


def test_azure_times_count_from_the_earliest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="medha")  # a command line run before may have raised it
    local = ("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:46.6805912", "2023-11-16T18:15:47")
    zoned = ("2024-05-10 00:00:00.009930+00:00", "2024-05-10 02:00:01.009930+02:00", "2024-05-10 00:00:02Z")
    for times, found_s in ((local, [0.0, 1e-6, 0.31941]), (zoned, [0.0, 1.0, 1.99007])):
        path = write(tmp_path / "a.csv", AZURE + "".join(f"{time},374,44\n" for time in times))
        assert read_trace(path).trace.arrival_s.tolist() == found_s
    assert not caplog.records
    path = write(tmp_path / "a.csv", AZURE + "2023-11-16 18:15:47,1,1\n2023-11-16 18:15:46,2,2\n")
    reading = read_trace(path)
    assert (reading.trace.arrival_s.tolist(), reading.trace.prompt_tokens.tolist()) == ([0.0, 1.0], [2, 1])
    assert "arrivals are not in order, first at request 2; the trace is sorted" in caplog.text


def test_burstgpt_of_both_releases(tmp_path: Path) -> None:
    lines = "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,API log\n118.5,GPT-4,417,276.0,693,x\n"
    reading = read_trace(write(tmp_path / "1.csv", BURSTGPT + lines))
    assert (reading.format, reading.num_dropped) == ("burstgpt", 1)
    assert reading.trace.arrival_s.tolist() == [5.0, 118.5]
    assert reading.trace.output_tokens.tolist() == [18, 276]
    later = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    second = write(tmp_path / "2.csv", later + "5,ab,3.5,ChatGPT,472,18,490,Conversation log\n")
    assert next(read_trace(second).trace.rows())[:3] == (5.0, 472, 18)


def test_vidur_without_arrivals(tmp_path: Path) -> None:
    reading = read_trace(write(tmp_path / "a.csv", "num_decode_tokens,num_prefill_tokens,pd_ratio\n2,3,1.5\n4,5,1\n"))
    assert (reading.format, reading.has_arrivals) == ("vidur", False)
    assert (reading.trace.prompt_tokens.tolist(), reading.trace.arrival_s.tolist()) == ([3, 5], [0.0, 0.0])


def test_own_lines_as_request_files_have_them(tmp_path: Path) -> None:
    own = {"arrival_s": 1, "num_prompt_tokens": 2, "num_output_tokens": 3}
    own |= {"slo": {"ttft_s": 2}, "priority": "low", "tenant": "a"}
    lines = [{"prompt_token_ids": [5, 6, 7], "max_tokens": 9, "temperature": 0.5, "tenant": ""}, {"id": 7, **own}]
    reading = read_trace(write(tmp_path / "a", "\n\n".join(map(json.dumps, lines))))
    assert (reading.format, reading.has_arrivals) == ("medha", True)
    first, second = reading.trace.rows()
    assert first == Row(0.0, 3, 9, "line-1", None, None, None, 2, "")
    assert second == Row(1.0, 2, 3, "7", None, 2.0, None, 3, "a")


TURNS = [("what is it", "a b c"), ("é" * 9, "😀"), ("lone", ""), ("x", "y" * 4001)]


def sharegpt(pairs: list[tuple[str, str]], **dump: Any) -> str:
    conversations = [
        {"id": "n", "conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}, {"value": "z"}]}
        for a, b in pairs
    ]
    return json.dumps([*conversations, {"id": "one turn", "conversations": [{"value": "x"}]}], **dump)


def test_sharegpt_estimates_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="medha")  # a command line run before may have raised it
    reading = read_trace(write(tmp_path / "a.json", sharegpt(TURNS, indent=1)))
    assert (reading.format, reading.has_arrivals, reading.num_dropped) == ("sharegpt", False, 2)
    assert reading.trace.prompt_tokens.tolist() == [3, 3, 1]
    assert reading.trace.output_tokens.tolist() == [2, 1, 1001]
    assert "tokens are an estimate, characters / 4" in caplog.text


@pytest.mark.parametrize(
    ("format", "line"),
    [
        ("medha", '{"id": "conversation-1", "num_prompt_tokens" : 3, "num_output_tokens": 4}'),
        ("medha", '{"id": "conversations", "tenant": "timestamp", "prompt_token_ids": [1, 2, 3], "max_tokens": 4}'),
        ("mooncake", '{"conversation_id": 7, "timestamp": 0, "input_length": 3, "output_length": 4}'),
        ("mooncake", '{"model": "prompt_token_ids", "timestamp": 0, "input_length": 3, "output_length": 4}'),
        ("medha", '{"prompt_token_ids": [1, 2, 3], "max_tokens": 4, "timestamp": 1, "input_length": 2}'),
        ("sharegpt", '{"id": 1, "conversation":[{"value": "a b c d e f"}, {"value": "0123456789abcdef"}]}'),
    ],
)
def test_a_format_is_recognised_by_keys_not_values(tmp_path: Path, format: str, line: str) -> None:
    reading = read_trace(write(tmp_path / "a", line))
    assert (reading.format, next(reading.trace.rows())[1:3]) == (format, (3, 4))


# -- what is wrong with a file ---------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff", "\n"])
@pytest.mark.parametrize("name", ["vidur", "mooncake", "sharegpt"])
def test_bom_crlf_and_blank_lines(tmp_path: Path, name: str, start: str, end: str) -> None:
    texts = {
        "vidur": VIDUR + '0.5,"3",4\n\n1,5,6\n',
        "mooncake": '{"timestamp": 0, "input_length": 3, "output_length": 4}\n\n'
        '{"timestamp": 9, "input_length": 5, "output_length": 6}\n',
        "sharegpt": sharegpt([("a" * 12, "a" * 16), ("a" * 20, "a" * 24)], indent=2),
    }
    reading = read_trace(write(tmp_path / "a", start + texts[name].replace("\n", end)))
    assert reading.format == name
    assert reading.trace.prompt_tokens.tolist() == [3, 5]
    assert reading.trace.output_tokens.tolist() == [4, 6]


MOON = '{"timestamp": %s, "input_length": %s, "output_length": %s}\n'
OWN = '{"id": "a", "num_prompt_tokens": 1, "num_output_tokens": 1}\n'

WRONG: list[tuple[str, str | bytes, str]] = [
    ("vidur", "", "is empty; accepted: a trace with requests"),
    ("vidur", VIDUR, r"has no requests \(0 dropped, 0 wrong\); accepted: at least 1"),
    ("vidur", "a,b\n1,2\n", "line 1: 'a,b' is of no known format; accepted, with their columns or keys: sharegpt: "),
    ("vidur", VIDUR + "1,2\n", "line 2: '1,2' has 2 fields; accepted: 3, as the header"),
    ("vidur", VIDUR.replace("\n", ",arrived_at\n") + "1,2,3,4\n", "line 1: header .* has a column twice"),
    ("vidur", VIDUR + '1,"2,3\n', "line 2: .* is not CSV .*; accepted: UTF-8, fields split by commas, quotes closed"),
    ("vidur", VIDUR + "1,2,3\nnan,2,3\n", "line 3: arrived_at='nan'; accepted: a time in s, not negative"),
    ("vidur", VIDUR + "1700000000000,2,3\n", r"line 2: arrived_at='1700000000000'; accepted: .* at most 1e\+10"),
    ("vidur", VIDUR + "1_0,2,3\n", "line 2: arrived_at='1_0'; accepted"),
    ("vidur", VIDUR + ",2,3\n", "line 2: arrived_at is missing; accepted"),
    ("vidur", VIDUR + "1,0,3\n", f"line 2: num_prefill_tokens='0'; accepted: an integer from 1 to {MAX_TOKENS}"),
    ("vidur", VIDUR + "1,2,3.5\n", "line 2: num_decode_tokens='3.5'; accepted"),
    ("vidur", VIDUR + "1,2," + "9" * 9999 + "\n", "line 2: num_decode_tokens='999"),
    ("vidur", VIDUR.encode() + b"1,2,\xff\n", "line 2: .* is not CSV .*invalid start byte"),
    ("vidur", gzip.compress(VIDUR.encode() + b"1,2,3\n" * 9999)[:-9], "the gzip data are damaged or end early"),
    ("azure", AZURE + "18:15:46,374,44\n", "line 2: TIMESTAMP='18:15:46'; accepted: an ISO date and time as"),
    ("azure", AZURE + "1700159746,374,44\n", "line 2: TIMESTAMP='1700159746'; accepted"),
    ("burstgpt", BURSTGPT + "5,GPT-4,0,18,18,x\n", "line 2: Request tokens='0'; accepted: an integer from 1"),
    ("burstgpt", BURSTGPT + "5,GPT-4,9,0,9,x\n", r"has no requests \(1 dropped, 0 wrong\)"),
    ("mooncake", MOON % (0, 1, 1) + "{\n", r"line 2: '\{' is not JSON \(.*\); accepted: a JSON object"),
    ("mooncake", MOON % (0, 1, 1) + "[1]\n", r"line 2: \[1\]; accepted: a JSON object"),
    ("mooncake", MOON % (0, 1, 1) + '{"timestamp": 3}\n', "line 2: input_length is missing; accepted"),
    ("mooncake", MOON % ("NaN", 1, 1), "line 1: timestamp=nan; accepted: a time in ms, not negative"),
    ("mooncake", MOON % (0, "[]", 1), r"line 1: input_length=\[\]; accepted"),
    ("mooncake", (MOON % (0, 1, 1)).replace("}", ', "hash_ids": [1.5]}'), r"line 1: hash_ids=\[1.5\]; accepted"),
    ("mooncake", '{"a": ' + "[" * 99_999, r"line 1: .* is not JSON"),
    ("medha", OWN + OWN, "line 2: id='a' is that of line 1; accepted: different ids"),
    ("medha", OWN.replace('"a"', '""'), "line 1: id=''; accepted: a string"),
    ("medha", OWN.replace('"a"', r'"\ud800"'), r"line 1: id='\\ud800'; accepted: a string of Unicode characters"),
    ("medha", OWN.replace("}", ', "slo": {"ttft": 1}}'), "line 1: slo=.*; accepted: an object with ttft_s and tpot_s"),
    ("medha", OWN.replace("}", ', "slo": {"ttft_s": 0}}'), "line 1: slo.ttft_s=0; accepted: a finite number above 0"),
    ("medha", OWN.replace("}", ', "priority": [1]}'), r"line 1: priority=\[1\]; accepted: one of realtime"),
    ("medha", OWN.replace("}", ', "arrival_s": "soon"}'), "line 1: arrival_s='soon'; accepted: a time in s"),
    ("medha", '{"prompt": "Hi", "max_tokens": 3}', "line 1: num_prompt_tokens is missing"),
    ("sharegpt", '[{"conversations": [{"value": 3}, {"value": ""}]}]', "entry 1: value=.*; accepted: a string in each"),
    ("sharegpt", '[\n{"conversations": 5}]', "entry 1: conversations=5; accepted: a list of objects with 'value'"),
    ("sharegpt", "[\n5]", "entry 1: 5; accepted: a JSON object"),
    ("sharegpt", sharegpt(TURNS)[:-1], r"is not JSON \(.*\); accepted: a JSON object"),
    ("sharegpt", '[{"conversations": ' + "[" * 99_999, "is not JSON"),
    ("sharegpt", b'[{"conversations": "\xff"}]', "is not JSON .*invalid start byte"),
    ("sharegpt", "[]", r"has no requests \(0 dropped, 0 wrong\)"),
]


@pytest.mark.parametrize(("format", "content", "message"), WRONG, ids=[f"{i}-{its[0]}" for i, its in enumerate(WRONG)])
def test_wrong_files(tmp_path: Path, format: str, content: str | bytes, message: str) -> None:
    path = write(tmp_path / "in.txt", content)
    named = None if "known format" in message or "is empty" in message else format
    with pytest.raises(TraceFormatError, match=message) as caught:
        read_trace(path, named)
    assert str(caught.value).startswith(str(path))
    assert len(str(caught.value)) < len(str(path)) + 400
    with pytest.raises(ConfigError):
        read_trace(path)


def test_wrong_lines_can_be_left_out(tmp_path: Path) -> None:
    text = OWN + "junk\n" + OWN + OWN.replace('"a"', '"b"') + OWN.replace("1", "0") + OWN
    path = write(tmp_path / "a.jsonl", text)
    faults: list[TraceFormatError] = []
    reading = read_trace(path, on_fault=faults.append)
    assert [str(error).split(": ")[0][-1] for error in faults] == ["2", "3", "5", "6"]
    assert (reading.num_faults, reading.trace.request_ids.tolist()) == (4, ["a", "b"])


def test_a_line_of_any_length_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 100)
    path = write(tmp_path / "a.csv", VIDUR + "1,2," + "3" * 200)
    with pytest.raises(TraceFormatError, match="line 2: more than 100 bytes; accepted: shorter lines"):
        read_trace(path)


def test_files_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trace file .*nowhere: No such file"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_trace(tmp_path)
    with pytest.raises(ConfigError, match="format='csv'; accepted: sharegpt, medha, mooncake, azure, burstgpt, vidur"):
        read_trace(tmp_path, "csv")
    trace = Trace(np.zeros(1), np.ones(1, int), np.ones(1, int))
    for path in (tmp_path / "no" / "a.csv", write(tmp_path / "file", "x") / "a.csv"):
        with pytest.raises(ConfigError, match="cannot be written"):
            write_trace(path, trace)
    with pytest.raises(ConfigError, match="the trace has no requests; accepted: at least 1"):
        write_trace(tmp_path / "a.csv", trace[:0])


def test_a_failed_write_leaves_the_former_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", "former")
    monkeypatch.setattr("medha.workload.io.medha_line", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
        write_trace(path, Trace(np.zeros(1), np.ones(1, int), np.ones(1, int)))
    assert path.read_text() == "former"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
@pytest.mark.parametrize(
    "content",
    [OWN.encode(), gzip.compress(OWN.encode()), sharegpt([("a", "b")]).encode()],
    ids=["plain", "gzip", "array"],
)
def test_what_comes_through_a_pipe_is_read_once(name: str, content: bytes) -> None:
    before, (reader, writer) = os.dup(0), os.pipe()
    os.write(writer, content)
    os.close(writer)
    os.dup2(reader, 0)
    try:
        assert read_trace(name).trace.prompt_tokens.tolist() == [1]
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(reader)


# -- garbage ---------------------------------------------------------------------------------------------------

SAMPLES = {
    "mooncake": MOON % (0, 3, 4) * 3,
    "azure": AZURE + "2023-11-16 18:15:46.6805900,374,44\n" * 3,
    "burstgpt": BURSTGPT + "5,ChatGPT,472,18,490,Conversation log\n" * 3,
    "vidur": VIDUR + "0.5,3,4\n" * 3,
    "sharegpt": sharegpt(TURNS, indent=1),
    "medha": OWN + OWN.replace("a", "b"),
}


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
    read_or_named(sample, None, format)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = {
    "mooncake": "timestamp input_length output_length hash_ids",
    "medha": "id arrival_s num_prompt_tokens num_output_tokens slo priority tenant hash_ids max_tokens",
    "sharegpt": "conversations conversation",
}


@pytest.mark.parametrize("format", KEYS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_values_are_a_request_or_a_named_error(format: str, data: st.DataObject) -> None:
    values = json_values | st.integers(1, 100)
    fields = data.draw(st.dictionaries(st.sampled_from(KEYS[format].split()), values, min_size=1))
    read_or_named(json.dumps(fields).encode(), format)
