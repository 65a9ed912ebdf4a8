"""Threads around an engine: they take turns to have it, in the order in which they asked, and let others run.

Prompts are prepared beside it, never where it steps: it takes a request when that is ready. A prompt of millions of
characters is overtaken by the short ones that arrive after it.
"""

from __future__ import annotations

import threading
import time
from _thread import RLock
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import suppress
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from medha.errors import EngineDeadError, UnsupportedFeatureError, is_interrupt

if TYPE_CHECKING:
    from medha.engine.engine import Engine

P = ParamSpec("P")
R = TypeVar("R")

LONG_PROMPT = 100_000
"""Characters or ids of the longest prompt that is prepared among the short ones."""
SOON_S = 0.002
"""For which a step waits for what has just come to be prepared: it may last a hundred times as long."""
PIECE_TOKENS = 16_384
"""Token ids that are worked on at once as Python integers."""
_PAUSE = 3.0


class Turns(RLock):  # type: ignore[misc]
    """A re-entrant lock. Whoever gives it back and asks again comes after those who wait.

    ``threading.RLock`` promises no order: a thread that steps an engine in a loop would get it back before another one
    that waits to add a request has woken up. Its own ``__exit__`` is kept: in one of Python's an interrupt may strike.
    """

    def __init__(self, nudge: Callable[[], None] = lambda: None) -> None:
        self._nudge = nudge  # called where somebody comes who must wait
        self._door = threading.RLock()  # held by the one who is next
        self.is_inside = False  # whether a method runs
        self.is_torn = False  # whether one has begun, and neither ended nor been cleared up behind an interrupt

    def __enter__(self) -> Turns:  # type: ignore[override]
        # What it is now, not what was noted: an interrupt, or a finalizer that enters, may strike at each line.
        is_owned = self._is_owned()  # type: ignore[attr-defined]
        try:
            if is_owned:
                self.acquire()
                return self
            with self._door:
                if not self.acquire(blocking=False):
                    self._nudge()
                    self.acquire()
            self.is_inside = False
            return self
        except BaseException:  # an interrupt, which strikes behind a call
            if self._is_owned():  # type: ignore[attr-defined]
                self.release()
            raise


def in_turn(method: Callable[P, R]) -> Callable[P, R]:
    """A method that changes an engine, which the caller's thread has to itself meanwhile; where an interrupt strikes in
    it, the requests are lost, the engine is not. What is aborted meanwhile ends with it."""

    @wraps(method)
    def call(*args: P.args, **options: P.kwargs) -> R:
        engine: Any = args[0]
        with engine.turns as turns:
            if turns.is_inside:
                if method.__name__ == "advance":
                    what = "a step (or generate, or a stream) within a step, as in on_step"
                    raise UnsupportedFeatureError(f"{what}; accepted: add_request, whose outputs a later step returns")
                return method(*args, **options)
            try:
                turns.is_inside = True
                if turns.is_torn:
                    engine.abandon()
                turns.is_torn = True
                result = method(*args, **options)
                turns.is_torn = False
            except BaseException as error:
                with suppress(EngineDeadError):  # other ranks have a part of it: each later call raises that
                    if is_interrupt(error):
                        engine.abandon()
                    elif isinstance(error, EngineDeadError):  # a journal that cannot be written raises it anywhere
                        engine.fail(error)
                turns.is_torn = False
                raise
            finally:
                turns.is_inside = False
                if engine.leaving:
                    engine.let_go()
            return result

    return call


class Preparing:
    """Prepares requests in threads, long prompts in one and the others in another; the engine goes on meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._threads = [futures.ThreadPoolExecutor(1, "medha-prepare") for _ in range(2)]
        self._begun: set[futures.Future[Any]] = set()  # and not done

    def close(self) -> None:
        """Give up what is not done."""
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)
        if self._begun and self._engine.tokenizer is not None:
            self._engine.tokenizer.interrupt()  # the end of the process would wait for it

    def begin(self, prompt: Any, prepare: Callable[[], R]) -> futures.Future[R]:
        """Prepare something of a prompt, after those that are as long or short."""
        begun = self._threads[prompt_size(prompt) > LONG_PROMPT].submit(prepare)
        self._begun.add(begun)
        begun.add_done_callback(self._begun.discard)
        return begun


def prompt_size(prompt: Any, depth: int = 64) -> int:
    """Characters or ids of a prompt, or of the longest part of what it holds down to a depth that no form has."""
    if isinstance(prompt, Mapping) and depth:
        return max((prompt_size(value, depth - 1) for value in prompt.values()), default=0)
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping) and depth:
        return max(prompt_size(value, depth - 1) for value in prompt)
    return len(prompt) if getattr(prompt, "ndim", 1) > 0 and hasattr(prompt, "__len__") else 0


def pieces(length: int) -> Iterator[slice]:
    """Parts of many ids, with a pause after each that is :data:`_PAUSE` times as long as what was done with it.

    Work on Python integers holds the interpreter lock, for which whoever decodes would wait at every operator.
    """
    for start in range(0, length, PIECE_TOKENS):
        began_s = time.perf_counter()
        yield slice(start, min(start + PIECE_TOKENS, length))
        if length > PIECE_TOKENS:
            time.sleep(_PAUSE * (time.perf_counter() - began_s))
