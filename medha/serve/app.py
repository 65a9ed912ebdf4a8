"""The server's HTTP side: routes, who may come in, and what goes out while an answer is being made.

A body is read and checked, the engine is asked (:mod:`medha.serve.service`), and then the answer is sent whole or as
server-sent events. Whoever leaves aborts what was asked for.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence, Set
from contextlib import ExitStack
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medha.engine.admission import checked_ids, tokenise
from medha.engine.engine import Engine
from medha.engine.jsonl import KNOWN_FIELDS
from medha.engine.threads import pieces
from medha.errors import EngineDeadError, MedhaError, exit_code, not_accepted
from medha.parallel.launch import exit_at_once
from medha.params import CHAT_OPTIONS, PROMPT_OPTIONS, UNSUPPORTED_FIELDS, SamplingParams
from medha.serve.body import NOT_READ, TOO_MANY_VALUES, BodyReader
from medha.serve.keys import Key, key_of
from medha.serve.metrics import EVENTS_S, PAGE, Metrics, snapshot
from medha.serve.protocol import ApiError, Asked, Flags, Json, api_error
from medha.serve.service import END_S, Answer, Service
from medha.serve.web import host_of

logger = logging.getLogger("medha")

_PING_S = 10.0
_BODY_S = 60.0  # for which a client may take to send a body, and a second for each megabyte
_BODIES = 8  # of the largest size that may be in memory
_PROGRESS_S = 0.5
_PART = 64 << 10  # bytes of a body, which is over when its client has taken all but so much
_MOST_NAMES = 100  # of fields that nobody knows are logged
_MAY_BE_EMPTY = ("allowed_token_ids", "tokens")  # fields; others count as absent then
_EVERYBODY = Key()
_OPEN_PATHS = ("/health", "/ready", "/")  # for which nobody needs a key
_NAME = re.compile(r"[!-~]{1,200}")  # of a request, as its client calls it
_ERRORS = (ClientDisconnect, MedhaError, RecursionError, msgspec.ValidationError)  # what a request may end with
_SSE = {"cache-control": "no-cache", "x-accel-buffering": "no", "content-type": "text/event-stream; charset=utf-8"}


@dataclass(eq=False, repr=False)
class Front:
    """The server as an ASGI application: its routes, and the requests that it has open."""

    engine: InitVar[Engine]
    models: Sequence[str]
    keys: Sequence[Key] = ()
    _: KW_ONLY
    max_body_bytes: int = 128 << 20
    max_concurrent: int = 4096  # requests that are in the engine or wait for it
    hosts: Sequence[str] = ()  # names by which clients may call the server; none is any

    def __post_init__(self, engine: Engine) -> None:
        self.service = Service(engine)
        self.num_open: Counter[str] = Counter()  # requests, by tenant
        self._num_bytes = 0  # of bodies that are being read
        self.bodies = BodyReader()  # whoever ends the front closes it
        self._metrics = metrics = Metrics(engine, self.models[0])
        self._ignored: set[str] = set()  # names of fields
        self._start_s = int(time.time())
        self._longest = min(engine.limits.max_model_len, engine.scheduler.memory.max_request_tokens)
        self.service.on_end = metrics.ended
        get, post = partial(self._route, "GET"), partial(self._route, "POST")
        self.app = Starlette(
            routes=[
                post("/v1/completions", partial(self._complete, is_chat=False)),
                post("/v1/chat/completions", partial(self._complete, is_chat=True)),
                post("/tokenize", self._tokenize),
                post("/detokenize", self._detokenize),
                post("/reset_prefix_cache", self._reset_prefix_cache),
                get("/v1/models", self._list_models),
                get("/v1/models/{name:path}", self._list_models),
                get("/version", lambda request, key: _json({"version": version("medha")})),
                get("/metrics", lambda request, key: Response(metrics.text(), media_type="text/plain; version=0.0.4")),
                get("/health", partial(self._state, also_draining=False)),
                get("/ready", partial(self._state, also_draining=True)),
                get("/events", lambda request, key: StreamingResponse(self._events(request.method), headers=_SSE)),
                get("/", lambda request, key: FileResponse(PAGE, headers={"x-content-type-options": "nosniff"})),
            ],
            exception_handlers=dict.fromkeys((HTTPException, *_ERRORS, Exception), _told),
        )
        self.app.router.redirect_slashes = False  # it would go to whatever the Host header names

    def _route(self, method: str, path: str, handler: Callable[..., Any]) -> Route:
        """A route whose handler gets the request and its key."""

        async def answer(request: Request) -> Any:
            found = handler(request, self._admitted(request, path))
            try:
                return await found if isinstance(found, Awaitable) else found
            except (asyncio.CancelledError, MedhaError):  # its client has left, or the server ends
                if self.service.ended is None:
                    raise
                raise self.service.ended from None

        return Route(path, answer, methods=[method])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by the name that its client gave it; what it has opened is closed when that is over."""
        name = _NAME.fullmatch(Headers(scope=scope).get("x-request-id", ""))

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start" and name is not None:
                MutableHeaders(scope=message)["x-request-id"] = name[0]
            if len(message.get("body", b"")) > _PART and not message.get("more_body"):  # the end waits for the rest
                await send({**message, "more_body": True})
                message = {**message, "body": b""}
            await send(message)

        with ExitStack() as leave:
            scope["state"] |= {"name": None if name is None else name[0], "leave": leave}
            await self.app(scope, receive, send_named)

    def fail(self, error: EngineDeadError) -> None:
        """End every request with an error and let streams tell it; for another thread, as the engine's is stuck."""
        self.service.fail(error)
        until_s = time.monotonic() + END_S
        while self.num_open.total() and time.monotonic() < until_s:
            time.sleep(0.01)

    def watch(self, limit_s: float) -> None:
        """End the process where requests wait and no batch completes; while it was stopped no time has passed."""
        service, look_s, stuck_s, num_steps = self.service, min(1.0, limit_s / 4), 0.0, 0
        while not stuck_s >= limit_s:  # which may be nan
            is_stuck = service.engine.num_unfinished > 0 and self._metrics.num_steps == num_steps
            stuck_s, num_steps = stuck_s + look_s if is_stuck else 0.0, self._metrics.num_steps
            time.sleep(look_s)
        if service.ended is None:
            dead = EngineDeadError(f"no batch has completed for {limit_s:g} s")
            logger.error("%s:\n%s", dead, service.engine.describe())
            self.fail(dead)
            exit_at_once(exit_code(dead))

    def _admitted(self, request: Request, path: str) -> Key:
        """Whose request it is; raises ApiError where it may not come in."""
        headers = request.headers
        hosts = headers.getlist("host")
        if len(hosts) > 1 or (not hosts and request.scope["http_version"] != "1.0"):
            raise ApiError(400, "a request names one Host")
        if hosts and self.hosts and host_of(hosts[0].rpartition("@")[2]).lower() not in self.hosts:
            raise ApiError(400, "the Host header names another server; see --allowed-host", code="host")
        key = key_of(self.keys, headers.get("authorization", ""))
        if key is None and self.keys and path not in _OPEN_PATHS:
            told = "the API key is missing or wrong; accepted: Authorization: Bearer KEY"
            raise ApiError(401, told, www_authenticate="Bearer")
        if request.method == "POST":
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                raise ApiError(415, "the content type is another; accepted: application/json")
            if headers.get("content-encoding", "identity") != "identity":
                raise ApiError(415, "compressed bodies are not read; accepted: no content-encoding")
        return key or _EVERYBODY

    async def _body(self, request: Request, key: Key) -> Json:
        """The JSON object of a body of a key's client, without what counts as absent; the request counts as open until
        its answer is over, and its task is cancelled where the client leaves."""
        service, most, body = self.service, self.max_body_bytes, bytearray()
        if service.is_draining or service.ended is not None:
            raise ApiError(503, "the server is stopping; no new request is taken", retry_after="1")
        if self.num_open.total() >= self.max_concurrent:
            raise ApiError(429, f"{self.max_concurrent} requests are open, as many as may be", retry_after="1")
        if key.max_concurrent is not None and self.num_open[key.tenant] >= key.max_concurrent:
            raise ApiError(429, f"this API key has {key.max_concurrent} requests open, all it may", retry_after="1")
        self.num_open[key.tenant] += 1
        request.state.leave.callback(self.num_open.subtract, [key.tenant])
        size = int(request.headers.get("content-length", most))
        large = ApiError(413, f"the body is too large; accepted: at most {most} bytes")
        if size > most:  # before the client is asked to go on with it
            raise large
        try:
            async with asyncio.timeout(_BODY_S + size / 1e6):
                async for part in request.stream():
                    self._num_bytes += len(part)
                    body += part
                    if len(body) > most:
                        raise large
                    if self._num_bytes > _BODIES * most:
                        raise ApiError(503, "too many bodies are being read", retry_after="1")
            found = await self.bodies.read(body)
        except TimeoutError as error:
            raise ApiError(408, "the body did not come in time", connection="close") from error
        except NOT_READ as error:
            if isinstance(error.__cause__, OSError):  # no process for it
                raise ApiError(503, "large bodies cannot be read at present", retry_after="1") from error
            known = str(error) == TOO_MANY_VALUES
            raise ApiError(400, TOO_MANY_VALUES if known else "the body is not JSON that can be read") from None
        finally:
            self._num_bytes -= len(body)
        if not isinstance(found, dict):
            raise ApiError(400, "the body is not a JSON object")
        empty = [name for name, its in found.items() if its is None or (isinstance(its, (list, dict)) and not its)]
        for name in set(empty) - set(_MAY_BE_EMPTY):
            del found[name]
        if found.get("model") not in (None, *self.models):
            told = f"there is no such model; accepted: {', '.join(self.models)}"
            raise ApiError(404, told, param="model", code="model_not_found")
        task, left = asyncio.current_task(), asyncio.ensure_future(request.receive())  # as its body has been read
        assert task is not None, "a request is answered by a task"
        left.add_done_callback(lambda left: left.cancelled() or task.cancel())  # its client has left
        request.state.leave.callback(left.cancel)
        return found

    async def _complete(self, request: Request, key: Key, *, is_chat: bool) -> ASGIApp:
        arrival_s, leave = self.service.engine.now(), request.state.leave
        body = await self._body(request, key)
        body |= key.objectives(body, request.headers)
        named = _NAME.fullmatch(str(body.get("request_id") or ""))  # vLLM's other way to say it
        name = request.state.name or (named and named[0])
        asked = Asked(body, is_chat=is_chat, models=self.models, request_id=name)
        known = KNOWN_FIELDS | {*Flags.__struct_fields__, *["top_logprobs"] * is_chat}
        self._note_ignored(body.keys() - known | asked.unused)
        key.check(asked.arrivals[0].slo, asked.arrivals[0].priority)
        answer = await self.service.prepare(asked.arrivals, most_tokens=key.max_prompt_tokens)
        leave.callback(self.service.abort, answer)  # of one that has ended, or was not taken, it does nothing
        await self.service.enqueue(answer, arrival_s)
        if asked.flags.stream:
            events = StreamingResponse(self._stream(asked, answer, request.url.path), headers=_SSE)
            return lambda scope, receive, send: events.stream_response(send)  # a client that leaves is seen to here
        while (outputs := answer.last) is None:
            await answer.read()
        if answer.error is not None:
            raise answer.error
        return _json(asked.whole(outputs))

    def _note_ignored(self, names: Set[str]) -> None:
        """Count fields of a body that nobody knows, and log each of their names once."""
        self._metrics.ignored.inc(len(names))
        for name in sorted({name[:80] for name in names} - self._ignored)[: _MOST_NAMES - len(self._ignored)]:
            self._ignored.add(name)
            logger.warning("request field %.80r is ignored", name)

    async def _stream(self, asked: Asked, answer: Answer, path: str) -> AsyncIterator[bytes]:
        """Server-sent events: chunks, comments while there is nothing to say, an error in place of the rest."""
        reports, said = bool(asked.flags.return_progress), list[Json]()  # until the first token
        while (outputs := answer.last) is None:
            news = await answer.read(_PROGRESS_S if reports else _PING_S)
            said = [chunk for index, output in news for chunk in asked.chunks(index, output)]
            if reports and not news:
                said = [asked.progress(answer.requests, self.service.eta_s(answer.requests))]
            reports &= not news
            if answer.last is None:
                yield b"".join(map(_event, said)) or b": ping\n\n"
        said += asked.last(outputs) if answer.error is None else [_logged(path, answer.error).body]
        yield b"".join(map(_event, said)) + b"data: [DONE]\n\n"

    def _reset_prefix_cache(self, request: Request, key: Key) -> Response:
        self.service.ask(self.service.engine.reset_prefix_cache)
        return Response()

    async def _tokenize(self, request: Request, key: Key) -> Response:
        body, engine = await self._body(request, key), self.service.engine
        prompt = {name: body[name] for name in ("prompt", "messages", *CHAT_OPTIONS, *PROMPT_OPTIONS) if name in body}
        SamplingParams.from_dict({name: body[name] for name in UNSUPPORTED_FIELDS if name in body})  # refuses them
        self._note_ignored(body.keys() - prompt.keys() - {"model", *UNSUPPORTED_FIELDS})
        if isinstance(prompt.get("prompt"), np.ndarray):  # of a large body
            prompt["prompt_token_ids"] = prompt.pop("prompt")
        work = partial(tokenise, prompt, engine.tokenizer, engine.limits.vocab_size)
        count, tokens = await self.service.in_thread(prompt, lambda: _listed(work()[1]))
        return _json({"count": count, "max_model_len": self._longest, "tokens": tokens})

    async def _detokenize(self, request: Request, key: Key) -> Response:
        body, engine = await self._body(request, key), self.service.engine
        self._note_ignored(body.keys() - {"model", "tokens"})
        if (tokenizer := engine.tokenizer) is None:
            raise ApiError(400, "the model has no tokenizer: its prompts and answers are token ids")
        tokens: Any = body.get("tokens")
        if not hasattr(tokens, "__len__") or len(tokens) > engine.limits.max_model_len:
            raise not_accepted("tokens", None, f"a list of at most {engine.limits.max_model_len} token ids")
        ids = partial(checked_ids, tokens, "tokens", engine.limits.vocab_size)
        work = lambda: tokenizer.decode(ids().tolist(), skip_special_tokens=False)  # noqa: E731
        return _json({"prompt": await self.service.in_thread(tokens, work)})

    def _list_models(self, request: Request, key: Key) -> Response:
        wanted, length = request.path_params.get("name") or None, self._longest
        same = {"object": "model", "created": self._start_s, "owned_by": "medha", "root": self.models[0]}
        found = [{"id": one, **same, "max_model_len": length} for one in self.models if wanted in (None, one)]
        if not found:
            raise ApiError(404, "there is no such model", param="model", code="model_not_found")
        return _json({"object": "list", "data": found} if wanted is None else found[0])

    def _state(self, request: Request, key: Key, *, also_draining: bool) -> Response:
        """Whether the engine lives, and whether it takes requests."""
        ended, is_draining = self.service.ended, self.service.is_draining
        if isinstance(ended, EngineDeadError):
            return _json({"status": "dead", "reason": type(ended).__name__}, 503)
        return _json({"status": "draining" if is_draining else "ok"}, 503 if is_draining and also_draining else 200)

    async def _events(self, method: str) -> AsyncIterator[bytes]:
        """What the page draws, some times a second."""
        while method == "GET" and not (self.service.is_draining or self.service.ended):
            yield _event({"model": self.models[0], **snapshot(self.service)})
            await asyncio.sleep(EVENTS_S)


def _event(value: Json) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _listed(ids: npt.NDArray[np.int32]) -> tuple[int, msgspec.Raw]:
    """How many ids there are, and their JSON, made in parts: streams go on meanwhile."""
    parts = (msgspec.json.encode(ids[part].tolist())[1:-1] for part in pieces(len(ids)))
    return len(ids), msgspec.Raw(b"[%b]" % b",".join(parts))


def _json(value: Json, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _told(request: Request, error: Exception) -> Response:
    """What whoever asked is told of an error."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    return _logged(request.url.path, error).response()


_traced = set[type]()


def _logged(path: str, error: Exception) -> ApiError:
    """What a client is told of an error, and the log of one of ours, with where the first of its kind came from."""
    told = api_error(error)
    if told.status_code == 500:
        logger.error("%s failed: %s", path, error, exc_info=None if type(error) in _traced else error)
        _traced.add(type(error))
    return told
