"""Noticing that another node cannot be reached: a TCP connection of each of its ranks to rank 0.

The kernels keep a connection alive by themselves, so nothing that Python does holds it up, and a process that is
stopped keeps it. It ends where the process ends, and where nothing comes back from the other node for some ten seconds.
Ranks of rank 0's own node are seen as processes and have none.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger("medha")

LIFELINES = "lifelines"
"""The key of the store under which rank 0 says where to connect."""

_PROBES = (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5))  # seconds, seconds, how many in vain
_CONNECT_S = 3.0  # shorter than a store may answer nothing
_TOKEN = 16  # bytes
_RANK = 4


class Lifelines:
    """Rank 0's ends of the connections.

    Args:
        store: where the other ranks find the port, and the token by which they are known.
    """

    def __init__(self, store: Store) -> None:
        self._token = secrets.token_bytes(_TOKEN)
        both = socket.has_dualstack_ipv6()  # and IPv4
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listening = socket.create_server(("", 0), family=family, backlog=128, dualstack_ipv6=both)
        self._listening.setblocking(False)
        self._new: list[socket.socket] = []  # have not said yet who they are
        self._of: dict[int, socket.socket] = {}
        store.set(LIFELINES, json.dumps([self._listening.getsockname()[1], self._token.hex()]))

    def lost(self) -> list[int]:
        """Ranks whose connection has ended; those that have not connected so far are not among them."""
        try:
            while True:
                connection, _ = self._listening.accept()
                self._new.append(_kept_alive(connection))
        except OSError:  # nobody is there, or no descriptor for who is
            pass
        for connection in list(self._new):
            if (said := _peek(connection, _TOKEN + _RANK)) is None or 0 < len(said) < _TOKEN + _RANK:
                continue
            self._new.remove(connection)
            if secrets.compare_digest(said[:_TOKEN], self._token):
                connection.recv(len(said))
                self._of[int.from_bytes(said[_TOKEN:], "big")] = connection
            else:
                connection.close()
        return [rank for rank, connection in self._of.items() if _peek(connection, 1) == b""]

    def close(self) -> None:
        """Let go of all connections."""
        for one in (self._listening, *self._new, *self._of.values()):
            one.close()


def connect(store: Store, host: str, rank: int) -> socket.socket:
    """This rank's end, kept as long as the rank is in the job; a warning, and a socket that leads nowhere, where rank 0
    does not let itself be reached at this host."""
    port, token = json.loads(store.get(LIFELINES))
    try:
        connection = socket.create_connection((host, port), timeout=_CONNECT_S)
        connection.sendall(bytes.fromhex(token) + rank.to_bytes(_RANK, "big"))
    except OSError as error:
        logger.error("no connection to rank 0 at %s:%s, so it does not see when it is cut off: %s", host, port, error)
        return socket.socket()
    return _kept_alive(connection)


def _kept_alive(connection: socket.socket) -> socket.socket:
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def _peek(connection: socket.socket, size: int) -> bytes | None:
    """What has come and is not read: None for nothing so far, empty where the connection has ended."""
    try:
        return connection.recv(size, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except OSError:
        return b""
