"""The engine's side of the server: one thread steps the engine, another has the event loop with the connections.

What the loop wants of the engine goes through a queue, which is emptied between two steps; what comes of a step goes to
the loop in one call. Neither waits for the other. Deltas that a reader has not taken are kept in its :class:`Answer`,
which joins them, so one who reads slowly holds up nobody, and what is kept of an answer is at most the answer.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from medha.engine.arrivals import Arrival, add_piece, prepare_arrival, taken, together
from medha.engine.engine import Engine
from medha.engine.request import Completion, Request
from medha.engine.threads import Preparing, prompt_size
from medha.errors import EngineDeadError, MedhaError, not_accepted
from medha.outputs import RequestOutput
from medha.serve.protocol import ApiError

_STOPPED = ApiError(503, "the server has stopped before the answer was whole", code="server_stopped")
_RECENT = 3.0  # what was read counts half for an ETA once 1/3 of what is left has been read after it
END_S = 1.0  # for which streams may end with what has become of them
_IDLE_S = 0.1  # how often an idle engine looks whether it is to stop
_TOGETHER_S = 0.02  # in which what follows a delivery is delivered together, but first and last tokens
_QUICK = 2000  # characters or ids of a prompt, no template's, that is prepared sooner than a thread has got it


class Answer:
    """What has come of the prompts of one HTTP request; of the event loop's thread.

    Attributes:
        last: the last output of each prompt, in their order; None until all of them were read.
        error: what went wrong with one of these.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.last: list[RequestOutput] | None = None
        self.error: Exception | None = None
        self._news = asyncio.Event()
        self._pieces: dict[int, list[RequestOutput]] = {}  # that were not read yet, by the index of a prompt
        self._ended: dict[int, RequestOutput] = {}

    def put(self, index: int, output: RequestOutput) -> None:
        """Add what the engine handed out for the prompt of an index."""
        add_piece(self._pieces.setdefault(index, []), output)  # there are many of a slow reader
        self._news.set()

    async def read(self, wait_s: float | None = None) -> list[tuple[int, RequestOutput]]:
        """Wait for news; by the index of a prompt what is new, nothing where there was none for so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._news.wait()
        self._news.clear()
        pieces, self._pieces = self._pieces, {}
        news = [(index, together(some)) for index, some in pieces.items()]
        self._ended |= {index: output for index, output in news if output.finished}
        if len(self._ended) == len(self.requests):
            self.last = [output for _, output in sorted(self._ended.items())]
            self.error = next((output.error for output in self.last if output.error is not None), None)
        return news


class Service:
    """An engine, which nobody else steps, and the requests that the event loop has for it, which calls what stands
    before :meth:`run`; the rest is the engine's thread's.

    Attributes:
        is_draining: no new request is taken.
        ended: what whoever asks is told as nothing is served any more: why the engine failed, or that the server stops.
        preparing: threads for what takes long; whoever ends the service closes it.
        on_end: called in the event loop with each request that has ended and its last output.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_draining = False
        self.ended: EngineDeadError | ApiError | None = None
        self.preparing = Preparing(engine)
        self.on_end: Callable[[Request, RequestOutput], None] = lambda request, output: None
        self.loop: asyncio.AbstractEventLoop | None = None
        # of a prompt, as it is asked for: when how many tokens were read, seconds that took of late, and alone would
        self._paces: WeakKeyDictionary[Completion, tuple[float, int, float, float]] = WeakKeyDictionary()
        self._inbox: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._outbox: deque[Callable[[], object]] = deque()  # any thread appends, the event loop calls
        self._is_urgent = False  # something of it
        self._next: asyncio.TimerHandle | None = None  # delivery, which the loop makes of itself

    async def in_thread(self, prompt: Any, work: Callable[[], Any]) -> Any:
        """What some work on a prompt returns that may take long, after other such work."""
        return await asyncio.wrap_future(self.preparing.begin(prompt, work))

    async def prepare(self, arrivals: Sequence[Arrival], *, most_tokens: int | None = None) -> Answer:
        """Tokenise and check requests, with prompts of so many tokens together; raises as :meth:`Engine.prepare`."""
        requests: list[Request] = []
        for arrival in arrivals:
            work = partial(prepare_arrival, self.engine, arrival)
            is_quick = len(arrivals) == 1 and "messages" not in arrival.prompt and prompt_size(arrival.prompt) <= _QUICK
            requests.append(work() if is_quick else await self.in_thread(arrival.prompt, work))
            if most_tokens is not None and sum(len(one.prompt_ids) for one in requests) > most_tokens:
                raise not_accepted("prompt", None, f"at most {most_tokens} tokens, with this API key")
        return Answer(requests)

    async def enqueue(self, answer: Answer, arrival_s: float) -> None:
        """Queue the requests of an answer, which :meth:`abort` must follow; raises as :meth:`Engine.add_request`."""
        self.loop = asyncio.get_running_loop()
        queued = asyncio.wrap_future(self.ask(partial(self._enqueue, answer, arrival_s)))
        while not queued.done():  # nobody does it where the engine's thread is stuck or has ended
            if self.ended is not None:
                raise self.ended
            await asyncio.wait([queued], timeout=_IDLE_S)
        queued.result()

    def abort(self, answer: Answer) -> None:
        """End what still runs of an answer, between two steps."""
        for one in answer.requests:
            self.ask(partial(self.engine.abort, one.request_id))

    def ask(self, call: Callable[[], Any]) -> Future[Any]:
        """Let the engine's thread make a call, between two steps."""
        made: Future[Any] = Future()
        self._inbox.put((made, call))
        self.engine.wake()
        return made

    def eta_s(self, requests: Sequence[Request]) -> float:
        """Predicted seconds to the first token of any of some requests, 0 where all are read. What is left of a prompt
        takes as much longer than alone as what was read of late did; one that waits is behind those with less left."""
        running = [one for live in requests for one in live.completions if one.finish_reason is None]
        return min((self._eta_s(one) for one in running if not one.token_ids), default=0.0)

    def _eta_s(self, one: Completion) -> float:
        left_s, begun_s = self.left_s(one, corrected=False), one.metrics.first_scheduled
        at_s, num_read, took_s, alone_s = self._paces.get(one, (begun_s, one.metrics.num_cached_tokens, 0.0, 0.0))
        if at_s is not None and one.num_computed_tokens != num_read:
            step_s = self.left_s(one, num_read, corrected=False) - left_s
            if step_s > 0:
                kept = left_s / (left_s + _RECENT * step_s)
                took_s, alone_s, at_s = kept * took_s + one.computed_s - at_s, kept * alone_s + step_s, one.computed_s
            else:  # it gave way
                took_s, alone_s, at_s = 0.0, 0.0, self.engine.now()
            self._paces[one] = at_s, one.num_computed_tokens, took_s, alone_s
        if not alone_s:
            return self.engine.scheduler.ahead_s(one.slot) + self.left_s(one)
        return max(left_s * took_s / alone_s - (self.engine.now() - one.computed_s), 0.0)

    def left_s(self, one: Completion, num_done: int | None = None, *, corrected: bool = True) -> float:
        """Predicted seconds to read a prompt alone from where it is, or was, on; ``corrected`` as the scheduler's."""
        if num_done is None:
            num_done = one.num_computed_tokens or self.engine.scheduler.num_there(one.slot)
        return self.engine.scheduler.prefill_left_s(num_done, len(one.request.prompt_ids), corrected=corrected)

    def run(self, should_stop: Callable[[], bool]) -> None:
        """Serve until ``should_stop``; raises EngineDeadError where a step failed, when its requests have ended."""
        try:
            while not should_stop():
                for made, call in taken(self._inbox, 0.0 if self.engine.has_unfinished else _IDLE_S):
                    try:
                        made.set_result(call())
                    except (MedhaError, ApiError) as error:
                        made.set_exception(error)
                if self.engine.has_unfinished:
                    self.engine.advance(_IDLE_S)
                self.flush()
        except Exception as error:
            dead = self.fail(error)
            raise dead from dead.__cause__

    def cut(self) -> None:
        """End every request now, as the server stops."""
        if self.ended is None:
            self.ended = _STOPPED
            self.engine.abort_all()
        self.flush()

    def fail(self, error: Exception) -> EngineDeadError:
        """End every request with an error, which is returned; another thread may call it, while a step is stuck."""
        self.ended = dead = self.engine.fail(error)
        self.flush()
        return dead

    def flush(self) -> None:
        """Have the event loop take what has come of requests, unless it will anyway, and that soon enough."""
        if self._outbox and self.loop is not None and (self._is_urgent or self._next is None):
            self._is_urgent = False
            with suppress(RuntimeError):  # the loop is closed: there is nobody left
                self.loop.call_soon_threadsafe(self._deliver)

    def _enqueue(self, answer: Answer, arrival_s: float) -> None:
        if self.ended is not None:
            raise self.ended
        for index, request in enumerate(answer.requests):
            self.engine.add_prepared(request, arrival_s=arrival_s, sink=partial(self._hand_out, answer, index))

    def _hand_out(self, answer: Answer, index: int, output: RequestOutput) -> None:
        self._outbox.append(partial(answer.put, index, output))
        if output.finished:
            if any(one.finish_reason == "abort" for one in output.outputs):  # of one who still reads
                output.error = _STOPPED
            assert self.loop is not None, "a loop has asked for it"
            self._outbox.append(partial(self.loop.call_soon, self.on_end, answer.requests[index], output))
        self._is_urgent |= output.finished or output.metrics.num_output_tokens <= answer.requests[index].params.n

    def _deliver(self) -> None:
        if self._next is not None:
            self._next.cancel()
        self._next = None  # from here on who appends calls
        if self._outbox:
            self._next = asyncio.get_running_loop().call_later(_TOGETHER_S, self._deliver)
        while self._outbox:
            self._outbox.popleft()()
