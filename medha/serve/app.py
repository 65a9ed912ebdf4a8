"""The server's HTTP side: routes, who may come in, and what goes out while an answer is being made.

A body is read and checked, the engine is asked (:mod:`medha.serve.service`), and then the answer is sent whole or as
server-sent events. Whoever leaves aborts what was asked for.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from medha.errors import MedhaError, ValidationError, not_accepted
from medha.outputs import RequestOutput
from medha.serve.body import LARGE_BODY, BodyReader
from medha.serve.keys import Key, Keys
from medha.serve.metrics import Metrics
from medha.serve.protocol import ApiError, Asked, Chunks, Json, api_error, read_asked, whole_answer
from medha.serve.service import Answer, Service

_PING_S = 10.0
_PROGRESS_S = 0.5
_EVENTS_S = 0.25
_MOST_SHOWN = 256  # requests of the page
_OPEN_PATHS = ("/health", "/ready", "/")  # for which nobody needs a key
_NAME = re.compile(r"[!-~]{1,200}")  # of a request, as its client calls it
_SSE = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{}'; connect-src 'self'"


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may take."""

    max_body_bytes: int = 128 << 20
    max_concurrent: int = 4096  # requests that are in the engine or wait for it
    body_timeout_s: float = 60.0  # between two pieces of a body
    hosts: tuple[str, ...] = ()  # names by which clients may call the server; none is any


