"""Chat messages to the text a model was trained on, by the template that came with its weights.

That is a program of somebody else's: it gets plain copies of what the caller gave, and runs in a child process
(:mod:`medha.child.text`), because it can crash or exhaust whatever it runs in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from medha.child.process import Child, ChildError
from medha.errors import ChatTemplateError, ValidationError, not_accepted

_MAX_DEPTH = 64
_NO_CALLS: tuple[str, list[Any]] = ("tool_calls", [])
_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # by type, what has it
_GENERATION = re.compile(r"(\{%[-+]?)\s*(end)?generation\s*([-+]?%\})")


def render(child: Child, source: str, variables: Mapping[str, Any], name: str) -> str:
    """Render a chat template in a child that runs :mod:`medha.child.text`.

    Args:
        source: Jinja source; it is checked now.
        variables: what :func:`template_variables` returned, and special tokens by name, such as ``bos_token``.
        name: what messages call the tokenizer it belongs to.
    """
    # Blocks that mark text for training become plain ones with the same whitespace rules.
    source = _GENERATION.sub(lambda m: f"{m[1]} {'endif' if m[2] else 'if true'} {m[3]}", source)
    try:
        return child.ask(json.dumps([source, variables]).encode()).decode()
    except (ChildError, ValueError) as error:  # an integer of thousands of digits is no JSON
        raise ChatTemplateError(f"chat template of {name}: {error}") from error


def template_variables(
    messages: Any, *, add_generation_prompt: Any = True, tools: Any = None, chat_template_kwargs: Any = None
) -> dict[str, Any]:
    """Check what a template is given, and copy it as plain dicts, lists and strings.

    Args:
        messages: each with a ``role`` and a ``content``: a str, or a list of text parts, which are joined; an
            assistant's may have none. Further keys are handed to the template, those that are None left out.
        add_generation_prompt: whether to open the assistant's turn.
        tools: functions that the model may call, as JSON objects; None for none.
        chat_template_kwargs: further variables of the template, by name; they win over the other arguments.
    """
    kwargs = {} if chat_template_kwargs is None else chat_template_kwargs
    if not (tools is None or (isinstance(tools, (list, tuple)) and all(isinstance(tool, Mapping) for tool in tools))):
        raise not_accepted("tools", tools, "a list of objects")
    if not isinstance(add_generation_prompt, bool):
        raise not_accepted("add_generation_prompt", add_generation_prompt, "true or false")
    if not isinstance(kwargs, Mapping) or "messages" in kwargs:
        raise not_accepted("chat_template_kwargs", kwargs, "an object of the template's variables but messages")
    return {
        "add_generation_prompt": add_generation_prompt,
        "tools": _plain_value(tools or None, "tools", _MAX_DEPTH),  # a template asks whether there is a list
        "documents": None,
        **_plain_value(kwargs, "chat_template_kwargs", _MAX_DEPTH),
        "messages": _plain_messages(messages),
    }


def _plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Copies of messages as plain dicts, lists and strings, each with a str ``role`` and ``content``."""
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise ValidationError("messages must be a non-empty list of messages", param="messages", value=messages)
    plain = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            found = "has no str role" if isinstance(message, Mapping) else f"is of type {type(message).__name__}"
            raise _wrong(f"messages[{index}]", found, "an object with a str role")
        copied = _plain_value(message, f"messages[{index}]", _MAX_DEPTH)
        copied = {name: value for name, value in copied.items() if value is not None and (name, value) != _NO_CALLS}
        if isinstance(calls := copied.get("tool_calls"), list):
            copied["tool_calls"] = [_with_object(call) for call in calls]
        content = copied.get("content", "" if copied["role"] in ("assistant", "tool") else None)
        plain.append({**copied, "content": _content_text(content, index)})
    return plain


def _with_object(call: Any) -> Any:
    """A copy of a tool call whose arguments, OpenAI's JSON text, are the object that templates expect."""
    match call:
        case {"function": {"arguments": str(text), **others}}:
            with suppress(ValueError, RecursionError):  # a template may take the text
                if isinstance(found := json.loads(text or "{}"), dict):
                    arguments = _plain_value(found, "tool_calls", _MAX_DEPTH)
                    return {**call, "function": {**others, "arguments": arguments}}
    return call


def map_strings(value: Any, function: Callable[[str], str]) -> Any:
    """Copy a JSON-like value with ``function`` applied to every string."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, list):
        return [map_strings(item, function) for item in value]
    if isinstance(value, dict):
        return {function(key): map_strings(item, function) for key, item in value.items()}
    return value


def check_utf8(text: str, where: str) -> None:
    """Raise ValidationError where text of a parameter (of an item of it, in brackets) cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise _wrong(where, f"holds the lone surrogate {text[at]!r} at character {at}", "text that UTF-8 has") from None


def _content_text(content: Any, index: int) -> str:
    content = [content] if isinstance(content, str) else content
    accepted = 'a content that is a str or a list of such and of {"type": "text", "text": str}'
    if not isinstance(content, list):
        raise _wrong(f"messages[{index}]", f"has a content of type {type(content).__name__}", accepted)
    texts = [part.get(_PARTS.get(str(part.get("type")))) if isinstance(part, dict) else part for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise _wrong(f"messages[{index}]", "has a content part of another kind", accepted)
    return "".join(map(str, texts))


def _plain_value(value: Any, where: str, depth: int) -> Any:
    """Copy a JSON-like value; nothing else may reach a template."""
    if depth == 0:
        raise _wrong(where, f"is nested deeper than {_MAX_DEPTH}", "what is nested less")
    if isinstance(value, str):
        check_utf8(value, where)
        return str(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain_value(item, where, depth - 1) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {_plain_value(key, where, depth): _plain_value(item, where, depth - 1) for key, item in value.items()}
    raise _wrong(where, f"holds a {type(value).__name__}", "what JSON has")


def _wrong(where: str, problem: str, accepted: str) -> ValidationError:
    """An error about a parameter, or about one item of it."""
    param, _, index = where.rstrip("]").partition("[")
    return ValidationError(f"{where} {problem}; accepted: {accepted}", param=param, index=int(index) if index else None)
