"""Chat messages to the text a model was trained on, by the template that came with its weights.

A chat template is a program that came with somebody's weights. It runs in minijinja, which has no way from a value to
the interpreter, on plain copies of the messages, with bounded fuel (executed instructions), bounded written text and
bounded expression length. Not bounded is what one instruction may allocate: a template that doubles a string forty
times stays within any fuel and exhausts memory, so a template from an untrusted source still needs a process limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import minijinja

from medha.errors import ChatTemplateError, ValidationError

MAX_FUEL = 1_000_000
"""Most template instructions executed in one rendering (tens of milliseconds)."""

MAX_OUTPUT_CHARS = 8_000_000
"""Most text a template may write, beside twice the text of its messages."""

_MAX_TEMPLATE_CHARS = 262_144
_MAX_TAG_CHARS = 4_000  # outside string literals; the compiler recurses once per operator and has a finite stack
_MAX_MESSAGE_DEPTH = 64
_LITERAL_CHARS = 128  # literal text longer than this is charged to the output budget when it is written
_CALL_CHARS = 64  # what each call from the template into Python costs of that budget, beside its text


class ChatTemplate:
    """A chat template, ready to render.

    Args:
        source: Jinja source; it is checked at the first rendering.
        special_tokens: what the template may write by name, such as ``bos_token``; all that it may ask for.
        name: what messages call the tokenizer it belongs to.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str], name: str) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._name = name

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
        """Render messages.

        Args:
            messages: what :func:`plain_messages` returned.
            add_generation_prompt: whether to open the assistant's turn.

        Returns:
            The rendered text.

        Raises:
            ChatTemplateError: the template fails or exceeds a limit.
        """
        num_chars = sum(map(len, strings(messages)))
        budget = _OutputBudget(MAX_OUTPUT_CHARS + 2 * num_chars + _CALL_CHARS * 16 * len(messages))
        environment = _environment(budget, min(MAX_FUEL, 100_000 + 2_000 * len(messages)))
        # Copies: a template can call methods such as append on the lists it is given.
        try:
            rendered: str = environment.render_str(
                self._program,
                "chat_template",
                messages=map_strings(messages, str),
                add_generation_prompt=bool(add_generation_prompt),
                tools=None,
                documents=None,
                **self._special_tokens,
            )
            budget.check_total(len(rendered))
        except ChatTemplateError as error:
            raise ChatTemplateError(f"chat template of {self._name}: {error}") from error
        except Exception as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:500]
            raise ChatTemplateError(f"chat template of {self._name} failed: {reason}") from error
        return rendered

    @cached_property
    def _program(self) -> str:
        return _prepare_template(self.source)


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Check messages and copy them as plain dicts, lists and strings, with text parts joined.

    Args:
        messages: what a caller gave as messages.

    Returns:
        The copies; each has a str ``role`` and a str ``content``.

    Raises:
        ValidationError: ``messages`` is malformed; ``index`` is the message's position.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise ValidationError("messages must be a non-empty list of messages", param="messages", value=messages)
    plain = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _message_error(index, f"must be a dict, got {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise _message_error(index, "needs a str role")
        copied = _plain_value(dict(message), index, _MAX_MESSAGE_DEPTH)
        copied["content"] = _content_text(copied.get("content"), index)
        plain.append(copied)
    return plain


def strings(value: Any) -> Iterator[str]:
    """Every string in a JSON-like value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings(item)


def map_strings(value: Any, function: Callable[[str], str]) -> Any:
    """Copy a JSON-like value with ``function`` applied to every string."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, list):
        return [map_strings(item, function) for item in value]
    if isinstance(value, dict):
        return {function(key): map_strings(item, function) for key, item in value.items()}
    return value


def check_utf8(text: str, *, param: str, index: int | None = None) -> None:
    """Check that text can be written as UTF-8.

    Args:
        text: any str.
        param: the field it came in, for the error.
        index: position of its message, for the error.

    Raises:
        ValidationError: it holds a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValidationError(
            f"{param} holds the lone surrogate {text[error.start]!r} at character {error.start}",
            param=param,
            index=index,
        ) from None


def _content_text(content: Any, index: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _message_error(index, f"needs a content of str or text parts, got {type(content).__name__}")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _message_error(index, 'has a content part that is not {"type": "text", "text": str}')
        texts.append(part["text"])
    return "".join(texts)


def _plain_value(value: Any, index: int, depth: int) -> Any:
    """Copy a JSON-like value; nothing else may reach a template."""
    if depth == 0:
        raise _message_error(index, f"is nested deeper than {_MAX_MESSAGE_DEPTH}")
    if isinstance(value, str):
        check_utf8(value, param="messages", index=index)
        return str(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain_value(item, index, depth - 1) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {_plain_value(key, index, depth): _plain_value(item, index, depth - 1) for key, item in value.items()}
    raise _message_error(index, f"holds a {type(value).__name__}, which is not JSON")


def _message_error(index: int, problem: str) -> ValidationError:
    return ValidationError(f"messages[{index}] {problem}", param="messages", index=index)


class _OutputBudget:
    """Characters a template may still write."""

    def __init__(self, num_chars: int) -> None:
        self._limit = num_chars
        self._left = num_chars

    def charge(self, num_chars: int) -> str:
        self._left -= abs(num_chars) + _CALL_CHARS  # a template can call this with any number
        if self._left < 0:
            raise ChatTemplateError(f"it writes more than {self._limit} characters")
        return ""

    def check_total(self, num_chars: int) -> None:
        if num_chars > self._limit:
            raise ChatTemplateError(f"it writes more than {self._limit} characters")


def _environment(budget: _OutputBudget, fuel: int) -> minijinja.Environment:
    """A template environment with the settings and functions that Hugging Face templates expect."""

    def raise_exception(message: Any = "") -> None:
        raise ChatTemplateError(f"raise_exception: {str(message)[:500]}")

    def strftime_now(layout: str) -> str:
        budget.charge(len(layout))
        return datetime.now().strftime(layout)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        if indent is not None and len(str(indent)) > 2:
            raise ChatTemplateError("tojson: indent must be below 100")
        if separators is not None:
            separators = tuple(separators)
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        budget.charge(len(text))
        return text

    def finalizer(value: Any) -> Any:
        budget.charge(len(value) if isinstance(value, str) else 0)
        return value

    environment = minijinja.Environment(
        filters={"tojson": tojson},
        globals={
            "raise_exception": raise_exception,
            "strftime_now": strftime_now,
            "medha_charge": budget.charge,
        },
        debug=False,
        fuel=fuel,
        auto_escape_callback=lambda name: False,
        trim_blocks=True,
        lstrip_blocks=True,
        finalizer=finalizer,
        pycompat=True,
    )
    environment.remove_global("debug")
    return environment


_TAG_START = re.compile(r"\{[{%#]")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_RAW = re.compile(r"\{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw\s*[-+]?%\}", re.DOTALL)
_TAG_PART = re.compile(r"""'(?:[^'\\]|\\.)*+'|"(?:[^"\\]|\\.)*+"|[^'"()\[\]{}%]++|.""", re.DOTALL)
_GENERATION = re.compile(r"(\{%[-+]?)\s*(end)?generation\s*([-+]?%\})")


