"""The loop: requests in, batches through scheduler and runner, outputs back.

:class:`Engine` is for those who drive the loop themselves (``add_request``, ``abort``, ``step``);
:class:`medha.LLM` wraps it. What a request must satisfy is in :mod:`medha.engine.admission`, when it ends in
:mod:`medha.engine.request`; the scheduler decides what runs; the runner computes. A step is: fill the
pipeline to its depth, then complete a batch that :mod:`medha.engine.in_flight` names. Where requests decode on
instances of their own :mod:`medha.engine.decode` has them from their first token on.

The file is longer than most because every call that a user or a front end may make stands here with its documentation.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from typing import Any, TextIO
from weakref import proxy

from medha.batch import Batch
from medha.engine.admission import Prompt, check_type, prepare_request
from medha.engine.decode import HandOvers
from medha.engine.explain import Explainer, explained
from medha.engine.in_flight import InFlight
from medha.engine.journal import Journal, check_recordable
from medha.engine.prefix import PrefixIds
from medha.engine.request import Completion, ModelLimits, Request, Sink
from medha.engine.threads import Turns, in_turn
from medha.errors import ConfigError, EngineDeadError, ValidationError, is_interrupt, not_accepted
from medha.outputs import Explanation, RequestOutput
from medha.params import SLO, SamplingParams, check_seconds
from medha.records import Tracer
from medha.sched.decision import Observer, Prediction
from medha.sched.scheduler import Scheduler
from medha.text import Tokenizer
from medha.worker.sampling import SlotSampling
from medha.worker.step import BatchRunner, phase

_EXTEND_EVERY = 256  # tokens of an output after which others may share them too


@dataclass(eq=False, repr=False)
class Engine:
    """Continuous batching on one model.

    An engine has one owner at a time: a call from another thread takes its turn, and those that wait come in the order
    in which they asked. What :meth:`step` returns goes to the thread that called it. Two calls wait for nobody:
    :meth:`prepare`, which changes nothing, and :meth:`fail`.

    Attributes:
        turns: who has the engine; held from one call to the next (``with engine.turns:``) it lets nobody between.
        on_step: called with each batch that is done, what was predicted of it before it was sent (None where the
            scheduler predicts nothing) and its busy seconds.
    """

    runner: BatchRunner
    scheduler: Scheduler  # of the prefills alone where there are decode instances; abandon() makes a new one
    limits: ModelLimits  # what requests are checked against
    _: KW_ONLY
    tokenizer: Tokenizer | None = None  # None serves token ids alone, with ``text`` None
    clock: InitVar[Callable[[], float]] = time.perf_counter  # monotonic seconds; the engine's time starts at 0
    timeline: Tracer | None = None  # records what ran when
    hand_overs: HandOvers = field(default_factory=HandOvers)  # to the decode instances
    news: InitVar[threading.Event | None] = None  # set when a batch may be done; None where they complete in order

    def __post_init__(self, clock: Callable[[], float], news: threading.Event | None) -> None:
        scheduler = self.scheduler
        self.on_step: Callable[[Batch, Prediction | None, float], None] | None = None
        num_groups = scheduler.memory.num_groups
        lanes = (None,) if news is None else range(num_groups)
        self._explainers = [Explainer(num_groups, scheduler.predictor, lane) for lane in lanes]
        self.observers: list[Observer] = [*self._explainers]  # are told what the scheduler is asked and what it decides
        self._clock = clock
        self._start = clock()
        self.live: dict[str, Request] = {}  # by id, not ended; other threads may look at it and change nothing
        self.by_slot: dict[int, Completion] = {}  # theirs, and of ended ones those with chunks in flight
        self._free_slots: list[int] = []
        self._num_added = 0
        self._in_flight = InFlight(news)
        self.wake = self._in_flight.wake  # lets a step that waits for one of several lanes return; for another thread
        self._unreturned: list[RequestOutput] = []  # outputs that the next step returns
        self.leaving = deque[str]()  # ids of requests that are to end where no method runs
        self._dead: EngineDeadError | None = None
        self._dying = threading.Lock()
        self.turns = Turns(self._in_flight.wake)
        keeps = scheduler.config.prefix_caching is not False
        self._prefix = PrefixIds(scheduler.memory.prefix.unit) if keeps else None

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether :meth:`step` has anything left to do or to return."""
        return bool(self.live or self._unreturned or self._in_flight or self.hand_overs.transfers)

    @property
    def schedulers(self) -> tuple[Scheduler, ...]:
        """That of the groups where prompts are read, and those of decode instances."""
        return (self.scheduler, *(one.scheduler for one in self.hand_overs.instances))

    @property
    def num_unfinished(self) -> int:
        """Requests queued or running."""
        return len(self.live)

    def describe(self) -> str:
        """The unfinished requests and the batches in flight, a line each; for another thread, while :meth:`step` is
        stuck."""
        lines = [f"{len(self.live)} unfinished requests, {len(self._in_flight)} batches in flight"]
        lines += [f"  {one}" for live in list(self.live.values()) for one in live.completions]
        lines += [str(sent.batch) for sent in list(self._in_flight)]
        return "\n".join(lines)

    def prefills(self, min_tokens: int = 1) -> list[tuple[str, int, int]]:
        """(request id, prompt tokens computed, prompt tokens) of admitted prompts of at least ``min_tokens``."""
        with self.turns:
            running = [one for live in list(self.live.values()) for one in live.completions if one.is_prefilling]
        sizes = ((one.name, one.num_computed_tokens, one.metrics.num_prompt_tokens) for one in running)
        return [size for size in sizes if size[2] >= min_tokens]

    def record(self, journal: TextIO) -> None:
        """Write down what is asked of the scheduler from now on, and what it decides, for ``medha replay``.

        The file is text; a line is written at each call. It is left open.

        Raises:
            ConfigError: the engine has served requests already, or its policy is a function.
            EngineDeadError: the file cannot be written; also from every later step that writes to it.
        """
        with self.turns:
            if self._num_added:
                raise ConfigError("a journal begins before the first request; this engine has served some")
            check_recordable(self.scheduler.config, len(self.hand_overs.instances))
            self.observers.append(Journal(self.scheduler, journal))

    def explain(self, request_id: str) -> Explanation:
        """Where the seconds of an unfinished request went until its first token, or so far; ``text()`` prints it.

        A finished one has it in its output, as ``metrics.explanation``.

        Raises:
            ValidationError: no unfinished request has this id.
        """
        with self.turns:
            check_type("request_id", request_id, str)
            if (live := self.live.get(request_id)) is None:
                message = f"request_id={request_id!r:.80} is not running; accepted: an unfinished request"
                raise ValidationError(message, param="request_id", value=request_id)
            self.hand_overs.note_wait(live.first, self.now())
            return live.first.metrics.explanation or explained(self._explainers, live.first.slot)

    def now(self) -> float:
        """Seconds since the engine was made, the clock of all metrics."""
        return self._clock() - self._start

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        slo: SLO | None = None,
        priority: str = "normal",
        tenant: str = "",
        arrival_s: float | None = None,
    ) -> None:
        """Check, tokenise and queue one request.

        Args:
            request_id: unique among unfinished requests.
            prompt: text, token ids, or a mapping with ``prompt``, ``prompt_token_ids`` or ``messages``.
            params: sampling parameters.
            slo: its objectives.
            priority: class: ``realtime``, ``high``, ``normal`` or ``low``.
            tenant: who shares the machine fairly with the others.
            arrival_s: when it arrived on the engine's clock (:meth:`now`), not later than that; now by default.

        Raises:
            ValidationError, ContextLengthError, KVCapacityError: the request is wrong; nothing was queued.
            DeadlineError: it cannot meet one of its objectives, and the option ``admission`` is ``refuse``.
            EngineDeadError: the engine has failed before.
        """
        arrival_s = self.now() if arrival_s is None else arrival_s
        prepared = self.prepare(request_id, prompt, params, slo=slo, priority=priority, tenant=tenant)
        self.add_prepared(prepared, arrival_s=arrival_s)

    def prepare(self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, **wanted: Any) -> Request:
        """Tokenise and check a request without queueing it, in any thread; as :meth:`add_request`, of whose keywords
        ``wanted`` are ``slo``, ``priority`` and ``tenant``."""
        if self._dead is not None:
            raise self._dead.with_traceback(None)  # else it keeps the frames of every call
        kv = self.scheduler.memory
        knows: dict[str, Any] = {"limits": self.limits, "tokenizer": self.tokenizer, "prefix": self._prefix}
        return prepare_request(request_id, prompt, params, **wanted, **knows, kv=kv, decode_kv=self.hand_overs.largest)

    @in_turn
    def add_prepared(self, request: Request, *, arrival_s: float, sink: Sink | None = None) -> None:
        """Queue a request that :meth:`prepare` returned, once; raises as :meth:`add_request`.

        ``sink`` takes its outputs, whoever steps; None lets :meth:`step` return them.
        """
        if self._dead is not None:
            raise self._dead.with_traceback(None)
        if (arrival_s := check_seconds("arrival_s", arrival_s)) > (now_s := self.now()):
            raise not_accepted("arrival_s", arrival_s, f"at most now(), {now_s}")
        name, is_live = request.request_id, request.request_id in self.live
        if is_live or request.completions:
            wrong = "is in flight already; accepted: an id not in use" if is_live else "was queued; prepare it again"
            raise ValidationError(f"request_id={name!r} {wrong}", param="request_id", value=name)
        params, completions = request.params, list[Completion]()
        request.sink = sink or self._unreturned.append
        seed = params.seed if params.seed is not None else self.limits.seed * 1_000_003 + self._num_added
        judged_s: float | None = now_s
        is_relegated = False
        for index in range(params.n):
            slot = self._free_slots[-1] if self._free_slots else len(self.by_slot)
            one = Completion(request, index, slot, arrival_s, self.tokenizer)
            sampling = SlotSampling.of(params, seed + index, tuple(sorted(one.end_ids)), request.prompt_ids)
            head = replace(request.asked(slot, arrival_s), is_relegated=is_relegated)
            if self.hand_overs.instances:
                head = replace(head, max_new_tokens=1)
            its = self.scheduler.add(head, judged_s)
            self.runner.open(slot, request.prompt_ids, sampling, one.token_ids)
            one.admitted(its)
            completions.append(one)
            self.by_slot[slot] = one
            del self._free_slots[-1:]
            for observer in self.observers:
                observer.added(head, judged_s, its, one.name)
            judged_s, is_relegated = None, its.is_relegated  # the first is judged for all: none is refused behind it
        self._num_added += params.n
        request.completions = tuple(completions)
        self.live[name] = request

    @in_turn
    def reset_prefix_cache(self) -> None:
        """Forget what is kept of requests that have ended; what runs goes on."""
        self.scheduler.reset_prefix_cache()
        for observer in self.observers:
            observer.forgot()

    @in_turn
    def abort(self, request_id: str) -> None:
        """End a request now, keeping what it has produced; the next :meth:`step` returns it. No-op if unknown.

        In the middle of another method, where a finalizer or a signal handler may call it, it ends when that does.
        """
        check_type("request_id", request_id, str)
        self.leaving.append(request_id)

    @in_turn
    def let_go(self) -> None:
        """End the requests that were aborted; so does every method that changes something, as it ends."""
        while self.leaving:
            if (live := self.live.get(self.leaving.popleft())) is None:
                continue
            running = [one for one in live.completions if one.finish_reason is None]
            self._abort(live)
            for one in running:
                self._extend(one)
                closed = self.hand_overs.cancel(self.scheduler, one.slot)
                for observer in self.observers:
                    observer.cancelled(one.slot, closed)
                self._release(closed)

    def abort_all(self) -> None:
        """End every request now; batches in flight are completed by the next steps."""
        with self.turns:
            for request_id in list(self.live):
                self.abort(request_id)

    def end(self, request_ids: Iterable[str]) -> None:
        """Abort what still runs of some requests, and leave nothing of them in flight if nothing else runs."""
        self.leaving.extend(request_ids)  # so that all of them end, also where an interrupt strikes behind this
        with suppress(EngineDeadError), self.turns:  # it has ended them, and each later call raises it
            if not self.turns.is_inside:
                self.let_go()
                while not self.num_unfinished and self.advance():
                    pass

    # -- the loop ------------------------------------------------------------------------------------------------

    def step(self, wait_s: float | None = None) -> list[RequestOutput]:
        """Fill the pipeline, complete its oldest batch, and return the outputs that changed.

        With lanes it completes a batch that is done, and waits at most ``wait_s`` for one, or until :meth:`wake`.

        A request that is not finished is returned as its ``output_kind`` says; a finished one once, whole (with
        ``delta``: what had not been returned yet). Returns an empty list when there is nothing to do.

        Raises:
            EngineDeadError: a step failed; every unfinished request has ended with that error, and the exception's
                ``outputs`` holds them.
        """
        with self.turns:
            self.advance(wait_s)
            outputs = self._unreturned.copy()
            del self._unreturned[: len(outputs)]
        return outputs

    @in_turn
    def advance(self, wait_s: float | None = None) -> bool:
        """As :meth:`step`, but outputs without a sink wait for the next step; returns whether a batch was in flight."""
        if self._dead is not None:
            raise self._dead.with_traceback(None)
        try:
            self._fill_pipeline()
            if self._in_flight or self.hand_overs.transfers:
                if (index := self._in_flight.await_done(wait_s)) is not None:
                    self._complete(index)
                return True
            if self.live:
                raise RuntimeError(f"the scheduler runs none of the unfinished requests:\n{self.describe()}")
            return False
        except BaseException as error:
            if is_interrupt(error):
                raise
            raise self.fail(error) from error

    @in_turn
    def abandon(self) -> None:
        """Abort everything and forget what is in flight; the next :meth:`step` returns the aborted requests."""
        for live in list(self.live.values()):
            self._abort(live)
        # An interrupt may have struck anywhere in a step, so nothing is undone: scheduler and runner start afresh.
        self.leaving.clear()
        self.by_slot.clear()
        self._free_slots.clear()
        self._in_flight.clear()
        self.scheduler = self.scheduler.fresh()
        for observer in self.observers:
            observer.restarted(self.scheduler.predictor.learned)
        try:
            self.runner.reset()
        except EngineDeadError as error:
            raise self.fail(error) from error

    def _fill_pipeline(self) -> None:
        """Schedule and submit batches until no more may enter."""
        self._release(self.hand_overs.advance(self.scheduler, self.by_slot, self.now))
        for scheduler, decision, start_s, batch in self.hand_overs.decisions(self.now):
            self._in_flight.sent(scheduler, decision, start_s, batch, self.runner.submit(batch))
        while True:
            start_s = self.now()
            with phase("medha.schedule"):
                decision = self.scheduler.schedule(start_s)
            for observer in self.observers:
                observer.scheduled(start_s, decision)
            for preempted in decision.preempted:
                self.by_slot[preempted.slot].gave_way(preempted)
            if decision.batch is None:
                return
            for row in decision.batch.chunks:
                self.by_slot[row.slot].scheduled(start_s)
            for shared in decision.batch.shared:
                self.by_slot[shared.slot].found(shared.num_tokens)
            pending = self.runner.submit(decision.batch)
            self._in_flight.sent(self.scheduler, decision, start_s, decision.batch, pending)

    def _complete(self, index: int) -> None:
        """Wait for a batch in flight and hand out what came of it."""
        sent = self._in_flight[index]
        batch, prediction, result = sent.batch, sent.decision.prediction, sent.pending.result()
        is_first = sent.scheduler is self.scheduler
        now, busy_s = self.now(), result.busy_s
        start_s = self._in_flight.completed(index, now)
        for row in batch.chunks:
            chunked = self.by_slot[row.slot]
            chunked.num_computed_tokens, chunked.computed_s = row.kv_len, now
        if self.timeline is not None:
            names = [self.by_slot[row.slot].name for row in batch.rows]
            step_s = {}
            if prediction is not None:
                step_s = {"predicted": prediction.seconds, "busy": busy_s, "budget": prediction.budget_s}
            self.timeline.record(batch, start_s, now, names, sent.decision.slack_s, step_s)
        if self.on_step is not None:
            self.on_step(batch, prediction, busy_s)
        results: list[tuple[int, int, bool]] = []
        took, told = list[Completion](), list[Request]()
        by_slot, hands_over = self.by_slot, bool(self.hand_overs.instances) and is_first
        for row, sampled in zip(result.rows, result.sampled, strict=True):
            one = by_slot[slot := row[0]]
            if one.finish_reason is None:  # else it was aborted while in flight: the result is dropped
                ends = one.take(sampled, now)
                results.append((slot, 0 if hands_over and not ends else 1, ends))
                took.append(one)
                if ends or one.request.params.output_kind != "final_only":
                    told.append(one.request)
                if one.error is not None:  # what it computed, or shared, may be as bad as its logits
                    self.reset_prefix_cache()
                elif ends or not len(one.token_ids) % _EXTEND_EVERY:
                    self._extend(one)
        closed = sent.scheduler.complete(batch, now, results, busy_s)
        for one in took if hands_over else ():
            if one.finish_reason is None:
                self.hand_overs.keep(self.scheduler, one.request.asked(one.slot, one.metrics.arrival))
        for observer in self.observers if is_first else ():
            observer.completed(batch, now, results, busy_s, closed)
        self._keep_explanations(took)
        for request in dict.fromkeys(told):  # of several completions once
            if not request.num_running:
                self._retire(request)
            elif request.params.output_kind != "final_only":
                request.emit()
        self._release(closed)

    def _extend(self, one: Completion) -> None:
        """Tell the scheduler the ids of what a completion has put out, so that others may share it."""
        if self._prefix is not None and one.request.prefix and (ids := one.further_ids(self._prefix)):
            self.scheduler.extend(one.slot, ids)
            for observer in self.observers:
                observer.extended(one.slot, ids)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _keep_explanations(self, completions: Iterable[Completion]) -> None:
        """Note where the time went of completions that have their first token, or end without one."""
        for one in completions:
            if one.metrics.explanation is None:
                one.metrics.explanation = explained(self._explainers, one.slot)

    def _abort(self, live: Request) -> None:
        """End what still runs of a request, and hand out its last output."""
        for one in live.completions:
            if one.finish_reason is None:
                one.finish("abort", self.now())
                self._keep_explanations([one])
        live.num_running = 0  # also where an interrupt has struck in finish()
        self._retire(live)

    def _retire(self, live: Request) -> None:
        """Hand out the output of a request that has ended."""
        live.emit()
        del self.live[live.request_id], live.sink  # which may know the request

    def _release(self, closed: Sequence[int]) -> None:
        """Forget slots whose requests have nothing in flight any more."""
        for slot in closed:
            self.runner.close(slot)
            one = self.by_slot.pop(slot)
            one.request = proxy(one.request)  # else a circle keeps them, and a long prompt, until garbage is collected
            self._free_slots.append(slot)

    def fail(self, cause: BaseException) -> EngineDeadError:
        """End every request with the error that stopped the engine; only the first call has an effect.

        Another thread may call it while :meth:`step` is stuck: it waits for no turn.

        Returns:
            What every later call raises; its ``outputs`` holds the requests that had not been returned as finished.
        """
        with self._dying:
            if self._dead is not None:
                return self._dead
            if isinstance(cause, EngineDeadError):
                dead = type(cause)(str(cause))
            else:
                dead = EngineDeadError(f"a step failed: {type(cause).__name__}: {cause}")
            self._dead = dead
            dead.__cause__ = cause
            for live in list(self.live.values()):
                for one in live.completions:
                    one.finish("error", self.now(), error=dead, flush_text=False)  # the tokenizer may be what failed
                self._retire(live)
            dead.outputs = self._unreturned.copy()
            self._unreturned.clear()
            self._in_flight.clear()
            self.hand_overs.transfers.clear()
            self.wake()
            return dead
