"""OpenAI's requests and answers as JSON has them: what a body asks for, what an output looks like, what an error says.

Field names and shapes are OpenAI's, and vLLM's where they go further (``prompt_token_ids``, ``/tokenize``); of medha
alone are ``slo``, ``priority``, ``return_progress`` and ``explain``. Fields of a request file
(:mod:`medha.engine.jsonl`) mean the same here. An error repeats numbers at most of what a client sent.
"""

from __future__ import annotations

import logging
import math
import re
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, starmap
from typing import Any, TypedDict

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from medha import errors
from medha.child.process import ChildError
from medha.engine.admission import listed
from medha.engine.jsonl import count_logprobs, read_fields
from medha.engine.request import Request
from medha.outputs import CompletionOutput, Logprob, RequestOutput
from medha.params import CHAT_OPTIONS, PROMPT_FORMS, PROMPT_OPTIONS

logger = logging.getLogger("medha")

Json = dict[str, Any]
_Stream = TypedDict("_Stream", {"include_usage": bool | None, "continuous_usage_stats": bool | None}, total=False)  # noqa: UP013
MAX_CHOICES = 512  # completions of one HTTP request
_LEAST = -9999.0  # of logprobs, as JSON has no infinity; vLLM's number for it
_VALUE = re.compile(r"[\w.]+(\[\d+\])?=(?!\d+ )|.*['\"]", re.DOTALL)  # of a message: it holds what was sent
_TYPES = {401: "AuthenticationError", 404: "NotFoundError", 429: "RateLimitError", 500: "InternalServerError"}