class Front:
    """The routes of a server, and the requests that it has open."""

    def __init__(self, service: Service, models: Sequence[str], keys: Keys, limits: Limits, metrics: Metrics) -> None:
        self.service = service
        self.models = models
        self.num_open: Counter[str] = Counter()  # requests, by tenant
        self._keys = keys
        self._limits = limits
        self._metrics = metrics
        self._bodies = BodyReader()
        self._numbers: dict[str, int] = {}  # of requests that the page shows
        service.on_end = metrics.ended
        get, post = partial(self._route, "GET"), partial(self._route, "POST")
        self.app = Starlette(
            routes=[
                post("/v1/completions", partial(self._complete, is_chat=False)),
                post("/v1/chat/completions", partial(self._complete, is_chat=True)),
                post("/tokenize", self._tokenize),
                post("/detokenize", self._detokenize),
                get("/v1/models", self._list_models),
                get("/version", lambda request, key: _json({"version": version("medha")})),
                get("/metrics", lambda request, key: Response(metrics.text(), media_type="text/plain; version=0.0.4")),
                get("/health", self._health),
                get("/ready", self._ready),
                get("/events", self._events),
                get("/", _page),
            ],
            exception_handlers={404: _not_found, 405: _not_allowed},
        )

    def _route(self, method: str, path: str, handler: Callable[..., Any]) -> Route:
        """A route whose handler gets the request and its key, and whose errors are OpenAI's."""

        async def answer(request: HttpRequest) -> Response:
            try:
                found = handler(request, self._admitted(request, path))
                response: Response = await found if isinstance(found, Awaitable) else found
            except (ApiError, MedhaError) as error:
                told = api_error(error)
                response = _json(told.body, told.status, told.headers)
            except ClientDisconnect:
                response = Response(status_code=499)
            if name := _NAME.fullmatch(request.headers.get("x-request-id", "")):
                response.headers["x-request-id"] = name[0]
            return response

        return Route(path, answer, methods=[method])

    def _admitted(self, request: HttpRequest, path: str) -> Key:
        """Whose request it is; raises ApiError where it may not come in."""
        headers = request.headers
        host = headers.get("host", "").rpartition("@")[2]
        name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
        if self._limits.hosts and name.lower() not in self._limits.hosts:
            raise ApiError(400, "the Host header names another server; see --allowed-host", code="host")
        key = self._keys.of(headers.get("authorization"))
        if key is None:
            if path not in _OPEN_PATHS:
                raise ApiError(401, "the API key is missing or wrong; accepted: Authorization: Bearer KEY")
            key = Key()
        if request.method == "POST":
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                raise ApiError(415, "the content type is another; accepted: application/json")
            if headers.get("content-encoding", "identity") != "identity":
                raise ApiError(415, "compressed bodies are not read; accepted: no content-encoding")
        return key

    # -- bodies ------------------------------------------------------------------------------------------------------

    async def _body(self, request: HttpRequest) -> Any:
        """The JSON of a body."""
        most, parts, size = self._limits.max_body_bytes, [], 0
        length = request.headers.get("content-length", "0")
        pieces = request.stream()
        try:
            while int(length) <= most and size <= most:
                part = await asyncio.wait_for(anext(pieces), self._limits.body_timeout_s)
                parts.append(part)
                size += len(part)
            raise ApiError(413, f"the body is too large; accepted: at most {most} bytes", connection="close")
        except StopAsyncIteration:
            body = b"".join(parts)
        except (TimeoutError, ValueError) as error:
            raise ApiError(408, "the body did not come in time", connection="close") from error
        try:
            if size > LARGE_BODY:
                return await self.service.in_thread(partial(self._bodies.read, body), is_long=True)
            return msgspec.json.decode(body)
        except (ValueError, RecursionError, msgspec.MsgspecError):
            raise ApiError(400, "the body is not JSON") from None

    # -- completions -------------------------------------------------------------------------------------------------

    async def _complete(self, request: HttpRequest, key: Key, *, is_chat: bool) -> Response:
        service, limits = self.service, self._limits
        arrival_s = service.engine.now()
        if service.is_draining or service.dead is not None:
            raise ApiError(503, "the server is stopping; no new request is taken", retry_after="1")
        if self.num_open.total() >= limits.max_concurrent:
            raise ApiError(429, f"{limits.max_concurrent} requests are open, as many as may be", retry_after="1")
        if key.max_concurrent is not None and self.num_open[key.tenant] >= key.max_concurrent:
            raise ApiError(429, f"this API key has {key.max_concurrent} requests open, all it may", retry_after="1")
        self.num_open[key.tenant] += 1
        leave = contextlib.ExitStack()
        leave.callback(self._left, key.tenant)
        with leave:
            body = await self._body(request)
            if not isinstance(body, dict):
                raise ApiError(400, "the body is not a JSON object")
            objectives = key.objectives(body, request.headers)
            name = _NAME.fullmatch(request.headers.get("x-request-id", ""))
            asked = read_asked(
                body,
                is_chat=is_chat,
                models=self.models,
                request_id=None if name is None else name[0],
                objectives=objectives,
            )
            del body
            answer = await self._submitted(asked, key, arrival_s)
            leave.callback(service.abort, answer)  # of one that has ended it does nothing
            if not asked.stream:
                return await self._whole(request, asked, answer)
            return _Events(self._stream(asked, answer), leave.pop_all())

    def _left(self, tenant: str) -> None:
        self.num_open[tenant] -= 1

    async def _submitted(self, asked: Asked, key: Key, arrival_s: float) -> Answer:
        """Have the engine take the prompts."""
        requests = [await self.service.prepare(arrival) for arrival in asked.arrivals]
        most = key.max_prompt_tokens
        if most is not None and sum(len(one.prompt_ids) for one in requests) > most:
            raise not_accepted("prompt", "", f"at most {most} tokens, with this API key")
        return await self.service.submit(requests, arrival_s)

    async def _whole(self, request: HttpRequest, asked: Asked, answer: Answer) -> Response:
        """The answer when all of it is there."""
        outputs: dict[int, RequestOutput] = {}
        gone = asyncio.ensure_future(_until_gone(request))
        try:
            while len(outputs) < len(asked.arrivals):
                news = asyncio.ensure_future(answer.read())
                await asyncio.wait({news, gone}, return_when=asyncio.FIRST_COMPLETED)
                if gone.done() and not news.done():
                    news.cancel()
                    raise ClientDisconnect
                outputs |= dict(await news)
        finally:
            gone.cancel()
        ordered = [outputs[index] for index in range(len(asked.arrivals))]
        if (error := _error_of(answer, ordered)) is not None:
            raise error
        return _json(whole_answer(asked, ordered))

    async def _stream(self, asked: Asked, answer: Answer) -> AsyncIterator[bytes]:
        """Server-sent events: chunks, comments while there is nothing to say, an error in place of the rest."""
        chunks, ended = Chunks(asked), dict[int, RequestOutput]()
        has_begun, silent_s, wait_s = False, 0.0, _PROGRESS_S if asked.return_progress else _PING_S
        while len(ended) < len(asked.arrivals):
            news = await answer.read(_PING_S if has_begun else wait_s)
            for index, output in news:
                if output.finished:
                    ended[index] = output
                for chunk in chunks.of(index, output):
                    has_begun, silent_s = True, 0.0
                    yield _event(chunk)
            if news:
                continue
            silent_s += _PING_S if has_begun else wait_s
            if asked.return_progress and not has_begun:
                etas = [self.service.eta_s(one) for one in answer.requests]
                known = [eta_s for eta_s in etas if eta_s is not None]
                yield _event(chunks.progress(answer.requests, min(known, default=None)))
            elif silent_s >= _PING_S:
                silent_s = 0.0
                yield b": ping\n\n"
        ordered = [ended[index] for index in range(len(asked.arrivals))]
        if (error := _error_of(answer, ordered)) is not None:
            yield _event(error.body)
        else:
            for chunk in chunks.last(ordered):
                yield _event(chunk)
        yield b"data: [DONE]\n\n"

    # -- the rest ----------------------------------------------------------------------------------------------------

    async def _tokenize(self, request: HttpRequest, key: Key) -> Response:
        body, tokenizer = _object(await self._body(request)), self._tokenizer()
        if "messages" in body:
            options = {name: body[name] for name in ("add_generation_prompt", "chat_template_kwargs") if name in body}
            work = partial(tokenizer.encode_chat, body["messages"], **options)
            _, ids = await self._in_thread(work, body["messages"])
        else:
            special = body.get("add_special_tokens", True) is not False
            prompt = body.get("prompt")
            if not isinstance(prompt, str):
                raise not_accepted("prompt", None, "text")
            work = partial(tokenizer.encode_array, prompt, add_special_tokens=special)
            ids = await self._in_thread(work, prompt)
        tokens = ids.tolist()
        return _json(
            {"count": len(tokens), "max_model_len": self.service.engine.limits.max_model_len, "tokens": tokens}
        )

    async def _in_thread(self, work: Callable[[], Any], prompt: Any) -> Any:
        try:
            return await self.service.in_thread(work, is_long=len(prompt) > LARGE_BODY)
        except MedhaError as error:
            raise ValidationError(str(error), param="prompt") from error

    async def _detokenize(self, request: HttpRequest, key: Key) -> Response:
        body, tokenizer = _object(await self._body(request)), self._tokenizer()
        tokens, size = body.get("tokens"), self.service.engine.limits.vocab_size
        tokens = getattr(tokens, "tolist", lambda: body.get("tokens"))()
        if not isinstance(tokens, list) or any(type(one) is not int or not 0 <= one < size for one in tokens):
            raise not_accepted("tokens", None, f"a list of integers from 0 to {size - 1}")
        return _json({"prompt": tokenizer.decode(tokens, skip_special_tokens=False)})

    def _tokenizer(self) -> Any:
        if (tokenizer := self.service.engine.tokenizer) is None:
            raise ApiError(400, "the model has no tokenizer; accepted: prompts of token ids")
        return tokenizer

    def _list_models(self, request: HttpRequest, key: Key) -> Response:
        length = self.service.engine.limits.max_model_len
        fields = {"object": "model", "created": 0, "owned_by": "medha", "root": self.models[0], "max_model_len": length}
        return _json({"object": "list", "data": [{"id": name, **fields} for name in self.models]})

    def _health(self, request: HttpRequest, key: Key) -> Response:
        if (dead := self.service.dead) is not None:
            return _json({"status": "dead", "reason": type(dead).__name__}, 503)
        return _json({"status": "ok"})

    def _ready(self, request: HttpRequest, key: Key) -> Response:
        if self.service.is_draining or self.service.dead is not None:
            return _json({"status": "draining" if self.service.dead is None else "dead"}, 503)
        return _json({"status": "ready"})

    async def _events(self, request: HttpRequest, key: Key) -> Response:
        return _Events(self._snapshots())

    async def _snapshots(self) -> AsyncIterator[bytes]:
        """What the page draws, some times a second: lengths and times, nobody's text or name."""
        while not self.service.is_draining and self.service.dead is None:
            yield _event(self.snapshot())
            await asyncio.sleep(_EVENTS_S)

    def snapshot(self) -> Json:
        """The unfinished requests and the memory as they are now."""
        engine = self.service.engine
        memory, now_s, rows = engine.scheduler.memory, engine.now(), []
        requests = engine.requests()
        names = {request.request_id for request in requests}
        self._numbers = {name: number for name, number in self._numbers.items() if name in names}
        for request in requests[:_MOST_SHOWN]:
            if not request.completions:
                continue
            one = request.first
            number = self._numbers.setdefault(request.request_id, max(self._numbers.values(), default=0) + 1)
            deadline_s = one.metrics.deadline_s
            left_s = engine.scheduler.prefill_left_s(one.num_computed_tokens, len(request.prompt_ids))
            state = "answering" if one.token_ids else "waiting" if one.metrics.first_scheduled is None else "reading"
            slack_s = None if deadline_s is None or one.token_ids else one.metrics.arrival + deadline_s - now_s - left_s
            rows.append(
                {
                    "number": number,
                    "state": state,
                    "priority": request.priority,
                    "prompt_tokens": len(request.prompt_ids),
                    "computed_tokens": one.num_computed_tokens,
                    "output_tokens": sum(len(each.token_ids) for each in request.completions),
                    "arrival_s": one.metrics.arrival,
                    "first_scheduled_s": one.metrics.first_scheduled,
                    "first_token_s": one.metrics.first_token,
                    "slack_s": slack_s,
                }
            )
        kv = [pool.num_used / memory.num_blocks for pool in memory.pools]
        return {"model": self.models[0], "now_s": now_s, "num_requests": len(requests), "requests": rows, "kv": kv}


