"""OpenAI's requests and answers as JSON has them: what a body asks for, what an output looks like, what an error says.

Field names and shapes are OpenAI's, and vLLM's where they go further (``prompt_token_ids``, ``/tokenize``); of medha
alone are ``slo``, ``priority``, ``return_progress`` and ``explain``. Fields of a request file
(:mod:`medha.engine.jsonl`) mean the same here. An error never repeats what a client sent.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from medha.engine.arrivals import Arrival
from medha.engine.jsonl import count_logprobs, read_fields
from medha.engine.request import Request
from medha.errors import (
    ChatTemplateError,
    ContextLengthError,
    DeadlineError,
    EngineDeadError,
    KVCapacityError,
    UnsupportedFeatureError,
    ValidationError,
    not_accepted,
)
from medha.outputs import CompletionOutput, Logprob, RequestOutput
from medha.params import CHAT_OPTIONS, SamplingParams

Json = dict[str, Any]

MAX_CHOICES = 512
"""Completions of one HTTP request."""

_TYPES = {401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError", 500: "InternalServerError"}
_FLAGS = ("stream", "return_progress", "explain")


class ApiError(Exception):
    """What a client is told in place of an answer, with the status and headers that go with it."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def body(self) -> Json:
        """As OpenAI has it."""
        kind = _TYPES.get(self.status, "BadRequestError" if self.status < 500 else "ServiceUnavailableError")
        fields = {"message": str(self), "type": kind, "param": self.param, "code": self.code or self.status}
        return {"error": fields}


def stopped() -> ApiError:
    """What whoever waits is told when the server ends."""
    return ApiError(503, "the server has stopped before the answer was whole", code="server_stopped")


