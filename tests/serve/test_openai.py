"""The ``openai`` package against the server: completions, chats, streams, errors; tokens are the engine's."""

from __future__ import annotations

from functools import partial
from typing import Any

import openai
import pytest

from medha.outputs import CompletionOutput, Logprob
from medha.params import SamplingParams
from medha.serve.protocol import _logprobs
from tests.serve.conftest import CHAT, PATH, Server, asked, asked_in_chat, served
from tests.serving import Model, serve_one


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


def alone(model: Model, prompt: Any, **params: Any) -> Any:
    return serve_one(model.engine(), prompt, SamplingParams(**params)).outputs[0]


def test_a_completion(client: openai.OpenAI, bytes_model: Model) -> None:
    given: Any = {"model": "model", "prompt": "hello", "max_tokens": 6, "temperature": 0}
    answer = client.completions.create(**given)
    expected = alone(bytes_model, "hello", max_tokens=6, temperature=0.0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (expected.text, "length")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 6, 11)
    assert answer.id.startswith("cmpl-") and answer.object == "text_completion"
    assert [model.id for model in client.models.list()] == ["model"]
    assert client.completions.create(**given, stop=expected.text[:2]).choices[0].finish_reason == "stop"


def test_several_prompts_with_several_completions(client: openai.OpenAI, bytes_model: Model) -> None:
    given: dict[str, Any] = {"max_tokens": 4, "temperature": 1.0, "seed": 5, "n": 2}
    answer = client.completions.create(model="model", prompt=["one", "other"], **given)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for at, prompt in enumerate(["one", "other"]):
        for index in range(2):
            expected = alone(bytes_model, prompt, max_tokens=4, temperature=1.0, seed=5 + index)
            assert answer.choices[2 * at + index].text == expected.text
    ids = [[1, 2, 3], [4, 5]]
    answer = client.completions.create(model="model", prompt=ids, max_tokens=2, temperature=0)
    expected = [alone(bytes_model, one, max_tokens=2, temperature=0.0).text for one in ids]
    assert [one.text for one in answer.choices] == expected