class ApiError(HTTPException):
    """What a client is told in place of an answer, with the status and headers that go with it."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        super().__init__(status, message, {name.replace("_", "-"): value for name, value in headers.items()})
        kind = _TYPES.get(status, "BadRequestError" if status < 500 else "ServiceUnavailableError")
        self.body: Json = {"error": {"message": message, "type": kind, "param": param, "code": code or status}}

    def response(self) -> Response:
        """It as an answer."""
        return Response(msgspec.json.encode(self.body), self.status_code, self.headers, "application/json")


def api_error(error: Exception) -> ApiError:
    """What a client is told of an error of the engine, without the value that was wrong, but for a number."""
    param, told, code = getattr(error, "param", None), str(error), None
    match error:
        case ApiError():
            return error
        case HTTPException(status_code=status, detail=detail, headers=headers):  # starlette's own
            return ApiError(status, detail, **(headers or {}))
        case errors.DeadlineError(wait_s=wait_s):
            when = {"x_should_retry": "false"} if wait_s is None else {"retry_after": str(math.ceil(wait_s))}
            return ApiError(429, told, param=param, code="deadline", **when)
        case errors.ContextLengthError() | errors.KVCapacityError():
            code = "context_length_exceeded"
        case errors.UnsupportedFeatureError():
            code = "unsupported"
        case errors.EngineDeadError():
            return ApiError(503, f"the engine has failed: {type(error).__name__}", code="engine_dead")
        case RecursionError():
            told = "the body is nested too deeply"
        case msgspec.ValidationError():  # tells types and the place
            param = told.rpartition("`$.")[2].rstrip("`") or None
        case errors.ValidationError(__cause__=errors.ModelLoadError(__cause__=ChildError(__cause__=OSError()))):
            _log_once(str(error))
            return ApiError(503, "the process for texts does not run at present", retry_after="1")
        case errors.ValidationError(__cause__=errors.ChatTemplateError(__cause__=cause)):
            told = "the model has no chat template that takes these messages"
            if cause is not None and not str(cause).startswith("raise_exception: "):
                told = "the model's chat template failed"
                _log_once(str(error))
        case errors.ValidationError():
            what, *accepted = told.rsplit("; accepted: ", 1)
            if error.__cause__ is not None or _VALUE.match(what):
                what = f"{param or 'the request'} has a value that cannot be served"
            told = "; accepted: ".join([what, *accepted])
        case _:
            return ApiError(500, f"the request failed: {type(error).__name__}")
    return ApiError(400, told, param=param, code=code)


_MOST_LOGGED = 20
_logged = set[str]()


def _log_once(text: str) -> None:
    if text not in _logged and len(_logged) < _MOST_LOGGED:  # what is sent may be in it
        _logged.add(text)
        logger.warning("%s", text)


class Flags(msgspec.Struct):
    """Fields of a body that say how its answer is to come."""

    model: str | None = None
    stream: bool | None = None
    stream_options: _Stream | None = None
    return_progress: bool | None = None
    explain: bool | None = None


class Asked:
    """What the body of a completion or a chat asks for, and its answer: whole, or as chunks in order.

    Attributes:
        flags: how the answer is to come.
        unused: fields that request lines have, and this kind of body does not.
        arrivals: one for each prompt.
    """

    def __init__(self, body: Json, *, is_chat: bool, models: Sequence[str], request_id: str | None) -> None:
        """Read a body, whose client calls it ``request_id``; raises ApiError, ValidationError, its like of msgspec, or
        UnsupportedFeatureError."""
        self.flags = flags = msgspec.convert(body, Flags)  # which leaves out all else
        self._is_chat = is_chat
        if flags.stream_options and not flags.stream:
            raise errors.not_accepted("stream_options", None, "an object, with stream true")
        fields = count_logprobs(body) if is_chat else body
        form = "messages" if is_chat else "prompt" if fields.get("prompt_token_ids") is None else "prompt_token_ids"
        asked: Any = fields.get(form)
        if is_chat and fields.get("tools"):
            raise errors.UnsupportedFeatureError("tools is not implemented; leave it out", param="tools")
        if asked is None or not len(prompts := listed(asked, form) if form == "prompt" else [asked]):
            raise ApiError(400, f"{form} is missing; accepted: {PROMPT_FORMS[form]}", param=form)
        shared = {name: fields[name] for name in PROMPT_OPTIONS + CHAT_OPTIONS * is_chat if name in fields}
        unused = {*PROMPT_FORMS, *CHAT_OPTIONS, "arrival_s"} - {form, *shared}
        self.unused = {name for name in unused if fields.get(name) is not None}
        forms = ["prompt_token_ids" if form == "prompt" and not isinstance(one, str) else form for one in prompts]
        prompts = [{form: one, **shared} for form, one in zip(forms, prompts, strict=True)]
        defaults: Json = {"output_kind": "delta" if flags.stream else "final_only"}
        defaults |= {"max_tokens": None} if is_chat else {}
        first = read_fields("", fields | dict.fromkeys((*PROMPT_FORMS, *CHAT_OPTIONS)) | prompts[0], defaults)
        assert first.params is not None, "they were read"
        if len(prompts) * first.params.n > MAX_CHOICES:
            raise errors.not_accepted("n", MAX_CHOICES, f"at most {MAX_CHOICES} completions of all prompts together")
        self._params = first.params  # of every prompt
        name, own = request_id or uuid.uuid4().hex, uuid.uuid4().hex[:12]  # as a client may send its own id twice
        self.arrivals = [replace(first, request_id=f"{name}-{own}-{i}", prompt=one) for i, one in enumerate(prompts)]
        kind = ("chat.completion" + ".chunk" * bool(flags.stream)) if is_chat else "text_completion"
        # what the answer, or each of its chunks, begins with
        self._head: Json = {"id": f"{'chatcmpl' if is_chat else 'cmpl'}-{name}", "object": kind}
        self._head |= {"created": int(time.time()), "model": flags.model or models[0]}
        options = flags.stream_options or {}
        self._head |= {"usage": None} if options.get("include_usage") else {}  # until the last chunk has it
        self._counts = bool(options.get("include_usage") and options.get("continuous_usage_stats"))
        self._num_chars: Counter[int] = Counter()  # of the choices that have begun

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """The answer to a request that does not stream, from the last output of each prompt."""
        choices = [self._choice(at, one, "message") for at, output in enumerate(outputs) for one in output.outputs]
        answer = self._head | {"choices": choices, "usage": usage_of(outputs)}
        return answer | (explained(outputs[0]) if self.flags.explain else {})

    def chunks(self, index: int, output: RequestOutput) -> list[Json]:
        """What is new of the prompt of an index; choices of a chat begin in order, each with its role, as OpenAI's."""
        news = [one for one in output.outputs if one.token_ids or one.finish_reason is not None]
        if self._is_chat and not self._num_chars:
            news = [CompletionOutput(at, "", []) for at in range(self._params.n)] + news
        head = self._head | ({"usage": usage_of([output])} if self._counts else {})
        return [head | {"choices": [self._choice(index, one, "delta")]} for one in news]

    def progress(self, requests: Sequence[Request], eta_s: float) -> Json:
        """How much of the prompts has been read, in llama.cpp's words, and in how many seconds a token is due."""
        computed = sum(one.first.num_computed_tokens for one in requests)
        cached = sum(one.first.metrics.num_cached_tokens for one in requests)
        total = sum(len(one.prompt_ids) for one in requests)
        progress = {"total": total, "cache": cached, "processed": min(computed, total), "eta_s": eta_s}
        return self._head | {"choices": [], "prompt_progress": progress}

    def last(self, outputs: Sequence[RequestOutput]) -> list[Json]:
        """What follows the last choice."""
        more = [explained(outputs[0])] if self.flags.explain else []
        more += [{"usage": usage_of(outputs)}] if "usage" in self._head else []
        return [self._head | {"choices": []} | one for one in more]

    def _choice(self, index: int, one: CompletionOutput, part: str) -> Json:
        """A choice of the prompt of an index, or what is new of it; ``part`` of a chat is its message or delta."""
        at, text = index * self._params.n + one.index, one.text or ""
        probs = _logprobs(one, self._params.logprobs, self._num_chars[at], is_chat=self._is_chat)
        role = {} if at in self._num_chars else {"role": "assistant"}
        choice: Json = {part: {**role, "content": text}} if self._is_chat else {"text": text}
        choice |= {"index": at, "finish_reason": one.finish_reason, "stop_reason": one.stop_reason, "logprobs": probs}
        if one.text is None:  # there is no tokenizer
            choice["token_ids"] = one.token_ids
        self._num_chars[at] += 0 if self._is_chat or probs is None else sum(map(len, probs["tokens"]))
        return choice


