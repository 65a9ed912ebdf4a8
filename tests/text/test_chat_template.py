"""Chat templates, against transformers, and what a malformed message or a hostile template does."""

from contextlib import suppress
from itertools import product
from typing import Any

import pytest
import transformers

from medha.errors import ChatTemplateError, ValidationError
from medha.text import Tokenizer
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
{%- if tools is iterable and tools | length > 0 %}never{% endif %}
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
GLM = """{% for t in tools %}{{ t.default | tojson }} {{ t.default }} {{ 'on' if t.default else 'off' }}
{% endfor %}
{%- for m in messages %}{{ m.content }}{{ m.score + 1 if m.score is number and m.score > 1.5 }}
{%- for c in m.tool_calls %}{% set args = c.function.arguments %}
{% for k, v in args.items() %}
{{ k }}={{ v | tojson(ensure_ascii=False) if v is not string else v }}, {{ [v] | tojson }}, {{ v }}
{{ v is iterable }} {{ v is sequence }} {{ v is mapping }} {{ v is number }} {{ v is float }} {{ v is integer }}
{% endfor %}{{ args | tojson }} {{ args }}
{% endfor %}{% endfor %}"""
TEMPLATES = {"llama3": LLAMA3, "qwen": QWEN, "mistral": MISTRAL, "glm": GLM}
TEMPLATES |= {"crlf": MISTRAL.replace("\n", "\r\n"), "cr": LLAMA3.replace("\n", "\r") + "\r\n"}
ARGUMENTS = {"t": 20.0, "few": [-3.0, {"x": -0.0}], "much": 1e15, "half": 0.5, "whole": 20, "text": "2.0"}
ARGUMENTS |= {"small": 1e-05, "smaller": [-2.5e-07], "no": None, "sure": True, "object": {"x": 0.0001}}
CALLS = [{"type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}]
TOOLS = [{"type": "function", "default": default} for default in (2.0, 0.0, 3)]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be brief. "},
    {"role": "user", "content": 'naïve 你好 <b> & "quotes" 🙂'},
    {"role": "assistant", "content": "<think>hm</think>\n\nYes."},
    {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]},
]


def joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        m if isinstance(m["content"], str) else {**m, "content": "".join(p["text"] for p in m["content"])}
        for m in messages
    ]


def rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
    return tokenizer.encode_chat(messages, **options)[0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_ids_are_those_of_transformers(name: str) -> None:
    theirs: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<|bos|>", eos_token="<|eot_id|>", chat_template=TEMPLATES[name]
    )
    mine = chat_tokenizer(TEMPLATES[name])
    tools = TOOLS if name == "glm" else None
    called = [CHAT[1] | {"score": 2.0}, {"role": "assistant", "content": "", "tool_calls": CALLS}]
    length = 600 if name == "llama3" else 4  # once so long that a child encodes it
    many = [{"role": ("user", "assistant")[i % 2], "content": f"message {i} " * 20} for i in range(length)]
    for opens, messages in product((True, False), (CHAT, CHAT[1:2], CHAT[1:], many, called)):
        options: Any = {"add_generation_prompt": opens, "tools": tools}
        text, ids = mine.encode_chat(messages, **options)
        assert text == theirs.apply_chat_template(joined(messages), tokenize=False, **options)
        assert ids.tolist() == theirs.apply_chat_template(joined(messages), return_dict=False, **options)


@pytest.mark.parametrize(
    ("each", "given"),
    [
        ("messages", {"messages": CHAT[1:2] * 2000}),
        ("messages[0].tool_calls", {"messages": [{"role": "assistant", "tool_calls": CALLS * 2000}]}),
        ("tools[0].properties", {"tools": [{"properties": {f"p{i}": {"type": "string"} for i in range(2000)}}]}),
    ],
)
def test_fuel_is_for_each_of_what_is_rendered(each: str, given: dict[str, Any]) -> None:
    template = "{% for m in @ %}{% for i in range(200) %}x{% endfor %}{% endfor %}".replace("@", each)
    assert len(rendered(chat_tokenizer(template), **{"messages": CHAT[1:2]} | given)) == 400_000


@pytest.mark.parametrize(
    ("messages", "index"),
    [
        ([], None),
        ([{"role": "user", "content": "a"}, "b"], 1),
        ([{"content": "a"}], 0),
        ([{"role": "user"}], 0),
        ([{"role": "user", "content": None}], 0),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], 0),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": "\udc00"}], 1),
        ([{"role": "user", "content": "a", "extra": object()}], 0),
    ],
)
def test_malformed_messages(messages: Any, index: int | None) -> None:
    tokenizer = chat_tokenizer(QWEN)
    with pytest.raises(ValidationError) as caught:
        tokenizer.encode_chat(messages)
    assert caught.value.param == "messages"
    assert caught.value.index == index
    assert ("has no str role" in str(caught.value)) == (messages == [{"content": "a"}])


