"""Headers: every malformed safetensors file is a WeightsError that names the file (cases A9, A10, A13)."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from medha.errors import WeightsError
from medha.models import safetensors_header
from medha.models.safetensors_header import read_header
from medha.models.weights import Checkpoint, check_tensors

FILE = "model.safetensors"


def write_raw(path: Path, header: bytes | dict[str, Any], data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(begin: int, end: int, *, dtype: Any = "F32", shape: Any = None) -> dict[str, Any]:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


DATA = bytes(16)
HEADERS: dict[str, tuple[bytes | dict[str, Any], bytes, int | None, str]] = {
    "length beyond the file": (b"{}", b"", 1000, "truncated: expected at least 1008 bytes"),
    "length 2**63 - 1": (b"{}", b"", 2**63 - 1, "accepted: at most 100000000"),
    "length 200 MB": (b"{}", b"", 200_000_000, "header of 200000000 bytes"),
    "no header": (b"", b"", None, "accepted: a JSON object"),
    "not JSON": (b"{nope", b"", None, "not JSON"),
    "not an object": (b"[1, 2]", b"", None, "begins with"),
    "not UTF-8": (b'{"\xff\xfe": 1}', b"", None, "not UTF-8"),
    "too deep": (b'{"a":' * 200_000, b"", None, "nested too deep"),
    "huge integer": (b'{"a":' + b"9" * 5000 + b"}", b"", None, "integer"),
    "tensor given twice": (
        b'{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
        DATA,
        None,
        "'a' is given twice",
    ),
    "name that steers a terminal": ({"\x1b[2J\n": entry(0, 16)}, DATA, None, "'\\x1b[2J\\n': its name; accepted"),
    "name of a megabyte": ({"a" * 10**6: entry(0, 16)}, DATA, None, "aaa...: its name; accepted: at most 200"),
    "entry not an object": ({"a": 3}, DATA, None, "'a': 3"),
    "entry without dtype": ({"a": {"shape": [4], "data_offsets": [0, 16]}}, DATA, None, "dtype, shape"),
    "entry with more": ({"a": {**entry(0, 16), "x": 1}}, DATA, None, "'x': 1"),
    "unknown dtype": ({"a": entry(0, 16, dtype="Q4")}, DATA, None, "dtype='Q4'"),
    "dtype not a string": ({"a": entry(0, 16, dtype=["F32"])}, DATA, None, "dtype=['F32']"),
    "negative dimension": ({"a": entry(0, 16, shape=[-4])}, DATA, None, "shape=[-4]"),
    "boolean dimension": ({"a": entry(0, 16, shape=[True, 4])}, DATA, None, "shape=[True, 4]"),
    "float dimension": ({"a": entry(0, 16, shape=[4.0])}, DATA, None, "shape=[4.0]"),
    "shape not a list": ({"a": entry(0, 16, shape="4")}, DATA, None, "shape='4'"),
    "shape overflows": ({"a": entry(0, 16, shape=[2**62, 2**62])}, DATA, None, "hold 16 bytes"),
    "many huge dimensions": ({"a": entry(0, 16, shape=[2**62] * 60)}, DATA, None, "hold 16 bytes"),
    "too many dimensions": ({"a": entry(0, 16, shape=[1] * 99 + [4])}, DATA, None, "at most 64"),
    "shape and offsets differ": ({"a": entry(0, 16, shape=[3])}, DATA, None, "96 bits"),
    "three offsets": ({"a": {**entry(0, 16), "data_offsets": [0, 8, 16]}}, DATA, None, "data_offsets=[0, 8, 16]"),
    "negative offset": ({"a": {**entry(0, 16), "data_offsets": [-16, 0]}}, DATA, None, "data_offsets=[-16, 0]"),
    "offsets reversed": ({"a": {**entry(0, 16), "data_offsets": [16, 0]}}, DATA, None, "begin <= end"),
    "offset past the end": ({"a": entry(0, 32)}, DATA, None, "truncated: expected"),
    "hole at the start": ({"a": entry(4, 16)}, DATA, None, "leaves a hole"),
    "hole between": ({"a": entry(0, 4), "b": entry(8, 16)}, DATA, None, "'b' at offset 8 leaves a hole"),
    "overlap": ({"a": entry(0, 12), "b": entry(8, 16)}, DATA, None, "'b' at offset 8 overlaps"),
    "trailing bytes": ({"a": entry(0, 12)}, DATA, None, "bytes after the last tensor"),
    "metadata not strings": ({"__metadata__": {"a": 1}, "a": entry(0, 16)}, DATA, None, "__metadata__={'a': 1}"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_malformed_header(tmp_path: Path, case: str) -> None:
    header, data, length, reason = HEADERS[case]
    write_raw(tmp_path / FILE, header, data, length)
    start = time.process_time()
    with pytest.raises(WeightsError) as caught:
        Checkpoint(tmp_path)
    assert time.process_time() - start < 1
    assert str(caught.value).startswith(f"{FILE}: ")
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("size", [0, 7])
def test_file_shorter_than_a_header(tmp_path: Path, size: int) -> None:
    (tmp_path / FILE).write_bytes(bytes(size))
    with pytest.raises(WeightsError, match=f"{FILE}: {size} bytes; accepted: at least 8"):
        Checkpoint(tmp_path)


def test_truncated_shard_says_expected_and_actual(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(100)}, tmp_path / FILE)
    size = (tmp_path / FILE).stat().st_size
    os.truncate(tmp_path / FILE, size - 10)
    with pytest.raises(WeightsError, match=f"{FILE}: truncated: expected {size} bytes, the file has {size - 10}"):
        Checkpoint(tmp_path)


def test_file_that_changes_while_its_header_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.zeros(4)}, tmp_path / FILE)
    times = iter(range(10))
    monkeypatch.setattr(safetensors_header, "file_stamp", lambda status: (next(times),))
    with pytest.raises(WeightsError, match=f"{FILE}: changed while it was read"):
        read_header(tmp_path / FILE)


@pytest.mark.parametrize("kind", ["folder", "dangling", "fifo"])
def test_not_a_regular_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / FILE
    if kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to("gone")
    else:
        os.mkfifo(path)  # opening it would wait for a writer for ever
    with pytest.raises(WeightsError, match=f"{FILE}: "):
        Checkpoint(tmp_path)


def test_zero_sized_tensors_and_padded_header(tmp_path: Path) -> None:
    header = json.dumps({"a": entry(0, 0, shape=[0, 4]), "b": entry(0, 16)}).encode()
    write_raw(tmp_path / FILE, header + b" " * (-len(header) % 8), DATA)
    with Checkpoint(tmp_path) as checkpoint:
        assert checkpoint.read("b").shape == (4,)
        assert checkpoint.read("a").shape == (0, 4)


def exercise(folder: Path) -> None:
    """Open and read everything; only a WeightsError may come out."""
    message = FILE
    try:
        with Checkpoint(folder) as checkpoint:
            for name in checkpoint.names:
                checkpoint.read(name)
            check_tensors(checkpoint, {}, ignored=lambda _: True)
    except WeightsError as error:
        message = str(error)
    assert message.startswith(FILE)


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["F32", "BF16", "", "a"]),
    lambda item: st.lists(item, max_size=3) | st.dictionaries(st.text(max_size=3), item, max_size=3),
    max_leaves=6,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "X"]) | JSON,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | JSON,
        "data_offsets": st.tuples(st.integers(-1, 16), st.integers(-1, 16)) | JSON,
    }
)


@FUZZ
@given(raw=st.binary(max_size=64))
def test_fuzz_bytes(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / FILE).write_bytes(raw)
    exercise(tmp_path)


@FUZZ
@given(header=JSON | st.dictionaries(st.text(max_size=3), ENTRY | JSON, max_size=3), size=st.integers(0, 16))
def test_fuzz_json(tmp_path: Path, header: Any, size: int) -> None:
    write_raw(tmp_path / FILE, json.dumps(header).encode(), bytes(size))
    exercise(tmp_path)


@FUZZ
@given(position=st.integers(0, 400), value=st.integers(0, 255))
def test_fuzz_one_byte_of_a_good_file(tmp_path: Path, position: int, value: int) -> None:
    save_file({"a": torch.zeros(4), "b": torch.zeros(2, 3, dtype=torch.bfloat16)}, tmp_path / "good")
    raw = bytearray((tmp_path / "good").read_bytes())
    raw[position % len(raw)] = value
    (tmp_path / FILE).write_bytes(raw)
    exercise(tmp_path)