def usage_of(outputs: Sequence[RequestOutput]) -> Json:
    """Tokens of some requests that have ended."""
    read = sum(output.metrics.num_prompt_tokens for output in outputs)
    made = sum(output.metrics.num_output_tokens for output in outputs)
    total, details = read + made, {"cached_tokens": sum(output.num_cached_tokens for output in outputs)}
    return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": total, "prompt_tokens_details": details}


def explained(output: RequestOutput) -> Json:
    """Where the seconds to the first token went; requests of others have numbers in place of names."""
    found = output.metrics.explanation
    if found is None:
        return {"explanation": None}
    others = [[f"other {number}", seconds] for number, (_, seconds) in enumerate(found.others, start=1)]
    behind = {"decode_wait_s": found.decode_wait_s} if found.decode_wait_s else {}  # for a decode instance
    return {"explanation": {"ttft_s": found.total_s, "parts_s": found.parts_s, "held_up_by": others, **behind}}


def _logprobs(one: CompletionOutput, most: int | None, offset: int, *, is_chat: bool) -> Json | None:
    """Of each token the drawn one and so many of the likeliest, as a chat or a completion has them; the text before
    the first one has ``offset`` characters."""
    if one.logprobs is None:
        return None
    steps = zip(one.token_ids, one.logprobs, strict=True)
    pairs = [((token, step[token]), sorted(step.items(), key=lambda its: its[1].rank)[:most]) for token, step in steps]
    if is_chat:
        found = (_chat_logprob(*its) | {"top_logprobs": [*starmap(_chat_logprob, best)]} for its, best in pairs)
        return {"content": [*found]}
    tokens = [_text(*token) for token, _ in pairs]
    tops = [(*reversed(best), token) for token, best in pairs]  # the likeliest of equal text, but the drawn one
    return {
        "tokens": tokens,
        "token_logprobs": [max(token.logprob, _LEAST) for (_, token), _ in pairs],
        "top_logprobs": [{_text(id_, each): max(each.logprob, _LEAST) for id_, each in top} for top in tops],
        "text_offset": [*accumulate(map(len, tokens), initial=offset)][:-1],
    }


def _text(token_id: int, each: Logprob) -> str:
    """Of a token; without a tokenizer as vLLM has it."""
    return f"token_id:{token_id}" if each.decoded_token is None else each.decoded_token


def _chat_logprob(token_id: int, each: Logprob) -> Json:
    token = _text(token_id, each)
    return {"token": token, "logprob": max(each.logprob, _LEAST), "bytes": [*token.encode()]}
