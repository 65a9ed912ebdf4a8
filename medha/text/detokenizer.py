"""From tokens to the text that leaves: one request's tokens are decoded as they come, and stop strings are found."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from medha.text.tokenizer import Tokenizer, tokenizer_error


class Detokenizer:
    """Decode one request's tokens as they come; everything returned, joined, is ``tokenizer.decode`` of all ids.

    The library's stream holds a character back until its last byte is known. A run of byte-fallback tokens is held
    back here until it ends, as one bad byte turns the whole run into U+FFFD.

    Args:
        tokenizer: the tokenizer the ids belong to.
        skip_special_tokens: whether special tokens are left out.
        streams: whether text is wanted before the end; if not, all of it comes with :meth:`finish`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, streams: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._streams = streams
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._num_emitted = 0  # characters
        self._run: list[int] = []

    def push(self, token_id: int) -> str:
        """Add one token, not negative; returns the text that became final, perhaps none."""
        self._ids.append(token_id)
        if not self._streams:
            return ""
        kind = self._tokenizer.kind(token_id)
        if kind == "none" or (kind == "special" and self._skip_special_tokens):
            return ""
        if kind == "byte":
            self._run.append(token_id)
            return ""
        ids: int | list[int] = token_id
        if self._run:
            ids, self._run = [*self._run, token_id], []
        try:
            text: str = self._stream.step(self._tokenizer.backend, ids) or ""
        except BaseException as error:
            raise tokenizer_error(self._tokenizer.name, "decode", error) from error
        self._num_emitted += len(text)
        return text

    def finish(self) -> str:
        """End the stream; returns the text still held back, in which incomplete bytes are U+FFFD."""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special_tokens)
        return whole[self._num_emitted :]


class StopChecker:
    """Find stop strings in a stream of text, however it is cut into pieces.

    The match that starts earliest in the whole text wins; of two with the same start, the one listed first. So a
    complete match is not reported while an occurrence that would win over it may still be completed.

    ``matched`` is the stop string found, or None; none of ``stops`` is empty.
    """

    def __init__(self, stops: Sequence[str], *, include_stop_str_in_output: bool = False) -> None:
        self.matched: str | None = None
        self._stops = tuple(stops)
        self._include = include_stop_str_in_output
        first_chars = {re.escape(stop[0]) for stop in stops}
        self._starts = re.compile("|".join(first_chars) or r"(?!)")
        self._held = ""  # from where the earliest occurrence began that is not complete

    def push(self, piece: str) -> tuple[str, str | None]:
        """Add the next text of the stream; returns text safe to emit, and the stop string found, or None. Once found,
        later text is dropped."""
        if not self._stops:
            return piece, None
        if self.matched is not None:
            return "", self.matched
        safe, self._held = self._split(self._held + piece, is_end=False)
        return safe, self.matched

    def finish(self) -> str:
        """End the stream; returns the text still held back. A complete match that was waiting for a better one now
        counts and sets ``matched``; of it what is to be emitted is returned."""
        safe, self._held = self._split(self._held, is_end=True)
        return safe

    def _split(self, text: str, *, is_end: bool) -> tuple[str, str]:
        """Text to emit, and text to hold back until more is known, which at the end is none."""
        for first in self._starts.finditer(text):
            start = first.start()
            for stop in self._stops:
                if text.startswith(stop, start):
                    self.matched = stop
                    return text[:start] + stop * self._include, ""
                if not is_end and len(text) - start < len(stop) and stop.startswith(text[start:]):
                    return text[:start], text[start:]
        return text, ""