class _Events(StreamingResponse):
    """A stream of events; ``leave`` is closed when it is over, also where it never began."""

    def __init__(self, events: AsyncIterator[bytes], leave: contextlib.ExitStack | None = None) -> None:
        super().__init__(events, headers=_SSE, media_type="text/event-stream")
        self._leave = leave or contextlib.ExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._leave:
            await super().__call__(scope, receive, send)


def _error_of(answer: Answer, outputs: Sequence[RequestOutput]) -> ApiError | None:
    """What went wrong with an answer; None where nothing did."""
    errors = [output.error for output in outputs if output.error is not None]
    if errors:
        return api_error(errors[0])
    if answer.was_cut:
        return ApiError(503, "the server has stopped before the answer was whole", code="server_stopped")
    return None


async def _until_gone(request: HttpRequest) -> None:
    """Return when the client has left; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _object(body: Any) -> Json:
    if not isinstance(body, dict):
        raise ApiError(400, "the body is not a JSON object")
    return body


def _event(value: Json) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _json(value: Json, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def _page(request: HttpRequest, key: Key) -> Response:
    """The status page; its policy lets its own script run and no other."""
    page = Path(__file__).with_name("page.html").read_bytes()
    script = page.partition(b"<script>")[2].partition(b"</script>")[0]
    policy = _PAGE_POLICY.format(base64.b64encode(hashlib.sha256(script).digest()).decode())
    headers = {"content-security-policy": policy, "x-content-type-options": "nosniff"}
    return Response(page, headers=headers, media_type="text/html")


async def _not_found(request: HttpRequest, error: Exception) -> Response:
    return _json(ApiError(404, "there is no such path").body, 404)


async def _not_allowed(request: HttpRequest, error: Exception) -> Response:
    return _json(ApiError(405, "the path has another method").body, 405)
