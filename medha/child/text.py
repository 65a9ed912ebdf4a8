"""The child that works on text, run by ``python -m medha.child.text``: it renders a chat template, or encodes.

A chat template is a program that came with somebody's weights. It runs in minijinja, which has no way from a value to
the interpreter, with bounded fuel (executed instructions); what a single instruction may take of memory and time, and a
value nested so deep that the stack ends, are bounded by the process: its end is an error of that rendering.

An encoder lets other threads run while it encodes, but not while its millions of ids become a list and the rest of
what it found is freed: 4M tokens take a tenth of a second, in which nobody in the same process would get a token.
"""

from __future__ import annotations

import json
import resource
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

import minijinja
import tokenizers

from medha.child.process import ChildError, serve

MAX_FUEL = 1_000_000
"""Most template instructions executed in one rendering (tens of milliseconds)."""

_MEMORY_BYTES = 1 << 28  # that a rendering may take, beside so many bytes for each that came in
_MEMORY_PER_BYTE = 64
_CPU_S = 10


def template_message(source: str, context: Mapping[str, Any]) -> bytes:
    """A template and its variables, as JSON has them; the answer is text in UTF-8."""
    return json.dumps([source, context]).encode()


def _render(sent: bytes) -> bytes:
    source, context = json.loads(sent)
    limit_resources(len(sent))
    environment = _environment(min(MAX_FUEL, 100_000 + 2_000 * len(context["messages"])))
    try:
        rendered: str = environment.render_str(source, "chat_template", **context)
    except minijinja.TemplateError as error:
        raise ChildError((str(error).splitlines() or ["it fails"])[0][:500]) from None
    return rendered.encode()


def limit_resources(num_bytes: int) -> None:
    """Let this process take so much more than it has taken so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    limits = {resource.RLIMIT_CPU: int(usage.ru_utime + usage.ru_stime) + 1 + _CPU_S + num_bytes // 1_000_000}
    with suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:  # Linux has it
        taken = int(file.read().split()[0]) * resource.getpagesize()
        limits[resource.RLIMIT_AS] = taken + _MEMORY_BYTES + _MEMORY_PER_BYTE * num_bytes
    for kind, limit in limits.items():
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _environment(fuel: int) -> minijinja.Environment:
    """A template environment with the settings and functions that Hugging Face templates expect."""

    def raise_exception(reason: Any = "") -> None:
        raise ChildError(f"raise_exception: {str(reason)[:500]}")

    def strftime_now(layout: str) -> str:
        return datetime.now().strftime(layout)

    def tojson(value: Any, ensure_ascii: bool = False, separators: Any = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, separators=separators and tuple(separators), **options)

    environment = minijinja.Environment(
        filters={"tojson": tojson},
        globals={"raise_exception": raise_exception, "strftime_now": strftime_now},
        debug=False,
        fuel=fuel,
        auto_escape_callback=lambda name: False,
        trim_blocks=True,
        lstrip_blocks=True,
        pycompat=True,
    )
    environment.remove_global("debug")
    return environment


def encode_message(text: str, *, add_special_tokens: bool) -> bytes:
    """A text to encode; the answer is int32 in the byte order of the machine."""
    return bytes([add_special_tokens]) + text.encode()


def encode(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids. Unlike ``backend.encode`` it lets other threads run, and counts no characters, which takes longest."""
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def _encode(backend: tokenizers.Tokenizer, sent: bytes) -> bytes:
    return array("i", encode(backend, sent[1:].decode(), add_special_tokens=bool(sent[0]))).tobytes()


def _load(sent: bytes) -> Callable[[bytes], bytes]:
    """What answers after this first message: a tokenizer as it writes itself (JSON), or nothing for templates."""
    if not sent:
        return _render
    backend = tokenizers.Tokenizer.from_str(sent.decode())
    backend.no_truncation()
    backend.no_padding()
    return partial(_encode, backend)


if __name__ == "__main__":
    serve(_load)
