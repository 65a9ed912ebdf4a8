"""uvicorn's protocol with a limit for the head of a request, so that silent connections shut nobody out."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedProtocol(H11Protocol):
    """Closes a connection on which no head is whole in time: from its beginning, or from a head's first byte."""

    limit_s = 30.0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Wait on where the head is not whole."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """A head may be half here."""
        super().on_response_complete()
        self._watch()

    def _watch(self) -> None:
        waits = self._waits
        if not waits and self._late is not None:
            self._late.cancel()
            self._late = None
        elif waits and self._late is None:
            self._late = self.loop.call_later(self.limit_s, self._close)

    def _close(self) -> None:
        self._late = None
        if self._waits and not self.transport.is_closing():
            self.transport.close()

    @property
    def _waits(self) -> bool:
        """Whether a head is to come, the first one, or has begun."""
        return self.conn.their_state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0] != b"")