def api_error(error: Exception) -> ApiError:
    """What a client is told of an error of the engine, without the value that was wrong."""
    param = getattr(error, "param", None)
    if isinstance(error, ApiError):
        return error
    if isinstance(error, DeadlineError):
        if error.wait_s is None:
            return ApiError(429, str(error), param=param, code="deadline", x_should_retry="false")
        return ApiError(429, str(error), param=param, code="deadline", retry_after=str(math.ceil(error.wait_s)))
    if isinstance(error, (ContextLengthError, KVCapacityError)):
        return ApiError(400, str(error), param=param, code="context_length_exceeded")
    if isinstance(error, UnsupportedFeatureError):
        return ApiError(400, str(error), param=param, code="unsupported")
    if isinstance(error.__cause__, ChatTemplateError):
        return ApiError(400, "the model has no chat template that takes these messages", param=param)
    if isinstance(error, ValidationError):
        _, found, accepted = str(error).rpartition("; accepted: ")
        told = f"; accepted: {accepted}" if found else ""
        return ApiError(400, f"{param or 'the request'} has a value that cannot be served{told}", param=param)
    if isinstance(error, EngineDeadError):
        return ApiError(503, f"the engine has failed: {type(error).__name__}", code="engine_dead")
    if isinstance(error, RecursionError):
        return ApiError(400, "the body is nested too deeply")
    return ApiError(500, f"the request failed: {type(error).__name__}")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the body of a completion or a chat asks for.

    Attributes:
        arrivals: one for each prompt, their ids made of ``request_id``.
        includes_usage: whether a stream ends with what was used.
    """

    request_id: str
    model: str
    is_chat: bool
    arrivals: tuple[Arrival, ...]
    stream: bool
    includes_usage: bool
    return_progress: bool
    explain: bool
    created: int

    @property
    def params(self) -> SamplingParams:
        """Those of every prompt."""
        params = self.arrivals[0].params
        assert params is not None, "they were read"
        return params


def read_asked(body: Json, *, is_chat: bool, models: Sequence[str], request_id: str | None, objectives: Json) -> Asked:
    """What a body asks for; raises ApiError, ValidationError or UnsupportedFeatureError.

    ``objectives`` are fields that it need not have: ``slo``, ``priority``, ``tenant``.
    """
    model = body.get("model")
    if model not in (None, *models):
        known = ", ".join(models)
        raise ApiError(404, f"there is no such model; accepted: {known}", param="model", code="model_not_found")
    flags = {name: _flag(body, name) for name in _FLAGS}
    options = body.get("stream_options")
    if options is not None and not (flags["stream"] and isinstance(options, dict)):
        raise ApiError(400, "stream_options has a value that cannot be served; accepted: an object, with stream true")
    fields = {name: value for name, value in body.items() if name not in _READ and value is not None}
    fields |= {name: value for name, value in objectives.items() if value is not None}
    if not is_chat:
        prompts = _prompts(fields)
    else:
        if "messages" not in fields:
            raise ApiError(400, "messages are missing; accepted: a list of messages", param="messages")
        if fields.get("tools"):
            raise UnsupportedFeatureError("tools is not implemented; leave it out", param="tools")
        fields = count_logprobs(fields)
        prompts = [{name: fields[name] for name in ("messages", *CHAT_OPTIONS) if name in fields}]
    if "cache_salt" in fields:
        prompts = [one | {"cache_salt": fields["cache_salt"]} for one in prompts]
    kind = "delta" if flags["stream"] else "final_only"
    defaults: Json = {"output_kind": kind} | ({"max_tokens": None} if is_chat else {})
    request_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{request_id or uuid.uuid4().hex}"
    rest = {name: value for name, value in fields.items() if name not in _PROMPT_FIELDS}
    first = read_fields(request_id, rest | prompts[0], defaults)
    unique = uuid.uuid4().hex[:12]  # a client may send its own id twice
    arrivals = [replace(first, request_id=f"{request_id}-{unique}-{i}", prompt=one) for i, one in enumerate(prompts)]
    usage = flags["stream"] and _flag(options or {}, "include_usage")
    seconds = int(time.time())
    asked = Asked(
        request_id, model or models[0], is_chat, tuple(arrivals), includes_usage=usage, created=seconds, **flags
    )
    if len(arrivals) * asked.params.n > MAX_CHOICES:
        raise not_accepted("n", MAX_CHOICES, f"at most {MAX_CHOICES} completions of all prompts together")
    return asked


_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "messages", *CHAT_OPTIONS)
_READ = {"model", "stream_options", "tenant", *_FLAGS}


def _flag(body: Json, name: str) -> bool:
    value = body.get(name)
    if value not in (None, True, False) or isinstance(value, (int, float)) is not isinstance(value, bool):
        raise not_accepted(name, value, "true or false")
    return bool(value)


def _prompts(fields: Json) -> list[Json]:
    """The prompts of a completion: one text or list of ids, or a list of them."""
    if "prompt_token_ids" in fields:
        return [{"prompt_token_ids": fields["prompt_token_ids"]}]
    prompt = fields.get("prompt")
    several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    prompts = prompt if isinstance(prompt, list) and several else [prompt]
    if any(one is None for one in prompts):
        raise not_accepted("prompt", None, "text, token ids, or a list of them")
    return [{"prompt" if isinstance(one, str) else "prompt_token_ids": one} for one in prompts]


# -- answers ----------------------------------------------------------------------------------------------------------


def whole_answer(asked: Asked, outputs: Sequence[RequestOutput]) -> Json:
    """The answer to a request that does not stream, from the last output of each prompt."""
    choices = [
        _choice(asked, index * asked.params.n + one.index, one, one.text or "", is_delta=False)
        for index, output in enumerate(outputs)
        for one in output.outputs
    ]
    answer = _head(asked, is_delta=False) | {"choices": choices, "usage": usage_of(outputs)}
    return answer | (explained(outputs[0]) if asked.explain else {})


class Chunks:
    """The chunks of one stream, in order."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._head = _head(asked, is_delta=True)
        self._begun: set[int] = set()  # choices whose role was told
        self._num_chars: dict[int, int] = {}

    def of(self, index: int, output: RequestOutput) -> list[Json]:
        """What is new of the prompt of an index."""
        chunks = []
        for one in output.outputs:
            if not one.token_ids and one.finish_reason is None:
                continue
            at, text = index * self._asked.params.n + one.index, one.text or ""
            if self._asked.is_chat and at not in self._begun:
                self._begun.add(at)
                first = {"index": at, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                chunks.append(self._chunk([first | {"logprobs": None}]))
            choice = _choice(self._asked, at, one, text, is_delta=True, offset=self._num_chars.get(at, 0))
            self._num_chars[at] = self._num_chars.get(at, 0) + len(text)
            chunks.append(self._chunk([choice]))
        return chunks

    def progress(self, requests: Sequence[Request], eta_s: float | None) -> Json:
        """How much of the prompts has been read, in llama.cpp's words, and in how many seconds a token is due."""
        begun = [one.first for one in requests if one.completions]
        computed = sum(one.num_computed_tokens for one in begun)
        cached = sum(one.metrics.num_cached_tokens for one in begun)
        total = sum(len(one.prompt_ids) for one in requests)
        progress = {"total": total, "cache": cached, "processed": min(computed, total), "eta_s": eta_s}
        return self._chunk([]) | {"prompt_progress": progress}

    def last(self, outputs: Sequence[RequestOutput]) -> list[Json]:
        """What follows the last choice."""
        chunks = [self._chunk([]) | explained(outputs[0])] if self._asked.explain else []
        if self._asked.includes_usage:
            chunks.append(self._chunk([]) | {"usage": usage_of(outputs)})
        return chunks

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "choices": choices} | ({"usage": None} if self._asked.includes_usage else {})