def test_a_stream_is_the_whole_in_pieces(client: openai.OpenAI, bytes_model: Model) -> None:
    given: Any = {"max_tokens": 90, "temperature": 0.0}
    ask = partial(client.completions.with_raw_response.create, model="model", prompt="hello", stream=True, **given)
    answer = ask(stream_options={"include_usage": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"  # else some take it for Latin-1
    chunks: Any = list(answer.parse())
    assert "".join(one.choices[0].text for one in chunks[:-1]) == alone(bytes_model, "hello", **given).text
    assert len(chunks) > 3 and len({one.id for one in chunks}) == 1
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 90
    assert all(one.usage is None for one in chunks[:-1])
    along: Any = {"include_usage": True, "continuous_usage_stats": True}  # vLLM's, which load generators ask for
    made = [one.usage.completion_tokens for one in ask(stream_options=along).parse()]
    assert made == sorted(made) and (made[0] < 90, made[-2:]) == (True, [90, 90])


def test_a_chat(client: openai.OpenAI, bytes_model: Model) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]}]
    options: Any = {"max_completion_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    neutral: Any = {"tools": [], "response_format": {"type": "text"}, "n": 1, "stop": None, "tool_choice": "none"}
    answer = client.chat.completions.create(model="model", messages=messages, **options, extra_body=neutral)
    expected = alone(bytes_model, {"messages": messages}, max_tokens=5, temperature=0.0, logprobs=2)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [len(one.top_logprobs) for one in choice.logprobs.content] == [2] * 5
    first = max(expected.logprobs[0].values(), key=lambda one: one.logprob)
    assert choice.logprobs.content[0].logprob == pytest.approx(first.logprob)
    pieces = list(client.chat.completions.create(model="model", messages=messages, stream=True, **options))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(one.choices[0].delta.content or "" for one in pieces) == expected.text
    assert pieces[-1].choices[0].finish_reason == "length"
    for wrong in (None, 3):
        given: Any = {"logprobs": wrong, "top_logprobs": 5}
        with pytest.raises(openai.BadRequestError, match="with logprobs true"):
            client.chat.completions.create(model="model", messages=messages, **given)


def test_the_choices_of_a_chat_begin_in_order(client: openai.OpenAI) -> None:
    """As OpenAI's client needs them, each with its role alone, and go on as the whole answer."""
    for seed in range(5):
        given: Any = {"model": "model", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": seed}
        whole = client.chat.completions.create(n=3, **given)
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        with client.chat.completions.stream(n=3, logprobs=True, stream_options=options, **given) as events:
            chunks = [event.chunk for event in events if event.type == "chunk"]
            found = events.current_completion_snapshot
        begun = [chunk.choices[0] for chunk in chunks[:3]]
        assert [one.index for one in begun] == [0, 1, 2] and not any(one.logprobs or one.finish_reason for one in begun)
        assert [(one.delta.role, one.delta.content) for one in begun] == [("assistant", "")] * 3
        assert all(one.choices[0].delta.role is None for one in chunks[3:-1])
        assert [one.message.content for one in found.choices] == [one.message.content for one in whole.choices]
        assert [len(one.logprobs.content or ()) for one in found.choices if one.logprobs] == [8] * 3
        assert chunks[-1].choices == [] and found.usage is not None and found.usage.completion_tokens == 24


def test_top_logprobs_have_the_drawn_token() -> None:
    one = CompletionOutput(0, "x", [3, 4])
    likely, drawn, part = Logprob(-0.1, 1, "a"), Logprob(-3.0, 9, "b"), Logprob(-0.2, 1, "")
    one.logprobs = [{2: likely, 3: drawn}, {4: part, 5: Logprob(-4.0, 2, "")}]
    found = _logprobs(one, 2, 0, is_chat=False)
    assert found is not None and found["top_logprobs"] == [{"a": -0.1, "b": -3.0}, {"": -0.2}]
    none = _logprobs(one, 0, 0, is_chat=False)
    assert none is not None and none["top_logprobs"] == [{"b": -3.0}, {"": -0.2}]
    chat = _logprobs(one, 1, 0, is_chat=True)
    assert chat is not None and [its["bytes"] for its in chat["content"]] == [[98], []]


def test_logprobs_of_a_completion_and_of_its_stream(client: openai.OpenAI) -> None:
    given: Any = {"model": "model", "prompt": "hello", "max_tokens": 40, "temperature": 0, "logprobs": 1}
    logprobs = client.completions.create(**given).choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs or ()) == len(logprobs.top_logprobs or ()) == 40
    assert logprobs.text_offset[0] == 0
    pieces = [one.choices[0].logprobs for one in client.completions.create(**given, stream=True)]
    assert [at for piece in pieces if piece is not None for at in piece.text_offset or ()] == logprobs.text_offset


def test_errors_are_those_that_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"temperature has a value .* accepted: a finite number"):
        client.completions.create(model="model", prompt="SECRET", max_tokens=2, temperature=9)
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.completions.create(model="other", prompt="hello")
    given: dict[str, Any] = {"tools": [{"type": "function"}], "response_format": {"type": "json_object"}}
    for name, value in given.items():
        with pytest.raises(openai.BadRequestError, match=f"{name} is not implemented"):
            client.chat.completions.create(model="model", **asked_in_chat(**{name: value}))
    with pytest.raises(openai.BadRequestError, match="fewer than max_model_len"):
        client.completions.create(model="model", prompt=[1] * 9000, max_tokens=2)
    with pytest.raises(openai.BadRequestError, match=r"top_logprobs has a value .* accepted: an integer from 0 to 20"):
        client.chat.completions.create(model="model", **asked_in_chat(logprobs=True, top_logprobs=50))


def test_logprobs_without_a_tokenizer_name_ids(bytes_model: Model) -> None:
    with served(bytes_model.engine(with_tokenizer=False)) as server:
        told = server.post(CHAT, asked_in_chat())[1]["error"]["message"]
        assert told == "messages needs a tokenizer, and the model has none; accepted: prompt_token_ids"
        (top,) = server.post(PATH, asked(5, 1, logprobs=3))[1]["choices"][0]["logprobs"]["top_logprobs"]
    assert len(top) == 3 and all(name.startswith("token_id:") for name in top)
