"""A server over a small engine, in this process: the engine's thread, and the event loop's."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import pytest

from medha.engine.engine import Engine
from medha.errors import EngineDeadError
from medha.serve.app import Front
from medha.serve.keys import Key
from medha.serve.service import Service
from medha.serve.web import bound, listening
from tests.commands import LIMIT_S, wait_until
from tests.serving import Model, assert_empty, random_ids

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
Answered = tuple[int, Any, dict[str, str]]


@dataclass
class Server:
    """A server that runs."""

    engine: Engine
    service: Service
    front: Front
    port: int

    def is_idle(self) -> bool:
        """Whether it is done with all clients, which are told before it is; between two steps of the engine."""
        with self.engine.turns:
            return not (self.front.num_open.total() or self.engine.has_unfinished)

    def connect(self) -> HTTPConnection:
        return HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S)

    def post(self, path: str, body: Any, **headers: str) -> Answered:
        """Status, JSON and headers of an answer; ``body`` is sent as it is where it is bytes."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, sent, {"content-type": "application/json"} | headers)

    def get(self, path: str, **headers: str) -> Answered:
        return self.ask("GET", path, None, headers)

    def ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answered:
        with closing(self.connect()) as connection:
            connection.request(method, path, body, {name.replace("_", "-"): its for name, its in headers.items()})
            answer = connection.getresponse()
            raw = answer.read()
            kind = answer.headers.get_content_type()
            told = json.loads(raw) if kind == "application/json" else raw.decode()
            return answer.status, told, {name.lower(): value for name, value in answer.headers.items()}

    def events(self, path: str, body: Any, **headers: str) -> Generator[Any]:
        """The events of a stream as they come; comments as text. Whoever stops reading has left."""
        with closing(self.connect()) as connection:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"} | headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            for line in answer:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
                elif line.strip():
                    yield line.decode().strip()


Start = Callable[..., Server]


def received(client: socket.socket, holds: Callable[[bytes], object]) -> bytes:
    """What comes until something holds of it, or until the connection is closed."""
    answer = b""
    while not holds(answer) and (part := client.recv(4096)):
        answer += part
    return answer


def asked(length: int, max_tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a greedy completion of exactly so many tokens."""
    return {"prompt": random_ids(length, seed=0), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | more


def asked_in_chat(content: Any = "x", **more: Any) -> dict[str, Any]:
    """The body of a chat of one message."""
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 1} | more


def sent(body: dict[str, Any], path: str = PATH, **headers: str) -> bytes:
    """A request as bytes, for a socket."""
    raw = json.dumps(body)
    given = {"host": "x", "content-type": "application/json", "content-length": len(raw), **headers}
    return "".join([f"POST {path} HTTP/1.1\r\n", *map("%s: %s\r\n".__mod__, given.items()), "\r\n", raw]).encode()


@contextmanager
def served(engine: Engine, *keys: Key, max_connections: int = 2048, **limits: Any) -> Iterator[Server]:
    """A server over an engine, which is empty at the end."""
    stopping = threading.Event()
    front = Front(engine, ["model"], keys, **limits)
    service = front.service
    with bound("127.0.0.1", 0) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # which a short answer fills

        def run() -> None:
            with suppress(EngineDeadError):
                service.run(stopping.is_set)

        thread = threading.Thread(target=run)
        with listening(front, listener, max_connections=max_connections):
            thread.start()
            try:
                yield Server(engine, service, front, listener.getsockname()[1])
            finally:
                stopping.set()
                thread.join(LIMIT_S)
                service.cut()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers, which end with the test."""
    with ExitStack() as stack:
        yield lambda *given, **options: stack.enter_context(served(*given, **options))


@pytest.fixture(scope="module")
def one_server(bytes_model: Model) -> Iterator[Server]:
    """A server of the byte model, with room for long requests."""
    with served(bytes_model.engine(num_blocks=512)) as running:
        yield running


@pytest.fixture
def server(one_server: Server) -> Iterator[Server]:
    """The one server, which has nothing cached and, when the test is over, nothing left."""
    one_server.service.ask(one_server.engine.reset_prefix_cache).result(LIMIT_S)
    yield one_server
    wait_until(one_server.is_idle)
    assert_empty(one_server.engine)
