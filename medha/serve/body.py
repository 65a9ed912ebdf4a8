"""The child that reads large request bodies, run by ``python -m medha.serve.body``.

A prompt of 10M token ids is 70 MB of JSON, and no parser lets other threads of its process run while it makes 10M
integers of them: nobody would get a token for a second. Here long lists of integers become arrays; what is left of the
body is short, or one long text.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from medha.child.process import Child, ChildError, serve

LARGE_BODY = 500_000
"""Bytes of the largest body that is read where the connections are."""

_LONG_LIST = 1000
_MARK = "\0medha array"  # JSON of a client may have it too: it then means no array, as the numbers say


class BodyReader:
    """Reads request bodies in a child process; any thread may ask."""

    def __init__(self) -> None:
        self._child = Child("medha.serve.body")

    def read(self, body: bytes) -> Any:
        """The value of a body, long lists of integers as arrays; ValueError where it is no JSON."""
        try:
            answer = self._child.ask(body)
        except ChildError as error:
            raise ValueError(str(error)) from error
        size, count = struct.unpack_from("qq", answer)
        lengths = struct.unpack_from(f"{count}q", answer, 16)
        start = 16 + 8 * count
        arrays, at = [], start + size
        for length in lengths:
            arrays.append(np.frombuffer(answer, np.int64, length, at))
            at += 8 * length
        return _restored(json.loads(answer[start : start + size]), arrays)


def _restored(value: Any, arrays: list[Any]) -> Any:
    if isinstance(value, dict):
        if len(value) == 1 and type(at := value.get(_MARK)) is int and 0 <= at < len(arrays):
            return arrays[at]
        return {name: _restored(one, arrays) for name, one in value.items()}
    return [_restored(one, arrays) for one in value] if isinstance(value, list) else value


def _replaced(value: Any, arrays: list[array[int]]) -> Any:
    if isinstance(value, dict):
        return {name.replace(_MARK, ""): _replaced(one, arrays) for name, one in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) >= _LONG_LIST and set(map(type, value)) == {int} and max(map(abs, value)) < 2**62:
        arrays.append(array("q", value))
        return {_MARK: len(arrays) - 1}
    return [_replaced(one, arrays) for one in value]


def _read(sent: bytes) -> bytes:
    arrays: list[array[int]] = []
    try:
        rest = json.dumps(_replaced(json.loads(sent), arrays)).encode()
    except (ValueError, RecursionError):
        raise ChildError("not JSON") from None
    rest += b" " * (-len(rest) % 8)  # arrays begin where integers may
    head = struct.pack(f"qq{len(arrays)}q", len(rest), len(arrays), *map(len, arrays))
    return b"".join([head, rest, *(one.tobytes() for one in arrays)])


def _load(setup: bytes) -> Callable[[bytes], bytes]:
    return _read


if __name__ == "__main__":
    serve(_load)
