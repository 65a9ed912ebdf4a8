"""The server's HTTP side: routes, who may come in, and what goes out while an answer is being made.

A body is read and checked, the engine is asked (:mod:`medha.serve.service`), and then the answer is sent whole or as
server-sent events. Whoever leaves aborts what was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from medha.engine.admission import checked_ids, tokenise
from medha.engine.arrivals import is_long
from medha.engine.jsonl import KNOWN_FIELDS
from medha.errors import MedhaError, not_accepted
from medha.outputs import RequestOutput
from medha.params import CHAT_OPTIONS
from medha.serve.body import BodyReader
from medha.serve.keys import Key, key_of
from medha.serve.metrics import Metrics
from medha.serve.page import EVENTS_S, PAGE, Snapshots
from medha.serve.protocol import ApiError, Asked, Flags, Json, api_error, read_asked, stopped
from medha.serve.service import Answer, Service

logger = logging.getLogger("medha")
T = TypeVar("T")

_PING_S = 10.0
_SLOWEST_BYTES_S = 1e6  # of a body
_BODIES = 8  # of the largest size that may be in memory
_PROGRESS_S = 0.5
_MOST_NAMES = 100  # of fields that nobody knows are logged
_OPEN_PATHS = ("/health", "/ready", "/")  # for which nobody needs a key
_NAME = re.compile(r"[!-~]{1,200}")  # of a request, as its client calls it
_ERRORS = (ClientDisconnect, MedhaError, RecursionError, msgspec.ValidationError)  # what a request may end with
_SSE = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients may take."""

    max_body_bytes: int = 128 << 20
    max_concurrent: int = 4096  # requests that are in the engine or wait for it
    body_timeout_s: float = 60.0  # and a second for each megabyte
    hosts: tuple[str, ...] = ()  # names by which clients may call the server; none is any


