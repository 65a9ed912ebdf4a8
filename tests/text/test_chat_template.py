"""Chat templates, against Jinja2 and transformers, and what a malformed message or a hostile template does."""

from __future__ import annotations

import json
import time
from datetime import datetime
from typing import Any

import jinja2.ext
import jinja2.sandbox
import pytest

from medha.errors import ChatTemplateError, ValidationError
from tests.text.samples import LLAMA3, byte_level, chat_tokenizer

QWEN = """{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' and ns.last < 0 %}{% set ns.last = messages|length - 1 - loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {{- '<|im_start|>assistant\\n' ~ content ~ '<|im_end|>\\n' }}
    {%- elif not (message.role == 'system' and loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if tools %}never{% endif %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
MISTRAL = """{{ bos_token }}
{% for m in messages if m['role'] != 'system' %}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if m['role'] == 'user' %}
        {{- ' [INST] ' + m['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + m['content'] + eos_token}}
    {%- endif %}
{% endfor %}
{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}
{{ strftime_now('%Y') }}
  {% if true %}
    tail
  {% endif %}
"""
TEMPLATES = {"llama3": LLAMA3, "qwen": QWEN, "mistral": MISTRAL}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be brief. "},
    {"role": "user", "content": 'naïve 你好 <b> & "quotes" 🙂'},
    {"role": "assistant", "content": "<think>hm</think>\n\nYes."},
    {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
]
HOSTILE_SECONDS = 5.0  # each takes milliseconds; the bound is for busy machines


def hf_render(template: str, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    for tag in ("generation", "endgeneration"):
        block = "if true" if tag == "generation" else "endif"
        template = template.replace("{%- " + tag, "{%- " + block).replace("{% " + tag, "{% " + block)
    return environment.from_string(template).render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        bos_token="<|bos|>",
        eos_token="<|eot_id|>",
        tools=None,
        documents=None,
    )


def joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        m if isinstance(m["content"], str) else {**m, "content": "".join(p["text"] for p in m["content"])}
        for m in messages
    ]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_render_equals_jinja2(name: str, add_generation_prompt: bool) -> None:
    tokenizer = chat_tokenizer(TEMPLATES[name])
    for messages in (CHAT, CHAT[1:2], CHAT[1:]):
        mine = tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt)
        assert mine == hf_render(TEMPLATES[name], joined(messages), add_generation_prompt)


@pytest.mark.parametrize("name", TEMPLATES)
def test_encode_chat_equals_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<|bos|>", eos_token="<|eot_id|>", chat_template=TEMPLATES[name]
    )
    mine = chat_tokenizer(TEMPLATES[name])
    ids = theirs.apply_chat_template(joined(CHAT), tokenize=True, add_generation_prompt=True, return_dict=False)
    assert mine.encode_chat(CHAT) == ids


def test_long_literals_render_unchanged() -> None:
    text = "Follow the rules below. { not a tag } 100% # \n  " * 20
    template = "{# c {{ ' #}" + text + "{% raw %}{{ ' {% endraw %}\n  {% if true %}\n" + text + "{% endif %}"
    assert chat_tokenizer(template).render_chat(CHAT) == hf_render(template, joined(CHAT), True)


def test_a_thousand_messages_render() -> None:
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"message {i} " * 20} for i in range(1000)]
    for name, template in TEMPLATES.items():
        assert len(chat_tokenizer(template).render_chat(messages)) > 200_000, name


@pytest.mark.parametrize(
    ("messages", "index"),
    [
        ([], None),
        ("hello", None),
        ([{"role": "user", "content": "a"}, "b"], 1),
        ([{"content": "a"}], 0),
        ([{"role": 1, "content": "a"}], 0),
        ([{"role": "user"}], 0),
        ([{"role": "user", "content": None}], 0),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], 0),
        ([{"role": "user", "content": ["x"]}], 0),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "\udc00"}], 1),
        ([{"role": "user", "content": "a", "extra": object()}], 0),
    ],
)
def test_malformed_messages(messages: Any, index: int | None) -> None:
    tokenizer = chat_tokenizer(QWEN)
    for method in (tokenizer.render_chat, tokenizer.encode_chat):
        with pytest.raises(ValidationError) as caught:
            method(messages)
        assert caught.value.param == "messages"
        assert caught.value.index == index


def test_messages_nested_too_deep_and_messages_are_not_changed() -> None:
    deep: Any = "x"
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(ValidationError, match="nested deeper"):
        chat_tokenizer("x").render_chat([{"role": "user", "content": "a", "extra": deep}])
    messages = [{"role": "user", "content": "a"}]
    chat_tokenizer("{% set x = messages.append(1) %}{% set y = messages[0].pop('role') %}").encode_chat(messages)
    assert messages == [{"role": "user", "content": "a"}]


HOSTILE = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__.os }}",
    "cycler": "{{ cycler.__init__.__globals__.os }}",
    "method": "{{ messages.__reduce__() }}",
    "attr": "{{ (messages | attr('__class__')).__base__ }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loop of output": "{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
    "loop of text": "{% for a in range(99999) %}" + "long text " * 5000 + "{% endfor %}",
    "loop of raw": "{% for a in range(99999) %}{% raw %}" + "long text " * 5000 + "{% endraw %}{% endfor %}",
    "blank text": "{% for a in range(99999) %}" + " " * 5000 + "{% endfor %}",
    "refill": "{% for a in range(99999) %}{{ medha_charge(-9000000) }}{{ 'x' * 1000000 }}{% endfor %}",
    "gigabyte": "{{ 'x' * 1_000_000_000 }}",
    "more than 8 MB": "{{ 'x' * 9_000_000 }}",
    "range": "{{ range(999999999) }}",
    "power": "{{ (9 ** 9999999) | string }}",
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "indent": "{{ messages | tojson(indent=100000000) }}",
    "expression": "{{ " + "-" * 50_000 + "1 }}",
    "expression after a dict": "{{ {'a': {}}['a'] " + "~ '}}' " * 20_000 + " }}",
    "parentheses": "{{ " + "(" * 3_000 + "1",
    "length": "{% if true %}" * 100_000,
    "syntax": "{% for %}",
    "unclosed": "{{ messages",
    "raise": "{{ raise_exception('no tools here') }}",
    "include": "{% include '/etc/passwd' %}",
    "undefined": "{{ nothing.at.all }}",
    "missing": None,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates(name: str) -> None:
    tokenizer = chat_tokenizer(HOSTILE[name])
    start = time.monotonic()
    for method in (tokenizer.render_chat, tokenizer.encode_chat):
        with pytest.raises(ChatTemplateError):
            method([{"role": "user", "content": "hi <|eot_id|>"}])
    assert time.monotonic() - start < HOSTILE_SECONDS


def test_template_errors_say_why() -> None:
    messages = [{"role": "user", "content": "hi"}]
    for template, reason in {
        HOSTILE["raise"]: "no tools here",
        HOSTILE["loops"]: "fuel",
        HOSTILE["syntax"]: "syntax error",
        None: "has no chat template",
    }.items():
        with pytest.raises(ChatTemplateError, match=reason):
            chat_tokenizer(template).render_chat(messages)
