"""The child that reads large request bodies, run by ``python -m medha.serve.body``.

A prompt of 10M token ids is 70 MB of JSON, and no parser lets other threads of its process run while it makes 10M
integers of them: nobody would get a token for a second. Here lists of ids become arrays; what is left of a body is
short, or one long text. The answer is pickled: what it is made of is the child's own.
"""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import msgspec
import numpy as np

from medha.child.process import Child, ChildError
from medha.child.serving import limit_resources, serve

_LARGE_BYTES = (500_000, 8_000_000)  # above the first a child reads a body, above the second another one does
_ID_LISTS = ("prompt", "prompt_token_ids", "tokens")
_MOST_VALUES = 200_000
TOO_MANY_VALUES = f"the body has more than {_MOST_VALUES} values beside lists of token ids"
NOT_READ = (ChildError, RecursionError, msgspec.MsgspecError, UnicodeDecodeError)


class BodyReader:
    """Reads the bodies of requests: small ones at once, large and huge ones each in a child process and in turn, so
    that nobody waits for what is much larger."""

    def __init__(self) -> None:
        self._children = [(Child("medha.serve.body"), asyncio.Lock()) for _ in _LARGE_BYTES]

    async def read(self, body: bytearray) -> Any:
        """The value of a body; one of :data:`NOT_READ` where it is no JSON, or too wide or deep."""
        size = sum(len(body) > least for least in _LARGE_BYTES)
        if size == 0:
            return msgspec.json.decode(body)
        child, turn = self._children[size - 1]
        async with turn:
            return pickle.loads(await asyncio.to_thread(child.ask, body))

    def close(self) -> None:
        """Give up what is being read, and end the child processes."""
        for child, _ in self._children:
            child.close()


def _read(sent: bytes) -> bytes:
    """The value of a body, lists of token ids as arrays."""
    limit_resources(len(sent))
    body = msgspec.json.decode(sent)
    for name in _ID_LISTS if isinstance(body, dict) else ():
        if isinstance(value := body.get(name), list):
            body[name] = _packed(value) if value and isinstance(value[0], int) else [*map(_packed, value)]
    if _num_values(body) > _MOST_VALUES:
        raise ChildError(TOO_MANY_VALUES)
    return pickle.dumps(body, protocol=5)


def _packed(value: Any) -> Any:
    """A list of token ids as an array; anything else as it is."""
    is_ids = isinstance(value, list) and value and set(map(type, value)) == {int}
    if is_ids and not -1 <= min(value) <= max(value) < 2**31:  # no vocabulary reaches there
        value = [max(-1, min(one, 2**31 - 1)) for one in value]
    return np.array(value, np.int32) if is_ids else value


def _num_values(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_num_values, inner))


if __name__ == "__main__":
    serve(lambda setup: _read)