class Front:
    """The routes of a server, and the requests that it has open."""

    def __init__(
        self, service: Service, models: Sequence[str], keys: Sequence[Key], limits: Limits, metrics: Metrics
    ) -> None:
        self.service = service
        self.models = models
        self.num_open: Counter[str] = Counter()  # requests, by tenant
        self._keys = keys
        self._limits = limits
        self.bodies = BodyReader()
        self._num_bytes = 0  # of bodies that are being read
        self._snapshots = Snapshots(service, models[0])
        self._metrics = metrics
        self._ignored: set[str] = set()  # names of fields
        self._start_s = int(time.time())
        service.on_end = metrics.ended
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
                get("/events", lambda request, key: Events(self._events(request.method))),
                get("/", lambda request, key: FileResponse(PAGE, headers={"x-content-type-options": "nosniff"})),
            ],
            exception_handlers=dict.fromkeys((HTTPException, *_ERRORS, Exception), _told),
        )

    def _route(self, method: str, path: str, handler: Callable[..., Any]) -> Route:
        """A route whose handler gets the request and its key."""

        async def answer(request: HttpRequest) -> Response:
            found = handler(request, self._admitted(request, path))
            return _named(request, await found if isinstance(found, Awaitable) else found)

        return Route(path, answer, methods=[method])

    def _admitted(self, request: HttpRequest, path: str) -> Key:
        """Whose request it is; raises ApiError where it may not come in."""
        headers = request.headers
        host = headers.get("host", "").rpartition("@")[2]
        name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
        if self._limits.hosts and name.lower() not in self._limits.hosts:
            raise ApiError(400, "the Host header names another server; see --allowed-host", code="host")
        key = key_of(self._keys, headers.get("authorization", ""))
        if key is None and path not in _OPEN_PATHS:
            told = "the API key is missing or wrong; accepted: Authorization: Bearer KEY"
            raise ApiError(401, told, www_authenticate="Bearer")
        if request.method == "POST":
            if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
                raise ApiError(415, "the content type is another; accepted: application/json")
            if headers.get("content-encoding", "identity") != "identity":
                raise ApiError(415, "compressed bodies are not read; accepted: no content-encoding")
        return key or Key()

    # -- bodies ------------------------------------------------------------------------------------------------------

    async def _body(self, request: HttpRequest) -> Json:
        """The JSON object of a body."""
        most, body = self._limits.max_body_bytes, bytearray()
        size = min(int(request.headers.get("content-length", most)), most + 1)
        large = ApiError(413, f"the body is too large; accepted: at most {most} bytes")
        if size > most:
            raise large
        try:
            async with asyncio.timeout(self._limits.body_timeout_s + size / _SLOWEST_BYTES_S):
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
        except ValueError:
            raise ApiError(400, "the body is not JSON that can be read") from None
        finally:
            self._num_bytes -= len(body)
        if not isinstance(found, dict):
            raise ApiError(400, "the body is not a JSON object")
        return found

    @contextlib.contextmanager
    def _opened(self, key: Key) -> Iterator[contextlib.ExitStack]:
        """Within, a request of a key is open; what is called back on the stack is called when it is no more."""
        service, most = self.service, self._limits.max_concurrent
        if service.is_draining or service.dead is not None:
            raise ApiError(503, "the server is stopping; no new request is taken", retry_after="1")
        if self.num_open.total() >= most:
            raise ApiError(429, f"{most} requests are open, as many as may be", retry_after="1")
        if key.max_concurrent is not None and self.num_open[key.tenant] >= key.max_concurrent:
            raise ApiError(429, f"this API key has {key.max_concurrent} requests open, all it may", retry_after="1")
        with contextlib.ExitStack() as leave:
            self.num_open[key.tenant] += 1
            leave.callback(lambda: self.num_open.subtract([key.tenant]))
            yield leave

    # -- completions -------------------------------------------------------------------------------------------------

    async def _complete(self, request: HttpRequest, key: Key, *, is_chat: bool) -> Response:
        arrival_s = self.service.engine.now()
        with self._opened(key) as leave:
            body = await self._body(request)
            objectives, name = key.objectives(body, request.headers), _name_of(request)
            asked = read_asked(body, is_chat=is_chat, models=self.models, request_id=name, objectives=objectives)
            self._note_ignored(body.keys() - KNOWN_FIELDS - {*Flags.__struct_fields__, "top_logprobs"})
            del body
            key.check(asked.arrivals[0].slo, asked.arrivals[0].priority)
            submitted = self.service.submit(asked.arrivals, arrival_s, most_tokens=key.max_prompt_tokens)
            answer = await _unless_gone(request.receive, submitted)
            leave.callback(self.service.abort, answer)  # of one that has ended it does nothing
            if not asked.flags.stream:
                return await _unless_gone(request.receive, self._whole(asked, answer))
            return Events(self._stream(asked, answer), leave.pop_all())

    def _note_ignored(self, names: Set[str]) -> None:
        """Count fields of a body that nobody knows, and log each of their names once."""
        self._metrics.ignored.inc(len(names))
        for name in sorted(names - self._ignored)[: _MOST_NAMES - len(self._ignored)]:
            self._ignored.add(name)
            logger.warning("request field %.80r is ignored", name)

    async def _whole(self, asked: Asked, answer: Answer) -> Response:
        """The answer when all of it is there."""
        outputs: dict[int, RequestOutput] = {}
        while len(outputs) < len(asked.arrivals):
            outputs |= await answer.read()
        ordered = [outputs[index] for index in range(len(asked.arrivals))]
        if (error := _error_of(ordered)) is not None:
            raise error
        return _json(asked.whole(ordered))

    async def _stream(self, asked: Asked, answer: Answer) -> AsyncIterator[bytes]:
        """Server-sent events: chunks, comments while there is nothing to say, an error in place of the rest."""
        ended, has_begun = dict[int, RequestOutput](), False
        while len(ended) < len(asked.arrivals):
            reports = bool(asked.flags.return_progress) and not has_begun
            news = await answer.read(_PROGRESS_S if reports else _PING_S)
            ended |= {index: output for index, output in news if output.finished}
            said = [chunk for index, output in news for chunk in asked.chunks(index, output)]
            has_begun |= bool(said)
            if not news and reports:
                said = [asked.progress(answer.requests, self.service.eta_s(answer.requests))]
            if not news and not reports:
                yield b": ping\n\n"
            elif len(ended) < len(asked.arrivals):
                yield b"".join(map(_event, said))
        ordered = [ended[index] for index in range(len(asked.arrivals))]
        error = _error_of(ordered)
        said += asked.last(ordered) if error is None else [error.body]
        yield b"".join(map(_event, said)) + b"data: [DONE]\n\n"

    def _reset_prefix_cache(self, request: HttpRequest, key: Key) -> Response:
        self.service.reset_prefix_cache()
        return Response()

    # -- the rest ----------------------------------------------------------------------------------------------------

    async def _tokenize(self, request: HttpRequest, key: Key) -> Response:
        with self._opened(key):
            body, engine = await self._body(request), self.service.engine
            prompt = {name: body[name] for name in ("prompt", "messages", *CHAT_OPTIONS) if name in body}
            special, size = body.get("add_special_tokens") is not False, engine.limits.vocab_size
            work = partial(tokenise, prompt, self._tokenizer(), size, add_special_tokens=special)
            _, ids = await self.service.in_thread(work, is_long=is_long(prompt))
            return _json({"count": len(ids), "max_model_len": engine.limits.max_model_len, "tokens": ids.tolist()})

    async def _detokenize(self, request: HttpRequest, key: Key) -> Response:
        with self._opened(key):
            body, tokenizer, limits = await self._body(request), self._tokenizer(), self.service.engine.limits
            tokens: Any = body.get("tokens")
            if not hasattr(tokens, "__len__") or len(tokens) > limits.max_model_len:
                raise not_accepted("tokens", None, f"a list of at most {limits.max_model_len} token ids")

            def text() -> str:
                ids = checked_ids(tokens, "tokens", limits.vocab_size).tolist()
                return str(tokenizer.decode(ids, skip_special_tokens=False))

            return _json({"prompt": await self.service.in_thread(text, is_long=is_long(tokens))})

    def _tokenizer(self) -> Any:
        if (tokenizer := self.service.engine.tokenizer) is None:
            raise ApiError(400, "the model has no tokenizer; accepted: prompts of token ids")
        return tokenizer

    def _list_models(self, request: HttpRequest, key: Key) -> Response:
        length, wanted = self.service.engine.limits.max_model_len, request.path_params.get("name")
        fields = {
            "object": "model",
            "created": self._start_s,
            "owned_by": "medha",
            "root": self.models[0],
            "max_model_len": length,
        }
        found = [{"id": name, **fields} for name in self.models if wanted in (None, name)]
        if not found:
            raise ApiError(404, "there is no such model", param="model", code="model_not_found")
        return _json({"object": "list", "data": found} if wanted is None else found[0])

    def _state(self, request: HttpRequest, key: Key, *, also_draining: bool) -> Response:
        """Whether the engine lives, and whether it takes requests."""
        if (dead := self.service.dead) is not None:
            return _json({"status": "dead", "reason": type(dead).__name__}, 503)
        is_draining = self.service.is_draining
        return _json({"status": "draining" if is_draining else "ok"}, 503 if is_draining and also_draining else 200)

    async def _events(self, method: str) -> AsyncIterator[bytes]:
        """What the page draws, some times a second."""
        while method == "GET" and not self.service.is_draining and self.service.dead is None:
            yield b"data: " + self._snapshots.event() + b"\n\n"
            await asyncio.sleep(EVENTS_S)


