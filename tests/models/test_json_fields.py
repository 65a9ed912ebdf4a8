"""Reading a JSON object: what each wrong file says (case A2)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from medha.errors import ConfigError
from medha.models.json_fields import read_json_object


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{", "not JSON: Expecting property name enclosed in double quotes at line 1 column 2"),
        (b'{\n "a": 1,\n "b" 2}', "at line 3 column 6"),
        (b"[]", "holds a list, []"),
        (b"3", "holds a int, 3"),
        (b"null", "holds a NoneType"),
        (b'{"a": "\xff"}', "not UTF-8 at byte 7"),
        (b'{"a": 1, "a": 1}', "key 'a' is given twice"),
        (b'{"x": {"deep": 1, "b": 2, "deep": 3}}', "key 'deep' is given twice"),
        (b'{"a":' * 100_000, "nested too deep"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deep"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "integer"),
        (b'{"a": "' + b"x" * 10_000_000 + b'"}', "larger than 10000000 bytes"),
    ],
)
def test_wrong_json(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        read_json_object(path)
    assert time.process_time() - start < 1
    assert str(path) in str(caught.value)
    assert reason in str(caught.value)
