"""The child that reads large request bodies, run by ``python -m medha.serve.body``.

A prompt of 10M token ids is 70 MB of JSON, and no parser lets other threads of its process run while it makes 10M
integers of them: nobody would get a token for a second. Here lists of ids become arrays; what is left of a body is
short, or one long text.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from medha.child.process import Child, ChildError, serve
from medha.child.text import limit_resources

LARGE_BODY = 500_000
"""Bytes of the largest body that is read where the connections are."""

_ID_LISTS = ("prompt", "prompt_token_ids", "tokens")
_MOST_VALUES = 200_000  # beside the ids


class BodyReader:
    """Reads request bodies in a child process; any thread may ask."""

    def __init__(self) -> None:
        self.child = Child("medha.serve.body")

    def read(self, body: bytes) -> Any:
        """The value of a body, lists of token ids as arrays; ValueError where it is no JSON, or too wide or deep."""
        try:
            answer = self.child.ask(body)
        except ChildError as error:
            raise ValueError(str(error)) from error
        (size,) = struct.unpack_from("q", answer)
        value, places = json.loads(answer[8 : 8 + size])
        at = 8 + size
        for name, index, length in places:
            ids = np.frombuffer(answer, np.int64, length, at)
            at += ids.nbytes
            if index is None:
                value[name] = ids
            else:
                value[name][index] = ids
        return value


def _read(sent: bytes) -> bytes:
    limit_resources(len(sent))
    arrays: list[array[int]] = []
    places: list[tuple[str, int | None, int]] = []

    def taken(value: Any, name: str, index: int | None) -> Any:
        if (
            isinstance(value, list)
            and value
            and set(map(type, value)) == {int}
            and -1 <= min(value) <= max(value) < 2**31
        ):
            arrays.append(array("q", value))
            places.append((name, index, len(value)))
            return None
        return value

    try:
        body = json.loads(sent)
        for name in _ID_LISTS if isinstance(body, dict) else ():
            value = taken(body.get(name), name, None)
            if isinstance(value, list):
                value = [taken(one, name, index) for index, one in enumerate(value)]
            if name in body:
                body[name] = value
        if _num_values(body) > _MOST_VALUES:
            raise ChildError("too many values")
        rest = json.dumps([body, places]).encode()
    except (ValueError, RecursionError):
        raise ChildError("not JSON") from None
    rest += b" " * (-len(rest) % 8)  # arrays begin where integers may
    return b"".join([struct.pack("q", len(rest)), rest, *(one.tobytes() for one in arrays)])


def _num_values(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_num_values, inner))


def _load(setup: bytes) -> Callable[[bytes], bytes]:
    return _read


if __name__ == "__main__":
    serve(_load)