def _prepare_template(source: str) -> str:
    """Turn a template into what is executed.

    ``generation`` blocks, which mark text for training, become plain blocks with the same whitespace rules. A call
    that charges the output budget is put inside each long literal text, which minijinja writes without a callback.

    Raises:
        ChatTemplateError: the template, one expression, or a blank text is too long.
    """
    if len(source) > _MAX_TEMPLATE_CHARS:
        raise ChatTemplateError(f"it has {len(source)} characters, more than {_MAX_TEMPLATE_CHARS}")
    parts: list[str] = []
    position = 0
    while position < len(source):
        tag_start = _TAG_START.search(source, position)
        start = tag_start.start() if tag_start else len(source)
        parts.append(_charged(source[position:start]))
        if start == len(source):
            break
        skipped = _COMMENT.match(source, start) or _RAW.match(source, start)
        position = skipped.end() if skipped else _tag_end(source, start)
        tag = source[start:position]
        if skipped and tag.startswith("{%") and len(tag) > _LITERAL_CHARS:
            parts.append("{{ medha_charge(" + str(len(tag)) + ") }}")
        parts.append(_GENERATION.sub(lambda m: f"{m[1]} {'endif' if m[2] else 'if true'} {m[3]}", tag))
    return "".join(parts)


def _tag_end(source: str, start: int) -> int:
    """Where a ``{{`` or ``{%`` tag ends, found as the template compiler does: outside strings and brackets."""
    closer = "}}" if source[start + 1] == "{" else "%}"
    position, depth, num_chars = start + 2, 0, 0
    while position < len(source):
        if depth == 0 and source.startswith(closer, position):
            return position + 2
        part = _TAG_PART.match(source, position)
        assert part is not None, "the last alternative matches any character"
        text = part.group()
        depth += (text in "([{") - (depth > 0 and text in ")]}")
        num_chars += 1 if text[0] in "'\"" else len(text)
        if num_chars > _MAX_TAG_CHARS:
            raise ChatTemplateError(f"one expression has more than {_MAX_TAG_CHARS} characters")
        position = part.end()
    return len(source)


def _charged(literal: str) -> str:
    if len(literal) <= _LITERAL_CHARS:
        return literal
    # Between two visible characters a tag changes no whitespace; not next to a brace, where it would join it.
    place = re.search(r"[^\s{}%#](?=[^\s{}%#])", literal)
    if place is None:
        raise ChatTemplateError(f"it has {len(literal)} blank characters in a row")
    return literal[: place.end()] + "{{ medha_charge(" + str(len(literal)) + ") }}" + literal[place.end() :]
