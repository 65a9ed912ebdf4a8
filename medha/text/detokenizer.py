"""Decode the tokens of one request as they come."""

from __future__ import annotations

import codecs
import re
from collections import deque

from medha.text.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x..>")
_NUM_CONTEXT_STEPS = 4


class Detokenizer:
    """Decode one request's tokens as they come; everything returned, joined, is ``tokenizer.decode`` of all ids.

    With a byte-level vocabulary a character is held back until its last byte is known. With byte-fallback tokens a run
    of them is held back until it ends, as one bad byte turns the whole run into U+FFFD.

    Args:
        tokenizer: the tokenizer the ids belong to.
        skip_special_tokens: whether special tokens are left out.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._may_end_mid_char = "ByteLevel" in tokenizer.decoder_types
        self._by_bytes = self._may_end_mid_char and set(tokenizer.decoder_types) <= {"ByteLevel", "Fuse"}
        # Ids of the latest emissions. A decoder may treat the first token differently (no space before it), so new
        # text is what the pending ids add to the text of these, and never a decoding of the pending ids alone.
        self._context: deque[list[int]] = deque(maxlen=_NUM_CONTEXT_STEPS)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Add one token.

        Args:
            token_id: a token id, not negative.

        Returns:
            Text that became final, perhaps empty.
        """
        if self._skip_special_tokens and token_id in self._tokenizer.special_ids:
            return ""
        token = self._tokenizer.backend.id_to_token(token_id)
        if token is None:
            return ""
        if self._by_bytes:
            return self._utf8.decode(_token_bytes(token))
        self._pending.append(token_id)
        if _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._pending_text()
        if not text or (self._may_end_mid_char and text.endswith("\ufffd")):
            return ""
        self._context.append(self._pending)
        self._pending = []
        return text

    def finish(self) -> str:
        """End the stream.

        Returns:
            The text still held back; incomplete bytes become U+FFFD.
        """
        if self._by_bytes:
            return self._utf8.decode(b"", final=True)
        text = self._pending_text()
        self._context.append(self._pending)
        self._pending = []
        return text

    def _pending_text(self) -> str:
        context = [token_id for step in self._context for token_id in step]
        skip = self._skip_special_tokens
        before = self._tokenizer.decode(context, skip_special_tokens=skip)
        return self._tokenizer.decode(context + self._pending, skip_special_tokens=skip)[len(before) :]


def _byte_alphabet() -> dict[str, int]:
    """Visible Latin-1 characters stand for themselves; the other bytes, in order, for U+0100 and up."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(b): b for b in visible} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


_BYTE_ALPHABET = _byte_alphabet()


def _token_bytes(token: str) -> bytes:
    """What a token of a byte-level vocabulary stands for; a token not written in its alphabet is plain text."""
    try:
        return bytes([_BYTE_ALPHABET[char] for char in token])
    except KeyError:
        return token.encode()
