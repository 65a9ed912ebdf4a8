"""Runs an engine over requests that arrive in time: feed what is due, step, hand on what changed.

Prompts are tokenised in threads, never where the engine steps: it goes on meanwhile, and takes a request when it is
ready. A prompt of millions of characters is overtaken by the short ones that arrive after it.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Self

from medha.errors import EngineDeadError, MedhaError
from medha.outputs import CompletionOutput, RequestOutput, unserved
from medha.params import SLO, SamplingParams

if TYPE_CHECKING:
    from medha.engine.admission import Prompt
    from medha.engine.engine import Engine
    from medha.engine.request import Request

LONG_PROMPT = 100_000
"""Characters or ids of the longest prompt that is prepared among the short ones."""

_MAX_SLEEP_S = 0.1
_MOST_BEGUN = 256  # of the arrivals that are due, between two steps


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and when it arrives.

    Attributes:
        arrival_s: seconds after :func:`drive` was called.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams | None = None
    slo: SLO | None = None
    arrival_s: float = 0.0
    priority: str = "normal"
    error: MedhaError | None = None  # why the request could not even be read; it is then returned at once
    custom_id: str | None = None  # its id as OpenAI's batch files have it, which its output line repeats
    tenant: str = ""

    def unserved(self, start_s: float, *, error: Exception | None = None, now_s: float | None = None) -> RequestOutput:
        """Its output if the engine never takes it; ``arrival_s`` counts from ``start_s``, its own error goes before
        another, and without one it is aborted."""
        error = self.error or error
        return unserved(self.request_id, start_s + self.arrival_s, slo=self.slo, error=error, finished_s=now_s)


def drive(
    engine: Engine,
    arrivals: Sequence[Arrival],
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[], None] = lambda: None,
) -> Iterator[RequestOutput]:
    """Serve arrivals to the end, yielding outputs as they change; each has one finished output, a refused one with its
    error.

    Args:
        engine: idle at the start.
        arrivals: in order of ``arrival_s``.
        should_stop: asked between steps; once true, everything unfinished is aborted and yielded.
        on_step: called after each step; it may add requests of its own.

    Raises:
        EngineDeadError: a step failed; the unfinished requests have been yielded before.
    """
    start = engine.now()
    upcoming = deque(arrivals)
    with _Preparing(engine) as preparing:
        while upcoming or preparing.pending or engine.has_unfinished:
            if should_stop():  # what is in flight runs to its end, on every rank
                engine.abort_all()
                yield from (arrival.unserved(start) for arrival in (*preparing.drop(), *upcoming))
                upcoming.clear()
            for _ in range(min(len(upcoming), _MOST_BEGUN)):
                if upcoming[0].arrival_s > engine.now() - start:
                    break
                arrival = upcoming.popleft()
                preparing.begin(arrival, partial(prepare_arrival, engine, arrival), is_long=is_long(arrival.prompt))
            wait_s = _MAX_SLEEP_S if preparing.pending else 0.0
            if upcoming:
                wait_s = min(_MAX_SLEEP_S, upcoming[0].arrival_s - (engine.now() - start))
            try:
                for arrival, request in preparing.ready(0.0 if engine.has_unfinished else wait_s):
                    try:
                        engine.add_prepared(request.result(), arrival_s=start + arrival.arrival_s)
                    except MedhaError as refusal:
                        yield arrival.unserved(start, error=refusal, now_s=engine.now())
                        if isinstance(refusal, EngineDeadError):
                            raise
                if engine.has_unfinished:
                    yield from engine.step(wait_s=max(min(wait_s, _MAX_SLEEP_S) if upcoming else _MAX_SLEEP_S, 0.0))
                    on_step()
            except EngineDeadError as error:
                yield from error.outputs
                yield from (arrival.unserved(start, error=error) for arrival in (*preparing.drop(), *upcoming))
                raise


class _Preparing:
    """Prepares items in threads, long ones in one and the others in another; the engine goes on meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._threads = [futures.ThreadPoolExecutor(1, "medha-prepare") for _ in range(2)]
        self.pending: dict[futures.Future[Any], Any] = {}  # what has begun and not come out again, to its item
        self._done: queue.SimpleQueue[futures.Future[Any]] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.drop()
        for thread in self._threads:
            thread.shutdown(wait=False, cancel_futures=True)

    def begin(self, item: Any, prepare: Callable[[], Any], *, is_long: bool) -> None:
        """Prepare an item, after those that are as long or short."""
        prepared = self._threads[is_long].submit(prepare)
        self.pending[prepared] = item
        prepared.add_done_callback(self._done.put)
        prepared.add_done_callback(lambda _: self._engine.wake())

    def ready(self, wait_s: float = 0.0) -> Iterator[tuple[Any, futures.Future[Any]]]:
        """Those that are done; waits so long for the first of them."""
        if wait_s > 0 and not self.pending:
            time.sleep(wait_s)
        with suppress(queue.Empty):
            while self.pending:
                prepared = self._done.get(wait_s > 0, max(wait_s, 0.0))
                if prepared in self.pending:  # else it was dropped
                    wait_s = 0.0
                    yield self.pending.pop(prepared), prepared

    def drop(self) -> list[Any]:
        """Give up what is not done; returns it in the order in which it was begun."""
        for prepared in self.pending:
            if not prepared.cancel() and not prepared.done() and self._engine.tokenizer is not None:
                self._engine.tokenizer.interrupt()  # the end of the process would wait for it
        dropped = list(self.pending.values())
        self.pending.clear()
        return dropped


def prepare_arrival(engine: Engine, arrival: Arrival) -> Request:
    """Tokenise and check an arrival, in any thread; raises its own error, or as :meth:`Engine.prepare`."""
    if arrival.error is not None:
        raise arrival.error
    objectives = {"slo": arrival.slo, "priority": arrival.priority, "tenant": arrival.tenant}
    return engine.prepare(arrival.request_id, arrival.prompt, arrival.params, **objectives)  # type: ignore[arg-type]


def is_long(prompt: Any) -> bool:
    """Whether a prompt, or what it holds at any depth that a form has, is longer than short ones should wait for."""
    if isinstance(prompt, Mapping):
        return any(map(is_long, prompt.values()))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
        return any(map(is_long, prompt))
    return getattr(prompt, "ndim", 1) > 0 and hasattr(prompt, "__len__") and len(prompt) > LONG_PROMPT


class Joiner:
    """Puts the outputs of requests whose ``output_kind`` is ``delta`` together again."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[CompletionOutput]] = {}

    def add(self, output: RequestOutput) -> RequestOutput | None:
        """Take an output; returns the whole one if it was its request's last."""
        self._pieces.setdefault(output.request_id, []).extend(output.outputs)
        return replace(output, outputs=joined(self._pieces.pop(output.request_id))) if output.finished else None


def joined(pieces: Iterable[CompletionOutput]) -> list[CompletionOutput]:
    """Of each completion, by index, one piece of those in order."""
    by_index: dict[int, list[CompletionOutput]] = {}
    for piece in pieces:
        by_index.setdefault(piece.index, []).append(piece)
    return [_whole(parts) for _, parts in sorted(by_index.items())]


def _whole(pieces: Sequence[CompletionOutput]) -> CompletionOutput:
    last = pieces[-1]
    return replace(
        last,
        text=None if last.text is None else "".join(piece.text or "" for piece in pieces),
        token_ids=list(chain.from_iterable(piece.token_ids for piece in pieces)),
        logprobs=None if last.logprobs is None else list(chain.from_iterable(piece.logprobs or () for piece in pieces)),
    )
