"""Runs an engine over requests that arrive in time: feed what is due, step, hand on what changed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from medha.errors import EngineDeadError, MedhaError
from medha.request import SLO, CompletionOutput, RequestMetrics, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from medha.engine import Engine, Prompt

_MAX_SLEEP_S = 0.1


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and when it arrives.

    Attributes:
        arrival_s: seconds after the start of :func:`drive`.
        error: why the request could not even be read; it is then returned at once.
        has_custom_id: its id came as OpenAI's ``custom_id``; its output line is to have it under that name too.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams | None = None
    slo: SLO | None = None
    arrival_s: float = 0.0
    priority: str = "normal"
    error: MedhaError | None = None
    has_custom_id: bool = False


def drive(
    engine: Engine,
    arrivals: Sequence[Arrival],
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[], None] = lambda: None,
) -> Iterator[RequestOutput]:
    """Serve arrivals to the end, yielding outputs as they change; each arrival has one finished output.

    A request that is refused yields a finished output with its error, and the others go on.

    Args:
        engine: idle at the start.
        arrivals: in order of ``arrival_s``.
        should_stop: asked between steps; once true, everything unfinished is aborted and yielded.
        on_step: called after each step; it may add requests of its own to the engine.

    Raises:
        EngineDeadError: a step failed; the unfinished requests have been yielded before.
    """
    start = engine.now()
    upcoming = deque(arrivals)
    while upcoming or engine.has_unfinished:
        if should_stop():  # what is in flight runs to its end, on every rank
            engine.abort_all()
            yield from (unserved(arrival, start) for arrival in upcoming)
            upcoming.clear()
        while upcoming and upcoming[0].arrival_s <= engine.now() - start:
            refused = _add(engine, upcoming.popleft(), start)
            if refused is not None:
                yield refused
        if engine.has_unfinished:
            try:
                outputs = engine.step()
            except EngineDeadError as error:
                yield from error.outputs
                yield from (unserved(arrival, start, error=error) for arrival in upcoming)
                raise
            yield from outputs
            on_step()
        elif upcoming:
            time.sleep(min(_MAX_SLEEP_S, max(0.0, upcoming[0].arrival_s - (engine.now() - start))))


class Joiner:
    """Puts the outputs of requests whose ``output_kind`` is ``delta`` together again."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[CompletionOutput]] = {}

    def add(self, output: RequestOutput) -> RequestOutput | None:
        """Take an output; returns the whole one if it was its request's last."""
        pieces = self._pieces.setdefault(output.request_id, [])
        last = output.outputs[0]
        pieces.append(last)
        if not output.finished:
            return None
        del self._pieces[output.request_id]
        whole = replace(
            last,
            text=None if last.text is None else "".join(piece.text or "" for piece in pieces),
            token_ids=[token for piece in pieces for token in piece.token_ids],
            logprobs=None if last.logprobs is None else [step for piece in pieces for step in piece.logprobs or ()],
        )
        return replace(output, outputs=[whole])


def _add(engine: Engine, arrival: Arrival, start: float) -> RequestOutput | None:
    """Queue an arrival; returns its output when it is refused."""
    error = arrival.error
    if error is None:
        try:
            engine.add_request(
                arrival.request_id,
                arrival.prompt,
                arrival.params,
                slo=arrival.slo,
                priority=arrival.priority,
                arrival_s=start + arrival.arrival_s,
            )
            return None
        except EngineDeadError:
            raise
        except MedhaError as refusal:
            error = refusal
    return unserved(arrival, start, error=error, now=engine.now())


def unserved(
    arrival: Arrival, start: float, *, error: MedhaError | None = None, now: float | None = None
) -> RequestOutput:
    """The output of a request that the engine never took; without an error it is aborted.

    Args:
        arrival: the request; its own error goes before ``error``.
        start: time from which ``arrival.arrival_s`` counts, on the engine's clock.
        error: why it was not taken.
        now: time of its end on that clock, if known.
    """
    error = arrival.error or error
    completion = CompletionOutput(0, text=None, token_ids=[], finish_reason="abort" if error is None else "error")
    slo = arrival.slo or SLO()
    metrics = RequestMetrics(start + arrival.arrival_s, finished=now, ttft_slo_s=slo.ttft_s, tpot_slo_s=slo.tpot_s)
    return RequestOutput(arrival.request_id, None, [], [completion], True, metrics, error)