def test_what_is_empty_counts_as_absent_and_a_call_of_tools_needs_no_content() -> None:
    """A template asks whether there is a list of tools, or a key; clients send back whole messages."""
    asks = "{{ tools is none }}{% for m in messages %} {{ m.keys() | sort | join(',') }}:{{ m.content }}{% endfor %}"
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    answer = {"role": "assistant", "content": "4", "tool_calls": [], "function_call": None}
    silent = {"role": "assistant", "content": None, "tool_calls": []}
    parts = ["4", {"type": "refusal", "refusal": "no"}, {"type": "output_text", "text": "!"}]
    others = {"role": "tool", "content": None}, {"role": "assistant", "content": parts}
    text = rendered(chat_tokenizer(asks), [call, answer, silent, *others], tools=[])
    assert text == "True content,role,tool_calls: content,role:4 content,role: content,role: content,role:4no!"


def test_arguments_of_a_call_are_an_object_to_templates() -> None:
    """As in what the model was trained on; clients send OpenAI's JSON text, which is one of its strings."""
    asks = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }} {% endfor %}"
    given = ['{"city": "Paris"}', "", {"n": 1}, "[1]", "{", "[" * 100_000, '{"a":' * 200 + "1" + "}" * 200]
    calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}} for arguments in given]
    text = rendered(chat_tokenizer(asks), [{"role": "assistant", "content": None, "tool_calls": calls}])
    assert text.startswith('{"city": "Paris"} {} {"n": 1} "[1]" "{" "[[')
    assert calls[0]["function"] == {"name": "f", "arguments": given[0]}


def test_messages_nested_too_deep_and_messages_are_not_changed() -> None:
    deep: Any = "x"
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(ValidationError, match="nested deeper"):
        chat_tokenizer("x").encode_chat([{"role": "user", "content": "a", "extra": deep}])
    messages = [{"role": "user", "content": "a"}]
    chat_tokenizer("{% set x = messages.append(1) %}{% set y = messages[0].pop('role') %}").encode_chat(messages)
    assert messages == [{"role": "user", "content": "a"}]


HOSTILE = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "cycler": "{{ cycler.__init__.__globals__.os }}",
    "attr": "{{ (messages | attr('__class__')).__base__ }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loop of output": "{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
    "gigabyte": "{{ 'x' * 1_000_000_000 }}",
    "power": "{{ (9 ** 9999999) | string }}",
    "macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "indent": "{{ messages | tojson(indent=100000000) }}",
    "length": "{% if true %}" * 100_000,
    "syntax": "{% for %}",
    "raise": "{{ raise_exception('no tools here') }}",
    "include": "{% include '/etc/passwd' %}",
    "missing": None,
    "namespace in itself": "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
    "memory": "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}x",
}

REASONS = {"raise": "no tools here", "loops": "fuel", "syntax": "syntax error", "missing": "has no chat template"}
REASONS["namespace in itself"] = "^chat template of tokenizer: the process ended with SIG"


@pytest.mark.timeout(120)  # each takes milliseconds, and without a bound minutes or for ever
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates(name: str) -> None:
    tokenizer = chat_tokenizer(HOSTILE[name])
    with pytest.raises(ChatTemplateError, match=REASONS.get(name, "chat template")):
        tokenizer.encode_chat([{"role": "user", "content": "hi <|eot_id|>"}])


GROW = "{% set ns = namespace(a=0) %}{% for i in range(20000) %}{% set ns.a = [ns.a] %}{% endfor %}"
DEEP = {
    "elif": "{% if 0 %}" + "{% elif 0 %}" * 9000 + "{% endif %}",
    "for": "{% for a in [1] %}" * 3000 + "x" + "{% endfor %}" * 3000,
    "filters": "{{ a" + "|string" * 9000 + " }}",
    "straight sets": "{% set a = 0 %}" + "{% set a = [a] %}" * 9000 + "{{ a }}",
    "grown as JSON": GROW + "{{ ns.a | tojson }}",
    "grown and tested": GROW + "{{ ns.a is iterable }}",
    "grown and compared": GROW + "{{ ns.a == ns.a }}",
    "compared": "{% set a = namespace() %}{% set a.a = a %}{% set b = namespace(a=a) %}{{ a == b }}",
    "list in itself": "{% set _ = messages.append(messages) %}{{ messages == messages }}{{ messages }}",
    "macro that calls itself": "{% macro a(x) %}{{ a([x]) }}{% endmacro %}{{ a(1) }}",
    "recursive loop": "{% for a in [1] recursive %}{{ loop([[a]]) }}{% endfor %}",
    "kill": "{{ raise_exception.__globals__ }}{{ strftime_now('%1000000000d') }}",
}


@pytest.mark.parametrize("name", DEEP)
def test_no_template_ends_the_process(name: str) -> None:
    """Depth of any kind ends in text or in an error, and the next conversation is served."""
    tokenizer = chat_tokenizer("{% if messages[0].content == 'good' %}fine{% else %}" + DEEP[name] + "{% endif %}")
    with suppress(ChatTemplateError):
        assert isinstance(rendered(tokenizer, [{"role": "user", "content": "bad"}]), str)
    with suppress(ChatTemplateError):  # of what does not compile
        assert rendered(tokenizer, [{"role": "user", "content": "good"}]) == "fine"
