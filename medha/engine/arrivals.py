"""Runs an engine over requests that arrive in time: feed what is due, step, hand on what changed.

Prompts are prepared in threads (:mod:`medha.engine.threads`) while the engine steps.
"""

from __future__ import annotations

import math
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, TypeVar

from medha.engine.threads import SOON_S, Preparing
from medha.errors import EngineDeadError, MedhaError
from medha.outputs import CompletionOutput, RequestOutput, unserved
from medha.params import SLO, SamplingParams

if TYPE_CHECKING:
    from medha.engine.admission import Prompt
    from medha.engine.engine import Engine
    from medha.engine.request import Request

T = TypeVar("T")

_MAX_SLEEP_S = 0.1
_MOST_BEGUN = 256  # of the arrivals that are due, between two steps
_MOST_PIECES = 256  # outputs of a request, a token or more each, that are kept apart


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
    start_s: float | None = None,
    most: int | None = None,
) -> Iterator[RequestOutput]:
    """Serve arrivals to the end, yielding outputs as they change; each has one finished output, a refused one with its
    error.

    Args:
        engine: idle at the start.
        arrivals: in order of ``arrival_s``.
        should_stop: asked between steps; once true, everything unfinished is aborted and yielded.
        on_step: called after each step; it may add requests of its own.
        start_s: from which arrivals count, on the engine's clock; by default the present.
        most: requests at once; who comes while there are so many arrives when one of them ends.

    Raises:
        EngineDeadError: a step failed; the unfinished requests have been yielded before.
    """
    start = engine.now() if start_s is None else start_s
    room_s = 0.0  # since when there is room for one more
    upcoming = deque(arrivals)
    pending: dict[Future[Request], Arrival] = {}  # being prepared
    prepared: queue.SimpleQueue[Future[Request]] = queue.SimpleQueue()

    def ahead_s() -> float:  # until the next one arrives
        return upcoming[0].arrival_s - (engine.now() - start) if upcoming else math.inf

    def is_full() -> bool:
        return most is not None and len(pending) + engine.num_unfinished >= most

    def unserved(error: EngineDeadError | None = None) -> Iterator[RequestOutput]:
        yield from (arrival.unserved(start, error=error) for arrival in (*pending.values(), *upcoming))
        pending.clear()
        upcoming.clear()

    with closing(Preparing(engine)) as preparing:
        while upcoming or pending or engine.has_unfinished:
            if should_stop():  # what is in flight runs to its end, on every rank
                engine.abort_all()
                yield from unserved()
            num_begun = 0
            while num_begun < _MOST_BEGUN and ahead_s() <= 0.0 and not is_full():
                num_begun += 1
                arrival = upcoming.popleft()
                arrival = replace(arrival, arrival_s=max(arrival.arrival_s, room_s))
                begun = preparing.begin(arrival.prompt, partial(prepare_arrival, engine, arrival))
                pending[begun] = arrival
                begun.add_done_callback(prepared.put)
                begun.add_done_callback(lambda _: engine.wake())
            was_full = is_full()
            wait_s = _MAX_SLEEP_S if was_full else min(_MAX_SLEEP_S, max(ahead_s(), 0.0))
            is_idle = not engine.has_unfinished
            if is_idle and upcoming and not pending:
                time.sleep(wait_s)
            try:
                soon_s = SOON_S if num_begun else wait_s if is_idle and pending else 0.0
                for one in taken(prepared, soon_s, num_begun):
                    if (its := pending.pop(one, None)) is None:  # it was given up
                        continue
                    try:
                        engine.add_prepared(one.result(), arrival_s=start + its.arrival_s)
                    except MedhaError as refusal:
                        yield its.unserved(start, error=refusal, now_s=engine.now())
                        if isinstance(refusal, EngineDeadError):
                            raise
                if engine.has_unfinished:
                    yield from engine.step(wait_s=wait_s)
                    on_step()
                if was_full and not is_full():
                    room_s = engine.now() - start
            except EngineDeadError as error:
                yield from error.outputs
                yield from unserved(error)
                raise


def taken(things: queue.SimpleQueue[T], wait_s: float, num: int = 1) -> Iterator[T]:
    """What is in a queue; waits so long for the first ``num`` of it, and for one at the least."""
    end_s = time.monotonic() + wait_s
    with suppress(queue.Empty):
        for at in count():
            left_s = end_s - time.monotonic() if at < max(num, 1) else 0.0
            yield things.get(left_s > 0, left_s)


def prepare_arrival(engine: Engine, arrival: Arrival) -> Request:
    """Tokenise and check an arrival, in any thread; raises its own error, or as :meth:`Engine.prepare`."""
    if arrival.error is not None:
        raise arrival.error
    objectives = {"slo": arrival.slo, "priority": arrival.priority, "tenant": arrival.tenant}
    return engine.prepare(arrival.request_id, arrival.prompt, arrival.params, **objectives)


class Joiner(dict[str, list[RequestOutput]]):
    """Puts the outputs of requests whose ``output_kind`` is ``delta`` together again: what has come of each."""

    def add(self, output: RequestOutput) -> RequestOutput | None:
        """Take an output; returns the whole one if it was its request's last."""
        add_piece(self.setdefault(output.request_id, []), output)
        return together(self.pop(output.request_id)) if output.finished else None


def add_piece(pieces: list[RequestOutput], output: RequestOutput) -> None:
    """Keep one more output of a request; many become one."""
    pieces.append(output)
    if len(pieces) > _MOST_PIECES:
        pieces[:] = [together(pieces)]


def together(pieces: Sequence[RequestOutput]) -> RequestOutput:
    """One output of several of a request in order, with one piece of each completion."""
    if len(pieces) == 1:
        return pieces[0]
    by_index: dict[int, list[CompletionOutput]] = {}
    for one in chain.from_iterable(piece.outputs for piece in pieces):
        by_index.setdefault(one.index, []).append(one)
    return replace(pieces[-1], outputs=[_whole(parts) for _, parts in sorted(by_index.items())])


def _whole(pieces: Sequence[CompletionOutput]) -> CompletionOutput:
    last = pieces[-1]
    text = None if last.text is None else "".join(piece.text or "" for piece in pieces)
    ids = list(chain.from_iterable(piece.token_ids for piece in pieces))
    logprobs = None if last.logprobs is None else list(chain.from_iterable(piece.logprobs or () for piece in pieces))
    return replace(last, text=text, token_ids=ids, logprobs=logprobs)
