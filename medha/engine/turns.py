"""Who has the engine: threads take turns, in the order in which they asked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Turns:
    """A re-entrant lock. Whoever gives it back and asks again comes after those who wait.

    ``threading.RLock`` promises no order: a thread that steps an engine in a loop would get it back before another one
    that waits to add a request has woken up.
    """

    def __init__(self, nudge: Callable[[], None] = lambda: None) -> None:
        self._nudge = nudge  # called where somebody comes who must wait
        self._door = threading.Lock()  # held by the one who is next
        self._room = threading.RLock()  # an interrupt may strike when it is held and no owner noted
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            with self._door:
                if not self._room.acquire(blocking=False):
                    self._nudge()
                    self._room.acquire()
            self._owner = me
        self._depth += 1

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
            self._room.release()


def in_turn(method: Callable[P, R]) -> Callable[P, R]:
    """A method that changes an engine, which the caller's thread has to itself meanwhile; where an interrupt strikes in
    it, the requests are lost, the engine is not."""

    @wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> R:
        engine: Any = args[0]
        with engine.turns:
            try:
                return method(*args, **options)
            except Exception:
                raise
            except BaseException:
                engine.abandon()
                raise

    return call
