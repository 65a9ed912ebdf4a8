"""Runs an engine over requests that arrive in time: feed what is due, step, hand on what changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from medha.engine import Engine, Prompt
from medha.errors import EngineDeadError, MedhaError
from medha.request import SLO, CompletionOutput, RequestMetrics, RequestOutput, SamplingParams

_MAX_SLEEP_S = 0.1


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and when it arrives.

    Attributes:
        arrival_s: seconds after the start of :func:`drive`.
        error: why the request could not even be read; it is then returned at once.
    """

    request_id: str
    prompt: Prompt
    params: SamplingParams | None = None
    slo: SLO | None = None
    arrival_s: float = 0.0
    error: MedhaError | None = None


def drive(
    engine: Engine,
    arrivals: Iterable[Arrival],
    *,
    should_stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[], None] = lambda: None,
) -> Iterator[RequestOutput]:
    """Serve arrivals to the end, yielding outputs as they change.

    A request that is refused yields a finished output with its error, and the others go on.

    Args:
        engine: idle at the start.
        arrivals: in order of ``arrival_s``.
        should_stop: asked between steps; once true, everything unfinished is aborted and yielded.
        on_step: called after each step.

    Raises:
        EngineDeadError: a step failed; the unfinished requests have been yielded before.
    """
    start = engine.now()
    pending = iter(arrivals)
    upcoming = next(pending, None)
    while upcoming is not None or engine.has_unfinished:
        if should_stop():
            engine.abandon()
            yield from engine.step()
            return
        while upcoming is not None and upcoming.arrival_s <= engine.now() - start:
            refused = _add(engine, upcoming, start)
            if refused is not None:
                yield refused
            upcoming = next(pending, None)
        if engine.has_unfinished:
            try:
                outputs = engine.step()
            except EngineDeadError as error:
                yield from error.outputs
                raise
            yield from outputs
            on_step()
        elif upcoming is not None:
            time.sleep(min(_MAX_SLEEP_S, max(0.0, upcoming.arrival_s - (engine.now() - start))))


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
                arrival_s=start + arrival.arrival_s,
            )
            return None
        except EngineDeadError:
            raise
        except MedhaError as refusal:
            error = refusal
    metrics = RequestMetrics(start + arrival.arrival_s, finished=engine.now())
    completion = CompletionOutput(index=0, text=None, token_ids=[], finish_reason="error")
    return RequestOutput(arrival.request_id, None, [], [completion], True, metrics, error)
