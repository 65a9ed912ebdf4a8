"""From tokens to the text that leaves: one request's tokens are decoded as they come, and stop strings are found."""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Iterator, Sequence

from medha.errors import ValidationError
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


class StopChecker:
    """Find stop strings in a stream of text, however it is cut into pieces.

    The match that starts earliest in the whole text wins; of two with the same start, the one listed first. So a
    complete match is not reported while an occurrence that would win over it may still be completed.

    Args:
        stops: stop strings, none empty.
        include_stop_str_in_output: whether the stop string itself is emitted.

    Attributes:
        matched: the stop string found, or None.

    Raises:
        ValidationError: a stop string is empty or not a str.
    """

    def __init__(self, stops: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise ValidationError(f"stop strings must be non-empty str, got {stop!r}", param="stop", value=stop)
        self.matched: str | None = None
        self._stops = list(dict.fromkeys(stops))
        self._include = include_stop_str_in_output
        self._fallbacks = [_prefix_function(stop) for stop in self._stops]
        self._first_chars = frozenset(stop[0] for stop in self._stops)
        self._lengths = [0] * len(self._stops)  # of the longest proper prefix of each stop that the text ends with
        self._held = ""
        self._num_seen = 0  # characters scanned
        self._held_start = 0  # where the held text starts in the stream
        self._best: tuple[int, int] | None = None  # start and index of the best complete match

    def push(self, piece: str) -> tuple[str, str | None]:
        """Add text.

        Args:
            piece: the next text of the stream.

        Returns:
            Text safe to emit, and the stop string found, or None. Once found, later text is dropped.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._held and self._first_chars.isdisjoint(piece):
            self._num_seen += len(piece)
            self._held_start = self._num_seen
            return piece, None
        self._held += piece
        for char in piece:
            self._num_seen += 1
            self._step(char)
            if self._best is not None and self._best <= min(self._partials(), default=self._best):
                return self._end(), self.matched
        oldest = min((start for start, _ in self._partials()), default=self._num_seen)
        safe_end = oldest if self._best is None else min(oldest, self._best[0])
        num_safe = safe_end - self._held_start
        self._held_start = safe_end
        safe, self._held = self._held[:num_safe], self._held[num_safe:]
        return safe, None

    def finish(self) -> str:
        """End the stream; a complete match that was waiting for a better one now counts and sets ``matched``.

        Returns:
            The text still held back, or, for such a match, the part of it that is to be emitted.
        """
        if self._best is not None and self.matched is None:
            return self._end()
        text, self._held = self._held, ""
        return text

    def _step(self, char: str) -> None:
        for index, stop in enumerate(self._stops):
            length = self._lengths[index]
            while length and stop[length] != char:
                length = self._fallbacks[index][length - 1]
            if stop[length] == char:
                length += 1
            if length == len(stop):
                match = (self._num_seen - length, index)
                self._best = match if self._best is None else min(self._best, match)
                length = self._fallbacks[index][-1]
            self._lengths[index] = length

    def _partials(self) -> Iterator[tuple[int, int]]:
        """Start and index of each occurrence that has begun and is not complete."""
        for index, length in enumerate(self._lengths):
            if length:
                yield self._num_seen - length, index

    def _end(self) -> str:
        assert self._best is not None, "ended without a match"
        start, index = self._best
        self.matched = self._stops[index]
        kept = self._held[: start - self._held_start]
        self._held = ""
        return kept + self.matched if self._include else kept


def _prefix_function(pattern: str) -> list[int]:
    """For each prefix of a pattern, the length of its longest proper border (Knuth, Morris and Pratt 1977)."""
    borders = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = borders[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        borders[i] = length
    return borders