def usage_of(outputs: Sequence[RequestOutput]) -> Json:
    """Tokens of some requests that have ended."""
    read = sum(output.metrics.num_prompt_tokens for output in outputs)
    made = sum(output.metrics.num_output_tokens for output in outputs)
    details = {"cached_tokens": sum(output.num_cached_tokens for output in outputs)}
    total = read + made
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": total, "prompt_tokens_details": details}


def explained(output: RequestOutput) -> Json:
    """Where the seconds to the first token went; requests of others have numbers in place of names."""
    found = output.metrics.explanation
    if found is None:
        return {"explanation": None}
    others = [[f"other {number}", seconds] for number, (_, seconds) in enumerate(found.others, start=1)]
    return {"explanation": {"ttft_s": found.total_s, "parts_s": found.parts_s, "held_up_by": others}}


def _head(asked: Asked, *, is_delta: bool) -> Json:
    kind = ("chat.completion" + ".chunk" * is_delta) if asked.is_chat else "text_completion"
    return {"id": asked.request_id, "object": kind, "created": asked.created, "model": asked.model}


def _choice(asked: Asked, index: int, one: CompletionOutput, text: str, *, is_delta: bool, offset: int = 0) -> Json:
    reason = one.finish_reason
    choice: Json = {"index": index, "finish_reason": reason, "stop_reason": one.stop_reason}
    chosen = _chosen(one, asked.params.logprobs)
    if not asked.is_chat:
        choice |= {"text": text, "logprobs": None if chosen is None else _completion_logprobs(chosen, offset)}
    else:
        message = {"content": text} if is_delta else {"role": "assistant", "content": text}
        chat = None if chosen is None else {"content": [_chat_logprob(*each) for each in chosen]}
        choice |= {"delta" if is_delta else "message": message, "logprobs": chat}
    if one.text is None:  # there is no tokenizer
        choice["token_ids"] = one.token_ids
    return choice


def _chosen(one: CompletionOutput, most: int | None) -> list[tuple[Logprob, list[Logprob]]] | None:
    """Of each token the drawn one, and so many of the likeliest."""
    if one.logprobs is None:
        return None
    drawn = [step[token] for token, step in zip(one.token_ids, one.logprobs, strict=True)]
    best = [sorted(step.values(), key=lambda each: each.rank)[:most] for step in one.logprobs]
    return list(zip(drawn, best, strict=True))


def _finite(value: float) -> float:
    return max(value, -9999.0)  # JSON has no infinity; vLLM's number for it


def _completion_logprobs(chosen: Sequence[tuple[Logprob, list[Logprob]]], offset: int) -> Json:
    tokens, offsets = [each.decoded_token or "" for each, _ in chosen], []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(each.logprob) for each, _ in chosen],
        "top_logprobs": [{top.decoded_token or "": _finite(top.logprob) for top in tops} for _, tops in chosen],
        "text_offset": offsets,
    }


def _chat_logprob(each: Logprob, tops: Sequence[Logprob]) -> Json:
    return _token_logprob(each) | {"top_logprobs": [_token_logprob(top) for top in tops]}


def _token_logprob(each: Logprob) -> Json:
    token = each.decoded_token or ""
    return {"token": token, "logprob": _finite(each.logprob), "bytes": list(token.encode(errors="replace"))}