class Events(StreamingResponse):
    """A stream of events; ``leave`` is closed when it is over, also where it never began."""

    def __init__(self, events: AsyncIterator[bytes], leave: contextlib.ExitStack | None = None) -> None:
        super().__init__(events, headers=_SSE, media_type="text/event-stream")
        self._leave = leave or contextlib.ExitStack()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._leave, contextlib.suppress(ClientDisconnect):
            await _unless_gone(receive, self.stream_response(send))


def _error_of(outputs: Sequence[RequestOutput]) -> ApiError | None:
    """What went wrong with an answer that somebody still reads; None where nothing did."""
    errors = [output.error for output in outputs if output.error is not None]
    if errors:
        return api_error(errors[0])
    was_cut = any(one.finish_reason == "abort" for output in outputs for one in output.outputs)
    return stopped() if was_cut else None


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What some work returns; it is cancelled where the client, whose body has been read, leaves before."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(until_gone())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return await working
    finally:
        working.cancel()
        gone.cancel()


def _name_of(request: HttpRequest) -> str | None:
    """How the client calls its request; None where it does not, or by no name."""
    found = _NAME.fullmatch(request.headers.get("x-request-id", ""))
    return None if found is None else found[0]


def _named(request: HttpRequest, response: Response) -> Response:
    """An answer with the name of its request."""
    if (name := _name_of(request)) is not None:
        response.headers["x-request-id"] = name
    return response


def _event(value: Json) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _json(value: Json, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _told(request: HttpRequest, error: Exception) -> Response:
    """What whoever asked is told of an error."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    told = api_error(error)
    if told.status_code == 500:
        logger.error("%s failed", request.url.path, exc_info=error)
    return _named(request, told.response())
