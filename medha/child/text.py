"""The child that works on text, run by ``python -m medha.child.text``: it renders a chat template, or encodes.

A chat template is a program that came with somebody's weights. It runs in minijinja, which has no way from a value to
the interpreter, with bounded fuel (executed instructions); what a single instruction may take of memory and time, and a
value nested so deep that the stack ends, are bounded by the process: its end is an error of that rendering.

An encoder lets other threads run while it encodes, but not while its millions of ids become a list and the rest of
what it found is freed: 4M tokens take a tenth of a second, in which nobody in the same process would get a token.

A message is a template and its variables, as JSON has them, and the answer text in UTF-8; or it is a byte that says
whether special tokens are added, and the text behind it, and the answer the ids, int32 in the machine's byte order.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

import minijinja
import tokenizers

from medha.child.process import ChildError
from medha.child.serving import limit_resources, serve

MAX_FUEL = 50_000_000
"""Most template instructions executed in one rendering (seconds)."""
_FUEL_PER_BYTE = 64  # of JSON, where 5 were seen, for nested parameters of tools; 2,000 for the shortest message
_TIMES = 8  # as much as other work on so many bytes: 470 a byte were seen, where each character is a token


def _render(sent: bytes) -> bytes:
    source, context = json.loads(sent)
    source = source.replace("\r\n", "\n").replace("\r", "\n")  # as Jinja does
    limit_resources(len(sent))
    context |= {name: _with_floats(context[name], name == "tools") for name in ("messages", "tools")}
    environment = _environment(min(MAX_FUEL, 100_000 + _FUEL_PER_BYTE * len(sent)))
    try:
        rendered: str = environment.render_str(source, "chat_template", **context)
    except minijinja.TemplateError as error:
        raise ChildError((str(error).splitlines() or ["it fails"])[0][:500]) from None
    return rendered.encode()


class _Float:
    """A float of a tool or a call that a filter would get as an integer, or that would be written without exponent.

    To a template it is text, or JSON.
    """

    def __init__(self, value: float) -> None:
        self._value = value

    def __bool__(self) -> bool:
        return self._value != 0

    def __repr__(self) -> str:
        return repr(self._value)


def _with_floats(value: Any, is_written: bool) -> Any:
    """A copy in which floats of what templates write, as the arguments of a call, are written as Python does."""
    if isinstance(value, list):
        return [_with_floats(item, is_written) for item in value]
    if isinstance(value, dict):
        return {name: _with_floats(item, is_written or name == "arguments") for name, item in value.items()}
    is_other = is_written and isinstance(value, float) and (value.is_integer() or abs(value) < 1e-4)
    return _Float(value) if is_other else value


def _environment(fuel: int) -> minijinja.Environment:
    """A template environment with the settings and functions that Hugging Face templates expect."""

    def raise_exception(reason: Any = "") -> None:
        raise ChildError(f"raise_exception: {str(reason)[:500]}")

    def tojson(value: Any, ensure_ascii: bool = False, separators: Any = None, **options: Any) -> str:
        options |= {"ensure_ascii": ensure_ascii, "separators": separators and tuple(separators)}
        return json.dumps(value, default=lambda value: float(repr(value)), **options)

    environment = minijinja.Environment(
        filters={"tojson": tojson},
        tests={  # as in Jinja; but what is undefined comes as None, and whole floats of the template's own as integers
            "iterable": lambda value: hasattr(value, "__iter__"),
            "sequence": lambda value: hasattr(value, "__getitem__"),
            "number": lambda value: isinstance(value, int | float | _Float),
            "float": lambda value: isinstance(value, float | _Float),
        },
        globals={"raise_exception": raise_exception, "strftime_now": datetime.now().strftime},
        debug=False,
        fuel=fuel,
        auto_escape_callback=lambda name: False,
        trim_blocks=True,
        lstrip_blocks=True,
        pycompat=True,
    )
    environment.remove_global("debug")
    return environment


def _encode(backend: tokenizers.Tokenizer, sent: bytes) -> bytes:
    limit_resources(_TIMES * len(sent))
    found = backend.encode_batch_fast([sent[1:].decode()], add_special_tokens=bool(sent[0]))
    return array("i", found[0].ids).tobytes()


def _load(sent: bytes) -> Callable[[bytes], bytes]:
    """What answers after this first message: a tokenizer as it writes itself (JSON), or nothing for templates."""
    if not sent:
        return _render
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads would take memory, and have nothing to do for one text
    backend = tokenizers.Tokenizer.from_str(sent.decode())
    backend.no_truncation()
    backend.no_padding()
    return partial(_encode, backend)


if __name__ == "__main__":
    serve(_load)
