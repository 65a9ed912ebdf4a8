"""The child that encodes long texts, run by ``python -m medha.child.encode``.

An encoder lets other threads run while it encodes, but not while its millions of ids become a list and the rest of
what it found is freed: 4M tokens take a tenth of a second, in which nobody in the same process would get a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import partial

import tokenizers

from medha.child.process import serve


def message(text: str, *, add_special_tokens: bool) -> bytes:
    """A text to encode; the answer is int32 in the byte order of the machine."""
    return bytes([add_special_tokens]) + text.encode()


def encode(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids. Unlike ``backend.encode`` it lets other threads run, and counts no characters, which takes longest."""
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def _encode(backend: tokenizers.Tokenizer, sent: bytes) -> bytes:
    return array("i", encode(backend, sent[1:].decode(), add_special_tokens=bool(sent[0]))).tobytes()


def _load(sent: bytes) -> Callable[[bytes], bytes]:
    backend = tokenizers.Tokenizer.from_str(sent.decode())  # the first message: a tokenizer as it writes itself, JSON
    backend.no_truncation()
    backend.no_padding()
    return partial(_encode, backend)


if __name__ == "__main__":
    serve(_load)
