"""Text to token ids and back, and the tokenizer files of a model folder.

:func:`load_tokenizer` reads those files in either generation of the Hugging Face layout. Chat messages are rendered by
:mod:`medha.text.chat_template` and encoded here. The file is long as both ways go by the same special tokens.
"""

from __future__ import annotations

import codecs
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import KW_ONLY, InitVar, dataclass, field
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders

from medha.child.process import Child, ChildError
from medha.errors import ChatTemplateError, TokenizerError, ValidationError, is_interrupt
from medha.models.folder import read_json_object
from medha.text.chat_template import check_utf8, map_strings, render, template_variables

TokenKind = Literal["none", "special", "byte", "text"]

logger = logging.getLogger("medha")

MAX_FILE_BYTES = 100_000_000
_LONG_TEXT = 100_000  # characters, from which a text is encoded in a child process
_MARK = "\U0010fffdmedha\U0010fffd"  # no text of a model or of a user
_BYTE_TOKEN = re.compile(r"<0x..>")
_SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def load_tokenizer(path: Path) -> Tokenizer | None:
    """Load the tokenizer of a model folder.

    ``chat_template.jinja``, with ``additional_chat_templates/``, wins over the ``chat_template`` of
    ``tokenizer_config.json``; of named templates ``default`` is used, and where there are tools ``tool_use``. A
    tokenizer need not have an end-of-sequence token. None where the folder has no ``tokenizer.json``.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        for other in filter(Path.is_file, (path / "tokenizer.model", path / "vocab.json")):
            made = f"AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
            logger.warning("%s is not read; transformers makes tokenizer.json of it: %s", other, made)
        return None
    data = _read(file)
    config = _read_json(path / "tokenizer_config.json")
    called = [*_specials(_read_json(path / "special_tokens_map.json")), *_specials(config)]
    listed = config.get("added_tokens_decoder") or _read_json(path / "added_tokens.json")
    with _ErrorsTold(f"{file} is not a usable tokenizer: it", "be made of"):
        backend = tokenizers.Tokenizer.from_str(data)
        has_grown = _add_listed(backend, listed, {its["content"] for _, its, _ in called})
    specials, new = dict[str, str](), list[tokenizers.AddedToken]()
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for key, its, adds in called:
        text = its["content"]
        specials |= {key: text} if key.endswith("_token") else {}
        is_new = not (adds or known.special) if (known := added.get(text)) else backend.token_to_id(text) is not None
        # What the vocabulary lacks would get an id without embedding, and of one character be in no message any more.
        if is_new and len(text) > 1:
            flags = {flag: getattr(known, flag) if known else its.get(flag) is True for flag in _FLAGS}
            new.append(tokenizers.AddedToken(text, special=True, **flags))
    source = None if backend.add_special_tokens(new) or has_grown else data
    named = {"default": path / "chat_template.jinja", "tool_use": path / "additional_chat_templates" / "tool_use.jinja"}
    found = [{"name": name, "template": _read(file)} for name, file in named.items() if file.is_file()]
    template = _configured_template(found or config.get("chat_template"), path / "tokenizer_config.json")
    return Tokenizer(backend, special_tokens=specials, chat_template=template, name=str(path), source=source)


@dataclass(eq=False, repr=False)
class Tokenizer:
    """A text tokenizer, its named special tokens, and its chat template."""

    backend: tokenizers.Tokenizer  # the tokenizer proper; its truncation and padding are switched off in place
    _: KW_ONLY
    special_tokens: Mapping[str, str] = field(default_factory=dict)  # texts, by names such as bos_token
    chat_template: str | None = None  # Jinja source
    name: str = "tokenizer"  # what messages call it
    source: InitVar[str | None] = None  # the backend as JSON, where that is at hand

    def __post_init__(self, source: str | None) -> None:
        backend = self.backend
        backend.no_truncation()
        backend.no_padding()
        self._encoder = _Encoder(backend, backend.to_str if source is None else lambda: source, name=self.name)
        self._renderer = Child("medha.child.text")
        ids = {key: backend.token_to_id(text) for key, text in self.special_tokens.items()}
        self.bos_token_id, self.eos_token_id = ids.get("bos_token"), ids.get("eos_token")
        added = backend.get_added_tokens_decoder().items()
        self.special_texts = {token_id: token.content for token_id, token in added if token.special}
        self._kinds: dict[int, TokenKind] = {}
        # Of tokens met that are whole characters, if a text is its tokens' bytes one behind the other: their text.
        self.whole_texts: dict[int, str] = {}

    def kind(self, token_id: int) -> TokenKind:
        """What a token id, not negative, stands for; ``none`` where it does not exist."""
        kind = self._kinds.get(token_id)
        if kind is None:
            token = self.backend.id_to_token(token_id)
            kind = "none" if token is None else "byte" if _BYTE_TOKEN.fullmatch(token) else "text"
            kind = self._kinds[token_id] = "special" if token_id in self.special_texts else kind
            if kind == "text" and self.byte_of is not None and "\ufffd" not in (text := self.decode([token_id])):
                self.whole_texts[token_id] = text
        return kind

    @cached_property
    def byte_of(self) -> dict[str, int] | None:
        """Of a byte-level tokenizer the byte for which each character of a token stands, by GPT-2's table."""
        if not isinstance(self.backend.decoder, decoders.ByteLevel):
            return None
        own = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = (byte for byte in range(256) if byte not in own)
        return {chr(byte): byte for byte in own} | {chr(256 + n): byte for n, byte in enumerate(others)}

    def check_vocab(self, vocab_size: int) -> None:
        """Raise TokenizerError where an id that this tokenizer can produce has no row in an embedding of that many.

        A token that was added may have none, as ``<pad>`` of Llama 2: a prompt that holds it is refused.
        """
        largest = max([*self.backend.get_vocab(with_added_tokens=False).values(), *self.encode("x")], default=-1)
        if largest >= vocab_size:
            what = f"the tokenizer produces ids up to {largest}, but the embedding has {vocab_size} rows"
            raise TokenizerError(f"{self.name}: {what}")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, in which special-token text becomes control tokens, and perhaps of what the tokenizer
        puts around a sequence, such as BOS."""
        ids: list[int] = self.encode_array(text, add_special_tokens=add_special_tokens).tolist()
        return ids

    def encode_array(self, text: str, *, add_special_tokens: bool = True) -> npt.NDArray[np.int32]:
        """As :meth:`encode`; other threads run meanwhile, however long the text."""
        if not isinstance(text, str):
            raise ValidationError(f"prompt must be a str, got {type(text).__name__}", param="prompt", value=text)
        check_utf8(text, "prompt")
        return self._encoder(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, goes_on: bool = False, skip_special_tokens: bool = True) -> str:
        """The text of token ids, none negative; bytes that are not UTF-8 are U+FFFD, ids that do not exist left out.

        Where it ``goes_on``, it is what they add to a text: SentencePiece drops the first space of a beginning.
        """
        before = self.some_text if goes_on else []
        with _ErrorsTold(self.name, "decode"):
            decode = partial(self.backend.decode, skip_special_tokens=skip_special_tokens)
            return str(decode([*before, *ids])[len(decode(before)) if before else 0 :])

    @cached_property
    def some_text(self) -> list[int]:
        """A token of text for others to go on with; none where a text is its tokens' bytes one behind the other."""
        if isinstance(self.backend.decoder, decoders.ByteLevel):
            return []
        return [token for token in self.encode("x", add_special_tokens=False) if self.kind(token) == "text"][-1:]

    @cached_property
    def adds_bos(self) -> bool:
        """Whether a sequence encoded with special tokens begins with BOS."""
        return self.bos_token_id is not None and self.encode("x")[:1] == [self.bos_token_id]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> tuple[str, npt.NDArray[np.int32]]:
        """The text that the model was trained on for messages, and its ids, with one BOS if the tokenizer uses one.

        Special-token text in what the caller gives stays text, while the template's own becomes control tokens: the
        caller's is given to the template with a mark behind its first character. To the encoder that mark is a token
        of its own, which nothing is matched across; it is left out of text and ids.

        Arguments are those of :func:`medha.text.chat_template.template_variables`.
        """
        variables = template_variables(messages, **options)
        if self.chat_template is None:
            where = "neither chat_template.jinja nor a default chat_template in tokenizer_config.json"
            instead = "give the text that the model was trained on as prompt"
            raise ChatTemplateError(f"{self.name} has no chat template: {where}; {instead}")
        marked = {name: map_strings(value, self._marked) for name, value in variables.items()}
        rendered = render(self._renderer, self.chat_template, {**self.special_tokens, **marked}, self.name)
        if _MARK not in rendered:
            return rendered, self._with_one_bos(self.encode_array(rendered, add_special_tokens=False))
        encoder, mark, mark_id = self._marked_encoder
        ids = encoder(rendered, add_special_tokens=False)
        return rendered.replace(mark, ""), self._with_one_bos(ids[ids != mark_id])

    def interrupt(self) -> None:
        """Give up the long text that another thread encodes, or the template that it renders; it gets an error."""
        for child in self._children():
            child.interrupt()

    def close(self) -> None:
        """End the child processes; what needs one later starts it."""
        for child in self._children():
            child.close()

    def _children(self) -> list[Child]:
        encoders = self._encoder, *vars(self).get("_marked_encoder", ())[:1]
        return [self._renderer, *(one.child for one in encoders)]

    def _with_one_bos(self, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        if (bos := self.bos_token_id) is None:
            return ids
        others = np.flatnonzero(ids != bos)
        rest = ids[others[0] if len(others) else len(ids) :]
        return np.concatenate([np.array([bos], np.int32), rest]) if self.adds_bos or len(rest) < len(ids) else ids

    @cached_property
    def _special_start(self) -> re.Pattern[str]:
        """The first character of any special-token text, also of one within another."""
        texts = filter(None, {*self.special_texts.values(), *self.special_tokens.values()})
        return re.compile("|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in texts) or r"(?!)")

    def _marked(self, text: str) -> str:
        """Text with a mark in each special-token text, behind its first character."""
        for single in self.special_texts.values():
            if len(single) == 1 and single in text:
                what = f"messages hold {single!r}, a special token of {self.name} that cannot be encoded as text"
                raise ValidationError(what, param="messages")
        return self._special_start.sub(lambda start: start[0] + self._marked_encoder[1], text)

    @cached_property
    def _marked_encoder(self) -> tuple[_Encoder, str, int]:
        """A second tokenizer, to which a mark is a token, the mark, and the id of that."""
        normalizer = self.backend.normalizer
        mark = normalizer.normalize_str(_MARK) if normalizer else _MARK
        # Where that puts ▁ before each text, the mark has it, too, and is found in normalized text: none comes behind.
        is_put_before = mark != _MARK and mark.endswith(_MARK)
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.add_special_tokens([tokenizers.AddedToken(_MARK, special=True, normalized=is_put_before)])
        mark_id = backend.token_to_id(_MARK)
        assert mark_id is not None, "it was added"
        return _Encoder(backend, backend.to_str, name=self.name), mark if is_put_before else _MARK, mark_id


class _Encoder:
    """Text to token ids, long texts in a child process, which gets the tokenizer as JSON from ``source``."""

    def __init__(self, backend: tokenizers.Tokenizer, source: Callable[[], str], *, name: str) -> None:
        self._backend = backend
        self._name = name
        self.child = Child("medha.child.text", setup=lambda: source().encode())

    def __call__(self, text: str, *, add_special_tokens: bool) -> npt.NDArray[np.int32]:
        with _ErrorsTold(self._name, "encode"):
            if len(text) <= _LONG_TEXT:  # unlike encode this lets other threads run, and counts no characters
                found = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
                return np.array(found[0].ids, np.int32)
            return np.frombuffer(bytearray(self.child.ask(bytes([add_special_tokens]) + text.encode())), np.int32)


@dataclass(slots=True)
class _ErrorsTold(AbstractContextManager[None]):
    """Within, what a tokenizer raises, be it a panic of its Rust code, which is no Exception, becomes a TokenizerError;
    an interrupt stays one."""

    name: str
    what: str

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None and not is_interrupt(error):
            kind = "" if isinstance(error, ChildError) else f"{type(error).__name__}: "
            told = f"{self.name} cannot {self.what} this: {kind}{str(error)[:500]}"
            has_died = isinstance(error.__cause__, EOFError)  # the child, of what it was sent
            raise TokenizerError(told + "; accepted: a shorter text, or token ids" * has_died) from error


def _read(file: Path) -> str:
    try:
        size = file.stat().st_size
        if size > MAX_FILE_BYTES:
            raise TokenizerError(f"{file} has {size} bytes, more than the {MAX_FILE_BYTES} accepted")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{file} cannot be read: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object, empty where the file does not exist."""
    return read_json_object(file, max_bytes=MAX_FILE_BYTES, error=TokenizerError) if file.is_file() else {}


def _specials(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """What a configuration calls special tokens, each with its key there, and whether a list has it of those to add."""
    for key, its in config.items():
        several = its.items() if isinstance(its, dict) else [(key, one) for one in its] if isinstance(its, list) else ()
        for name, one in several if key in _SPECIAL_LISTS else [(key, its)] if key.endswith("_token") else ():
            token = one if isinstance(one, dict) else {"content": one}
            is_special = key != "added_tokens_decoder" or token.get("special")
            if is_special and isinstance(token.get("content"), str):
                yield name, token, isinstance(its, list)


def _add_listed(backend: tokenizers.Tokenizer, listed: Mapping[str, Any], specials: Collection[str]) -> bool:
    """Add the tokens to which ``added_tokens_decoder``, or of old ``added_tokens.json``, gives the ids behind the last;
    whether there are any. Those whose ids lie elsewhere the vocabulary has, or the model has not."""
    size = end = backend.get_vocab_size()
    tokens = [(its, {"content": key}) if isinstance(its, int) else (int(key), its) for key, its in listed.items()]
    for token_id, its in sorted(tokens, key=itemgetter(0)):
        if token_id == end:
            special = its["content"] in specials and len(its["content"]) > 1
            flags = {flag: its.get(flag, flag == "normalized" and not special) is True for flag in _FLAGS}
            end += backend.add_tokens([tokenizers.AddedToken(its["content"], special=special, **flags)])
    return end > size


def _configured_template(value: Any, file: Path) -> str | None:
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        named = {item.get("name"): item.get("template") for item in value}
        value = named.get("default")
        if isinstance(tools := named.get("tool_use"), str) and isinstance(value, str):
            value = f"{{% if tools %}}\n{tools}{{% else %}}\n{value}{{% endif %}}"
        if named and value is None:
            logger.warning("%s has chat templates %s and none named default", file.parent, sorted(map(str, named)))
    if value is None or isinstance(value, str):
        return value
    raise TokenizerError(f"{file}: chat_template must be a str or a list of objects with name and template")


class Detokenizer:
    """Decode one request's tokens as they come; everything returned, joined, is ``tokenizer.decode`` of all ids.

    ``after`` is the last token of the prompt. Where that is text, theirs goes on with it.

    A character is held back until its last byte is known: by Python's decoder where the tokenizer is byte-level, else
    by the library's stream, which decodes all that it holds at each token. A run of byte-fallback tokens is held back
    here until it ends, as one bad byte turns the whole run into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, *, after: int | None = None, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = decoders.DecodeStream(skip_special_tokens=skip_special_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_emitted = 0  # characters
        self._run: list[int] = []
        self._goes_on = after is not None and tokenizer.kind(after) in ("text", "byte")
        if self._goes_on and tokenizer.byte_of is None and (before := tokenizer.some_text):
            self._stream.step(tokenizer.backend, before)

    def push(self, token_id: int) -> str:
        """Add one token, not negative; returns the text that became final, perhaps none."""
        if (text := self._tokenizer.whole_texts.get(token_id)) is not None and not self._utf8.getstate()[0]:
            self._num_emitted += len(text)
            return text
        kind = self._tokenizer.kind(token_id)
        if kind == "none" or (kind == "special" and self._skip_special_tokens):
            return ""
        if (byte_of := self._tokenizer.byte_of) is not None:
            token = self._tokenizer.backend.id_to_token(token_id) or ""
            own = bytes(map(byte_of.__getitem__, token)) if byte_of.keys() >= set(token) else token.encode()
            text = self._utf8.decode(own)
        elif kind == "byte":
            self._run.append(token_id)
            return ""
        else:
            ids, self._run = [*self._run, token_id], []
            with _ErrorsTold(self._tokenizer.name, "decode"):
                text = self._stream.step(self._tokenizer.backend, ids) or ""
        self._num_emitted += len(text)
        return text

    def finish(self, ids: Sequence[int]) -> str:
        """End the stream; returns the text of all ``ids`` that is not out yet, in which incomplete bytes are U+FFFD."""
        options = {"goes_on": self._goes_on, "skip_special_tokens": self._skip_special_tokens}
        return self._tokenizer.decode(ids, **options)[self._num_emitted :]


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
        self._starts = re.compile("|".join({re.escape(stop[0]) for stop in stops}) or r"(?!)")
        self._held = ""  # from where the earliest occurrence began that is not complete

    def push(self, piece: str) -> str:
        """Add the next text of a stream in which none is found yet; returns text safe to emit."""
        safe, self._held = self._split(self._held + piece, is_end=False)
        return safe

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
