"""uvicorn in a thread of its own, with a limit for the head of a request, so that silent clients shut nobody out."""

from __future__ import annotations

import gc
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from medha.errors import ConfigError
from medha.serve.protocol import ApiError
from medha.serve.service import END_S

KEEP_ALIVE_S = 75  # for which a connection may be open, or be so again, without the head of a request
READER_S = 300  # for which a client may take nothing of what is sent to it, where the kernel counts that


def bound(host: str, port: int) -> socket.socket:
    """A socket of an address, at which nobody is listened to yet; ConfigError where it is taken, or none of ours."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":  # its connections have it from it
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * READER_S))
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"{host}:{port} cannot be listened at: {error.strerror or error}") from error
    return listener


@contextmanager
def listening(app: Any, listener: socket.socket, *, max_connections: int, **tls: Path | None) -> Iterator[None]:
    """Within, serve an app; at the end connections may send what they have. ``tls`` are uvicorn's options for it."""
    parts: dict[str, Any] = {"http": TimedProtocol, "loop": "asyncio", "ws": "none", "lifespan": "off"}
    says = {"log_config": None, "log_level": "critical", "server_header": False}
    limits = {"limit_concurrency": max_connections, "timeout_keep_alive": KEEP_ALIVE_S, "timeout_graceful_shutdown": 1}
    config = uvicorn.Config(app, **(parts | says | limits | tls))
    try:
        config.load()
    except (OSError, ValueError) as error:
        raise ConfigError(f"the server does not start: {error}") from error
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="medha-http", daemon=True)
    listener.listen(config.backlog)  # who comes before the loop does waits
    gc.collect()
    gc.freeze()  # what torch and the model have made stays: going through it would stop every stream for 0.15 s
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(2 * END_S)
        gc.unfreeze()


class TimedProtocol(H11Protocol):
    """Closes a connection on which no head is whole for :data:`KEEP_ALIVE_S`, where uvicorn's timer begins with an
    answer and ends with a byte; what is no request, or comes by one connection too many, gets an error as OpenAI's."""

    def connection_made(self, transport: Any) -> None:
        """Start the timer."""
        super().connection_made(transport)
        most, self.limit_concurrency = self.config.limit_concurrency, None  # uvicorn's own answer is plain text
        if most is not None and len(self.connections) > most:
            full = ApiError(503, f"{most} connections are open, as many as may be", retry_after="1", connection="close")
            self.app = full.response()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _unset_keepalive_if_required(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            super()._unset_keepalive_if_required()

    def send_400_response(self, msg: str) -> None:
        """Tell what is wrong with a head."""
        status = getattr(sys.exception(), "error_status_hint", 400)  # uvicorn handles h11's error by this call
        answer = ApiError(status, "the request is no HTTP, or its head too large", connection="close").response()
        head = h11.Response(status_code=status, headers=answer.raw_headers)
        for event in (head, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
