"""A lock that threads get in turn."""

from __future__ import annotations

import threading


class Turns:
    """A re-entrant lock. Whoever gives it back and asks again comes after those who wait.

    ``threading.RLock`` promises no order: a thread that steps an engine in a loop would get it back before another one
    that waits to add a request has woken up.
    """

    def __init__(self) -> None:
        self._door = threading.Lock()  # held by the one who is next
        self._room = threading.RLock()  # an interrupt may strike when it is held and no owner noted
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            with self._door:
                self._room.acquire()
            self._owner = me
        self._depth += 1

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._room.release()
