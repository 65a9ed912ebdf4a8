"""uvicorn in a thread of its own, with a limit for the head of a request, so that silent clients shut nobody out."""

from __future__ import annotations

import gc
import re
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from medha.errors import ConfigError
from medha.serve.protocol import ApiError
from medha.serve.service import END_S

KEEP_ALIVE_S = 75  # for which a connection may be open, or be so again, without the head of a request
READER_S = 300  # for which a client may take nothing of what is sent to it, where the kernel counts that
_HEAD_BYTES = 16 << 10  # of a request
_HOST = re.compile(r"([\w.-]+|\[[\w:.%]+\])(:\d+)?", re.ASCII)  # with its port, or without
_MOST_WAITING = 16  # requests behind one that is being answered, beyond which a connection is not read


def host_names(given: Iterable[str]) -> tuple[str, ...]:
    """Names as a Host header has them without its port; none, which lets in any, where one is ``*``. ConfigError for
    what no request can name."""
    names = []
    for text in given:
        with suppress(ValueError):
            text = f"[{IPv6Address(text)}]"
        if text != "*" and _HOST.fullmatch(text) is None:
            raise ConfigError(f"allowed_host={text!r}; accepted: a host name, an address, or * for any")
        names.append(host_of(text).lower())
    return () if "*" in names else tuple(names)


def host_of(text: str) -> str:
    """A host without its port."""
    return text[: text.index("]") + 1] if text.startswith("[") and "]" in text else text.partition(":")[0]


def bound(host: str, port: int) -> socket.socket:
    """A socket of an address, at which nobody is listened to yet; ConfigError where it is taken, or none of ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":  # its connections have it from it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * READER_S))
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{host}:{port} cannot be listened at: {why}") from error
    return listener


@contextmanager
def listening(app: Any, listener: socket.socket, *, max_connections: int, **tls: Path | None) -> Iterator[None]:
    """Within, serve an app; at the end connections may send what they have. ``tls`` are uvicorn's options for it."""
    parts: dict[str, Any] = {"http": TimedProtocol, "loop": "uvloop", "ws": "none", "lifespan": "off"}
    says = {"log_config": None, "log_level": "critical", "server_header": False, "proxy_headers": False}
    limits = {"limit_concurrency": max_connections, "timeout_keep_alive": KEEP_ALIVE_S, "timeout_graceful_shutdown": 1}
    config = uvicorn.Config(app, **(parts | says | limits | tls))
    try:
        config.load()
        listener.listen(config.backlog)  # who comes before the loop does waits
    except (OSError, ValueError) as error:
        raise ConfigError(f"the server does not start: {error}") from error
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="medha-http", daemon=True)
    gc.collect()
    gc.freeze()  # what torch and the model have made stays: going through it would stop every stream for 0.15 s
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(2 * END_S)
        gc.unfreeze()


class TimedProtocol(HttpToolsProtocol):
    """Closes a connection on which no head is whole for :data:`KEEP_ALIVE_S`, where uvicorn's timer begins with an
    answer and ends with a byte; limits a head, which uvicorn does not; reads on where a client would change to another
    protocol; sees a client leave that has sent further requests; what is no request, or comes by one connection too
    many, gets an error as OpenAI's."""

    _num_new = 0  # bytes since a head, or some of a body, was whole
    _answered: Any = None  # the request that is, where uvicorn knows the newest alone

    def connection_made(self, transport: Any) -> None:
        """Start the timer."""
        super().connection_made(transport)
        most, self.limit_concurrency = self.config.limit_concurrency, None  # uvicorn's own answer is plain text
        if most is not None and len(self.connections) > most:
            full = ApiError(503, f"{most} connections are open, as many as may be", retry_after="1", connection="close")
            self.app = full.response()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def data_received(self, data: bytes) -> None:
        """Parse it, unless too much is not whole."""
        self._num_new += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")
        if self._num_new > _HEAD_BYTES:
            self.send_400_response("")

    def _stay(self, behind: bytes) -> None:
        """Parse a head again without what asks for another protocol, and then what lies behind it."""
        if (method := self.parser.get_method()) == b"CONNECT":
            return self.send_400_response("")
        kept = ((name, value) for name, value in self.headers if name not in (b"connection", b"upgrade"))
        lines = (b"%b: %b\r\n" % header for header in kept)
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join([method, b" ", self.url, b" HTTP/1.1\r\n", *lines, b"\r\n", behind]))

    def on_headers_complete(self) -> None:
        """A head is whole."""
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > _HEAD_BYTES:
            raise ValueError("the head is too large")
        self._num_new = 0
        super().on_headers_complete()
        if not self.pipeline:
            self._answered = self.cycle
        elif len(self.pipeline) < _MOST_WAITING:  # uvicorn would read no more, and see nobody leave
            self.flow.resume_reading()
        self._unset_keepalive_if_required()

    def on_response_complete(self) -> None:
        """The next one's turn."""
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Let go what is being answered."""
        self.cycle = self._answered
        super().connection_lost(exc)

    def on_body(self, body: bytes) -> None:
        """Some of it is there."""
        self._num_new = 0
        super().on_body(body)

    def _should_upgrade(self) -> bool:
        return True  # asked where the parser would: uvicorn does nothing with the head then

    def send_400_response(self, msg: str) -> None:
        """Tell what is wrong with a request, unless it is being answered, and hang up."""
        is_answered = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not (self.pipeline or is_answered or self.transport.is_closing()):
            status = 431 if self._num_new > _HEAD_BYTES else 400
            answer = ApiError(status, "the request is no HTTP, or its head too large", connection="close").response()
            lines = (b"%b: %b\r\n" % header for header in answer.raw_headers)
            self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", answer.body]))
        self.transport.close()
